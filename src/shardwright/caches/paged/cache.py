"""The paged cache: slots take pages of a common pool as their sequences grow, and share those of a common prefix."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self, final

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.caches import arguments, scatter
from shardwright.caches.base import CacheSpec, Change, KVCache, Overflow, View
from shardwright.caches.operating import operate
from shardwright.caches.paged import pool, tables
from shardwright.caches.paged.pool import PAGE_AXES
from shardwright.caches.paged.tables import Books, Decision, Rows
from shardwright.caches.scatter import Buffers
from shardwright.caches.sharding import Axes, Shards, ambient_shards, entries, specs_of
from shardwright.errors import CacheError
from shardwright.vocabulary.axes import BATCH, EMPTY
from shardwright.vocabulary.integers import read_integer


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PagedCache(KVCache):
    """Keys and values in pages. Position p of slot b is row `p % page_size` of page `tables[b, p // page_size]`.

    A page may belong to several slots: `share` and `reorder` copy no rows, and a slot that writes to a page that others have
    too gets a copy of its own first. Under a manager pages lie as (PAGE, EMPTY, KV_HEAD, KV_HEAD_DIM) resolves; what says whose
    they are is the same everywhere while an operation runs, so an append sends new rows and small integers, never pages.

    Attributes:
      spec: the static part.
      length: `[batch]` int32.
      k_pages: `[pages, page_size, kv_heads, head_dim]`.
      v_pages: `[pages, page_size, kv_heads, v_dim]`.
      tables: `[batch, pages_per_slot]` int32, page numbers; of a slot those of its length are in use, the others are anything.
      references: `[pages]` int32, entries of tables in use that name each page; 0 for a free one.
    """

    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    length: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    tables: jax.Array
    references: jax.Array

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.k_pages.shape[1]

    @property
    def buffers(self) -> Buffers:
        """Keys and values."""
        return {"k_pages": self.k_pages, "v_pages": self.v_pages}

    @property
    def buffer_axes(self) -> dict[str, Axes]:
        """Their annotations."""
        return {"k_pages": PAGE_AXES, "v_pages": PAGE_AXES}

    def axes(self) -> Self:
        """Return the annotation of every array."""
        axes: dict[str, Any] = {
            "length": (BATCH,),
            "tables": (BATCH, EMPTY),
            "references": (EMPTY,),
            **self.buffer_axes,
        }
        return dataclasses.replace(self, **axes)

    def append(self, k: Any, v: Any, *, valid: Any = None) -> Change[Self]:
        """Write the next tokens of every slot; see `KVCache.append`.

        Slots take their pages one after the other. One for which too few are free is refused, and the next may have them.
        """
        arguments.check_append(self.spec, k, v, valid)
        return operate(_append, self, k, v, valid)

    def insert(self, source: KVCache, slots: Any) -> Change[Self]:
        """Copy sequences into free slots; see `KVCache.insert`. Pages are taken in the order of the sequences, as by `append`."""
        arguments.check_source(self.spec, source)
        return operate(_insert, self, source, arguments.destinations(self.spec, source, slots))

    def share(self, sources: Any, slots: Any, *, lengths: Any = None) -> Change[Self]:
        """Let free slots begin as others do: the same pages, also one that is partly filled. No row is copied until one writes.

        Args:
          sources: `[n]` int, slots that hold sequences; one may be named several times.
          slots: `[n]` int, free slots.
          lengths: `[n]` int, tokens to share, from 0 to the length of the source; absent: all.

        Returns:
          The change, by entry.

        Raises:
          CacheError: no integers, or different numbers of them.
        """
        into = arguments.integers("slots", slots)
        count = into.shape[0]
        given = None if lengths is None else arguments.integers("lengths", lengths, size=count)
        return operate(
            _settle,
            self,
            arguments.integers("sources", sources, size=count),
            into,
            given,
            rule=tables.share,
        )

    def free(self, slots: Any) -> Change[Self]:
        """Empty slots; see `KVCache.free`. Pages that others share stay with them."""
        return operate(_settle, self, arguments.integers("slots", slots), rule=tables.free)

    def rewind(self, lengths: Any) -> Change[Self]:
        """Cut each slot to a length; see `KVCache.rewind`. Pages without a token that is left are given back."""
        return operate(
            _settle,
            self,
            arguments.integers("lengths", lengths, size=self.batch),
            rule=tables.rewind,
        )

    def reorder(self, parents: Any, *, group: int | None = None) -> Change[Self]:
        """Let every slot continue what another holds; see `KVCache.reorder`. No row is copied until one writes."""
        group = arguments.read_group(self.spec, group)
        parents = arguments.integers("parents", parents, size=self.batch)
        return operate(_settle, self, parents, rule=tables.reorder, group=group)

    def view(self) -> View:
        """Return what attention reads."""
        return View(
            k=self.k_pages, v=self.v_pages, positions=None, lengths=self.length, tables=self.tables
        )

    def free_pages(self) -> jax.Array:
        """Return how many pages nothing refers to, int32."""
        return jnp.sum(self.references == 0, dtype=jnp.int32)


def make(spec: CacheSpec, *, page_size: int = 16, pages: int | None = None) -> PagedCache:
    """Return a cache without tokens.

    Args:
      spec: the static part; `capacity` is the most that a slot may hold, however many pages are free.
      page_size: rows of a page.
      pages: of the pool; absent: as many as all slots at their capacity need.

    Raises:
      CacheError: no such pages, or a spec that pages do not do.
    """
    page_size = read_integer("page_size", page_size, error=CacheError)
    if pages is not None:
        pages = read_integer("pages", pages, error=CacheError)
    if spec.overflow is Overflow.RING:
        fix = 'kind "sliding" keeps the latest tokens; overflow="report" refuses what does not fit'
        raise CacheError(
            "pages do not go round: a paged cache cannot be a ring", path="overflow", fix=fix
        )
    if spec.order.block is not None:
        raise CacheError(
            "pages hold rows in order",
            path="order",
            fix='leave order away; the rule of "page" spreads pages',
        )
    columns = -(-spec.capacity // page_size)
    pages = spec.batch * columns if pages is None else pages
    _check_pages((pages, page_size, spec.kv_heads, spec.head_dim), spec)
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


def _check_pages(shape: tuple[int, ...], spec: CacheSpec) -> None:
    """Refuse pages over what the batch lies over: any slot may use any page, and attention looks for them on its own shards."""
    shards = ambient_shards(spec.mode)
    found = shards.spec(PAGE_AXES, shape, name="k_pages")
    batch = entries(shards.spec((BATCH,), (spec.batch,), name="length"), 1)[0]
    both = [axis for axis in entries(found, len(shape))[0] if axis in batch]
    if both:
        what = f"the pages and the batch both lie over {both[0]}: attention to a slot would lack pages that the slot uses"
        fix = 'page = "-" keeps every page on every shard of the batch; or shard pages over a mesh axis of their own'
        raise CacheError(what, path="k_pages", dim=0, axis="PAGE", mesh_axes=tuple(both), fix=fix)


def _decide(
    cache: PagedCache, shards: Shards, rule: Callable[..., Decision], *arrays: Any, **static: Any
) -> Decision:
    # In a shard_map, since the partitioner would spread this over the shards of the batch, with dozens of collectives.
    books = Books(length=cache.length, tables=cache.tables, references=cache.references)
    arguments = (books, *(None if x is None else jnp.asarray(x) for x in arrays))
    everywhere = jax.tree.map(lambda _: PartitionSpec(), arguments)
    local = functools.partial(rule, page_size=cache.page_size, **static)
    decision: Decision = shards.run(local, arguments, everywhere, out_specs=PartitionSpec())
    return decision


def _changed(
    cache: PagedCache, shards: Shards, decision: Decision, buffers: Buffers | None = None
) -> Change[Any]:
    axes, books = cache.axes(), decision.books
    fields: dict[str, Any] = dict(buffers or {})
    for name in ("length", "tables", "references"):
        fields[name] = shards.place(getattr(books, name), getattr(axes, name))
    return Change(cache=dataclasses.replace(cache, **fields), refused=decision.refused)


def _settle(
    cache: PagedCache, *arrays: Any, rule: Callable[..., Decision], **static: Any
) -> Change[Any]:
    """Do what writes no rows."""
    shards = ambient_shards(cache.spec.mode)
    return _changed(cache, shards, _decide(cache, shards, rule, *arrays, **static))


def _append(cache: PagedCache, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Any]:
    shards = ambient_shards(cache.spec.mode)
    is_token = jnp.ones(k.shape[:2], bool) if valid is None else valid
    decision = _decide(cache, shards, tables.append, is_token, capacity=cache.spec.capacity)
    assert decision.rows is not None
    positions = shards.place(decision.rows.positions, (BATCH, EMPTY))
    return dataclasses.replace(
        _changed(cache, shards, decision, _write(cache, shards, decision.rows, k, v)),
        positions=positions,
    )


def _insert(cache: PagedCache, source: KVCache, into: jax.Array) -> Change[Any]:
    shards, dtype = ambient_shards(cache.spec.mode), cache.spec.dtype
    view = pool.in_rows(source.view(), ambient_shards(source.spec.mode))
    decision = _decide(
        cache,
        shards,
        tables.insert,
        view.positions,
        view.lengths,
        into,
        capacity=cache.spec.capacity,
    )
    assert decision.rows is not None
    k, v = pool.plain(view.k, view.k_scale, dtype), pool.plain(view.v, view.v_scale, dtype)
    return _changed(cache, shards, decision, _write(cache, shards, decision.rows, k, v))


def _write(cache: PagedCache, shards: Shards, rows: Rows, k: jax.Array, v: jax.Array) -> Buffers:
    buffers, specs = cache.buffers, specs_of(shards, cache.buffers, cache.buffer_axes)
    if rows.shared is not None and rows.copies is not None:
        buffers = pool.copy_pages(buffers, rows.shared, rows.copies, shards=shards, specs=specs)
    new = {"k_pages": jnp.asarray(k), "v_pages": jnp.asarray(v)}
    return scatter.scatter_rows(
        buffers, new, rows.pages, rows.positions % cache.page_size, shards=shards, specs=specs
    )
