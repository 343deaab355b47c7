"""The check of sizes against mesh axes that stand for names in another library.

A table of another library has no fallbacks, so a size that does not divide is an error. So is a
size other than the one that the table was made for, if the strategy shards it in another way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.errors import IndivisibleError, ShardingError, StrategyError
from shardwright.interop.logical_rules.names import Names, read_names
from shardwright.interop.logical_rules.to_rules import candidate_shards
from shardwright.resolution.partition_specs import entry_names

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager

# Name, its size in `sizes=`, and the numbers of shards that its rule may give to it.
ShardCounts = tuple[tuple[str, int, tuple[int, ...]], ...]


def shard_counts(
    pm: PartitionManager, names: Names, sizes: Mapping[str, int] | None
) -> ShardCounts:
    """Return what decides whether the rules of `sizes=` hold for another size. It is hashable."""
    targets = read_names(names, pm.rules.user_axes, declare="")
    return tuple(
        (name, size, candidate_shards(pm, name, targets[name]))
        for name, size in (sizes or {}).items()
        if name in targets
    )


def misfit(
    name: str,
    size: int,
    entry: Any,
    mesh: Mapping[str, int],
    *,
    sizes: ShardCounts,
    path: str,
    dim: int,
    call: str,
    advice: str = "",
) -> ShardingError | None:
    """Return the error to raise if a size does not fit the table, or None.

    Args:
      name: Name of the dim in the other library.
      size: Size of the dim.
      entry: Mesh axes that the table has for the name.
      mesh: Size of each mesh axis.
      sizes: What `shard_counts` returns.
      path: The array, for the message.
      dim: Number of the dim.
      call: Function of the bridge that takes `sizes=`, for the message.
      advice: Another line of the fix, or empty.
    """
    axes = entry_names(entry)
    shards = math.prod(mesh[axis] for axis in axes)
    if size % shards:
        fix = f"pass sizes={{{name!r}: {size}}} to {call}, so that a fallback applies"
        return IndivisibleError(
            f"size {size} of {name!r} does not divide over {'+'.join(axes)}={shards}",
            path=path,
            dim=dim,
            size=size,
            mesh_axes=axes,
            shards=shards,
            fix="\n".join(filter(None, (advice, fix, "or choose a size and a mesh that divide"))),
        )
    given, counts = next(((own, each) for other, own, each in sizes if other == name), (size, ()))
    if any((size % count == 0) != (given % count == 0) for count in counts):
        what = f"size {size} of {name!r}: the rules were made for size {given}"
        what += ", which the strategy shards in another way"
        fix = f"give dims of size {given} another name than {name!r}"
        fix = "\n".join(filter(None, (advice, fix)))
        return StrategyError(what, path=path, dim=dim, size=size, fix=fix)
    return None
