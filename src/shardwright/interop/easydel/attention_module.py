"""EasyDeL's attention module with a KV cache, built on `shardwright.caches`. Imports flax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.caches.dense import DenseCache
from shardwright.caches.quantized import SCALE_AXES, QuantizedCache
from shardwright.caches.refusals import Refusal
from shardwright.caches.rows import ROW_AXES
from shardwright.caches.sharding import ambient_sharding
from shardwright.caches.spec import CacheSpec
from shardwright.errors import LayerError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.vocabulary.axes import BATCH, KV_LENGTH
from shardwright.vocabulary.modes import GENERATION_MODES, MODE_DECODE

# `Any`, so that type checkers report the same with and without flax.
_Module: Any = flax.linen.Module
_compact: Any = flax.linen.compact


class BaseJAXAttentionModule(_Module):  # type: ignore[misc]
    """Base of attention modules that keep keys and values in flax's collection "cache".

    The variables of the collection are:

    - `cached_key`, `cached_value`: `[batch, capacity, heads, head_dim]`, int8 if quantized;
    - `cached_key_scale`, `cached_value_scale`: `[batch, capacity, heads]` float32, if quantized;
    - `cache_index`: int32, the number of tokens so far;
    - `cache_refused`: `[batch]` int8, the codes of `caches.Refusal` of the last call.

    The first call only creates the variables. The length of the keys in this call is the capacity.

    This module differs from EasyDeL's module in these points:

    - New tokens are written by one scatter on each shard. No shard gathers the cache.
    - Tokens beyond the capacity are not written. Outside `jit` the call raises an error. Inside
      `jit` nothing is written, the index does not change, `cache_refused` has the code of the
      refusal, and the mask hides every key.
    - A quantized cache rounds new rows only. Rows in the cache are not rounded again.
    - The mask of the cache is always merged with the caller's mask, as bool; True means attend.
    - The strategy decides the sharding of the cache. No mesh axis is written into the code.

    Attributes:
      config: Has `quantize_kv_cache` and `use_sharded_kv_caching`. If `use_sharded_kv_caching` is
        true, the ambient manager shards the cache in the manager's mode. If that mode is neither
        decode nor insert, the cache is sharded in the mode decode. Without a manager, the cache is
        sharded by `config.partition_axis`, by default `PartitionAxis()`, on the mesh of
        `config.jax_mesh()`.
    """

    config: Any

    @_compact  # type: ignore[untyped-decorator]
    def _concatenate_to_cache(
        self, key: Any, value: Any, query_states: Any, attention_mask: Any
    ) -> tuple[Any, Any, Any]:
        """Append keys and values, and return all rows of the cache with their mask.

        Args:
          key: `[batch, q_length, heads, head_dim]`, already rotated. The position of its first
            token is `cache_index`.
          value: `[batch, q_length, heads, v_dim]`.
          query_states: `[batch, q_length, ...]`; only its length is used.
          attention_mask: Bool or int, `[batch or 1, heads or 1, q_length or 1, capacity or 1]`, or
            `[batch, capacity]`, or None. For each new token, the mask must hide the new tokens
            after it.

        Returns:
          (key, value, attention_mask) with `capacity` rows. The mask is
          `[batch, heads or 1, q_length, capacity]`; True means attend. Quantized keys are returned
          as a copy in the dtype of `key`; `attention.append_and_attend` reads them without a copy.

        Raises:
          LayerError: The shapes do not fit together.
          CacheError: The shapes of keys and values do not fit the cache. Or, outside `jit`, there
            are more new tokens than free rows in the cache.
        """
        # As in `flax.linen.MultiHeadDotProductAttention`, the first call sets the capacity.
        initialized = self.has_variable("cache", "cached_key")
        _check(key, value, query_states)
        with _manager(self.config) as mode:
            variables = self._variables(key, value, mode)
            if not initialized:
                return key, value, attention_mask
            return _append(variables, key, value, attention_mask, mode)

    def _variables(self, key: Any, value: Any, mode: str | None) -> dict[str, Any]:
        quantized = bool(self.config.quantize_kv_cache)
        sharding = ambient_sharding(mode)

        def rows(like: Any) -> jax.Array:
            return sharding.place(
                jnp.zeros(like.shape, jnp.int8 if quantized else like.dtype), ROW_AXES
            )

        variables = {
            name: self.variable("cache", name, rows, like)
            for name, like in (("cached_key", key), ("cached_value", value))
        }
        if quantized:
            for name in ("cached_key_scale", "cached_value_scale"):
                variables[name] = self.variable(
                    "cache",
                    name,
                    lambda: sharding.place(jnp.ones(key.shape[:-1], jnp.float32), SCALE_AXES),
                )
        variables["cache_index"] = self.variable(
            "cache", "cache_index", lambda: jnp.array(0, jnp.int32)
        )
        variables["cache_refused"] = self.variable(
            "cache", "cache_refused", lambda: jnp.zeros(key.shape[0], jnp.int8)
        )
        return variables


def _append(
    variables: dict[str, Any], key: Any, value: Any, mask: Any, mode: str | None
) -> tuple[Any, Any, Any]:
    cache = _cache_of(variables, key, mode)
    capacity, q_length = cache.spec.capacity, key.shape[1]
    mask = _mask(mask, batch=cache.batch, q_length=q_length, capacity=capacity)
    change = cache.append(key, value)
    # Inside a trace, the refusals are tracers, so nothing can be raised here. `cache_refused` keeps
    # the refusals for the caller.
    if not _jax.in_trace():
        change.require()
    view, index = change.cache.view(), variables["cache_index"]
    written = change.refused == Refusal.NONE
    variables["cached_key"].value, variables["cached_value"].value = view.k, view.v
    if view.k_scale is not None:
        variables["cached_key_scale"].value, variables["cached_value_scale"].value = (
            view.k_scale,
            view.v_scale,
        )
    # All sequences share one index, so it grows only if all of them are written.
    index.value = index.value + jnp.where(jnp.all(written), q_length, 0).astype(jnp.int32)
    variables["cache_refused"].value = change.refused
    filled = jnp.arange(capacity, dtype=jnp.int32)[None] < change.cache.length[:, None]
    filled = ambient_sharding(mode).place(filled & written[:, None], (BATCH, KV_LENGTH))
    # Here, all queries of this call see all new rows. The caller's mask hides the later tokens.
    visible = jnp.broadcast_to(filled[:, None, None], (cache.batch, 1, q_length, capacity))
    k, v = view.dequantized(str(key.dtype))
    return k, v, visible if mask is None else visible & mask


def _cache_of(variables: dict[str, Any], key: Any, mode: str | None) -> Any:
    k, v, index = (variables[name].value for name in ("cached_key", "cached_value", "cache_index"))
    batch, capacity, heads, dim = k.shape
    # The rows of a quantized cache are read in the dtype of `key`.
    dtype = str(key.dtype if "cached_key_scale" in variables else k.dtype)
    spec = CacheSpec(
        batch=batch,
        capacity=capacity,
        kv_heads=heads,
        head_dim=dim,
        v_dim=v.shape[-1],
        dtype=dtype,
        mode=mode,
    )
    # EasyDeL has one index for all sequences. Our caches have one length per sequence, so repeat
    # the index.
    length = ambient_sharding(mode).place(jnp.full((batch,), index, jnp.int32), (BATCH,))
    if "cached_key_scale" not in variables:
        return DenseCache(spec=spec, length=length, start=None, k=k, v=v)
    k_scale, v_scale = (
        variables[name].value for name in ("cached_key_scale", "cached_value_scale")
    )
    return QuantizedCache(
        spec=spec, length=length, start=None, k=k, v=v, k_scale=k_scale, v_scale=v_scale
    )


def _check(key: Any, value: Any, query_states: Any) -> None:
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
        what = f"key has shape {key.shape}, and value has shape {value.shape}"
        raise LayerError(
            what,
            path="key",
            fix=(
                "pass key and value as [batch, q_length, heads, head_dim], with the same batch, "
                "length "
                "and heads"
            ),
        )
    if query_states.shape[1] != key.shape[1]:
        what = f"query_states has length {query_states.shape[1]}, and key has {key.shape[1]}"
        raise LayerError(
            what, path="query_states", fix="pass the queries of the tokens that are appended"
        )


def _mask(mask: Any, *, batch: int, q_length: int, capacity: int) -> Any:
    """Return the caller's mask as bool with 4 dims.

    Raises:
      LayerError: The shape or dtype of the mask does not fit the scores.
    """
    if mask is None:
        return None
    # A mask [batch, capacity] says which keys are padding.
    four = mask[:, None, None] if mask.ndim == 2 else mask
    full = (batch, None, q_length, capacity)
    fits = four.ndim == 4 and all(
        whole is None or size in (1, whole) for size, whole in zip(four.shape, full, strict=True)
    )
    if not fits or jnp.issubdtype(mask.dtype, jnp.floating):
        what = f"attention_mask is {mask.dtype} of shape {mask.shape}"
        fix = (
            "pass bool [batch, heads, q_length, capacity]; each dim has size 1 or its size in "
            f"{(batch, 'heads', q_length, capacity)}"
        )
        raise LayerError(what, path="attention_mask", fix=fix)
    return four.astype(bool)


@contextlib.contextmanager
def _manager(config: Any) -> Iterator[str | None]:
    """Yield the mode in which the cache is sharded, or None if the configuration does not shard it.

    If no manager is ambient, enter a manager that has the `partition_axis` and the mesh of the
    configuration.
    """
    if not config.use_sharded_kv_caching:
        yield None
        return
    manager = context.current()
    if manager is not None:
        # A cache exists for generation, whatever the mode of the program is.
        yield manager.mode if manager.mode in GENERATION_MODES else MODE_DECODE
        return
    axes = getattr(config, "partition_axis", None)
    with PartitionManager(
        PartitionAxis() if axes is None else axes, mesh=config.jax_mesh(), mode=MODE_DECODE
    ):
        yield MODE_DECODE
