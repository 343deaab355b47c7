"""A flax attention module's cache under the names that other code uses, on top of our caches. Imports flax."""

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

# Alike for type checkers with and without flax.
_Module: Any = flax.linen.Module
_compact: Any = flax.linen.compact


class BaseJAXAttentionModule(_Module):  # type: ignore[misc]
    """Base of attention modules that keep keys and values in flax's collection "cache".

    Variables: `cached_key`, `cached_value` `[batch, capacity, heads, head_dim]`, int8 if quantised and then `cached_key_scale`,
    `cached_value_scale` `[batch, capacity, heads]` float32; `cache_index` int32, tokens so far; `cache_refused` `[batch]` int8,
    codes of `caches.Refusal` of the last call. The first call only makes them: its keys' length is the capacity.

    What is known under this name has faults that this one has not:

    - several tokens, or one beside a sharded length, go through one scatter: no shard gathers the cache, none is left out;
    - tokens beyond the capacity are never written over the last ones, nor dropped in silence: outside `jit` the call raises;
      inside, nothing is written, the index stays, `cache_refused` says so, and the mask lets nothing through;
    - a quantised cache rounds the new rows alone, on every path; rows that it holds are never rounded again;
    - the mask is merged with the caller's on every path, as bool, True = attend;
    - where the cache lies is what the strategy says, not names of mesh axes written into the code.

    Attributes:
      config: has `quantize_kv_cache` and `use_sharded_kv_caching`. Sharded, the cache lies as the ambient manager says in its
        mode, or in decode if that does not generate; without one, as `config.partition_axis`, or `PartitionAxis()`, says on
        the mesh of `config.jax_mesh()`.
    """

    config: Any

    @_compact  # type: ignore[untyped-decorator]
    def _concatenate_to_cache(
        self, key: Any, value: Any, query_states: Any, attention_mask: Any
    ) -> tuple[Any, Any, Any]:
        """Append keys and values, and return all that is held, with the mask that goes with it.

        Args:
          key: `[batch, q_length, heads, head_dim]`; rotated already, by positions from `cache_index` on.
          value: `[batch, q_length, heads, v_dim]`.
          query_states: `[batch, q_length, ...]`; only its length is looked at.
          attention_mask: bool or int, `[batch or 1, heads or 1, q_length or 1, capacity or 1]`, or `[batch, capacity]`, or None;
            what is causal among the new tokens is for it to say.

        Returns:
          (key, value, attention_mask), of `capacity` rows; the mask `[batch, heads or 1, q_length, capacity]`, True = attend. Keys
          that are quantised come back in the dtype of `key`, a copy: `attention.append_and_attend` reads them as they are.

        Raises:
          LayerError: shapes that do not go together.
          CacheError: keys and values do not go with the cache; outside `jit`, tokens exceed it.
        """
        made = self.has_variable("cache", "cached_key")
        _check(key, value, query_states)
        with _manager(self.config) as mode:
            held = self._variables(key, value, mode)
            if not made:
                return key, value, attention_mask
            return _append(held, key, value, attention_mask, mode)

    def _variables(self, key: Any, value: Any, mode: str | None) -> dict[str, Any]:
        quantised = bool(self.config.quantize_kv_cache)
        sharding = ambient_sharding(mode)

        def rows(like: Any) -> jax.Array:
            return sharding.place(
                jnp.zeros(like.shape, jnp.int8 if quantised else like.dtype), ROW_AXES
            )

        held = {
            name: self.variable("cache", name, rows, like)
            for name, like in (("cached_key", key), ("cached_value", value))
        }
        if quantised:
            for name in ("cached_key_scale", "cached_value_scale"):
                held[name] = self.variable(
                    "cache",
                    name,
                    lambda: sharding.place(jnp.ones(key.shape[:-1], jnp.float32), SCALE_AXES),
                )
        held["cache_index"] = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        held["cache_refused"] = self.variable(
            "cache", "cache_refused", lambda: jnp.zeros(key.shape[0], jnp.int8)
        )
        return held


