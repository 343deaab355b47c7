"""Which row of a slot holds which position, with rings and row orders taken into account."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.caches.spec import CacheSpec


def row_of(spec: CacheSpec, positions: jax.Array) -> jax.Array:
    """Return the row that stores each position. Positions may have any shape."""
    places = positions % spec.capacity if spec.is_ring else positions
    return spec.order.row(places, spec.capacity)


def of_tokens(length: jax.Array, is_token: jax.Array, *, every: bool) -> jax.Array:
    """Return the positions of appended tokens, `[batch, q_length]` int32.

    Padding has the position of the token before it, so tokens after padding continue without a gap.

    Args:
      length: `[batch]` int32, before the append.
      is_token: `[batch, q_length]` bool.
      every: Whether the caller knows that all rows are tokens.
    """
    if every:
        # Do not sum a constant: XLA would sum it at compile time, which takes 3 to 10 s for 16 x
        # 32,640 rows.
        return length[:, None] + jax.lax.broadcasted_iota(jnp.int32, (1, is_token.shape[1]), 1)
    return length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1


def positions_of_rows(spec: CacheSpec, length: jax.Array, start: jax.Array | None) -> jax.Array:
    """Return the position that each row holds.

    Args:
      spec: The spec of the cache.
      length: `[batch]` int32.
      start: `[batch]` int32, the first position that a slot of a ring still holds. None if the
        cache is not a ring.

    Returns:
      For a ring `[batch, capacity]` int32, -1 for an empty row. Otherwise `[1, capacity]`: the same
      for all slots, and valid only below the length of a slot.
    """
    places = spec.order.place(jnp.arange(spec.capacity, dtype=jnp.int32), spec.capacity)[None]
    if start is None:
        return places
    last = length[:, None] - 1
    # A row holds the largest position that is at most `last` and equals its place modulo the
    # capacity. In JAX, as in Python, the remainder of a negative number is not negative.
    positions = last - (last - places) % spec.capacity
    return jnp.where(positions >= start[:, None], positions, -1)


def first_needed(spec: CacheSpec, length: jax.Array) -> jax.Array:
    """Return the first position that the next query of each slot sees.

    In a ring, it is the start of the query's window. In other caches, it is 0.
    """
    if not spec.is_ring:
        return jnp.zeros_like(length)
    window = spec.capacity if spec.window is None else spec.window
    # Add 1, because the query at position `length` sees its own position too.
    return jnp.maximum(length - window + 1, 0)
