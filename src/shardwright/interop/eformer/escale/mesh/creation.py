"""The names of `eformer.escale.mesh.creation`."""

from __future__ import annotations

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
from shardwright.interop.eformer.meshes import (
    cpu_context,
    create_cpu_mesh,
    create_mesh,
    force_cpu,
    parse_mesh_from_string,
)

__all__ = ["cpu_context", "create_cpu_mesh", "create_mesh", "force_cpu", "parse_mesh_from_string"]
