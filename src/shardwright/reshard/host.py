"""Read blocks of arrays that are in the memory of the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardwright.errors import ShardingError
from shardwright.reshard.programs import grouped_shape, wire_view
from shardwright.reshard.route import Route

Box = tuple[slice, ...]


def host_block(value: Any, box: Box, route: Route, start: int) -> np.ndarray:
    """Copy one piece of one block into a contiguous array of the dtype after the move.

    Args:
      value: NumPy array, number, or JAX array in host memory.
      box: The block, as slices of the whole array.
      route: How the array moves.
      start: First row of the piece.
    """
    block = _read(value, box)
    dim = route.pieces.dim
    if dim is None:
        return np.array(block, dtype=route.to_dtype, order="C")
    # Splitting a dimension never copies, so only the piece is copied.
    grouped = block.reshape(grouped_shape(block.shape, dim, route.pieces.rows))
    rows = (slice(None),) * (dim + 1) + (slice(start, start + route.pieces.size),)
    piece = np.array(grouped[rows], dtype=route.to_dtype, order="C")
    return wire_view(piece.reshape(route.pieces.shape(block.shape)), route)


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
