"""Keys and values as they are: all positions up to the capacity, or a ring of the latest."""

from __future__ import annotations

import dataclasses
from typing import final

import jax
import jax.numpy as jnp

from shardwright.caches.base import CacheSpec, Overflow
from shardwright.caches.rows import RowCache
from shardwright.caches.scatter import Buffers
from shardwright.caches.sharding import Axes
from shardwright.caches.sliding import is_ring
from shardwright.errors import CacheError
from shardwright.vocabulary.axes import BATCH, KV_HEAD, KV_HEAD_DIM, KV_LENGTH

ROW_AXES = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DenseCache(RowCache):
    """Keys and values of `capacity` positions per slot; with `overflow="ring"` of the latest `capacity`.

    Attributes:
      spec: the static part.
      length: `[batch]` int32.
      start: see `RowCache`.
      k: `[batch, capacity, kv_heads, head_dim]`.
      v: `[batch, capacity, kv_heads, v_dim]`.
    """

    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    length: jax.Array
    start: jax.Array | None
    k: jax.Array
    v: jax.Array

    @property
    def buffers(self) -> Buffers:
        """Keys and values."""
        return {"k": self.k, "v": self.v}

    @property
    def buffer_axes(self) -> dict[str, Axes]:
        """Their annotations."""
        return {"k": ROW_AXES, "v": ROW_AXES}

    def encode(self, k: jax.Array, v: jax.Array) -> Buffers:
        """Return keys and values as they are."""
        return {"k": k, "v": v}


def make(spec: CacheSpec) -> DenseCache:
    """Return an empty cache; of `overflow="ring"` one whose window is its capacity, unless it has another."""
    if is_ring(spec) and spec.window is None:
        spec = dataclasses.replace(spec, window=spec.capacity)
    rows = (spec.batch, spec.capacity, spec.kv_heads)
    k, v = (jnp.zeros((*rows, dim), spec.dtype) for dim in (spec.head_dim, spec.v_dim))
    length = jnp.zeros(spec.batch, jnp.int32)
    return DenseCache(
        spec=spec, length=length, start=jnp.zeros_like(length) if is_ring(spec) else None, k=k, v=v
    )


def make_sliding(spec: CacheSpec) -> DenseCache:
    """Return an empty ring of which attention sees a window.

    Raises:
      CacheError: there is no window, or the policy is not that of a ring.
    """
    if spec.window is None:
        fix = 'pass window=, of an engine CacheShape(window=...), or take init("dense", overflow="ring")'
        raise CacheError("a sliding cache without a window", path="window", fix=fix)
    if spec.overflow is not Overflow.RING:
        fix = 'leave overflow out, or take init("dense", window=...), which holds all positions'
        raise CacheError(
            f"a sliding cache is a ring, and overflow={str(spec.overflow)!r}",
            path="overflow",
            fix=fix,
        )
    return make(spec)
