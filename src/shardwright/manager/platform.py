"""The platform that programs are traced for."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh

from shardwright.manager import context


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """Return "cpu", "gpu" or "tpu": the target of a plan, else the platform of a mesh's devices, or
    of JAX's default backend if there are none.
    """
    target: str | None = context.TARGET.value
    if target is not None:
        return target
    name = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else str(name)
