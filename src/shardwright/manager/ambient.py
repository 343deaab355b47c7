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
    """Make an array, or every array of a tree, lie as its annotation resolves under the ambient manager.

    `shard(x, BATCH, LENGTH, EMBED)`, `shard(x, ColumnWise)`, or `shard(tree, annotations)`. Strict: what does not fit raises.
    See `PartitionManager.shard` for the arguments.

    Raises:
      ShardingError: the annotation does not fit the array, the rules or the mesh.
      NoManagerError: no manager is entered in this thread.
    """
    manager: PartitionManager = context.current() or context.require("shard")
    return manager._place(x, axes, mode, role, True)


def hint(x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None) -> Any:
    """Like `shard`, best effort: a dim that is indivisible, in conflict or Manual is left to the compiler.

    Without an ambient manager it returns `x` as it is. See `PartitionManager.hint`.
    """
    manager = context.current()
    return x if manager is None else manager.hint(x, *axes, mode=mode, role=role)


def gather(
    w: Any, *axes: Any, path: str | None = None, mode: str | None = None, shape: Any = None
) -> Any:
    """Constrain a stored weight, or a tree of them, to where it is used, and its gradient back to where it is stored.

    `gather(w, EMBED, MLP_INTERMEDIATE)`. Inside `shard_map` it is an all-gather. See `PartitionManager.gather` for the arguments.

    Raises:
      ShardingError: the annotation does not fit the array, the rules or the mesh.
      NoManagerError: no manager is entered in this thread.
    """
    return context.require("gather").gather(w, *axes, path=path, mode=mode, shape=shape)


def current_manager() -> PartitionManager:
    """Return the ambient manager.

    Raises:
      NoManagerError: no manager is entered in this thread.
    """
    return context.require("current_manager", method=False)  # type: ignore[no-any-return]


def current_mesh() -> Mesh | AbstractMesh | None:
    """Return the current mesh, or None.

    It is that of `jax.set_mesh`, of a surrounding `shard_map`, of a legacy `with mesh:` or of the
    entered manager; the first of these counts.
    """
    mesh = _jax.mesh_at_hand()
    if mesh is not None:
        return mesh
    manager = context.current()
    return None if manager is None else manager.mesh


def current_mesh_has(*names: str) -> bool:
    """Tell whether the current mesh has all of these axes. Without a mesh there are none.

    Raises:
      MeshSpecError: a name is not a string.
    """
    for name in names:
        if not isinstance(name, str):
            fix = 'pass the names one by one, as in ("dp", "tp")'
            raise MeshSpecError(f"{name!r} is not the name of a mesh axis", fix=fix)
    mesh = current_mesh()
    return set(names) <= set(() if mesh is None else mesh.axis_names)
