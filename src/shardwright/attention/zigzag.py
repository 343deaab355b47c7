"""The zigzag order of a sequence: shard r of n holds chunks r and 2n - 1 - r, so that causal attention is the same work on each.

Permute the batch once, where it is loaded; everything else goes by position:

>>> batch = {"tokens": np.arange(8)[None]}
>>> permute(batch, shards=2)["tokens"]
array([[0, 1, 6, 7, 2, 3, 4, 5]])

A model that rotates or masks by position gets `positions(length, shards=...)`, or permuted positions of its own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from shardwright.errors import AttentionError


def positions(length: int, *, shards: int) -> np.ndarray:
    """Return the position of each row in zigzag order, `[length]` int32: row i of a permuted array is row `positions[i]` of it.

    Args:
      length: of the sequence.
      shards: number of shards of it, odd ones too; `manager.axis_size(QUERY_LENGTH)`. With one shard
        nothing moves, and any length will do.

    Raises:
      AttentionError: there are several shards, and the length is not a multiple of `2 * shards`.
    """
    if shards < 1:
        raise AttentionError(
            f"{shards} shards",
            path="shards",
            fix="pass how many parts the sequence is sharded into",
        )
    if shards == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * shards):
        more = -length % (2 * shards)
        fix = f"pad it by {more} rows (with segment id 0, or a loss weight of 0), or keep the order as it is"
        raise AttentionError(
            f"a length of {length} does not divide into 2 * {shards} chunks, two per shard", fix=fix
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    order = [chunk for rank in range(shards) for chunk in (rank, 2 * shards - 1 - rank)]
    return chunks[order].reshape(-1)


def permute(batch: Any, *, shards: int, dim: int = 1) -> Any:
    """Return a tree of arrays whose rows are in zigzag order: tokens, targets, positions, segment ids alike.

    NumPy arrays stay NumPy arrays, and sharded arrays lie as before; inside `jit`, on Auto mesh axes, as the compiler decides. Do
    it before the batch is sharded: moving rows of a sharded array sends them.

    Args:
      batch: arrays of which dim `dim` is the length of the sequence.
      shards: as for `positions`.
      dim: the length's.

    Raises:
      AttentionError: an array without that dim, or a length that is not a multiple of `2 * shards`.
    """
    return _reorder(batch, dim, lambda length: positions(length, shards=shards))


def unpermute(batch: Any, *, shards: int, dim: int = 1) -> Any:
    """Return a tree of arrays whose rows are in order again, and lie as before; the inverse of `permute`.

    Args:
      batch: arrays in zigzag order.
      shards: as for `positions`.
      dim: the length's.

    Raises:
      AttentionError: as `permute`.
    """
    return _reorder(batch, dim, lambda length: np.argsort(positions(length, shards=shards)))


def _reorder(batch: Any, dim: int, order_of: Any) -> Any:
    def one(path: Any, array: Any) -> Any:
        shape = np.shape(array)
        if not -len(shape) <= dim < len(shape):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise AttentionError(
                f"no dim {dim} in shape {shape}",
                path=where,
                fix="leave what has no sequence out, or pass dim=",
            )
        return _take(array, order_of(shape[dim]), dim % len(shape))

    return jax.tree_util.tree_map_with_path(one, batch)


def _take(array: Any, order: np.ndarray, dim: int) -> Any:
    """Return rows in another order, which lie as they did, where that is known."""
    if isinstance(array, np.ndarray):
        return array.take(order, axis=dim)
    array = jnp.asarray(array)
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        return array.at[(*[slice(None)] * dim, order)].get(out_sharding=sharding)
    taken = jnp.take(array, order, axis=dim)
    # Auto axes: the partitioner leaves the length whole, and inside a trace nobody knows how it lay.
    return taken if isinstance(array, jax.core.Tracer) else jax.device_put(taken, array.sharding)
