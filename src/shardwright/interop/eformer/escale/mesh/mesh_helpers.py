"""No name of `eformer.escale.mesh.mesh_helpers` is provided. A call raises an error with a fix."""

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
