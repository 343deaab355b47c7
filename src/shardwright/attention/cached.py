"""Attention to a cache: append the new tokens, then attend to all that each slot holds, by position."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.api import dot_product_attention
from shardwright.attention.masks import MaskRules, Window
from shardwright.attention.paged import paged_attention
from shardwright.caches.base import KVCache, View
from shardwright.caches.change import Change
from shardwright.caches.rows import RowCache
from shardwright.caches.sharding import PlacedArrays, ambient_sharding, axes_by_dim
from shardwright.errors import AttentionError
from shardwright.manager import context
from shardwright.resolution.partition_specs import spec_text
from shardwright.vocabulary.axes import BATCH, EMPTY, KV_LENGTH
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.modes import MODE_DECODE, mode_name, parse_mode

C = TypeVar("C", bound=KVCache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedAttention(Generic[C]):
    """What attention to a cache gives.

    Attributes:
      o: `[batch, q_length, heads, v_dim]`; exactly 0 for rows that are no tokens and for slots that took none.
      change: the cache after the append, what was refused, and the positions of the tokens.
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
    """Append new tokens to every slot, and attend from them to all that the slot then holds.

    Row i of the queries belongs to row i of the new keys. Masks go by position, so one call serves prefill, a chunk of it,
    decode, and several drafted tokens: n tokens at once give what n calls with one token give. Of a ring, tokens that the call
    itself makes the ring forget are still seen by the queries that need them: where a chunk is longer than the rows beyond
    the window, `q_length > capacity - window + 1`, the call attends to a copy of the ring with the chunk behind it.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, q_length, kv_heads, head_dim]`, in the cache's dtype; query head h reads kv head `h * kv_heads // heads`.
      v: `[batch, q_length, kv_heads, v_dim]`, likewise.
      cache: of any kind. Under `jit`, donate it.
      valid: `[batch, q_length]` bool, which rows are tokens; the others are neither written nor attended from. Absent: all.
      mode: runtime mode, for where q lies; absent: that of the cache, else the manager's.
      implementation: as in `dot_product_attention`; pages have one of their own.
      causal: no key after the query.
      window: (left, right), as in `dot_product_attention`; absent: the cache's.
      chunk: as in `dot_product_attention`.
      sinks: `[heads]`, as in `dot_product_attention`.
      softcap: as in `dot_product_attention`.
      scale: factor of the products; absent: `1 / sqrt(head_dim)`.

    Raises:
      AttentionError: the arguments do not go together, a window reaches beyond what a ring keeps, or the cache lies elsewhere
        than the mode says.
      CacheError: keys and values do not go with the cache.
      ShardingError: the arrays do not lie on the mesh as the rules say.
    """
    _check_cache(cache)
    if (
        getattr(q, "ndim", None) == 4
        and getattr(k, "ndim", None) == 4
        and q.shape[:2] != k.shape[:2]
    ):
        what = f"q has [batch, q_length] {q.shape[:2]}, and k {k.shape[:2]}"
        raise AttentionError(
            what, path="q", fix="pass the queries of the tokens that are appended, row by row"
        )
    mode = _mode(cache, mode)
    seen = _window(cache, window)
    options = {
        "causal": causal,
        "window": seen,
        "chunk": chunk,
        "sinks": sinks,
        "softcap": softcap,
        "scale": scale,
        "mode": mode,
    }
    change = cache.append(k, v, valid=valid)
    assert change.positions is not None
    # Said here, or the partitioner would spread them as the keys' length, and gather them.
    positions = ambient_sharding(cache.spec.mode).place(change.positions, (BATCH, EMPTY))
    view = change.cache.view()
    if view.tables is not None:
        o = _attend_to_pages(q, view, positions, options, implementation)
    else:
        if _forgets(cache, k.shape[1], seen):
            view = (_join if _jax.in_trace() else _joined)(
                cache, jnp.asarray(k), jnp.asarray(v), positions
            )
        o = _attend_to_rows(q, view, positions, options, implementation)
    # Causal or not, and whatever stands in rows that are no tokens.
    return CachedAttention(o=jnp.where(positions[:, :, None, None] >= 0, o, 0), change=change)


def next_positions(cache: KVCache, *, q_length: int = 1, valid: Any = None) -> jax.Array:
    """Return the positions that an append would give, `[batch, q_length]` int32, -1 where there is no token: for rotary embeddings.

    Args:
      cache: before the append.
      q_length: rows to append.
      valid: `[batch, q_length]` bool, which of them are tokens; absent: all.

    Raises:
      AttentionError: `valid` has another shape, `q_length` is no number of rows, or the cache is none.
    """
    _check_cache(cache)
    fix = "pass the number of rows that are appended"
    q_length = read_integer("q_length", q_length, error=AttentionError, fix=fix)
    shape = (cache.batch, q_length)
    if valid is not None and (getattr(valid, "shape", None) != shape or valid.dtype != bool):
        what = f"valid is {getattr(valid, 'dtype', type(valid).__name__)} of shape {getattr(valid, 'shape', None)}"
        raise AttentionError(
            what, path="valid", fix=f"pass bool of shape {shape}, one per row that is appended"
        )
    sharding = ambient_sharding(cache.spec.mode)
    is_token = sharding.place(
        jnp.ones(shape, bool) if valid is None else jnp.asarray(valid), (BATCH, EMPTY)
    )
    positions = cache.length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    return jnp.where(is_token, positions, -1)


