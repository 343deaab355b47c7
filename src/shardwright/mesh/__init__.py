"""Meshes: the text form of a mesh, and building a real or an abstract mesh from it.

Code that builds a mesh or reads `"dp:2,tp:4"` belongs here. Code that decides which dim is sharded
over which mesh axis does not: it is in `resolution`.
"""

from shardwright.mesh.build import abstract_mesh as abstract_mesh
from shardwright.mesh.build import create_mesh as create_mesh
from shardwright.mesh.build import get_jax_mesh as get_jax_mesh
from shardwright.mesh.build import get_ranks_and_size as get_ranks_and_size
from shardwright.mesh.build import mesh_sizes as mesh_sizes
