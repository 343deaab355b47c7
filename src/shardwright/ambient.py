"""`shard`, `hint` and `gather` under the ambient manager."""

from __future__ import annotations

from typing import Any

from shardwright import context
from shardwright.axes import Role
from shardwright.manager import PartitionManager


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