# What is asked.


def _check_cache(cache: Any) -> None:
    if not isinstance(cache, KVCache):
        raise AttentionError(
            f"cache is {type(cache).__name__}, not a cache",
            path="cache",
            fix="make one with caches.init",
        )


def _mode(cache: KVCache, mode: str | None) -> str:
    """Return the mode of the call, in which the cache lies where it is."""
    own, manager = cache.spec.mode, context.current()
    if mode is None:
        return own or (manager.mode if manager is not None else None) or MODE_DECODE
    said = parse_mode(mode)
    if own is None or own == said:
        return said
    for name, axes, array in _placed(cache):
        made, wanted = (ambient_sharding(which).spec(axes, array.shape) for which in (own, said))
        if made != wanted:
            lies, wants = spec_text(made), spec_text(wanted)
            what = f"the cache lies as {mode_name(own)} says, {name} {lies}, and {mode_name(said)} says {wants}"
            raise AttentionError(
                what, path="mode", fix="move it once, with caches.reshard, or leave mode out"
            )
    return said


def _placed(cache: Any) -> list[tuple[str, Any, jax.Array]]:
    return [(name, axes, cache.buffers[name]) for name, axes in cache.buffer_axes.items()]


def _window(cache: KVCache, window: Window | None) -> Window | None:
    """Return what the queries see.

    Raises:
      AttentionError: it is more than a ring keeps.
    """
    own = cache.spec.window
    if window is None:
        return None if own is None else (own - 1, None)
    given = MaskRules(window=window).window
    assert given is not None
    left = given[0]
    if cache.spec.is_ring and own is not None and (left is None or left >= own):
        what = f"window={window} sees {'all' if left is None else left} positions to the left, and the ring keeps a window of {own}"
        raise AttentionError(
            what,
            path="window",
            fix=f"leave window out, pass {(own - 1, given[1])} or less, or make the cache with more",
        )
    return given


def _forgets(cache: KVCache, q_length: int, seen: Window | None) -> bool:
    """Tell whether an append may overwrite what its own queries see."""
    if not cache.spec.is_ring or seen is None or seen[0] is None:
        return False
    return q_length > cache.spec.capacity - seen[0]


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
        # Where slots share one row of positions, their lengths alone say what each holds.
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
        what = (
            f"implementation={implementation!r}, and pages are attended to by paged_attention alone"
        )
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
    """Return a view of a ring as it was, and behind it the new tokens, on every shard some of them: nothing of the ring is sent."""
    assert isinstance(cache, RowCache)
    sharding, before = ambient_sharding(cache.spec.mode), cache.view()
    assert before.positions is not None
    old = {**cache.buffers, "positions": before.positions}
    new = {**cache.encode(k, v), "positions": positions}
    placed = sharding.placed(old, {**cache.buffer_axes, "positions": (BATCH, KV_LENGTH)})
    padding = -positions.shape[1] % _row_shards(placed)
    new = {name: _pad_rows(x, padding, -1 if name == "positions" else 0) for name, x in new.items()}

    def local(old: dict[str, jax.Array], new: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jnp.concatenate([x, new[name]], axis=1) for name, x in old.items()}

    both = placed.run(local, new, specs=(placed.specs,))
    return View(
        k=both["k"],
        v=both["v"],
        positions=both["positions"],
        # With the new tokens: of one slot, lengths are read, and would hide them.
        lengths=cache.length + jnp.sum(positions >= 0, axis=1, dtype=jnp.int32),
        k_scale=both.get("k_scale"),
        v_scale=both.get("v_scale"),
    )


_joined = jax.jit(_join)


def _row_shards(placed: PlacedArrays) -> int:
    """Return the number of shards of the rows."""
    manager = placed.sharding.manager
    if manager is None:
        return 1
    sizes: Mapping[str, int] = manager.mesh.shape
    return math.prod(sizes[name] for name in axes_by_dim(placed.specs["positions"], 2)[1])


def _pad_rows(x: jax.Array, count: int, value: int) -> jax.Array:
    return (
        x
        if not count
        else jnp.pad(x, ((0, 0), (0, count), *((0, 0),) * (x.ndim - 2)), constant_values=value)
    )
