"""Keys and values in 8 bits, with a float32 scale for every token and head: half the bytes of bfloat16.

Rows are quantised once, when they are written, and never again: what a row holds does not change with the tokens that follow.
Attention reads them as they are, with the scales folded into its logits and weights (`k_scale`, `v_scale`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp

from shardwright.caches import dense
from shardwright.caches.base import CacheSpec
from shardwright.caches.rows import RowCache
from shardwright.caches.scatter import Buffers
from shardwright.caches.sharding import Axes
from shardwright.errors import CacheError, did_you_mean
from shardwright.vocabulary.axes import BATCH, KV_HEAD, KV_LENGTH

SCALE_AXES = (BATCH, KV_LENGTH, KV_HEAD)
STORED = ("int8", "float8_e4m3fn", "float8_e5m2")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """Rows of 8 bits, and what each is multiplied by.

    Attributes:
      values: `[..., dim]`, int8 or float8.
      scale: `[...]` float32.
    """

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, dtype: Any = "int8") -> Quantized:
    """Round rows `[..., dim]` to 8 bits, each by its own scale: its largest magnitude over the largest that the dtype holds.

    An element is off by at most half a scale in int8 (1/254 of the row's largest), by 1/16 of itself in float8_e4m3fn and 1/8 in
    float8_e5m2, where it is not smaller than their least normal numbers. A row of zeros has scale 1, and so has one that float32
    cannot scale, below 2e-36: it becomes zeros.

    Args:
      x: floating point.
      dtype: of the values: int8, float8_e4m3fn or float8_e5m2.

    Raises:
      CacheError: another dtype.
    """
    stored = _stored(dtype)
    whole = jnp.issubdtype(stored, jnp.integer)
    most = float(jnp.iinfo(stored).max if whole else jnp.finfo(stored).max)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / most
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    ratio = x / scale[..., None]
    return Quantized(values=(jnp.round(ratio) if whole else ratio).astype(stored), scale=scale)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedCache(RowCache):
    """Keys and values in 8 bits, otherwise a `DenseCache`: all positions up to the capacity, or a ring of the latest.

    Attributes:
      spec: the static part; its dtype is that of the keys and values that are appended.
      length: `[batch]` int32.
      start: see `RowCache`.
      k: `[batch, capacity, kv_heads, head_dim]`, int8 or float8.
      v: `[batch, capacity, kv_heads, v_dim]`, likewise.
      k_scale: `[batch, capacity, kv_heads]` float32; a key is `k * k_scale`.
      v_scale: likewise.
    """

    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    length: jax.Array
    start: jax.Array | None
    k: jax.Array
    v: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array

    @property
    def buffers(self) -> Buffers:
        """Keys, values and their scales."""
        return {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def buffer_axes(self) -> dict[str, Axes]:
        """Their annotations."""
        return {
            "k": dense.ROW_AXES,
            "v": dense.ROW_AXES,
            "k_scale": SCALE_AXES,
            "v_scale": SCALE_AXES,
        }

    def encode(self, k: jax.Array, v: jax.Array) -> Buffers:
        """Return keys and values in 8 bits, and their scales."""
        keys, values = quantize(k, self.k.dtype), quantize(v, self.v.dtype)
        return {
            "k": keys.values,
            "v": values.values,
            "k_scale": keys.scale,
            "v_scale": values.scale,
        }


def make(spec: CacheSpec, *, stored: Any = "int8") -> QuantizedCache:
    """Return an empty cache.

    Args:
      spec: the static part.
      stored: dtype of the rows: int8, float8_e4m3fn or float8_e5m2.

    Raises:
      CacheError: another dtype.
    """
    dtype = _stored(stored)
    empty = dense.make(
        spec
    )  # for its shapes: where a program makes it, its own rows are never made
    k, v = (jnp.zeros(x.shape, dtype) for x in (empty.k, empty.v))
    scale = jnp.ones(k.shape[:3], jnp.float32)
    return QuantizedCache(
        spec=empty.spec,
        length=empty.length,
        start=empty.start,
        k=k,
        v=v,
        k_scale=scale,
        v_scale=jnp.ones_like(scale),
    )


def _stored(dtype: Any) -> Any:
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in STORED:
        fix = did_you_mean(name, STORED) or f"say one of {', '.join(STORED)}"
        raise CacheError(f"{name!r} is no dtype of quantized rows", path="stored", fix=fix)
    return jnp.dtype(name)