def _append(
    held: dict[str, Any], key: Any, value: Any, mask: Any, mode: str | None
) -> tuple[Any, Any, Any]:
    cache = _cache_of(held, key, mode)
    capacity, q_length = cache.spec.capacity, key.shape[1]
    mask = _mask(mask, batch=cache.batch, q_length=q_length, capacity=capacity)
    change = cache.append(key, value)
    if not _jax.in_trace():
        change.require()
    view, index = change.cache.view(), held["cache_index"]
    done = change.refused == Refusal.NONE
    held["cached_key"].value, held["cached_value"].value = view.k, view.v
    if view.k_scale is not None:
        held["cached_key_scale"].value, held["cached_value_scale"].value = (
            view.k_scale,
            view.v_scale,
        )
    # One index for all sequences, so all of them have room, or none.
    index.value = index.value + jnp.where(jnp.all(done), q_length, 0).astype(jnp.int32)
    held["cache_refused"].value = change.refused
    filled = jnp.arange(capacity, dtype=jnp.int32)[None] < change.cache.length[:, None]
    filled = ambient_sharding(mode).place(filled & done[:, None], (BATCH, KV_LENGTH))
    seen = jnp.broadcast_to(filled[:, None, None], (cache.batch, 1, q_length, capacity))
    k, v = _plain(view.k, view.k_scale, key.dtype), _plain(view.v, view.v_scale, value.dtype)
    return k, v, seen if mask is None else seen & mask


def _cache_of(held: dict[str, Any], key: Any, mode: str | None) -> Any:
    k, v, index = (held[name].value for name in ("cached_key", "cached_value", "cache_index"))
    batch, capacity, heads, dim = k.shape
    dtype = str(key.dtype if "cached_key_scale" in held else k.dtype)
    spec = CacheSpec(
        batch=batch,
        capacity=capacity,
        kv_heads=heads,
        head_dim=dim,
        v_dim=v.shape[-1],
        dtype=dtype,
        mode=mode,
    )
    length = ambient_sharding(mode).place(jnp.full((batch,), index, jnp.int32), (BATCH,))
    if "cached_key_scale" not in held:
        return DenseCache(spec=spec, length=length, start=None, k=k, v=v)
    k_scale, v_scale = (held[name].value for name in ("cached_key_scale", "cached_value_scale"))
    return QuantizedCache(
        spec=spec, length=length, start=None, k=k, v=v, k_scale=k_scale, v_scale=v_scale
    )


def _plain(x: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    return x if scale is None else (x.astype(jnp.float32) * scale[..., None]).astype(dtype)


def _check(key: Any, value: Any, query_states: Any) -> None:
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
        what = f"key has shape {key.shape}, and value {value.shape}"
        raise LayerError(
            what,
            path="key",
            fix="pass both as [batch, q_length, heads, head_dim], with the same batch, length and heads",
        )
    if query_states.shape[1] != key.shape[1]:
        what = f"query_states have length {query_states.shape[1]}, and key {key.shape[1]}"
        raise LayerError(
            what, path="query_states", fix="pass the queries of the tokens that are appended"
        )


def _mask(mask: Any, *, batch: int, q_length: int, capacity: int) -> Any:
    """Return the caller's mask as bool of 4 dims.

    Raises:
      LayerError: it does not go with the scores.
    """
    if mask is None:
        return None
    four = mask[:, None, None] if mask.ndim == 2 else mask
    full = (batch, None, q_length, capacity)
    fits = four.ndim == 4 and all(
        want is None or have in (1, want) for have, want in zip(four.shape, full, strict=True)
    )
    if not fits or jnp.issubdtype(mask.dtype, jnp.floating):
        what = f"attention_mask is {mask.dtype} of shape {mask.shape}"
        fix = f"pass bool [batch, heads, q_length, capacity], each dim 1 or that of {(batch, 'heads', q_length, capacity)}"
        raise LayerError(what, path="attention_mask", fix=fix)
    return four.astype(bool)


@contextlib.contextmanager
def _manager(config: Any) -> Iterator[str | None]:
    """Yield the mode in whose layout the cache lies, its manager ambient; None: it is left where it is."""
    if not config.use_sharded_kv_caching:
        yield None
        return
    manager = context.current()
    if manager is not None:
        yield manager.mode if manager.mode in GENERATION_MODES else MODE_DECODE
        return
    axes = getattr(config, "partition_axis", None)
    with PartitionManager(
        PartitionAxis() if axes is None else axes, mesh=config.jax_mesh(), mode=MODE_DECODE
    ):
        yield MODE_DECODE
