"""Cut a move into pieces, so that the caller can bound the bytes of the move's temporaries."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from shardwright.errors import ShardingError
from shardwright.vocabulary.units import BYTES

# Units may be in upper or lower case.
_UNITS = {unit.upper(): size for unit, size in BYTES.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How a leaf is cut into pieces along one dimension.

    A row is all elements with one index of the dimension. The dimension consists of equal groups of
    rows. No step of the move divides a group between devices, or changes the order of its rows. A
    piece has the same rows of each group, so it moves exactly like the whole leaf.

    Attributes:
      dim: The dimension, or None if the leaf moves in one piece.
      groups: Number of groups along the dimension of the whole array.
      rows: Number of rows of a group.
      size: Number of rows in a piece, for each group.
      count: Number of pieces. The last piece overlaps the piece before it if `size` does not divide
        `rows`.
      bytes: Bytes of a piece over all devices, at the step with the most bytes.
    """

    dim: int | None = None
    groups: int = 1
    rows: int = 1
    size: int = 1
    count: int = 1
    bytes: int = 0

    def of_all(self, whole: int) -> int:
        """Return the bytes of all pieces, overlaps included, for a leaf of `whole` bytes."""
        # Rows of an overlap count twice, because they are sent twice.
        return whole // self.rows * self.size * self.count

    def start(self, number: int) -> int:
        """Return the first row of a piece, in each group."""
        # The last piece begins earlier instead of being smaller. So all pieces have one shape, and
        # one program moves them.
        return min(number * self.size, self.rows - self.size)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a piece, given the shape of the array or shard that is cut."""
        if self.dim is None:
            return tuple(shape)
        cut = list(shape)
        cut[self.dim] = cut[self.dim] // self.rows * self.size
        return tuple(cut)


def cut(
    shape: Sequence[int], counts: Sequence[Sequence[int]], *, largest: int, limit: int
) -> Pieces:
    """Return the pieces of a leaf.

    Args:
      shape: Shape of the leaf.
      counts: Number of shards along each dimension, at every step of the move.
      largest: Bytes of the leaf over all devices, at the step with the most bytes.
      limit: Largest number of bytes of a piece. A piece of one row of each group may be larger.
    """
    # The lcm over all steps: a shard boundary of any step is also a boundary of a group.
    groups = [math.lcm(*each) for each in zip(*counts, strict=True)]
    rows = [size // group for size, group in zip(shape, groups, strict=True)]
    if largest <= limit or max(rows, default=1) <= 1:
        return Pieces(bytes=largest)
    pieces = -(-largest // limit)
    # Pieces along an outer dimension are contiguous, so cut the outermost dimension that has enough
    # rows.
    dim = next((at for at, count in enumerate(rows) if count >= pieces), rows.index(max(rows)))
    size = _size(rows[dim], max(1, rows[dim] // pieces))
    return Pieces(
        dim=dim,
        groups=groups[dim],
        rows=rows[dim],
        size=size,
        count=-(-rows[dim] // size),
        bytes=largest // rows[dim] * size,
    )


def _size(rows: int, most: int) -> int:
    """Return the number of rows of a piece: a divisor of `rows` near `most`, if there is one."""
    # If a piece has few rows, an overlap is a large share of the piece. Then a smaller divisor is
    # better.
    smallest = most // 2 if most >= 8 else 0
    for size in range(most, smallest, -1):
        if rows % size == 0:
            return size
    count = -(-rows // most)
    return -(-rows // count)


def parse_bytes(size: int | str) -> int:
    """Return the number of bytes that `size` means: an integer, or text such as `64MiB`.

    Raises:
      ShardingError: `size` is neither a positive integer nor such text.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d{1,12})\s*([KMGT]?i?B)?\s*", size, re.IGNORECASE)
        unit = (match[2] or "B").upper() if match else ""
        if match and unit in _UNITS and int(match[1]) > 0:
            return int(match[1]) * _UNITS[unit]
    elif isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    raise ShardingError(
        f"{size!r} is not a number of bytes",
        path="piece",
        fix='pass a positive integer, or text such as "64MiB"',
    )
