"""Caches of rows: every slot has rows of its own.

Position p is stored in row p of the slot. In a ring, where new tokens overwrite the oldest ones,
position p is stored in row p modulo the capacity. A `RowOrder` may permute the rows. Subclasses
decide what a row stores: unchanged keys and values, or quantized keys and values with their scales.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from shardwright.caches import positions, refusals, scatter
from shardwright.caches.base import KVCache, View, array
from shardwright.caches.change import Change
from shardwright.caches.refusals import Refusal
from shardwright.caches.scatter import Buffers
from shardwright.caches.spec import CacheSpec
from shardwright.vocabulary.axes import BATCH, EMPTY, KV_HEAD, KV_HEAD_DIM, KV_LENGTH

ROW_AXES = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowCache(KVCache):
    """A cache whose buffers are `[batch, capacity, ...]`. Subclasses declare the buffers.

    Attributes:
      start: `[batch]` int32, the first position that a slot of a ring still holds. None if the
        cache is not a ring.
    """

    start: jax.Array | None = dataclasses.field(metadata=array(BATCH))

    @abc.abstractmethod
    def encode(self, k: jax.Array, v: jax.Array) -> Buffers:
        """Return buffer name -> the rows to store in that buffer for keys and values.

        Args:
          k: `[..., kv_heads, head_dim]`.
          v: `[..., kv_heads, v_dim]`.
        """

    def view(self) -> View:
        """Return what attention reads."""
        row_positions = positions.positions_of_rows(self.spec, self.length, self.start)
        if self.start is not None:
            row_positions = self._sharding.place(row_positions, (BATCH, KV_LENGTH))
        buffers = self.buffers
        return View(
            k=buffers["k"],
            v=buffers["v"],
            positions=row_positions,
            lengths=self.length,
            k_scale=buffers.get("k_scale"),
            v_scale=buffers.get("v_scale"),
        )

    def row_view(self) -> View:
        """Return `view()`: in a row cache, the rows of a sequence are adjacent already."""
        return self.view()

    def _append(self, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Self]:
        spec, sharding = self.spec, self._sharding
        # Convert NumPy arrays here, because `operate` does not convert them inside a trace.
        k, v = jnp.asarray(k), jnp.asarray(v)
        is_token = jnp.ones(k.shape[:2], bool) if valid is None else jnp.asarray(valid)
        is_token = sharding.place(is_token, (BATCH, EMPTY))
        token_positions = positions.of_tokens(self.length, is_token, every=valid is None)
        after = self.length + jnp.sum(is_token, axis=1, dtype=jnp.int32)
        # A ring takes any number of tokens, until positions exceed 32 bits and would wrap.
        overflows = after < self.length if spec.is_ring else after > spec.capacity
        accepted = is_token & ~overflows[:, None]
        # If more tokens are appended than a ring has rows, only the last of them are written: two
        # writes of one row in one scatter have no defined order.
        stored = accepted & (token_positions >= after[:, None] - spec.capacity)
        rows = jnp.where(stored, positions.row_of(spec, token_positions), spec.capacity)
        buffers = scatter.append_rows(self._placed_buffers, self.encode(k, v), rows)
        length = jnp.where(overflows, self.length, after)
        # `start` is the first position that has not been overwritten.
        start = None if self.start is None else jnp.maximum(self.start, length - spec.capacity)
        return self._changed(
            refusals.first_refusal((overflows, Refusal.OVERFLOW)),
            length=length,
            start=start,
            buffers=buffers,
            positions=jnp.where(accepted, token_positions, -1),
        )

    def _insert(self, source: KVCache, slots: jax.Array) -> Change[Self]:
        spec, sharding = self.spec, self._sharding
        view = source.row_view()
        lengths, slots, length = (
            sharding.place(jnp.asarray(x), (EMPTY,)) for x in (view.lengths, slots, self.length)
        )
        assert view.positions is not None
        row_positions = sharding.place(view.positions, (EMPTY, EMPTY))
        row_positions = jnp.where(row_positions < lengths[:, None], row_positions, -1)
        # Replicate the positions. Otherwise the minimum over them would need a collective.
        row_positions = sharding.place(row_positions, (EMPTY, EMPTY))
        first = jnp.zeros_like(lengths)
        # A ring or a paged cache may lack old positions: `first` is the oldest position that the
        # source has. A query in this cache can see only positions from `needed` on, so the insert
        # is refused only if one of these is missing.
        if source.spec.is_ring or not isinstance(source, RowCache):
            first = jnp.min(jnp.where(row_positions >= 0, row_positions, lengths[:, None]), axis=1)
        needed = positions.first_needed(spec, lengths)
        named = refusals.named_slots(slots, spec.batch)
        refused = refusals.first_refusal(
            *refusals.invalid_names(named),
            (refusals.at_named(named, length > 0), Refusal.SLOT_IN_USE),
            ((lengths > spec.capacity) & (not spec.is_ring), Refusal.OVERFLOW),
            (needed < first, Refusal.POSITIONS_MISSING),
        )
        done = refused == Refusal.NONE
        # As in `_append`, only the last rows of a sequence are written if it is longer than the
        # ring.
        stored = (
            done[:, None]
            & (row_positions >= 0)
            & (row_positions >= lengths[:, None] - spec.capacity)
        )
        rows = jnp.where(stored, positions.row_of(spec, row_positions), spec.capacity)
        buffers = scatter.scatter_rows(
            self._placed_buffers,
            self._encoded_rows(source, view),
            slots[:, None],
            rows,
            in_place=self._rows_match(source),
        )
        start = self.start
        if start is not None:
            start = refusals.set_named(
                sharding.place(start, (EMPTY,)),
                named,
                done,
                jnp.maximum(first, lengths - spec.capacity),
            )
        return self._changed(
            refused,
            length=refusals.set_named(length, named, done, lengths),
            start=start,
            buffers=buffers,
        )

    def _rows_match(self, source: KVCache) -> bool:
        """Tell whether each position has the same row number in both caches."""
        return (
            isinstance(source, RowCache)
            and not (self.spec.is_ring or source.spec.is_ring)
            and (self.spec.capacity, self.spec.order) == (source.spec.capacity, source.spec.order)
        )

    def _encoded_rows(self, source: KVCache, view: View) -> Buffers:
        if type(source) is type(self) and source.buffers["k"].dtype == self.buffers["k"].dtype:
            # Copy the rows as stored: quantizing them again would change them.
            return source.buffers
        return self.encode(*view.dequantized(self.spec.dtype))

    def _free(self, slots: jax.Array) -> Change[Self]:
        sharding = self._sharding
        length, slots = (sharding.place(jnp.asarray(x), (EMPTY,)) for x in (self.length, slots))
        named = sharding.place(refusals.named_slots(slots, self.batch), (EMPTY, EMPTY))
        # Freeing an empty slot is refused, and changes nothing. So `slots` alone decides which
        # slots to empty, and lengths are sent only if the caller reads the refusals.
        valid = refusals.first_refusal(*refusals.invalid_names(named)) == Refusal.NONE
        freed = sharding.place(refusals.at_slots(named, valid), (BATCH,))
        return self._changed(
            refusals.refuse_free(named, length),
            length=jnp.where(freed, 0, self.length),
            start=None if self.start is None else jnp.where(freed, 0, self.start),
        )

    def _rewind(self, lengths: jax.Array) -> Change[Self]:
        lengths, start = self._sharding.place(jnp.asarray(lengths), (BATCH,)), self.start
        # The rows need no change: a row past the length of its slot counts as empty.
        reasons = [refusals.invalid_length(lengths, self.length)]
        if start is not None:
            needed = positions.first_needed(self.spec, lengths)
            reasons.append((needed < jnp.minimum(start, lengths), Refusal.OVERWRITTEN))
        refused = refusals.first_refusal(*reasons)
        length = jnp.where(refused == Refusal.NONE, lengths, self.length)
        # An emptied slot begins again at position 0.
        start = None if start is None else jnp.minimum(start, length)
        return self._changed(refused, length=length, start=start)

    def _reorder(self, parents: jax.Array, *, group: int) -> Change[Self]:
        sharding = self._sharding
        # A refused slot keeps its own sequence, so make the slot its own parent.
        slots = sharding.place(jnp.arange(self.batch, dtype=jnp.int32), (BATCH,))
        parents = sharding.place(jnp.asarray(parents), (BATCH,))
        outside = refusals.outside_group(parents, slots, group=group)
        # Every array of a row cache has one entry per slot.
        arrays = self.buffers | {name: getattr(self, name) for name in self.array_axes}
        reordered: dict[str, Any] = scatter.take_slots(
            sharding.with_specs(arrays, self.array_axes),
            jnp.where(outside, slots, parents),
            group=group,
        )
        refused = refusals.first_refusal((outside, Refusal.SLOT_OUT_OF_RANGE))
        return self._changed(
            refused,
            length=reordered.pop("length"),
            start=reordered.pop("start", None),
            buffers=reordered,
        )

    def _changed(
        self,
        refused: jax.Array,
        *,
        length: jax.Array,
        start: jax.Array | None,
        buffers: Buffers | None = None,
        positions: jax.Array | None = None,
    ) -> Change[Self]:
        sharding = self._sharding
        fields: dict[str, Any] = {
            "length": sharding.place(length, (BATCH,)),
            "start": None if start is None else sharding.place(start, (BATCH,)),
            **(buffers or {}),
        }
        cache = dataclasses.replace(self, **fields)
        return Change(cache=cache, refused=refused, positions=positions)


def with_window(spec: CacheSpec) -> CacheSpec:
    """Return a spec in which the window of a ring defaults to its capacity."""
    if spec.is_ring and spec.window is None:
        return dataclasses.replace(spec, window=spec.capacity)
    return spec


def counters(spec: CacheSpec) -> dict[str, Any]:
    """Return the `length` and the `start` of an empty cache."""
    length = jnp.zeros(spec.batch, jnp.int32)
    return {"length": length, "start": jnp.zeros_like(length) if spec.is_ring else None}
