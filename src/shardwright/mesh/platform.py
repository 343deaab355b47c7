"""The platform of a mesh's devices."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """Return "cpu", "gpu" or "tpu": the platform of the devices, or of JAX's default backend if
    there are none.
    """
    name = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else str(name)
