"""The static part of a cache: sizes, dtype, order of the rows, and what happens on overflow."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, TypeVar

import jax

from shardwright.errors import CacheError
from shardwright.vocabulary.read import integer, read_fields

T = TypeVar("T", int, jax.Array)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """A static permutation of a slot's rows.

    Contiguous: row r of a slot holds position r, so decoding fills one shard after the other.
    Interleaved: blocks of `block` positions go to the shards in turn, position p to shard
    `(p // block) % shards`. With interleaved rows, all shards hold nearly equal parts of a sequence
    of any length.

    Attributes:
      block: Number of consecutive positions that stay on one shard. None: contiguous.
      shards: Number of shards of the rows (the product of the sizes of KV_LENGTH's mesh axes), or a
        multiple of it.
    """

    block: Annotated[int, integer()] | None = None
    shards: Annotated[int, integer()] = 1

    def __post_init__(self) -> None:
        read_fields(self, error=CacheError)

    def check(self, rows: int) -> None:
        """Raise CacheError unless `rows` rows divide evenly into blocks and shards."""
        if self.block is None:
            if self.shards != 1:
                raise CacheError(
                    f"RowOrder(shards={self.shards}) has no block size",
                    path="order",
                    fix=f"pass RowOrder(block=1, shards={self.shards}), or a larger block",
                )
            return
        # Each shard must hold whole blocks. Otherwise two positions would share a row.
        if rows % (self.block * self.shards):
            raise CacheError(
                f"{rows} rows do not divide into blocks of {self.block} on {self.shards} shards",
                path="order",
                fix=f"pass a capacity that is a multiple of {self.block} * {self.shards}",
            )

    def row(self, place: T, rows: int) -> T:
        """Return the row that holds a position.

        Args:
          place: The position; in a ring, the position modulo the capacity.
          rows: Number of rows of the slot.
        """
        if self.block is None:
            return place
        # Memory holds one shard after the other. Block b is on shard b % shards, where it is block
        # b // shards.
        block, inner = place // self.block, place % self.block
        return (
            (block % self.shards) * (rows // self.shards)
            + (block // self.shards) * self.block
            + inner
        )

    def place(self, row: T, rows: int) -> T:
        """Return the position that a row holds: the inverse of `row`."""
        if self.block is None:
            return row
        per_shard = rows // self.shards
        shard, inner = row // per_shard, row % per_shard
        return ((inner // self.block) * self.shards + shard) * self.block + inner % self.block


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
    """The static part of a cache. All sizes are global, not those of a shard.

    Attributes:
      batch: Number of slots.
      capacity: Rows per slot. A slot holds at most that many tokens; a ring keeps the latest
        tokens.
      kv_heads: Number of heads of keys and values.
      head_dim: Size of a key.
      v_dim: Size of a value.
      dtype: Dtype of the keys and values that callers append. The cache stores them in this dtype
        unless it is quantized.
      overflow: What happens to tokens that do not fit into a slot.
      order: Which row of a slot holds which position.
      window: Number of positions that attention sees, including the query's own. None: all.
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
