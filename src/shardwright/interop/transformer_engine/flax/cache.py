"""The variables of a decoding `MultiHeadAttention`: keys and values of earlier tokens.

Their names, shapes and dtypes are those of TransformerEngine. The rows are written in place, at
their positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from shardwright.errors import CacheError
from shardwright.interop.transformer_engine.scores import ScoreConfig, check_mask, hidden_pairs


def next_position(module: Any) -> Any:
    """Return the position of the first token of this call. It is 0 if there is no cache yet."""
    if not module.has_variable("cache", "cache_index"):
        return 0
    return module.get_variable("cache", "cache_index")


def with_cache(module: Any, arrays: Any, mask: Any, bias: Any) -> tuple[list[Any], Any, Any]:
    """Append keys and values to the cache, and return all of them with a full mask.

    The first call creates the cache and writes nothing. The length of its keys is the length of the
    cache. `cache_index` counts the tokens that later calls write.

    Args:
      module: A `MultiHeadAttention`.
      arrays: Query, key and value of this call.
      mask: `[batch, 1 or heads, q_length, cache length]`; where it is 1, the pair is hidden. The
        mask type "causal" ignores it.
      bias: `[1, heads, q_length, cache length]`, or with a row for each position of the cache.

    Returns:
      (query, all keys, all values), a mask with causality and the window, and the rows of the bias.

    Raises:
      CacheError: The tokens do not fit the cache. Inside a trace, the result is NaN instead.
      ShardingError: The mask is not valid; see `scores.check_mask`.
    """
    query, key, value = arrays
    dim = 0 if module.transpose_batch_sequence else 1
    exists = module.has_variable("cache", "cached_key")
    keys = module.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
    values = module.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
    index = module.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
    start, count = index.value, query.shape[dim]
    if exists:
        length = keys.value.shape[dim]
        is_full = _is_full(start, count, length)
        key = _written(keys.value, key, start, dim)
        value = _written(values.value, value, start, dim)
        keys.value, values.value, index.value = key, value, start + count
        value = jnp.where(is_full, jnp.nan, value)
    batch = query.shape[1 - dim]
    check_mask(mask, (batch, query.shape[2], count, key.shape[dim]))
    mask = jnp.asarray(
        hidden_pairs(
            ScoreConfig(mask_type=module.attn_mask_type, window=module.window_size),
            count,
            key.shape[dim],
            mask=mask,
            start=start,
            is_cached=True,
        )
    )
    if bias is not None and exists and bias.shape[2] == key.shape[dim]:
        bias = jax.lax.dynamic_slice_in_dim(bias, start, count, axis=2)
    return [query, key, value], mask, bias


def _written(stored: Any, rows: Any, start: Any, dim: int) -> Any:
    """Return the stored rows with new rows from a position on, sharded like the new rows."""
    sharding = jax.typeof(rows).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        stored = jax.sharding.reshard(stored, sharding)
    return jax.lax.dynamic_update_slice_in_dim(stored, rows.astype(stored.dtype), start, dim)


def _is_full(start: Any, count: int, length: int) -> Any:
    """Tell whether rows are past the end of the cache."""
    is_full = start + count > length
    if not isinstance(is_full, jax.core.Tracer) and bool(np.asarray(is_full)):
        raise CacheError(
            f"the cache holds {length} tokens, has {int(start)}, and gets {count} more",
            path="cache_index",
            fix="initialize the module with inputs as long as the longest sequence",
        )
    return is_full
