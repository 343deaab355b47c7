"""Find the mesh axes that replace the mesh axes of a trace.

A trace has the names of mesh axes inside `shard_map`. Two meshes give the same trace, up to these
names, under two conditions: every dim has the same number of shards on both meshes, and an axis of
one mesh always stands for the same axes of the other mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jax.sharding import PartitionSpec

from shardwright.resolution.partition_specs import entry_names

# Mesh axis of a trace -> the mesh axes that replace it. No mesh axis replaces an axis of size 1.
Renaming: TypeAlias = Mapping[str, tuple[str, ...]]


def find_renaming(
    pairs: Iterable[tuple[PartitionSpec | None, PartitionSpec | None]],
    old: Mapping[str, int],
    new: Mapping[str, int],
) -> dict[str, tuple[str, ...]] | None:
    """Return the mesh axes that replace each old mesh axis, or None if the traces would differ.

    Args:
      pairs: For each request of the trace, its specs on the old mesh and on the new mesh.
      old: Mesh axis -> size, of the mesh of the trace.
      new: Mesh axis -> size, of the other mesh.
    """
    # A mesh axis of size 1 may be in any spec: it does not change the shapes of shards, so nothing
    # must replace it.
    renaming: dict[str, tuple[str, ...]] = {axis: () for axis, size in old.items() if size == 1}
    for before, after in pairs:
        if before is None or after is None:
            if before is not after:
                return None
            continue
        for at in range(max(len(before), len(after))):
            held, goal = _names(before, at, old), _names(after, at, new)
            if not _extend(renaming, held, goal, old, new):
                return None
    used = {axis for axes in renaming.values() for axis in axes}
    # Mesh axes that are in no resolved spec may be in a `shard_map`, so they must be replaced too.
    left = [axis for axis, size in old.items() if size > 1 and axis not in renaming]
    free = [axis for axis, size in new.items() if size > 1 and axis not in used]
    return renaming if _extend(renaming, left, free, old, new) else None


def _names(spec: PartitionSpec, at: int, sizes: Mapping[str, int]) -> list[str]:
    entry = spec[at] if at < len(spec) else None
    return [name for name in entry_names(entry) if sizes[name] > 1]


def _extend(
    renaming: dict[str, tuple[str, ...]],
    held: Sequence[str],
    goal: Sequence[str],
    old: Mapping[str, int],
    new: Mapping[str, int],
) -> bool:
    """Add the mesh axes of one dim to the renaming. Return False if they contradict it."""
    rest = list(goal)
    for axis in held:
        if axis not in renaming:
            taken = {other for axes in renaming.values() for other in axes}
            # Take the first new axes that together have as many devices as the old axis: `fsdp:4`
            # may stand for `dp:2` and `fsdp:2`.
            part = next(
                (
                    tuple(rest[:end])
                    for end in range(1, len(rest) + 1)
                    if math.prod(new[name] for name in rest[:end]) == old[axis]
                ),
                None,
            )
            if part is None or taken.intersection(part):
                return False
            renaming[axis] = part
        part = renaming[axis]
        if tuple(rest[: len(part)]) != part:
            return False
        rest = rest[len(part) :]
    return not rest
