"""A cache as plain Python: for each slot, which position holds which token."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwright.caches import CacheSpec, Overflow, Refusal


@dataclasses.dataclass(slots=True)
class Slot:
    """One sequence: its length, and the tokens that are still in the cache."""

    length: int = 0
    held: dict[int, int] = dataclasses.field(default_factory=dict)

    def copy(self) -> Slot:
        return Slot(self.length, dict(self.held))


class Model:
    """A reference cache in plain Python, slot by slot. Tokens are integers."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.ring = spec.overflow is Overflow.RING
        self.window = (spec.window or spec.capacity) if self.ring else None
        self.slots = [Slot() for _ in range(spec.batch)]

    def append(self, tokens: Sequence[Sequence[int]]) -> list[Refusal]:
        """Tokens by slot, without those that are none."""
        refused = []
        for slot, new in zip(self.slots, tokens, strict=True):
            over = not self.ring and slot.length + len(new) > self.spec.capacity
            refused.append(Refusal.OVERFLOW if over else Refusal.NONE)
            for token in () if over else new:
                slot.held[slot.length] = token
                slot.held.pop(slot.length - self.spec.capacity, None)
                slot.length += 1
        return refused

    def insert(self, sources: Sequence[Slot], into: Sequence[int]) -> list[Refusal]:
        counts, busy = Counter(into), [slot.length > 0 for slot in self.slots]
        refused = []
        for source, at in zip(sources, into, strict=True):
            needed = range(
                max(0, source.length - self.window + 1) if self.window else 0, source.length
            )
            if not 0 <= at < self.spec.batch:
                refused.append(Refusal.SLOT_OUT_OF_RANGE)
            elif counts[at] > 1:
                refused.append(Refusal.SLOT_TWICE)
            elif busy[at]:
                refused.append(Refusal.SLOT_IN_USE)
            elif not self.ring and source.length > self.spec.capacity:
                refused.append(Refusal.OVERFLOW)
            elif any(position not in source.held for position in needed):
                refused.append(Refusal.POSITIONS_MISSING)
            else:
                refused.append(Refusal.NONE)
                kept = {
                    p: token
                    for p, token in source.held.items()
                    if p >= source.length - self.spec.capacity
                }
                self.slots[at] = Slot(source.length, kept)
        return refused

    def free(self, which: Sequence[int]) -> list[Refusal]:
        counts, lengths = Counter(which), [slot.length for slot in self.slots]
        refused = []
        for at in which:
            if not 0 <= at < self.spec.batch:
                refused.append(Refusal.SLOT_OUT_OF_RANGE)
            elif counts[at] > 1:
                refused.append(Refusal.SLOT_TWICE)
            elif not lengths[at]:
                refused.append(Refusal.SLOT_EMPTY)
            else:
                refused.append(Refusal.NONE)
                self.slots[at] = Slot()
        return refused

    def rewind(self, lengths: Sequence[int]) -> list[Refusal]:
        refused = []
        for slot, length in zip(self.slots, lengths, strict=True):
            needed = range(max(0, length - self.window + 1) if self.window else 0, length)
            if not 0 <= length <= slot.length:
                refused.append(Refusal.LENGTH_OUT_OF_RANGE)
            elif any(position not in slot.held for position in needed):
                refused.append(Refusal.OVERWRITTEN)
            else:
                refused.append(Refusal.NONE)
                slot.length = length
                slot.held = {p: token for p, token in slot.held.items() if p < length}
        return refused

    def reorder(self, parents: Sequence[int], group: int) -> list[Refusal]:
        before = [slot.copy() for slot in self.slots]
        refused = []
        for at, parent in enumerate(parents):
            fits = 0 <= parent < self.spec.batch and parent // group == at // group
            refused.append(Refusal.NONE if fits else Refusal.SLOT_OUT_OF_RANGE)
            if fits:
                self.slots[at] = before[parent].copy()
        return refused


def keys_of(tokens: Any, spec: CacheSpec) -> np.ndarray:
    """`[..., kv_heads, head_dim]` keys, different for every token, head and dim."""
    heads, dims = np.arange(spec.kv_heads)[:, None], np.arange(spec.head_dim)
    return (np.asarray(tokens)[..., None, None] * 8 + heads * 2 + dims / spec.head_dim).astype(
        spec.dtype
    )


def values_of(tokens: Any, spec: CacheSpec) -> np.ndarray:
    """`[..., kv_heads, v_dim]`."""
    heads, dims = np.arange(spec.kv_heads)[:, None], np.arange(spec.v_dim)
    return -(np.asarray(tokens)[..., None, None] * 8 + heads * 2 + dims / spec.v_dim).astype(
        spec.dtype
    )


def slots_of(cache: Any) -> list[Slot]:
    """The tokens in a cache, read through its view; checks every head and dim."""
    view, spec = cache.view(), cache.spec
    k, v, lengths = (np.asarray(x) for x in (view.k, view.v, view.lengths))
    positions = np.broadcast_to(np.asarray(view.positions), k.shape[:2])
    actual = []
    for b, length in enumerate(lengths):
        rows = np.flatnonzero((positions[b] >= 0) & (positions[b] < length))
        tokens = np.round(k[b, rows, 0, 0] / 8).astype(int)
        np.testing.assert_array_equal(k[b, rows], keys_of(tokens, spec))
        np.testing.assert_array_equal(v[b, rows], values_of(tokens, spec))
        held = dict(zip(positions[b, rows].tolist(), tokens.tolist(), strict=True))
        assert len(held) == len(rows), "a position is in two rows"
        actual.append(Slot(int(length), held))
    return actual
