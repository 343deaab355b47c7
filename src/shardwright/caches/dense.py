"""A cache of unchanged keys and values: all positions up to the capacity, or the last positions."""

from __future__ import annotations

import dataclasses
from typing import final

import jax
import jax.numpy as jnp

from shardwright.caches.base import buffer
from shardwright.caches.rows import ROW_AXES, RowCache, counters, with_window
from shardwright.caches.scatter import Buffers
from shardwright.caches.spec import CacheSpec
from shardwright.errors import CacheError


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DenseCache(RowCache):
    """Keys and values of `capacity` positions per slot: in a ring, of the latest positions.

    Attributes:
      spec: The static part of the cache.
      length: `[batch]` int32.
      start: See `RowCache`.
      k: `[batch, capacity, kv_heads, head_dim]`.
      v: `[batch, capacity, kv_heads, v_dim]`.
    """

    k: jax.Array = dataclasses.field(metadata=buffer(*ROW_AXES))
    v: jax.Array = dataclasses.field(metadata=buffer(*ROW_AXES))

    def encode(self, k: jax.Array, v: jax.Array) -> Buffers:
        """Return keys and values as they are."""
        return {"k": k, "v": v}


def make(spec: CacheSpec) -> DenseCache:
    """Return an empty cache."""
    spec = with_window(spec)
    rows = (spec.batch, spec.capacity, spec.kv_heads)
    k, v = (jnp.zeros((*rows, dim), spec.dtype) for dim in (spec.head_dim, spec.v_dim))
    return DenseCache(spec=spec, **counters(spec), k=k, v=v)


def make_sliding(spec: CacheSpec) -> DenseCache:
    """Return an empty ring that keeps the positions that a window of attention sees.

    Raises:
      CacheError: There is no window, or the policy is not that of a ring.
    """
    if spec.window is None:
        raise CacheError(
            "a sliding cache needs a window",
            path="window",
            fix="pass window= (in an engine: CacheShape(window=...)), or use "
            'init("dense", overflow="ring")',
        )
    if not spec.is_ring:
        raise CacheError(
            f"a sliding cache is a ring, but overflow={str(spec.overflow)!r}",
            path="overflow",
            fix='leave overflow out, or use init("dense", window=...), which holds all positions',
        )
    return make(spec)
