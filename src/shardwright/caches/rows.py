"""Caches of rows: every slot has its own, position p in row p, or, of a ring, in row p modulo their number.

What a row holds is for subclasses to say: keys and values as they are, or quantised ones with their scales.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from shardwright.caches import arguments, scatter, slots
from shardwright.caches.base import Change, KVCache, Refusal, View
from shardwright.caches.operating import operate
from shardwright.caches.paged import pool
from shardwright.caches.scatter import Buffers
from shardwright.caches.sharding import Axes, Shards, ambient_shards, specs_of
from shardwright.caches.sliding import is_ring, needed_from, positions_of_rows, row_of
from shardwright.vocabulary.axes import BATCH, EMPTY, KV_LENGTH


class RowCache(KVCache):
    """A cache that is written in rows. Subclasses are dataclasses with a field for every buffer.

    Attributes:
      start: `[batch]` int32, the first position that a slot of a ring still holds; None unless it is a ring.
    """

    start: jax.Array | None

    @property
    @abc.abstractmethod
    def buffers(self) -> Buffers:
        """The arrays by field, `[batch, rows, ...]` each."""

    @property
    @abc.abstractmethod
    def buffer_axes(self) -> dict[str, Axes]:
        """Their annotations."""

    @abc.abstractmethod
    def encode(self, k: jax.Array, v: jax.Array) -> Buffers:
        """Return what rows hold of keys and values, by buffer: `[..., kv_heads, head_dim]` to `[..., ...]`."""

    def axes(self) -> Self:
        """Return the annotation of every array."""
        start = None if self.start is None else (BATCH,)
        cache: Any = self
        annotated: Self = dataclasses.replace(
            cache, length=(BATCH,), start=start, **self.buffer_axes
        )
        return annotated

    def append(self, k: Any, v: Any, *, valid: Any = None) -> Change[Self]:
        """Write the next tokens of every slot; see `KVCache.append`."""
        arguments.check_append(self.spec, k, v, valid)
        return operate(_append, self, k, v, valid)

    def insert(self, source: KVCache, slots: Any) -> Change[Self]:
        """Copy sequences into free slots; see `KVCache.insert`."""
        arguments.check_source(self.spec, source)
        return operate(_insert, self, source, arguments.destinations(self.spec, source, slots))

    def free(self, slots: Any) -> Change[Self]:
        """Empty slots; see `KVCache.free`."""
        return operate(_free, self, arguments.integers("slots", slots))

    def rewind(self, lengths: Any) -> Change[Self]:
        """Cut each slot to a length; see `KVCache.rewind`."""
        return operate(_rewind, self, arguments.integers("lengths", lengths, size=self.batch))

    def reorder(self, parents: Any, *, group: int | None = None) -> Change[Self]:
        """Let every slot continue what another holds; see `KVCache.reorder`."""
        return operate(
            _reorder,
            self,
            arguments.integers("parents", parents, size=self.batch),
            group=arguments.read_group(self.spec, group),
        )

    def view(self) -> View:
        """Return what attention reads."""
        buffers = self.buffers
        return View(
            k=buffers["k"],
            v=buffers["v"],
            positions=_positions(self),
            lengths=self.length,
            k_scale=buffers.get("k_scale"),
            v_scale=buffers.get("v_scale"),
        )


def _positions(cache: RowCache) -> jax.Array:
    positions = positions_of_rows(cache.spec, cache.length, cache.start)
    return (
        positions
        if cache.start is None
        else ambient_shards(cache.spec.mode).place(positions, (BATCH, KV_LENGTH))
    )


def _changed(
    cache: Any,
    shards: Shards,
    refused: jax.Array,
    *,
    length: jax.Array,
    start: jax.Array | None,
    **fields: Any,
) -> Change[Any]:
    start = None if start is None else shards.place(start, (BATCH,))
    positions = fields.pop("positions", None)
    cache = dataclasses.replace(cache, length=shards.place(length, (BATCH,)), start=start, **fields)
    return Change(cache=cache, refused=refused, positions=positions)


def _append(cache: RowCache, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Any]:
    spec, shards = cache.spec, ambient_shards(cache.spec.mode)
    # Jitted by itself, NumPy arrays are JAX's already; inside a trace they are not.
    k, v = jnp.asarray(k), jnp.asarray(v)
    is_token = jnp.ones(k.shape[:2], bool) if valid is None else jnp.asarray(valid)
    is_token = shards.place(is_token, (BATCH, EMPTY))
    positions = cache.length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    after = cache.length + jnp.sum(is_token, axis=1, dtype=jnp.int32)
    # A ring goes round until its positions exceed 32 bits, and wrap.
    over = after < cache.length if is_ring(spec) else after > spec.capacity
    taken = is_token & ~over[:, None]
    # Of a chunk longer than a ring only the last rows: in one scatter, which of two writes of a row is last is not defined.
    kept = taken & (positions >= after[:, None] - spec.capacity)
    rows = jnp.where(kept, row_of(spec, positions), spec.capacity)
    specs = specs_of(shards, cache.buffers, cache.buffer_axes)
    buffers = scatter.append_rows(
        cache.buffers, cache.encode(k, v), rows, shards=shards, specs=specs
    )
    length = jnp.where(over, cache.length, after)
    start = None if cache.start is None else jnp.maximum(cache.start, length - spec.capacity)
    refused = slots.first_reason((over, Refusal.OVERFLOW))
    return _changed(
        cache,
        shards,
        refused,
        length=length,
        start=start,
        positions=jnp.where(taken, positions, -1),
        **buffers,
    )


def _insert(cache: RowCache, source: KVCache, into: jax.Array) -> Change[Any]:
    spec, shards = cache.spec, ambient_shards(cache.spec.mode)
    view = pool.in_rows(source.view(), ambient_shards(source.spec.mode))
    lengths, into, held = (
        shards.place(view.lengths, (EMPTY,)),
        shards.place(jnp.asarray(into), (EMPTY,)),
        _held(view, shards),
    )
    first = jnp.min(jnp.where(held >= 0, held, lengths[:, None]), axis=1)
    needed = needed_from(spec, lengths)
    length = shards.place(cache.length, (EMPTY,))
    named = slots.which(into, spec.batch)
    refused = slots.first_reason(
        *slots.naming_reasons(named),
        (slots.of_entries(named, length > 0), Refusal.SLOT_IN_USE),
        ((lengths > spec.capacity) & (not is_ring(spec)), Refusal.OVERFLOW),
        ((needed < first) & (needed < lengths), Refusal.POSITIONS_MISSING),
    )
    done = refused == Refusal.NONE
    kept = done[:, None] & (held >= 0) & (held >= lengths[:, None] - spec.capacity)
    rows = jnp.where(kept, row_of(spec, held), spec.capacity)
    specs = specs_of(shards, cache.buffers, cache.buffer_axes)
    buffers = scatter.scatter_rows(
        cache.buffers,
        _rows_of(cache, source, view),
        into[:, None],
        rows,
        shards=shards,
        specs=specs,
    )
    start = None
    if cache.start is not None:
        start = slots.to_slots(
            named,
            done,
            jnp.maximum(first, lengths - spec.capacity),
            shards.place(cache.start, (EMPTY,)),
        )
    return _changed(
        cache,
        shards,
        refused,
        length=slots.to_slots(named, done, lengths, length),
        start=start,
        **buffers,
    )


def _held(view: View, shards: Shards) -> jax.Array:
    """Return `[n, rows]` positions that the rows of a source hold, -1 for none."""
    assert view.positions is not None
    positions = shards.place(view.positions, (EMPTY, EMPTY))
    return jnp.where(positions < shards.place(view.lengths, (EMPTY,))[:, None], positions, -1)


def _rows_of(cache: RowCache, source: KVCache, view: View) -> Buffers:
    """Return what a source holds, as the rows of a cache do."""
    if type(source) is type(cache) and source.buffers["k"].dtype == cache.buffers["k"].dtype:
        return source.buffers
    dtype = cache.spec.dtype
    return cache.encode(
        pool.plain(view.k, view.k_scale, dtype), pool.plain(view.v, view.v_scale, dtype)
    )


def _free(cache: RowCache, which: jax.Array) -> Change[Any]:
    shards = ambient_shards(cache.spec.mode)
    length = shards.place(cache.length, (EMPTY,))
    named = slots.which(shards.place(jnp.asarray(which), (EMPTY,)), cache.spec.batch)
    refused = slots.freeing(named, length)
    done = refused == Refusal.NONE
    start = (
        None
        if cache.start is None
        else slots.to_slots(named, done, 0, shards.place(cache.start, (EMPTY,)))
    )
    return _changed(
        cache, shards, refused, length=slots.to_slots(named, done, 0, length), start=start
    )


def _rewind(cache: RowCache, lengths: jax.Array) -> Change[Any]:
    shards = ambient_shards(cache.spec.mode)
    wanted = shards.place(jnp.asarray(lengths), (BATCH,))
    reasons = [slots.length_reason(wanted, cache.length)]
    start = cache.start
    if start is not None:
        reasons.append(
            (needed_from(cache.spec, wanted) < jnp.minimum(start, wanted), Refusal.OVERWRITTEN)
        )
    refused = slots.first_reason(*reasons)
    length = jnp.where(refused == Refusal.NONE, wanted, cache.length)
    return _changed(
        cache,
        shards,
        refused,
        length=length,
        start=None if start is None else jnp.minimum(start, length),
    )


def _reorder(cache: RowCache, parents: jax.Array, *, group: int) -> Change[Any]:
    spec, shards = cache.spec, ambient_shards(cache.spec.mode)
    own = shards.place(jnp.arange(spec.batch, dtype=jnp.int32), (BATCH,))
    wanted = shards.place(jnp.asarray(parents), (BATCH,))
    outside = slots.outside_group(wanted, own, batch=spec.batch, group=group)
    per_slot = {"length": cache.length} | ({} if cache.start is None else {"start": cache.start})
    buffers = cache.buffers | per_slot
    specs = specs_of(shards, buffers, cache.buffer_axes | dict.fromkeys(per_slot, (BATCH,)))
    taken = scatter.take_slots(
        buffers, jnp.where(outside, own, wanted), group=group, shards=shards, specs=specs
    )
    refused = slots.first_reason((outside, Refusal.SLOT_OUT_OF_RANGE))
    fields: dict[str, Any] = {"start": None} | taken
    return _changed(cache, shards, refused, **fields)
