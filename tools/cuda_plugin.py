"""Print what pip must install so that this JAX compiles for GPUs, on a machine without any.

    python -m pip install --no-deps $(python tools/cuda_plugin.py)

The wheels have XLA for CUDA and its assembler, 200 MB, and neither a driver nor cuDNN. No extra of
pyproject.toml can name them, because each plugin is for exactly one version of jaxlib.
"""

from __future__ import annotations

import importlib.metadata


def requirements(jaxlib: str) -> list[str]:
    """Return the requirements for a version of jaxlib, such as `0.10.2`.

    >>> requirements("0.10.2")[0]
    'jax-cuda12-plugin==0.10.2'
    """
    # Newer versions have no plugin for CUDA 12.
    major, minor = map(int, jaxlib.split(".")[:2])
    cuda = "cuda12" if (major, minor) < (0, 11) else "cuda13"
    assembler = "nvidia-cuda-nvcc-cu12" if cuda == "cuda12" else "nvidia-cuda-nvcc"
    return [f"jax-{cuda}-plugin=={jaxlib}", f"jax-{cuda}-pjrt=={jaxlib}", assembler]


if __name__ == "__main__":
    print(*requirements(importlib.metadata.version("jaxlib")))
