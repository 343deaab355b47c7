"""The static part of a cache: sizes, dtype, and what happens to tokens that do not fit."""

from __future__ import annotations

import dataclasses
import enum

from shardwright.caches.row_order import RowOrder


class Overflow(enum.StrEnum):
    """What happens to tokens that exceed the capacity of a slot.

    REPORT: none of the call's tokens is written to that slot, and the `Change` says so. RING: new
    tokens overwrite the oldest ones. ERROR: like REPORT, but every refusal also raises an error:
    outside `jit` immediately, inside `jit` through `jax.experimental.checkify`, which the caller
    applies.
    """

    REPORT = "report"
    RING = "ring"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The static part of a cache. Sizes are global.

    Attributes:
      batch: Number of slots.
      capacity: Rows per slot. A slot holds at most that many tokens; a ring keeps the latest ones.
      kv_heads: Heads of keys and values.
      head_dim: Size of a key.
      v_dim: Size of a value.
      dtype: Dtype of the keys and values that callers append. The cache stores them in this dtype
        unless it is quantized.
      overflow: What happens to tokens that do not fit.
      order: Which row of a slot holds which position.
      window: Positions that attention sees, including the query's own. None: all.
      mode: Runtime mode whose sharding the arrays have under a manager. None: the cache was created
        without a manager and is not sharded.
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

    @property
    def is_ring(self) -> bool:
        """Whether new tokens overwrite the oldest ones."""
        return self.overflow is Overflow.RING
