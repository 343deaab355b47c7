"""`shard`, `hint` and `gather` under the ambient manager."""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import MeshSpecError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.vocabulary.axes import Role


def shard(x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None) -> Any:
    """Shard an array, or every array of a tree, as the ambient manager resolves its annotation.

    Write `shard(x, BATCH, LENGTH, EMBED)`, `shard(x, ColumnWise)` or `shard(tree, annotations)`.
    `shard` is strict: an array that does not fit raises an error. See `PartitionManager.shard` for
    the arguments.

    Raises:
      ShardingError: The annotation does not fit the array, the rules or the mesh.
      NoManagerError: No manager is entered in this thread.
    """
    # A trace calls `shard` thousands of times, so call `require` only to raise its error.
    manager: PartitionManager = context.current() or context.require("shard")
    return manager.place(x, axes, mode, role)


def hint(x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None) -> Any:
    """Like `shard`, but leave indivisible, conflicting and Manual dims to the compiler.

    Without an ambient manager, return `x` unchanged. See `PartitionManager.hint` for the arguments.

    Raises:
      NoManagerError: Another task of the thread has entered a manager, or a `with pm:` in which
        this task was created has ended.
    """
    manager = context.current()
    return x if manager is None else manager.hint(x, *axes, mode=mode, role=role)


def gather(
    w: Any, *axes: Any, path: str | None = None, mode: str | None = None, shape: Any = None
) -> Any:
    """Gather a stored weight, or a tree of them, into the sharding that computation uses.

    Write `gather(w, EMBED, MLP_INTERMEDIATE)`. The gradient has the stored sharding. Inside
    `shard_map`, `gather` is an all-gather. See `PartitionManager.gather` for the arguments.

    Raises:
      ShardingError: The annotation does not fit the array, the rules or the mesh.
      NoManagerError: No manager is entered in this thread.
    """
    return context.require("gather").gather(w, *axes, path=path, mode=mode, shape=shape)


def current_manager() -> PartitionManager:
    """Return the ambient manager.

    Raises:
      NoManagerError: No manager is entered in this thread.
    """
    return context.require("current_manager", method=False)  # type: ignore[no-any-return]


def current_mesh() -> Mesh | AbstractMesh | None:
    """Return the current mesh, or None.

    The current mesh is the first of these that exists: the mesh of `jax.set_mesh`, of an enclosing
    `shard_map`, of a legacy `with mesh:`, or of the ambient manager.
    """
    mesh = _jax.mesh_at_hand()
    if mesh is not None:
        return mesh
    manager = context.current()
    return None if manager is None else manager.mesh


def current_mesh_has(*names: str) -> bool:
    """Tell whether the current mesh has all of these axes. Without a mesh, no axis exists.

    Raises:
      MeshSpecError: A name is not a string.
    """
    for name in names:
        if not isinstance(name, str):
            fix = 'pass each name as an argument, as in ("dp", "tp")'
            raise MeshSpecError(f"{name!r} is not the name of a mesh axis", fix=fix)
    mesh = current_mesh()
    return set(names) <= set(() if mesh is None else mesh.axis_names)
