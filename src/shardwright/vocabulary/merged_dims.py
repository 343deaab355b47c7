"""One dim that flattens several axes, each with its own size."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from shardwright.errors import StrategyError
from shardwright.vocabulary.axes import axis_label, canonical_axis
from shardwright.vocabulary.integers import as_integer

_EXAMPLE = "merged((KV_HEAD, 8), (KV_HEAD_DIM, 128))"


@dataclasses.dataclass(frozen=True, slots=True)
class MergedDim:
    """A dim that flattens several axes, in row-major order. Build it with `merged`."""

    members: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of elements of the flattened dim."""
        return math.prod([size for _, size in self.members])


def merged(*members: tuple[str, int]) -> MergedDim:
    """Annotate one dim that flattens several axes.

    Only the first axis may be sharded, and its size must be a multiple of the number of shards. So
    a flat `[embed, kv_heads * head_dim]` projection is never split within a head:

    >>> from shardwright.vocabulary.axes import EMBED, KV_HEAD, KV_HEAD_DIM
    >>> kernel_axes = (EMBED, merged((KV_HEAD, 8), (KV_HEAD_DIM, 128)))

    Args:
      *members: Pairs of an axis and its size.

    Raises:
      StrategyError: There are no members, or one is not a pair of an axis and a positive size.
    """
    if not members:
        raise StrategyError("merged needs at least one (axis, size)", fix=f"write {_EXAMPLE}")
    return MergedDim(tuple(map(_checked, members)))


def _checked(member: Any) -> tuple[str, int]:
    is_pair = isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)
    size = as_integer(member[1]) if is_pair else None
    if size is None or size < 1:
        what = "is not (axis, size)" if size is None else "has no positive size"
        raise StrategyError(f"merged: {member!r} {what}", fix=f"write {_EXAMPLE}")
    return canonical_axis(member[0]), size


def axis_text(axis: Any) -> str:
    """Return an entry of an annotation as people write it: `HEAD`, `KV_HEAD:8*KV_HEAD_DIM:128`."""
    if isinstance(axis, MergedDim):
        return "*".join(f"{axis_label(name)}:{size}" for name, size in axis.members)
    return axis_label(axis)
