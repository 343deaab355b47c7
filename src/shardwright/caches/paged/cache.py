"""The paged cache: slots take pages of a pool as sequences grow, and share common prefixes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.caches import arguments, scatter
from shardwright.caches.base import KVCache, View, array, buffer
from shardwright.caches.change import Change
from shardwright.caches.paged import pool, tables
from shardwright.caches.paged.claims import count_pages
from shardwright.caches.paged.pool import PAGE_AXES
from shardwright.caches.paged.tables import Decision, Ownership, SlotRows
from shardwright.caches.scatter import Buffers
from shardwright.caches.spec import CacheSpec
from shardwright.errors import CacheError
from shardwright.vocabulary.axes import BATCH, EMPTY
from shardwright.vocabulary.integers import read_integer


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PagedCache(KVCache):
    """Keys and values in pages of a pool.

    Position p of slot b is in row `p % page_size` of page `tables[b, p // page_size]`. A page may
    belong to several slots: `share` and `reorder` copy no rows. A slot that writes to a page that
    other slots use too gets a copy of the page first. `append` and `insert` give pages to one slot
    after the other. If too few pages are free for a slot, the slot is refused, and the next slot
    may get these pages. `free` and `rewind` give back pages that no other slot uses.

    Under a manager, pages are sharded as the rules resolve (PAGE, EMPTY, KV_HEAD, KV_HEAD_DIM). The
    tables are replicated while an operation runs, so an append sends only new rows and small
    integers. An append sends a page only if it must copy a shared page, and only if pages are
    sharded by page.

    Attributes:
      spec: The static part of the cache.
      length: `[batch]` int32.
      k_pages: `[pages, page_size, kv_heads, head_dim]`.
      v_pages: `[pages, page_size, kv_heads, v_dim]`.
      tables: `[batch, pages_per_slot]` int32 page numbers. Entries beyond the length of a slot are
        not in use and hold any number.
      references: `[pages]` int32, how many table entries in use name each page; 0 for a free page.
    """

    k_pages: jax.Array = dataclasses.field(metadata=buffer(*PAGE_AXES))
    v_pages: jax.Array = dataclasses.field(metadata=buffer(*PAGE_AXES))
    tables: jax.Array = dataclasses.field(metadata=array(BATCH, EMPTY))
    references: jax.Array = dataclasses.field(metadata=array(EMPTY))

    @property
    def page_size(self) -> int:
        """Number of rows of a page."""
        return self.k_pages.shape[1]

    def free_pages(self) -> jax.Array:
        """Return how many pages are free, int32."""
        return jnp.sum(self.references == 0, dtype=jnp.int32)

    def view(self) -> View:
        """Return what attention reads."""
        return View(
            k=self.k_pages, v=self.v_pages, positions=None, lengths=self.length, tables=self.tables
        )

    def row_view(self) -> View:
        """Return a copy of the pages in which the rows of each sequence are adjacent."""
        return pool.read_rows(self.view(), self._sharding)

    def only(self, slots: jax.Array) -> Self:
        """Return a cache of some slots. Only read it: its pages are those of this cache.

        Args:
          slots: `[n]` int32. A number past the last slot gives an empty slot.
        """
        length = self._sharding.place(self.length, (EMPTY,))
        tables = self._sharding.place(self.tables, (EMPTY, EMPTY))
        return dataclasses.replace(
            self,
            spec=dataclasses.replace(self.spec, batch=slots.shape[0]),
            # Without `fill`, JAX would read the last slot in place of one that does not exist.
            length=length.at[slots].get(mode="fill", fill_value=0),
            tables=tables.at[slots].get(mode="fill", fill_value=self.references.shape[0]),
        )

    def share(self, sources: Any, slots: Any, *, lengths: Any = None) -> Change[Self]:
        """Let free slots start with the tokens of other slots, in the same pages.

        No row is copied until a slot writes to a shared page.

        Args:
          sources: `[n]` int, slots that hold sequences. A slot may be named several times.
          slots: `[n]` int, free slots.
          lengths: `[n]` int, number of tokens to share, from 0 to the length of the source.
            Defaults to all tokens.

        Returns:
          The change, with one code per entry.

        Raises:
          CacheError: The arguments are not integers, or their lengths differ.
        """
        into = arguments.integers("slots", slots)
        count = into.shape[0]
        counts = None if lengths is None else arguments.integers("lengths", lengths, size=count)
        sources = arguments.integers("sources", sources, size=count)
        return self._operate(type(self)._share, sources, into, counts)

    def _append(self, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Self]:
        is_token = jnp.ones(k.shape[:2], bool) if valid is None else valid
        decision = self._decide(
            tables.append, is_token, capacity=self.spec.capacity, every=valid is None
        )
        assert decision.rows is not None
        positions = self._sharding.place(decision.rows.positions, (BATCH, EMPTY))
        change = self._changed(decision, self._write(decision.rows, k, v))
        return dataclasses.replace(change, positions=positions)

    def _insert(self, source: KVCache, slots: jax.Array) -> Change[Self]:
        view = source.row_view()
        decision = self._decide(
            tables.insert, view.positions, view.lengths, slots, capacity=self.spec.capacity
        )
        assert decision.rows is not None
        k, v = view.dequantized(self.spec.dtype)
        return self._changed(decision, self._write(decision.rows, k, v))

    # The operations below write no rows.

    def _free(self, slots: jax.Array) -> Change[Self]:
        return self._changed(self._decide(tables.free, slots))

    def _rewind(self, lengths: jax.Array) -> Change[Self]:
        return self._changed(self._decide(tables.rewind, lengths))

    def _reorder(self, parents: jax.Array, *, group: int) -> Change[Self]:
        return self._changed(self._decide(tables.reorder, parents, group=group))

    def _share(
        self, sources: jax.Array, slots: jax.Array, lengths: jax.Array | None
    ) -> Change[Self]:
        return self._changed(self._decide(tables.share, sources, slots, lengths))

    def _decide(self, rule: Callable[..., Decision], *arrays: Any, **static: Any) -> Decision:
        # Decide in a shard_map: otherwise XLA would shard the integers of the decision over the
        # batch, with dozens of collectives.
        owned = Ownership(length=self.length, tables=self.tables, references=self.references)
        arguments = (owned, *(None if x is None else jnp.asarray(x) for x in arrays))
        everywhere = jax.tree.map(lambda _: PartitionSpec(), arguments)
        local = functools.partial(rule, page_size=self.page_size, **static)
        decision: Decision = self._sharding.run(
            local, arguments, everywhere, out_specs=PartitionSpec()
        )
        return decision

    def _write(self, rows: SlotRows, k: jax.Array, v: jax.Array) -> Buffers:
        pages = self._placed_buffers
        # Copy before the write, so that the other slots of a shared page keep its rows.
        if rows.shared is not None and rows.copies is not None:
            copied = pool.copy_pages(pages, rows.shared, rows.copies)
            pages = dataclasses.replace(pages, arrays=copied)
        new = {"k_pages": jnp.asarray(k), "v_pages": jnp.asarray(v)}
        return scatter.scatter_rows(pages, new, rows.pages, rows.positions % self.page_size)

    def _changed(self, decision: Decision, buffers: Buffers | None = None) -> Change[Self]:
        fields: dict[str, Any] = dict(buffers or {})
        for name in ("length", "tables", "references"):
            fields[name] = self._sharding.place(
                getattr(decision.owned, name), self.array_axes[name]
            )
        return Change(cache=dataclasses.replace(self, **fields), refused=decision.refused)


def make(spec: CacheSpec, *, page_size: int = 16, pages: int | None = None) -> PagedCache:
    """Return an empty cache.

    Args:
      spec: The static part of the cache. `capacity` limits a slot even if more pages are free.
      page_size: Number of rows of a page.
      pages: Number of pages in the pool. Defaults to what all slots need at their capacity.

    Raises:
      CacheError: Sizes are invalid, or a paged cache does not support the spec.
    """
    page_size = read_integer("page_size", page_size, error=CacheError)
    if pages is not None:
        pages = read_integer("pages", pages, error=CacheError)
    if spec.is_ring:
        raise CacheError(
            "a paged cache cannot be a ring",
            path="overflow",
            fix='use kind "sliding", which keeps the latest tokens, or overflow="report", which '
            "refuses tokens that do not fit",
        )
    if spec.order.block is not None:
        raise CacheError(
            "a paged cache takes no order of rows",
            path="order",
            fix='leave order out; a rule for "page" shards the pages',
        )
    columns = count_pages(spec.capacity, page_size)
    pages = spec.batch * columns if pages is None else pages
    k, v = (
        jnp.zeros((pages, page_size, spec.kv_heads, dim), spec.dtype)
        for dim in (spec.head_dim, spec.v_dim)
    )
    return PagedCache(
        spec=spec,
        length=jnp.zeros(spec.batch, jnp.int32),
        k_pages=k,
        v_pages=v,
        tables=jnp.full((spec.batch, columns), pages, jnp.int32),
        references=jnp.zeros(pages, jnp.int32),
    )
