"""The names of `eformer.escale.mesh.mesh_helpers` can be imported, but are not provided.

A call of one raises an error with a fix.
"""

from shardwright.interop.eformer.absent import __getattr__  # noqa: F401
