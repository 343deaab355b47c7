"""What every KV cache is: a frozen pytree of buffers and of how many tokens each slot holds, and what may be done with it.

A slot is a row of the batch: room for one sequence. Position p of a sequence is its p-th token, from 0; a slot holds the
positions below its `length`, a ring those from its `start` on, and nothing else says what is valid. Buffers are written by
dropping scatters: nothing is ever clamped, shifted or written over another token, and what cannot be done is a value, per slot,
in the `Change` that every operation returns. Everything here runs inside `jit` and outside.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from shardwright.caches.row_order import RowOrder
from shardwright.errors import CacheError

C = TypeVar("C", bound="KVCache")


class Refusal(enum.IntEnum):
    """Why an operation left a slot as it was. An array of these is what a compiled program can return."""

    NONE = 0
    OVERFLOW = 1
    SLOT_OUT_OF_RANGE = 2
    SLOT_TWICE = 3
    SLOT_IN_USE = 4
    SLOT_EMPTY = 5
    NO_FREE_PAGE = 6
    LENGTH_OUT_OF_RANGE = 7
    OVERWRITTEN = 8
    POSITIONS_MISSING = 9

    @property
    def meaning(self) -> str:
        """The reason in words."""
        return _MEANINGS[self]


_MEANINGS = {
    Refusal.NONE: "done",
    Refusal.OVERFLOW: "the tokens exceed the capacity of the slot",
    Refusal.SLOT_OUT_OF_RANGE: "there is no such slot",
    Refusal.SLOT_TWICE: "the slot is named twice",
    Refusal.SLOT_IN_USE: "the slot holds a sequence: free it first",
    Refusal.SLOT_EMPTY: "the slot holds nothing",
    Refusal.NO_FREE_PAGE: "no page is free",
    Refusal.LENGTH_OUT_OF_RANGE: "the length is negative, or more than the slot holds",
    Refusal.OVERWRITTEN: "newer tokens took the rows of those that would be needed",
    Refusal.POSITIONS_MISSING: "the source does not hold every position that this cache keeps",
}


class Overflow(enum.StrEnum):
    """What happens to tokens that exceed a slot's capacity.

    REPORT: none of the call's tokens is written to that slot, and the change says so. RING: they take the rows of the
    oldest. ERROR: like REPORT, and whatever an operation refuses raises: at once outside `jit`; inside it by
    `jax.experimental.checkify`, which the caller then has to apply.
    """

    REPORT = "report"
    RING = "ring"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The static part of a cache. Sizes are global.

    Attributes:
      batch: number of slots.
      capacity: rows per slot; the tokens that a slot can hold, or, of a ring, the latest that it keeps.
      kv_heads: heads of keys and values.
      head_dim: size of a key.
      v_dim: size of a value.
      dtype: of keys and values as callers give and, but for a quantised cache, as they are stored.
      overflow: what happens to tokens that do not fit.
      order: which row of a slot holds which position.
      window: positions that attention sees, the query's own included; None for all.
      mode: runtime mode in whose layout the arrays lie under a manager; None: made without one, and left where they are.
    """

    batch: int
    capacity: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    overflow: Overflow = Overflow.REPORT
    order: RowOrder = dataclasses.field(default_factory=RowOrder)
    window: int | None = None
    mode: str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change(Generic[C]):
    """A cache after an operation, and what of it was refused.

    Attributes:
      cache: after the operation; slots that were refused are as they were, in content and length.
      refused: int8 codes of `Refusal`, 0 where done: by slot for `append`, `rewind` and `reorder`, by entry of the argument for
        operations that name slots.
      positions: `[batch, q_length]` int32 of an append's tokens, -1 for those that were refused or no tokens; else None.
    """

    cache: C
    refused: jax.Array
    positions: jax.Array | None = None

    @property
    def ok(self) -> jax.Array:
        """Where the operation was done."""
        return self.refused == Refusal.NONE

    @property
    def overflow(self) -> jax.Array:
        """Which slots overflowed."""
        return self.refused == Refusal.OVERFLOW

    def reasons(self) -> dict[int, Refusal]:
        """Return the refusals by entry, outside `jit`.

        Raises:
          CacheError: inside, where nobody knows them yet; or these are several changes, as `vmap` and `scan` stack them.
        """
        if isinstance(self.refused, jax.core.Tracer):
            fix = "return the change, or `ok`, from the compiled function, and ask outside"
            raise CacheError(
                "what is refused is not known while a function is traced", path="refused", fix=fix
            )
        codes = np.asarray(self.refused)
        if codes.ndim != 1:
            fix = "look at one at a time: jax.tree.map(lambda x: x[0], change).reasons()"
            raise CacheError(
                f"refused has shape {codes.shape}: these are changes of several caches",
                path="refused",
                fix=fix,
            )
        return {int(at): Refusal(int(code)) for at, code in enumerate(codes) if code}

    def check(self, *, fix: str) -> None:
        """Raise CacheError if something was refused, outside `jit`."""
        reasons = self.reasons()
        if reasons:
            at, first = next(iter(reasons.items()))
            more = f"; {len(reasons) - 1} more were" if len(reasons) > 1 else ""
            raise CacheError(f"entry {at} was refused: {first.meaning}{more}", fix=fix)

    def require(self) -> C:
        """Return the cache, outside `jit`.

        Raises:
          CacheError: something was refused.
        """
        self.check(fix="look at `reasons()` of the change")
        return self.cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """What attention reads. Nothing is copied.

    Attributes:
      k: `[batch, rows, kv_heads, head_dim]`; of a paged cache `[pages, page_size, kv_heads, head_dim]`.
      v: likewise with v_dim.
      positions: `[batch, rows]` int32, -1 for a row that holds nothing; `[1, rows]` where all slots have the same and lengths
        alone say what is held; None for pages.
      lengths: `[batch]` int32, tokens of each slot.
      k_scale: `[batch, rows, kv_heads]` float32, a key is `k * k_scale`; None but for a quantised cache.
      v_scale: likewise.
      tables: `[batch, pages_per_slot]` int32 page numbers; None but for a paged cache.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array | None
    lengths: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    tables: jax.Array | None = None


class KVCache(abc.ABC):
    """A cache of keys and values: buffers, and numbers that say what of them is held. Subclasses are frozen, registered dataclasses.

    Attributes:
      spec: the static part.
      length: `[batch]` int32, tokens that each slot has seen and not taken back; 0 for a free slot.
    """

    spec: CacheSpec
    length: jax.Array

    @abc.abstractmethod
    def axes(self) -> Self:
        """Return the annotation of every array, in a cache of the same structure; role activation."""

    @abc.abstractmethod
    def append(self, k: Any, v: Any, *, valid: Any = None) -> Change[Self]:
        """Write the next tokens of every slot.

        Args:
          k: `[batch, q_length, kv_heads, head_dim]`.
          v: `[batch, q_length, kv_heads, v_dim]`.
          valid: `[batch, q_length]` bool, which of them are tokens; the others are skipped, wherever they stand. Absent: all.

        Returns:
          The change. A slot whose tokens do not all fit takes none of them.

        Raises:
          CacheError: shapes or dtypes do not go with the cache.
        """

    @abc.abstractmethod
    def insert(self, source: KVCache, slots: Any) -> Change[Self]:
        """Copy sequences into free slots, several at once.

        Args:
          source: a cache of n sequences, such as prefill fills; its lengths say how much of each.
          slots: `[n]` int, where each goes; `batch` or more, or a negative number, is refused and not wrapped.

        Returns:
          The change, by sequence of the source.

        Raises:
          CacheError: the source's sizes or dtype do not go with this cache.
        """

    @abc.abstractmethod
    def free(self, slots: Any) -> Change[Self]:
        """Empty slots. An empty slot, one that is named twice and one that does not exist are refused.

        Args:
          slots: `[n]` int.
        """

    @abc.abstractmethod
    def rewind(self, lengths: Any) -> Change[Self]:
        """Cut each slot to `lengths[b]` tokens, which the next append follows; two drafts back: `jnp.maximum(cache.length - 2, 0)`.

        Args:
          lengths: `[batch]` int, each from 0 to the slot's length.
        """

    @abc.abstractmethod
    def reorder(self, parents: Any, *, group: int | None = None) -> Change[Self]:
        """Let every slot continue what another holds: slot b what slot `parents[b]` does. For beams.

        Args:
          parents: `[batch]` int, slots.
          group: size of the aligned groups of slots within which parents lie, such as the number of beams; sequences then stay on
            their shard of the batch where groups do. A parent outside its group is refused. Absent: the whole batch.
        """

    @abc.abstractmethod
    def view(self) -> View:
        """Return what attention reads."""

    @property
    def batch(self) -> int:
        """The number of slots."""
        return self.spec.batch
