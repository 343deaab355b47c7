"""Attend to a cache: append new tokens, then attend to all keys of each slot, by position."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.api import dot_product_attention
from shardwright.attention.masks import MaskRules, Window
from shardwright.attention.paged import paged_attention
from shardwright.caches.base import CACHE, KVCache, View
from shardwright.caches.change import Change
from shardwright.caches.positions import of_tokens
from shardwright.caches.rows import RowCache
from shardwright.caches.sharding import ambient_sharding, axes_by_dim
from shardwright.errors import AttentionError
from shardwright.manager import context
from shardwright.resolution.partition_specs import spec_text
from shardwright.vocabulary.axes import BATCH, EMPTY, KV_LENGTH
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.modes import MODE_DECODE, mode_name, parse_mode
from shardwright.vocabulary.read import array, read_value

C = TypeVar("C", bound=KVCache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedAttention(Generic[C]):
    """The result of attention to a cache.

    Attributes:
      o: `[batch, q_length, heads, v_dim]`. Exactly 0 for padding rows, and for slots
        that refused their tokens.
      change: The cache after the append, the refusals, and the positions of the tokens.
    """

    o: jax.Array
    change: Change[C]

    @property
    def cache(self) -> C:
        """The cache after the append."""
        return self.change.cache


def append_and_attend(
    q: Any,
    k: Any,
    v: Any,
    cache: C,
    *,
    valid: Any = None,
    mode: str | None = None,
    implementation: str | None = None,
    causal: bool = True,
    window: Window | None = None,
    chunk: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> CachedAttention[C]:
    """Append new tokens to every slot, and attend from them to all keys that the slot then holds.

    Row i of the queries belongs to row i of the new keys. Masks compare positions, so the same call
    serves prefill, chunked prefill, decode, and several drafted tokens. One call with n tokens
    equals n calls with one token each. This also holds for a ring: if the new tokens would
    overwrite keys that their queries see (`q_length > capacity - window + 1`), the call attends to
    a copy of the ring, followed by the new tokens.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, q_length, kv_heads, head_dim]`, in the cache's dtype. Query head h reads kv head
        `h * kv_heads // heads`.
      v: `[batch, q_length, kv_heads, v_dim]`, in the cache's dtype.
      cache: A cache of any kind. Under `jit`, donate it.
      valid: `[batch, q_length]` bool, True for rows that are tokens. Other rows are not written to
        the cache, and their output is 0. By default, all rows are tokens.
      mode: Runtime mode, for the sharding of q. Defaults to the cache's, else the manager's, else
        decode.
      implementation: As in `dot_product_attention`. Leave it out for a paged cache.
      causal: Whether a query sees only keys up to its own position.
      window: (left, right), as in `dot_product_attention`. Defaults to the cache's.
      chunk: As in `dot_product_attention`.
      sinks: `[heads]`, as in `dot_product_attention`.
      softcap: As in `dot_product_attention`.
      scale: Factor of the scores, q · k. Defaults to `1 / sqrt(head_dim)`.

    Raises:
      AttentionError: The arguments do not fit each other; the window is longer than that of a ring
        cache; or the cache does not have the sharding of the mode.
      CacheError: Keys and values do not fit the cache.
      ShardingError: The rules of the manager do not fit the arrays.
    """
    read_value("cache", cache, CACHE, error=AttentionError)
    # Compare the batch and q_length of q and k here, because the cache checks only k and v, and
    # attention checks only q.
    if getattr(q, "ndim", 0) == getattr(k, "ndim", 0) == 4 and q.shape[:2] != k.shape[:2]:
        raise AttentionError(
            f"q has [batch, q_length] {q.shape[:2]}, and k {k.shape[:2]}",
            path="q",
            fix="pass one query for each key: q, k and v of the tokens that are appended",
        )
    mode = _mode(cache, mode)
    query_window = _window(cache, window)
    options = {
        "causal": causal,
        "window": query_window,
        "chunk": chunk,
        "sinks": sinks,
        "softcap": softcap,
        "scale": scale,
        "mode": mode,
    }
    change = cache.append(k, v, valid=valid)
    assert change.positions is not None
    # Shard the positions by batch only. Otherwise XLA would shard them over the mesh axes of the
    # keys' length, and gather them again.
    positions = ambient_sharding(cache.spec.mode).place(change.positions, (BATCH, EMPTY))
    view = change.cache.view()
    if view.tables is not None:
        o = _attend_to_pages(q, view, change.positions, options, implementation)
    else:
        if _overwrites_visible_keys(cache, k.shape[1], query_window):
            view = (_join if _jax.in_trace() else _jitted_join)(
                cache, jnp.asarray(k), jnp.asarray(v), positions
            )
        o = _attend_to_rows(q, view, positions, options, implementation)
    # Zero the output of padding rows. Without a causal mask, padding rows see keys too.
    return CachedAttention(o=jnp.where(positions[:, :, None, None] >= 0, o, 0), change=change)


def next_positions(cache: KVCache, *, q_length: int = 1, valid: Any = None) -> jax.Array:
    """Return the positions that an append would give to its tokens, for rotary embeddings.

    Args:
      cache: The cache before the append.
      q_length: Number of rows to append.
      valid: `[batch, q_length]` bool, True for tokens. By default, all rows are tokens.

    Returns:
      `[batch, q_length]` int32, -1 for padding.

    Raises:
      AttentionError: `valid` has a wrong shape, `q_length` is not a positive integer, or `cache` is
        not a cache.
    """
    read_value("cache", cache, CACHE, error=AttentionError)
    fix = "pass the number of rows to append"
    q_length = read_integer("q_length", q_length, error=AttentionError, fix=fix)
    shape = (cache.batch, q_length)
    if valid is not None:
        read_value("valid", valid, array(shape, dtype="bool"), error=AttentionError)
    sharding = ambient_sharding(cache.spec.mode)
    is_token = sharding.place(
        jnp.ones(shape, bool) if valid is None else jnp.asarray(valid), (BATCH, EMPTY)
    )
    positions = of_tokens(cache.length, is_token, every=valid is None)
    return jnp.where(is_token, positions, -1)


# Arguments.


def _mode(cache: KVCache, mode: str | None) -> str:
    """Return the mode of the call. The cache must have the sharding of that mode."""
    own, manager = cache.spec.mode, context.current()
    if mode is None:
        return own or (manager.mode if manager is not None else None) or MODE_DECODE
    parsed = parse_mode(mode)
    if own is None or own == parsed:
        return parsed
    for name, axes in cache.buffer_axes.items():
        shape = cache.buffers[name].shape
        current, required = (ambient_sharding(each).spec(axes, shape) for each in (own, parsed))
        if current != required:
            raise AttentionError(
                f"the cache is sharded for {mode_name(own)}, {name} as {spec_text(current)}, "
                f"and {mode_name(parsed)} needs {spec_text(required)}",
                path="mode",
                fix="move the cache once with caches.reshard, or leave mode out",
            )
    return parsed


def _window(cache: KVCache, window: Window | None) -> Window | None:
    """Return the window of the queries.

    Raises:
      AttentionError: The window is longer than the window that a ring keeps.
    """
    own = cache.spec.window
    if window is None:
        return None if own is None else (own - 1, None)
    checked = MaskRules(window=window).window
    assert checked is not None
    left = checked[0]
    if cache.spec.is_ring and own is not None and (left is None or left >= own):
        positions = "all" if left is None else left
        raise AttentionError(
            f"window={window} sees {positions} positions to the left, "
            f"and the ring keeps a window of {own}",
            path="window",
            fix=f"leave window out, pass {(own - 1, checked[1])} or a shorter window, "
            "or create the cache with a longer one",
        )
    return checked


def _overwrites_visible_keys(cache: KVCache, q_length: int, window: Window | None) -> bool:
    """Tell whether an append may overwrite keys that its own queries see."""
    if not cache.spec.is_ring or window is None or window[0] is None:
        return False
    # The first new query sees the `window[0]` positions before its own. The last new key overwrites
    # the key whose position is lower by `capacity`.
    return q_length > cache.spec.capacity - window[0]


# Attending.


def _attend_to_rows(
    q: Any, view: View, positions: jax.Array, options: dict[str, Any], implementation: str | None
) -> jax.Array:
    assert view.positions is not None
    o: jax.Array = dot_product_attention(
        q,
        view.k,
        view.v,
        implementation=implementation,
        positions=positions,
        kv_positions=view.positions,
        # If all slots share one row of positions, only lengths tell which rows a slot has filled.
        lengths=view.lengths if view.positions.shape[0] == 1 else None,
        k_scale=view.k_scale,
        v_scale=view.v_scale,
        **options,
    )
    return o


def _attend_to_pages(
    q: Any, view: View, positions: jax.Array, options: dict[str, Any], implementation: str | None
) -> jax.Array:
    if implementation is not None:
        what = f"implementation={implementation!r}, and only paged_attention reads pages"
        raise AttentionError(what, path="implementation", fix="leave it out")
    o: jax.Array = paged_attention(
        q,
        view.k,
        view.v,
        block_tables=view.tables,
        lengths=view.lengths,
        positions=positions,
        **options,
    )
    return o


def _join(cache: KVCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> View:
    """Return a view whose rows are those of a ring before the append, and then the new tokens.

    Each shard appends its part of the new tokens to its part of the ring, so no row of the ring is
    sent.
    """
    assert isinstance(cache, RowCache)
    sharding, ring = ambient_sharding(cache.spec.mode), cache.view()
    assert ring.positions is not None
    old = {**cache.buffers, "positions": ring.positions}
    new = {**cache.encode(k, v), "positions": positions}
    placed = sharding.with_specs(old, {**cache.buffer_axes, "positions": (BATCH, KV_LENGTH)})
    shards = sharding.shards(axes_by_dim(placed.specs["positions"], 2)[1])
    # Each shard must get the same number of new rows, so pad them. Padding has position -1, which
    # no query sees.
    padding = -positions.shape[1] % shards
    if padding:
        new = {
            name: jnp.pad(
                x,
                ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)),
                constant_values=-1 if name == "positions" else 0,
            )
            for name, x in new.items()
        }

    def local(old: dict[str, jax.Array], new: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jnp.concatenate([x, new[name]], axis=1) for name, x in old.items()}

    joined = placed.run(local, new, specs=(placed.specs,))
    return View(
        k=joined["k"],
        v=joined["v"],
        positions=joined["positions"],
        # If there is one slot, `_attend_to_rows` passes these lengths, and attention hides keys at
        # positions beyond them. So the lengths must include the new tokens.
        lengths=cache.length + jnp.sum(positions >= 0, axis=1, dtype=jnp.int32),
        k_scale=joined.get("k_scale"),
        v_scale=joined.get("v_scale"),
    )


_jitted_join = jax.jit(_join)
