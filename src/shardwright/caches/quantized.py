"""Keys and values in int8 or fp8, with float32 scales: about half the bytes of bfloat16.

There is one scale per token and head. A row is quantized once, when it is written: later tokens do
not change it. Attention reads the rows as they are, and multiplies its scores by `k_scale` and its
weights by `v_scale`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp

from shardwright.caches.base import buffer
from shardwright.caches.rows import ROW_AXES, RowCache, counters, with_window
from shardwright.caches.scatter import Buffers
from shardwright.caches.spec import CacheSpec
from shardwright.errors import CacheError, did_you_mean
from shardwright.vocabulary.axes import BATCH, KV_HEAD, KV_LENGTH

SCALE_AXES = (BATCH, KV_LENGTH, KV_HEAD)
STORED = ("int8", "float8_e4m3fn", "float8_e5m2")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedRows:
    """Rows in int8 or fp8, and their scales. A row is `values * scale[..., None]`.

    Attributes:
      values: `[..., dim]`, int8 or float8.
      scale: `[...]` float32.
    """

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, dtype: Any = "int8") -> QuantizedRows:
    """Round rows to int8 or fp8, with a float32 scale for each row.

    The scale is the row's largest magnitude divided by the largest number of the dtype.

    In int8 the error of an element is at most half a scale (1/254 of the row's largest element). In
    float8_e4m3fn it is at most 1/16 of the element, in float8_e5m2 1/8, unless the element divided
    by the scale is below the smallest normal number of that dtype.

    The scale is 1 for a row of zeros. If the scale would be below the smallest normal float32, the
    scale is also 1, and the row becomes zeros. All magnitudes of such a row are below 1.5e-36 in
    int8, 5.3e-36 in float8_e4m3fn and 6.8e-34 in float8_e5m2.

    Args:
      x: `[..., dim]` floating point.
      dtype: Dtype of the values: int8, float8_e4m3fn or float8_e5m2.

    Raises:
      CacheError: The dtype is not one of these.
    """
    stored = _stored_dtype(dtype)
    is_integer = jnp.issubdtype(stored, jnp.integer)
    largest = float(jnp.iinfo(stored).max if is_integer else jnp.finfo(stored).max)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    # XLA may flush a subnormal number to 0, and x / 0 would be NaN or infinity.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    # A cast to an integer cuts off the fraction, so round first. A cast to float8 rounds by itself.
    ratio = x / scale[..., None]
    return QuantizedRows(
        values=(jnp.round(ratio) if is_integer else ratio).astype(stored), scale=scale
    )


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedCache(RowCache):
    """A `DenseCache` that stores keys and values in int8 or fp8.

    Attributes:
      spec: The static part of the cache. `dtype` is the dtype of appended keys and values.
      length: `[batch]` int32.
      start: See `RowCache`.
      k: `[batch, capacity, kv_heads, head_dim]`, int8 or float8.
      v: `[batch, capacity, kv_heads, v_dim]`, int8 or float8.
      k_scale: `[batch, capacity, kv_heads]` float32; a key is `k * k_scale`.
      v_scale: Likewise for values.
    """

    k: jax.Array = dataclasses.field(metadata=buffer(*ROW_AXES))
    v: jax.Array = dataclasses.field(metadata=buffer(*ROW_AXES))
    k_scale: jax.Array = dataclasses.field(metadata=buffer(*SCALE_AXES))
    v_scale: jax.Array = dataclasses.field(metadata=buffer(*SCALE_AXES))

    def encode(self, k: jax.Array, v: jax.Array) -> Buffers:
        """Return keys and values in int8 or fp8, and their scales."""
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
      spec: The static part of the cache.
      stored: Dtype of the rows: int8, float8_e4m3fn or float8_e5m2.

    Raises:
      CacheError: The dtype is not one of these.
    """
    spec = with_window(spec)
    rows, dtype = (spec.batch, spec.capacity, spec.kv_heads), _stored_dtype(stored)
    k, v = (jnp.zeros((*rows, dim), dtype) for dim in (spec.head_dim, spec.v_dim))
    k_scale, v_scale = (jnp.ones(rows, jnp.float32) for _ in range(2))
    return QuantizedCache(spec=spec, **counters(spec), k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def _stored_dtype(dtype: Any) -> Any:
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in STORED:
        fix = did_you_mean(name, STORED) or f"pass one of {', '.join(STORED)}"
        raise CacheError(f"{name!r} is not a dtype of quantized rows", path="stored", fix=fix)
    return jnp.dtype(name)
