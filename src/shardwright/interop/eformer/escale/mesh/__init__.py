"""The names of `eformer.escale.mesh`."""

from __future__ import annotations

from shardwright.interop.eformer.absent import __getattr__ as __getattr__
from shardwright.interop.eformer.meshes import cpu_context as cpu_context
from shardwright.interop.eformer.meshes import create_cpu_mesh as create_cpu_mesh
from shardwright.interop.eformer.meshes import create_mesh as create_mesh
from shardwright.interop.eformer.meshes import force_cpu as force_cpu
from shardwright.interop.eformer.meshes import parse_mesh_from_string as parse_mesh_from_string
