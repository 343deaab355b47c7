"""The zigzag order of a sequence, in which causal attention is the same work on each shard.

The sequence is cut into 2n equal chunks, and shard r of n holds the chunks r and 2n - 1 - r.

Permute the batch once, where it is loaded:

>>> batch = {"tokens": np.arange(8)[None]}
>>> permute(batch, shards=2)["tokens"]
array([[0, 1, 6, 7, 2, 3, 4, 5]])

Pass `positions(length, shards=...)` to the rotary embedding and to attention, or permute positions
of your own with the batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from shardwright.errors import AttentionError
from shardwright.vocabulary.integers import read_integer


def positions(length: int, *, shards: int) -> np.ndarray:
    """Return the position of each row in zigzag order, `[length]` int32.

    Row i of a permuted array is row `positions[i]` of the original.

    Args:
      length: Length of the sequence.
      shards: Number of shards of the sequence, `manager.axis_size(QUERY_LENGTH)`. It may be odd.
        With one shard no row moves, and any length is valid.

    Raises:
      AttentionError: There are several shards, and the length is not a multiple of `2 * shards`.
    """
    shards = read_integer("shards", shards, error=AttentionError)
    if shards == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * shards):
        more = -length % (2 * shards)
        raise AttentionError(
            f"a length of {length} does not divide into 2 * {shards} chunks, two per shard",
            fix=f"pad the length by {more} rows (with segment id 0, or a loss weight of 0), "
            "or keep the order as it is",
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    # With a causal mask, chunk c attends to c + 1 chunks. So the two chunks of every shard together
    # attend to 2 * shards + 1 chunks.
    order = [chunk for rank in range(shards) for chunk in (rank, 2 * shards - 1 - rank)]
    return chunks[order].reshape(-1)


def permute(batch: Any, *, shards: int, dim: int = 1) -> Any:
    """Return a tree of arrays with rows in zigzag order: tokens, targets, positions, segment ids.

    NumPy arrays stay NumPy arrays, and sharded arrays keep their sharding. (Inside `jit`, on Auto
    mesh axes, the compiler chooses the sharding.) Permute before the batch is sharded: in a sharded
    array, rows would be sent between devices.

    Args:
      batch: Arrays whose dim `dim` is the length of the sequence.
      shards: As for `positions`.
      dim: The dim of the length.

    Raises:
      AttentionError: An array does not have that dim, or the length is not a multiple of
        `2 * shards`.
    """
    return _reorder(batch, dim, lambda length: positions(length, shards=shards))


def unpermute(batch: Any, *, shards: int, dim: int = 1) -> Any:
    """Return a tree of arrays with rows in their original order; the inverse of `permute`.

    Args:
      batch: Arrays in zigzag order.
      shards: As for `positions`.
      dim: The dim of the length.

    Raises:
      AttentionError: As for `permute`.
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
                fix="pass only arrays with a sequence dim, or name that dim with dim=",
            )
        return _take(array, order_of(shape[dim]), dim % len(shape))

    return jax.tree_util.tree_map_with_path(one, batch)


def _take(array: Any, order: np.ndarray, dim: int) -> Any:
    """Return an array with its rows reordered. If its sharding is known, keep the sharding."""
    if isinstance(array, np.ndarray):
        return array.take(order, axis=dim)
    array = jnp.asarray(array)
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        return array.at[(*[slice(None)] * dim, order)].get(out_sharding=sharding)
    reordered = jnp.take(array, order, axis=dim)
    # On Auto axes, `take` replicates the length, so restore the sharding. A tracer on Auto axes has
    # no sharding to restore.
    if isinstance(array, jax.core.Tracer):
        return reordered
    return jax.device_put(reordered, array.sharding)
