"""The paged cache: slots take pages of a common pool as their sequences grow, and share those of a common prefix."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, final

import jax
import jax.numpy as jnp

from shardwright.axes import BATCH, EMPTY
from shardwright.caches import arguments, pages, slots, writing
from shardwright.caches.base import CacheSpec, Change, KVCache, Overflow, Refusal, View
from shardwright.caches.operating import operate
from shardwright.caches.pages import PAGE_AXES, Claim, count_pages, refer, used_entries
from shardwright.caches.shards import Axes, Shards, ambient_shards, specs_of
from shardwright.caches.writing import Buffers
from shardwright.errors import CacheError


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
        axes: dict[str, Any] = {"length": (BATCH,), "tables": (BATCH, EMPTY), "references": (EMPTY,), **self.buffer_axes}
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
        return operate(_insert, self, source, arguments.integers("slots", slots, size=source.batch))

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
        return operate(_share, self, arguments.integers("sources", sources, size=count), into, given)

    def free(self, slots: Any) -> Change[Self]:
        """Empty slots; see `KVCache.free`. Pages that others share stay with them."""
        return operate(_free, self, arguments.integers("slots", slots))

    def rewind(self, lengths: Any) -> Change[Self]:
        """Take tokens back; see `KVCache.rewind`. Pages without a token that is left are given back."""
        return operate(_rewind, self, arguments.integers("lengths", lengths, size=self.batch))

    def reorder(self, parents: Any, *, group: int | None = None) -> Change[Self]:
        """Let every slot continue what another holds; see `KVCache.reorder`. No row is copied until one writes."""
        arguments.check_group(self.spec, group)
        return operate(_reorder, self, arguments.integers("parents", parents, size=self.batch), group=group or self.batch)

    def view(self) -> View:
        """Return what attention reads."""
        return View(k=self.k_pages, v=self.v_pages, positions=None, lengths=self.length, tables=self.tables)

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
    if page_size < 1 or (pages is not None and pages < 1):
        raise CacheError(f"page_size is {page_size} and pages {pages}", path="pages", fix="pass numbers of at least 1")
    if spec.overflow is Overflow.RING:
        fix = 'kind "sliding" keeps the latest tokens; overflow="report" refuses what does not fit'
        raise CacheError("pages do not go round: a paged cache cannot be a ring", path="overflow", fix=fix)
    if spec.order.block is not None:
        raise CacheError("pages hold rows in order", path="order", fix='leave order away; the rule of "page" spreads pages')
    columns = -(-spec.capacity // page_size)
    pages = spec.batch * columns if pages is None else pages
    k, v = (jnp.zeros((pages, page_size, spec.kv_heads, dim), spec.dtype) for dim in (spec.head_dim, spec.v_dim))
    return PagedCache(
        spec=spec,
        length=jnp.zeros(spec.batch, jnp.int32),
        k_pages=k,
        v_pages=v,
        tables=jnp.full((spec.batch, columns), pages, jnp.int32),
        references=jnp.zeros(pages, jnp.int32),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Books:
    """Whose the pages are, the same on every shard."""

    length: jax.Array
    tables: jax.Array
    references: jax.Array

    @property
    def pages(self) -> int:
        return self.references.shape[0]


def _open(cache: PagedCache, shards: Shards) -> _Books:
    tables, references = shards.place(cache.tables, (EMPTY, EMPTY)), shards.place(cache.references, (EMPTY,))
    return _Books(length=shards.place(cache.length, (EMPTY,)), tables=tables, references=references)


def _changed(cache: PagedCache, shards: Shards, refused: jax.Array, *, positions: jax.Array | None = None, **fields: Any) -> Change[Any]:
    axes = cache.axes()
    laid: dict[str, Any] = {name: x if name in cache.buffers else shards.place(x, getattr(axes, name)) for name, x in fields.items()}
    return Change(cache=dataclasses.replace(cache, **laid), refused=refused, positions=positions)


def _append(cache: PagedCache, k: jax.Array, v: jax.Array, valid: jax.Array | None) -> Change[Any]:
    shards, page_size = ambient_shards(cache.spec.mode), cache.page_size
    books, k, v = _open(cache, shards), jnp.asarray(k), jnp.asarray(v)
    is_token = jnp.ones(k.shape[:2], bool) if valid is None else jnp.asarray(valid)
    is_token = shards.place(is_token, (EMPTY, EMPTY))
    counts = jnp.sum(is_token, axis=1, dtype=jnp.int32)
    over = books.length + counts > cache.spec.capacity
    claim = pages.claim_pages(
        books.references,
        _pages_at(books, books.length[:, None] // page_size)[:, 0],
        lengths=books.length,
        counts=jnp.where(over, 0, counts),
        page_size=page_size,
        most=min(count_pages(k.shape[1] - 1, page_size) + 1, books.tables.shape[1]),
    )
    books = _take(books, claim, jnp.arange(cache.batch, dtype=jnp.int32))
    positions = books.length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    positions = jnp.where(is_token & claim.served[:, None], positions, -1)
    into = jnp.where(positions < 0, books.pages, _pages_at(books, positions // page_size))
    specs = specs_of(shards, cache.buffers, cache.buffer_axes)
    buffers = pages.copy_pages(cache.buffers, claim.shared, claim.pages[:, 0], shards=shards, specs=specs)
    new = {"k_pages": k, "v_pages": v}
    buffers = writing.scatter_rows(buffers, new, into, positions % page_size, shards=shards, specs=specs)
    refused = slots.first_reason((over, Refusal.OVERFLOW), ((counts > 0) & ~claim.served, Refusal.NO_FREE_PAGE))
    length = books.length + jnp.where(claim.served, counts, 0)
    return _changed(cache, shards, refused, positions=positions, length=length, tables=books.tables, references=books.references, **buffers)


def _insert(cache: PagedCache, source: KVCache, into: jax.Array) -> Change[Any]:
    shards, page_size, spec = ambient_shards(cache.spec.mode), cache.page_size, cache.spec
    books, view = _open(cache, shards), pages.in_rows(source.view(), ambient_shards(source.spec.mode))
    lengths, into = shards.place(view.lengths, (EMPTY,)), shards.place(jnp.asarray(into), (EMPTY,))
    assert view.positions is not None
    held = shards.place(view.positions, (EMPTY, EMPTY))
    held = jnp.where(held < lengths[:, None], held, -1)
    named = slots.which(into, spec.batch)
    refused = slots.first_reason(
        *slots.naming_reasons(named),
        (slots.of_entries(named, books.length > 0), Refusal.SLOT_IN_USE),
        (lengths > spec.capacity, Refusal.OVERFLOW),
        (jnp.sum(held >= 0, axis=1) < lengths, Refusal.POSITIONS_MISSING),
    )
    counts = jnp.where(refused == Refusal.NONE, lengths, 0)
    nothing = jnp.zeros_like(lengths)
    most = min(count_pages(held.shape[1], page_size), books.tables.shape[1])
    claim = pages.claim_pages(books.references, nothing, lengths=nothing, counts=counts, page_size=page_size, most=most)
    books = _take(books, claim, into)
    refused = jnp.where((counts > 0) & ~claim.served, jnp.int8(Refusal.NO_FREE_PAGE), refused)
    kept = (held >= 0) & claim.served[:, None]
    at = jnp.take_along_axis(claim.pages, jnp.where(kept, held // page_size, 0), axis=1)
    new = {"k_pages": pages.plain(view.k, view.k_scale, spec.dtype), "v_pages": pages.plain(view.v, view.v_scale, spec.dtype)}
    specs = specs_of(shards, cache.buffers, cache.buffer_axes)
    buffers = writing.scatter_rows(cache.buffers, new, jnp.where(kept, at, books.pages), held % page_size, shards=shards, specs=specs)
    length = slots.to_slots(named, claim.served, lengths, books.length)
    return _changed(cache, shards, refused, length=length, tables=books.tables, references=books.references, **buffers)


def _pages_at(books: _Books, columns: jax.Array) -> jax.Array:
    """Return `[batch, n]` pages at columns of the tables; anything where there is no such column."""
    return jnp.take_along_axis(books.tables, jnp.clip(columns, 0, books.tables.shape[1] - 1), axis=1)


def _take(books: _Books, claim: Claim, into: jax.Array) -> _Books:
    """Return the books after slots took what they claim: the i-th claim is that of slot `into[i]`."""
    references = refer(refer(books.references, claim.pages, 1), claim.shared, -1)
    return dataclasses.replace(books, tables=pages.enter(books.tables, claim, into, pages=books.pages), references=references)


def _held_pages(books: _Books, lengths: jax.Array, page_size: int) -> jax.Array:
    """Return the pages of the first tokens of every slot, elsewhere none; `[batch, columns]`."""
    end = count_pages(lengths, page_size)
    return used_entries(books.tables, jnp.zeros_like(end), end, pages=books.pages)


def _share(cache: PagedCache, sources: jax.Array, into: jax.Array, lengths: jax.Array | None) -> Change[Any]:
    shards = ambient_shards(cache.spec.mode)
    books = _open(cache, shards)
    sources, into = (shards.place(jnp.asarray(x), (EMPTY,)) for x in (sources, into))
    asked, named = slots.which(sources, cache.batch), slots.which(into, cache.batch)
    held = jnp.sum(jnp.where(asked, books.length[None], 0), axis=1, dtype=jnp.int32)
    wanted = held if lengths is None else shards.place(jnp.asarray(lengths), (EMPTY,))
    refused = slots.first_reason(
        (~jnp.any(asked, axis=1), Refusal.SLOT_OUT_OF_RANGE),
        *slots.naming_reasons(named),
        (slots.of_entries(named, books.length > 0), Refusal.SLOT_IN_USE),
        (held == 0, Refusal.SLOT_EMPTY),
        ((wanted < 0) | (wanted > held), Refusal.LENGTH_OUT_OF_RANGE),
    )
    done = refused == Refusal.NONE
    rows = books.tables[jnp.where(done, sources, 0)]
    end = count_pages(jnp.where(done, wanted, 0), cache.page_size)
    shared = used_entries(rows, jnp.zeros_like(end), end, pages=books.pages)
    return _changed(
        cache,
        shards,
        refused,
        length=slots.to_slots(named, done, wanted, books.length),
        tables=books.tables.at[jnp.where(done, into, cache.batch)].set(rows, mode="drop"),
        references=refer(books.references, shared, 1),
    )


def _free(cache: PagedCache, which: jax.Array) -> Change[Any]:
    shards = ambient_shards(cache.spec.mode)
    books = _open(cache, shards)
    named = slots.which(shards.place(jnp.asarray(which), (EMPTY,)), cache.batch)
    refused = slots.first_reason(*slots.naming_reasons(named), (slots.of_entries(named, books.length == 0), Refusal.SLOT_EMPTY))
    length = slots.to_slots(named, refused == Refusal.NONE, 0, books.length)
    given = _held_pages(books, books.length - length, cache.page_size)
    return _changed(cache, shards, refused, length=length, references=refer(books.references, given, -1))


def _rewind(cache: PagedCache, lengths: jax.Array) -> Change[Any]:
    shards, page_size = ambient_shards(cache.spec.mode), cache.page_size
    books, wanted = _open(cache, shards), shards.place(jnp.asarray(lengths), (EMPTY,))
    refused = slots.first_reason(((wanted < 0) | (wanted > books.length), Refusal.LENGTH_OUT_OF_RANGE))
    length = jnp.where(refused == Refusal.NONE, wanted, books.length)
    first, end = count_pages(length, page_size), count_pages(books.length, page_size)
    given = used_entries(books.tables, first, end, pages=books.pages)
    return _changed(cache, shards, refused, length=length, references=refer(books.references, given, -1))


def _reorder(cache: PagedCache, parents: jax.Array, *, group: int) -> Change[Any]:
    shards, page_size = ambient_shards(cache.spec.mode), cache.page_size
    books, wanted = _open(cache, shards), shards.place(jnp.asarray(parents), (EMPTY,))
    own = jnp.arange(cache.batch, dtype=jnp.int32)
    outside = (wanted < 0) | (wanted >= cache.batch) | (wanted // group != own // group)
    parents = jnp.where(outside, own, wanted)
    after = dataclasses.replace(books, length=books.length[parents], tables=books.tables[parents])
    references = refer(books.references, _held_pages(after, after.length, page_size), 1)
    references = refer(references, _held_pages(books, books.length, page_size), -1)
    refused = slots.first_reason((outside, Refusal.SLOT_OUT_OF_RANGE))
    return _changed(cache, shards, refused, length=after.length, tables=after.tables, references=references)
