"""Arithmetic of rings: which row a position takes, which position a row holds, what a window still needs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.caches.base import CacheSpec, Overflow


def is_ring(spec: CacheSpec) -> bool:
    """Tell whether tokens that exceed the capacity take the rows of the oldest."""
    return spec.overflow is Overflow.RING


def row_of(spec: CacheSpec, positions: jax.Array) -> jax.Array:
    """Return the row of each position; any shape."""
    places = positions % spec.capacity if is_ring(spec) else positions
    return spec.order.row(places, spec.capacity)


def positions_of_rows(spec: CacheSpec, length: jax.Array, start: jax.Array | None) -> jax.Array:
    """Return `[batch, capacity]` int32 positions that the rows of a ring hold, -1 for none; otherwise `[1, capacity]`, whatever is held.

    Args:
      spec: of the cache.
      length: `[batch]` int32.
      start: `[batch]` int32, the first position that a ring still holds; else None.
    """
    places = spec.order.place(jnp.arange(spec.capacity, dtype=jnp.int32), spec.capacity)[None]
    if start is None:
        return places
    last = length[:, None] - 1
    positions = last - (last - places) % spec.capacity
    return jnp.where(positions >= start[:, None], positions, -1)


def needed_from(spec: CacheSpec, length: jax.Array) -> jax.Array:
    """Return the first position that must be held for a query at each length: 0, or where a ring's window begins."""
    if not is_ring(spec):
        return jnp.zeros_like(length)
    window = spec.capacity if spec.window is None else spec.window
    return jnp.maximum(length - window + 1, 0)
