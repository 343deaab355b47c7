"""Reset the ambient mesh and manager that a test leaves set, so that no test depends on another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, Mesh

from shardwright._jax import legacy_meshes
from shardwright.manager import context


class AmbientLeftError(AssertionError):
    """A block left a manager entered or a mesh set."""


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run a block, and restore the ambient managers and mesh after it.

    Raises:
      AmbientLeftError: the block succeeded, but left a manager entered or a mesh set. Both are
        reset before the error is raised.
    """
    depth, mesh, legacy = context.depth(), jax.sharding.get_mesh(), len(legacy_meshes())
    try:
        yield
    except BaseException:
        # If the block failed, what it left is probably a consequence. So raise the error of the
        # block unchanged.
        _take_back(depth, mesh, legacy)
        raise
    if leftovers := _take_back(depth, mesh, legacy):
        raise AmbientLeftError("left behind: " + "; and ".join(leftovers))


def _take_back(depth: int, mesh: Mesh, legacy: int) -> list[str]:
    """Restore the ambient mesh and managers. Return a text with a fix for each that was left."""
    leftovers = []
    while context.depth() > depth:
        leftovers.append(
            f"{context.take_back()!r} is entered\n"
            f"  fix   write `with manager:` around what needs it"
        )
    # `with mesh:` has a stack of its own, which neither get_mesh nor set_mesh knows.
    for entered in reversed(legacy_meshes()[legacy:]):
        entered.__exit__(None, None, None)
        leftovers.append(
            f"the mesh {_sizes(entered)} is entered\n"
            f"  fix   write `with jax.set_mesh(mesh):` around what needs it"
        )
    now, abstract = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
    # `get_mesh` does not return an abstract mesh that is set.
    if now != mesh or (mesh.empty and not abstract.empty):
        what = "the mesh is unset" if abstract.empty else f"the mesh {_sizes(abstract)} is set"
        leftovers.append(
            f"{what}\n  fix   write `with jax.set_mesh(mesh):`; without `with` the mesh stays set"
        )
        jax.set_mesh(None if mesh.empty else mesh)
    return leftovers


def _sizes(mesh: Mesh | AbstractMesh) -> str:
    return ",".join(f"{name}:{size}" for name, size in mesh.shape.items())
