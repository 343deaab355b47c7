"""Read blocks of arrays that are in the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from shardwright.errors import ShardingError
from shardwright.reshard.programs import wire_view
from shardwright.reshard.route import Route

Box = tuple[slice, ...]


@runtime_checkable
class ArrayInParts(Protocol):
    """An array that is not in memory, such as one in a file."""

    def read(self, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Return the parts of the array in these boxes."""


def host_blocks(value: Any, boxes: Sequence[Box], route: Route, start: int) -> list[np.ndarray]:
    """Copy one piece of each block into a contiguous array of the dtype after the move.

    Args:
      value: NumPy array, number, JAX array in host memory, or array that is read in parts.
      boxes: The blocks, as slices of the whole array.
      route: How the array moves.
      start: First row of the piece, in each block.
    """
    cut = [_rows_of(box, route, start) for box in boxes]
    if isinstance(value, ArrayInParts):
        parts = value.read(cut)
    else:
        parts = [_read(value, box) for box in cut]
    # Copy, because JAX on the CPU may use NumPy's memory directly.
    blocks = [np.array(part, dtype=route.to_dtype, order="C") for part in parts]
    return blocks if route.pieces.dim is None else [wire_view(block, route) for block in blocks]


def _rows_of(box: Box, route: Route, start: int) -> Box:
    """Return the rows of a piece. A block is one group of rows, as no other step cuts it."""
    dim = route.pieces.dim
    if dim is None:
        return box
    first = (box[dim].start or 0) + start
    return (*box[:dim], slice(first, first + route.pieces.size), *box[dim + 1 :])


def _read(value: Any, box: Box) -> np.ndarray:
    if not isinstance(value, jax.Array):
        return np.asarray(value)[box]
    parts = [(_overlap(shard.index, box, value.shape), shard) for shard in value.addressable_shards]
    shape = tuple(stop - start for start, stop in _bounds(box, value.shape))
    for overlap, shard in parts:
        if overlap is not None and overlap[0] == tuple(slice(0, size) for size in shape):
            return np.asarray(shard.data)[overlap[1]]
    block = np.empty(shape, value.dtype)
    filled = np.zeros(shape, bool) if parts else None
    for overlap, shard in parts:
        if overlap is not None and filled is not None:
            block[overlap[0]] = np.asarray(shard.data)[overlap[1]]
            filled[overlap[0]] = True
    if filled is None or not filled.all():
        raise ShardingError(
            "a part of the array is in the memory of another process",
            fix="move the array to device memory with jax.device_put first",
        )
    return block


def _bounds(box: Box, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(size)[:2] for cut, size in zip(box, shape, strict=True)]


def _overlap(own: Box, box: Box, shape: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Return where a shard and a block overlap, as slices of the block and of the shard."""
    in_block, in_shard = [], []
    for (low, high), (start, stop) in zip(_bounds(own, shape), _bounds(box, shape), strict=True):
        first, last = max(low, start), min(high, stop)
        if first >= last:
            return None
        in_block.append(slice(first - start, last - start))
        in_shard.append(slice(first - low, last - low))
    return tuple(in_block), tuple(in_shard)
