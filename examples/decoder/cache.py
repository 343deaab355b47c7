"""A plain KV cache: two arrays per layer, and the number of rows of each batch entry.

Each layer has its own leaves, so that a donated cache is updated in place. A stack of all layers in
a scan would be copied at every step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from decoder.config import DecoderConfig
from shardwright import caches

CACHE_AXES = (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)


def cache_specs(config: DecoderConfig, *, batch: int, capacity: int) -> dict[str, Any]:
    """Return the cache as `ArraySpec`s; `k` and `v` are `[batch, capacity, kv_heads, head_dim]`."""
    shape = (batch, capacity, config.kv_heads, config.head_dim)
    rows = sw.ArraySpec(shape, config.dtype, CACHE_AXES)
    return {
        "layers": [{"k": rows, "v": rows} for _ in range(config.layers)],
        "length": sw.ArraySpec((batch,), jnp.int32, (sw.BATCH,)),
    }


def empty_cache(pm: sw.PartitionManager, specs: dict[str, Any]) -> dict[str, Any]:
    """Create an empty cache, already sharded."""
    shardings = pm.shardings(specs, role="activation")

    def zeros() -> dict[str, Any]:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)

    return jax.jit(zeros, out_shardings=shardings)()


def next_positions(cache: dict[str, Any] | None, tokens: jax.Array) -> jax.Array:
    """Return the positions `[batch, q_length]` of new tokens after the rows of the cache."""
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return steps if cache is None else cache["length"][:, None] + steps


def write_rows(rows: jax.Array, new: jax.Array, positions: jax.Array, real: jax.Array) -> jax.Array:
    """Write the first `real` new rows of each batch entry at their positions; skip padding.

    Args:
      rows: `[batch, capacity, kv_heads, head_dim]`.
      new: `[batch, q_length, kv_heads, head_dim]`.
      positions: `[batch, q_length]`.
      real: `[batch]`.
    """
    capacity = rows.shape[1]
    targets = jnp.where(jnp.arange(new.shape[1]) < real[:, None], positions, capacity)
    # vmap keeps the batch a parallel dim of the scatter. An index past the end is dropped.
    written = jax.vmap(lambda row, values, index: row.at[index].set(values, mode="drop"))(
        rows, new, targets
    )
    return sw.shard(written, CACHE_AXES)


def insert_rows(cache: dict[str, Any], prefix: dict[str, Any], slot: jax.Array) -> dict[str, Any]:
    """Copy a prefilled cache of one prompt into one slot of a larger cache.

    The library's `insert` writes on each shard. For `rows.at[slot].set(prompt)`, a compiler for
    TPUs gathers the rows of all slots first.
    """
    # What the slot held before is overwritten.
    free = jnp.where(jnp.arange(cache["length"].size) == slot, 0, cache["length"])
    layers, length = [], free
    for rows, prompt in zip(cache["layers"], prefix["layers"], strict=True):
        source = as_dense(prompt, prefix["length"])
        written = as_dense(rows, free).insert(source, jnp.reshape(slot, (1,))).cache
        layers.append({"k": written.k, "v": written.v})
        length = written.length
    return {"layers": layers, "length": length}


def as_dense(rows: dict[str, jax.Array], length: jax.Array) -> caches.DenseCache:
    """Return the rows of one layer as a cache of the library."""
    batch, capacity, kv_heads, head_dim = rows["k"].shape
    sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "head_dim": head_dim}
    dtype = str(rows["k"].dtype)
    empty = jax.eval_shape(lambda: caches.init("dense", **sizes, dtype=dtype))
    return dataclasses.replace(empty, length=length, **rows)
