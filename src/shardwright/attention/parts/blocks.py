"""Cut local operands into blocks of queries and keys.

The last block of queries may be padded. Padding the keys would copy them, so the forward pass does
not pad keys. Instead, the last block of keys overlaps the block before it, and masks the rows that
both blocks have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout as layouts

from shardwright.attention.call import Arithmetic, DimOrder, Operands, dims_along
from shardwright.attention.masks import block_is_empty
from shardwright.attention.parts import online_softmax

# By default, a TPU stores a dim as the minor dim only if its size is a multiple of the 128 lanes,
# and as the second minor dim only if its bytes fill whole sublanes.
_LANES, _SUBLANE_BYTES = 128, 4
_Q_DIM, _KV_DIM = dims_along("q_length"), dims_along("kv_length")


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of queries and of keys: length, rows of a block, and number of blocks."""

    q_length: int
    kv_length: int
    q_block: int
    kv_block: int
    q_count: int
    kv_count: int


def grid_of(operands: Operands, recipe: Arithmetic) -> Grid:
    """Return the blocks of local operands."""
    q_length, kv_length = operands.q.shape[1], operands.k.shape[1]
    q_block = max(1, min(recipe.q_block, q_length))
    kv_block = max(1, min(recipe.kv_block, kv_length))
    return Grid(
        q_length, kv_length, q_block, kv_block, -(-q_length // q_block), -(-kv_length // kv_block)
    )


def repeat(count: int, step: Callable[[Any, Any], Any], init: Any) -> Any:
    """Apply `step(0, ·)`, `step(1, ·)` and so on to `init`, `count` times; return the result."""
    if count == 1:
        return step(jnp.int32(0), init)
    numbers = jnp.arange(count, dtype=jnp.int32)
    return jax.lax.scan(lambda carry, i: (step(i, carry), None), init, numbers)[0]


def may_be_empty(operands: Operands, recipe: Arithmetic) -> bool:
    """Tell whether a mask may hide all pairs of a block, so that `is_empty` is worth calling."""
    arrays = operands.lengths is not None or operands.q_segment_ids is not None
    return recipe.mask.positional or arrays


def is_empty(block: Operands, recipe: Arithmetic) -> jax.Array:
    """Return whether a mask hides a whole block. False may be wrong; see `masks.block_is_empty`."""
    q, kv = block.q_positions, block.kv_positions
    # A row without a key has the position -1. Leave it out of the minimum: otherwise no block of a
    # partly filled ring would be skipped.
    kv_low, kv_high = jnp.min(jnp.where(kv < 0, jnp.iinfo(jnp.int32).max, kv)), jnp.max(kv)
    empty: jax.Array = block_is_empty(recipe.mask, (jnp.min(q), jnp.max(q)), (kv_low, kv_high))
    if block.lengths is not None:
        empty = empty | (kv_low >= jnp.max(block.lengths))
    if block.q_segment_ids is not None:
        q_ids, kv_ids = block.q_segment_ids, block.kv_segment_ids
        empty = empty | (jnp.max(kv_ids) < jnp.min(q_ids)) | (jnp.min(kv_ids) > jnp.max(q_ids))
    return empty


# Padding.


def pad_queries(operands: Operands, grid: Grid) -> Operands:
    """Return the operands with the queries padded to whole blocks."""
    return _pad_side(operands, _Q_DIM, grid.q_length, grid.q_count * grid.q_block)


def pad_keys(operands: Operands, grid: Grid) -> Operands:
    """Return the operands with the keys padded to whole blocks. Padding is at position -1."""
    return _pad_side(operands, _KV_DIM, grid.kv_length, grid.kv_count * grid.kv_block)


def _pad_side(operands: Operands, dims: dict[str, int], length: int, size: int) -> Operands:
    if size == length:
        return operands
    padded = {}
    for name, dim in dims.items():
        array = getattr(operands, name)
        if array is None or array.shape[dim] != length:
            continue
        if name == "kv_positions":
            padded[name] = pad_dim(array, dim, size, -1)
        else:
            # Pad positions and segment ids with their last value. So padding does not widen the
            # range of values in the last block, which `is_empty` compares.
            padded[name] = pad_dim(array, dim, size, "edge" if array.dtype == jnp.int32 else 0)
    return operands.replace(**padded)


def pad_dim(array: jax.Array, dim: int, size: int, value: Any = 0) -> jax.Array:
    """Return an array padded at the end of a dim; the value "edge" repeats the last row."""
    if size == array.shape[dim]:
        return array
    widths = [(0, size - current if at == dim else 0) for at, current in enumerate(array.shape)]
    if value == "edge":
        return jnp.pad(array, widths, mode="edge")
    return jnp.pad(array, widths, constant_values=value)


def pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return an array padded with zeros to a shape."""
    if array.shape == shape:
        return array
    widths = [(0, size - current) for size, current in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, widths)


# Slices.


def slice_dim(array: jax.Array, dim: int, start: Any, size: int) -> jax.Array:
    """Return `size` rows along a dim. Return the array itself if it has at most `size` rows."""
    if array.shape[dim] <= size:
        return array
    return jax.lax.dynamic_slice_in_dim(array, start, size, dim)


def query_block(operands: Operands, i: Any, grid: Grid) -> Operands:
    """Return block `i` of the queries, with all keys."""
    if grid.q_count == 1:
        return operands
    return _slice_side(operands, _Q_DIM, i * grid.q_block, grid.q_block)


def padded_key_block(operands: Operands, j: Any, grid: Grid) -> Operands:
    """Return block `j` of padded keys, with all queries."""
    if grid.kv_count == 1:
        return operands
    return _slice_side(operands, _KV_DIM, j * grid.kv_block, grid.kv_block)


def key_block(operands: Operands, j: Any, recipe: Arithmetic, grid: Grid) -> Operands:
    """Return block `j` of the keys without padding, with all queries."""
    block = operands
    if grid.kv_count > 1:
        first = j * grid.kv_block
        # The last block starts early and repeats rows of the block before it. Hide the repeated
        # rows: otherwise their keys would be counted twice.
        start = jnp.minimum(first, grid.kv_length - grid.kv_block)
        block = _slice_side(operands, _KV_DIM, start, grid.kv_block)
        if grid.kv_length % grid.kv_block:
            repeated = start + jnp.arange(grid.kv_block, dtype=jnp.int32) < first
            block = block.replace(kv_positions=jnp.where(repeated[None], -1, block.kv_positions))
    if recipe.cached is not None:
        block = _in_stored_order(block, recipe.cached)
    return online_softmax.without_remains(block, recipe)


def _slice_side(operands: Operands, dims: dict[str, int], start: Any, size: int) -> Operands:
    sliced = {}
    for name, dim in dims.items():
        array = getattr(operands, name)
        if array is not None and array.shape[dim] > size:
            sliced[name] = jax.lax.dynamic_slice_in_dim(array, start, size, dim)
    return operands.replace(**sliced)


def _in_stored_order(block: Operands, layout: DimOrder) -> Operands:
    """Return a block of a cache in the layout in which TPUs store the cache by default.

    Without this, XLA copies the whole cache in every call, into the layout that XLA prefers for the
    matmul of one block.
    """
    ordered = {}
    for name in ("k", "v"):
        rows = getattr(block, name)
        heads, dim = rows.shape[2:]
        order = (0, 1, 2, 3)
        if dim % _LANES:
            order = (0, 2, 3, 1)
        elif layout is DimOrder.BHTD or heads * rows.dtype.itemsize % _SUBLANE_BYTES:
            order = (0, 2, 1, 3)
        ordered[name] = layouts.with_layout_constraint(rows, layouts.Layout(order))
    for name in ("k_scale", "v_scale"):
        if (scale := getattr(block, name)) is not None:
            ordered[name] = layouts.with_layout_constraint(scale, layouts.Layout((0, 2, 1)))
    return block.replace(**ordered)
