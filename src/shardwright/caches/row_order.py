"""Which row of a slot holds which position: in order, or dealt out in blocks so that the shards of the rows fill evenly."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax

from shardwright.errors import CacheError
from shardwright.vocabulary.integers import as_integer, read_integer

T = TypeVar("T", int, jax.Array)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """A permutation of a slot's rows; static.

    Contiguous: slot row r holds position r, so that decoding fills one shard after the other. Interleaved: blocks of `block`
    positions go to the shards in turn, position p to shard `(p // block) % shards`, so that all shards hold equal parts of a
    sequence of any length.

    Attributes:
      block: positions that stay together, or None for contiguous.
      shards: parts of equal size in which the rows lie, those of the mesh axes of KV_LENGTH, or a multiple of their number.
    """

    block: int | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        for name in ("block", "shards"):
            if (count := as_integer(getattr(self, name))) is not None:
                object.__setattr__(self, name, count)

    def check(self, rows: int) -> None:
        """Raise CacheError unless that many rows can be dealt out evenly."""
        read_integer("shards", self.shards, error=CacheError)
        if self.block is not None:
            read_integer("block", self.block, error=CacheError)
        if self.block is None:
            if self.shards != 1:
                what = f"RowOrder(shards={self.shards}) does not say in blocks of how many rows"
                raise CacheError(
                    what,
                    path="order",
                    fix=f"pass RowOrder(block=1, shards={self.shards}), or a larger block",
                )
            return
        if rows % (self.block * self.shards):
            what = (
                f"{rows} rows cannot be dealt out to {self.shards} shards in blocks of {self.block}"
            )
            raise CacheError(
                what, path="order", fix=f"make the rows a multiple of {self.block} * {self.shards}"
            )

    def row(self, place: T, rows: int) -> T:
        """Return the row of the place-th row in order, of so many."""
        if self.block is None:
            return place
        block, inner = place // self.block, place % self.block
        return (
            (block % self.shards) * (rows // self.shards)
            + (block // self.shards) * self.block
            + inner
        )

    def place(self, row: T, rows: int) -> T:
        """Return the inverse of `row`."""
        if self.block is None:
            return row
        per_shard = rows // self.shards
        shard, inner = row // per_shard, row % per_shard
        return ((inner // self.block) * self.shards + shard) * self.block + inner % self.block
