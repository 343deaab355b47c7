"""A paged cache whose tables come from outside: the caller assigns pages before each append."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.caches import refusals, scatter
from shardwright.caches.base import KVCache, View, array, buffer
from shardwright.caches.change import Change
from shardwright.caches.paged import pool
from shardwright.caches.paged.pool import PAGE_AXES
from shardwright.caches.positions import of_tokens
from shardwright.caches.refusals import Refusal
from shardwright.errors import CacheError
from shardwright.vocabulary.axes import EMPTY


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AssignedPages(KVCache):
    """Keys and values of one layer, in pages that the caller has assigned to slots.

    All layers of a model have the same tables and lengths, so a program receives them once. Tables
    and lengths are replicated, so no layer gathers them. An append writes rows, and changes no
    table: a slot whose next tokens have no page is refused.

    Attributes:
      spec: The static part of the cache.
      length: `[batch]` int32.
      k_pages: `[pages, page_size, kv_heads, head_dim]`.
      v_pages: `[pages, page_size, kv_heads, v_dim]`.
      tables: `[batch, pages_per_slot]` int32 page numbers; the number of pages means "no page".
    """

    length: jax.Array = dataclasses.field(metadata=array(EMPTY))
    k_pages: jax.Array = dataclasses.field(metadata=buffer(*PAGE_AXES))
    v_pages: jax.Array = dataclasses.field(metadata=buffer(*PAGE_AXES))
    tables: jax.Array = dataclasses.field(metadata=array(EMPTY, EMPTY))

    @property
    def page_size(self) -> int:
        """Number of rows of a page."""
        return self.k_pages.shape[1]

    def view(self) -> View:
        """Return what attention reads."""
        return View(
            k=self.k_pages, v=self.v_pages, positions=None, lengths=self.length, tables=self.tables
        )

    def row_view(self) -> View:
        """Return a copy of the pages in which the rows of each sequence are adjacent."""
        return pool.read_rows(self.view(), self._sharding)

    def _append(self, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Self]:
        is_token = jnp.ones(k.shape[:2], bool) if valid is None else jnp.asarray(valid)
        arguments = (self.length, self.tables, is_token)
        decide = functools.partial(self._decide, every=valid is None)
        # Decide in a shard_map, as `PagedCache` does: each shard computes the same few integers,
        # without collectives.
        length, refused, positions, pages = self._sharding.run(
            decide, arguments, (PartitionSpec(),) * 3, out_specs=PartitionSpec()
        )
        new = {"k_pages": jnp.asarray(k), "v_pages": jnp.asarray(v)}
        buffers = scatter.scatter_rows(self._placed_buffers, new, pages, positions % self.page_size)
        fields: dict[str, Any] = {"length": length, **buffers}
        return Change(
            cache=dataclasses.replace(self, **fields), refused=refused, positions=positions
        )

    def _decide(
        self, length: jax.Array, tables: jax.Array, is_token: jax.Array, *, every: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return lengths and refusals after an append, and the positions and pages of its rows."""
        count = self.k_pages.shape[0]
        positions = of_tokens(length, is_token, every=every)
        # Padding has the position of the token before it, which is -1 in an empty slot. A position
        # past the capacity may have no column. Both kinds of rows are dropped below.
        columns = jnp.clip(positions // self.page_size, 0, tables.shape[1] - 1)
        pages = jnp.take_along_axis(tables, columns, axis=1)
        after = length + jnp.sum(is_token, axis=1, dtype=jnp.int32)
        over = after > self.spec.capacity
        # A table entry that equals `count` means that the caller assigned no page.
        lacks_page = jnp.any(is_token & (pages >= count), axis=1)
        accepted = ~(over | lacks_page)
        positions = jnp.where(is_token & accepted[:, None], positions, -1)
        refused = refusals.first_refusal(
            (over, Refusal.OVERFLOW), (lacks_page, Refusal.NO_FREE_PAGE)
        )
        pages = jnp.where(positions < 0, count, pages)
        return jnp.where(accepted, after, length), refused, positions, pages

    # The caller assigns the pages, so only the caller can do the operations below. This cache
    # refuses them.

    def _insert(self, source: KVCache, slots: jax.Array) -> Change[Self]:
        _raise_assigned("insert")

    def _free(self, slots: jax.Array) -> Change[Self]:
        _raise_assigned("free")

    def _rewind(self, lengths: jax.Array) -> Change[Self]:
        _raise_assigned("rewind")

    def _reorder(self, parents: jax.Array, *, group: int) -> Change[Self]:
        _raise_assigned("reorder")


def _raise_assigned(operation: str) -> NoReturn:
    raise CacheError(
        f"{operation} is not an operation of a cache whose pages are assigned by an engine",
        path="cache",
        fix="only append to this cache; a cache that caches.init creates has every operation",
    )
