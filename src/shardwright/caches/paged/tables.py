"""Whose the pages of a cache are, and what becomes of an operation: decided by every shard for itself, from integers that all have.

Each function takes books and what the caller gave, and returns books and who was refused; no keys and values are seen here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from shardwright.caches import slots
from shardwright.caches.base import Refusal
from shardwright.caches.paged import pool
from shardwright.caches.paged.pool import Claim, count_pages, refer, used_entries


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Books:
    """Whose the pages are; the fields are those of the cache."""

    length: jax.Array
    tables: jax.Array
    references: jax.Array

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.references.shape[0]

    def held(self, page_size: int) -> jax.Array:
        """Return the pages that each slot has, elsewhere none; `[batch, pages_per_slot]`."""
        end = count_pages(self.length, page_size)
        return used_entries(self.tables, jnp.zeros_like(end), end, pages=self.pages)

    def at(self, columns: jax.Array) -> jax.Array:
        """Return `[batch, n]` pages of columns, which are those of the nearest where there is no such column."""
        return jnp.take_along_axis(
            self.tables, jnp.clip(columns, 0, self.tables.shape[1] - 1), axis=1
        )

    def take(self, claim: Claim, slots: jax.Array) -> Books:
        """Return the books after slots took what they claim; the i-th claim is that of `slots[i]`."""
        references = refer(refer(self.references, claim.pages, 1), claim.shared, -1)
        return dataclasses.replace(
            self,
            tables=pool.enter(self.tables, claim, slots, pages=self.pages),
            references=references,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows that an operation writes.

    Attributes:
      positions: `[n, m]` int32 of the tokens, -1 for those that are not written.
      pages: `[n, m]` int32, the page of each; or none.
      shared: `[n]` int32, the pages that are copied first; or none. None where none ever are.
      copies: `[n]` int32, what they are copied to.
    """

    positions: jax.Array
    pages: jax.Array
    shared: jax.Array | None = None
    copies: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What becomes of an operation.

    Attributes:
      books: after it.
      refused: as `Change` has it.
      rows: what it writes; None where it never writes any.
    """

    books: Books
    refused: jax.Array
    rows: Rows | None = None


def append(books: Books, is_token: jax.Array, *, capacity: int, page_size: int) -> Decision:
    """Decide on the next tokens of every slot, `[batch, q_length]` bool."""
    counts = jnp.sum(is_token, axis=1, dtype=jnp.int32)
    over = books.length + counts > capacity
    claim = pool.claim_pages(
        books.references,
        books.at(books.length[:, None] // page_size)[:, 0],
        lengths=books.length,
        counts=jnp.where(over, 0, counts),
        page_size=page_size,
        most=min(count_pages(is_token.shape[1] - 1, page_size) + 1, books.tables.shape[1]),
    )
    books = books.take(claim, jnp.arange(counts.shape[0], dtype=jnp.int32))
    positions = books.length[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    positions = jnp.where(is_token & claim.served[:, None], positions, -1)
    return Decision(
        books=dataclasses.replace(books, length=books.length + jnp.where(claim.served, counts, 0)),
        refused=slots.first_reason(
            (over, Refusal.OVERFLOW), ((counts > 0) & ~claim.served, Refusal.NO_FREE_PAGE)
        ),
        rows=Rows(
            positions=positions,
            pages=jnp.where(positions < 0, books.pages, books.at(positions // page_size)),
            shared=claim.shared,
            copies=claim.pages[:, 0],
        ),
    )


def insert(
    books: Books,
    positions: jax.Array,
    lengths: jax.Array,
    into: jax.Array,
    *,
    capacity: int,
    page_size: int,
) -> Decision:
    """Decide on sequences for free slots.

    Args:
      books: as they are.
      positions: `[n or 1, rows]` int32 of the sequences' rows, -1 for a row that holds nothing.
      lengths: `[n]` int32, tokens of each.
      into: `[n]` int32, slots.
      capacity: tokens that a slot may hold.
      page_size: rows of a page.
    """
    held = jnp.where(positions < lengths[:, None], positions, -1)
    named = slots.which(into, books.length.shape[0])
    refused = slots.first_reason(
        *slots.naming_reasons(named),
        (slots.of_entries(named, books.length > 0), Refusal.SLOT_IN_USE),
        (lengths > capacity, Refusal.OVERFLOW),
        (jnp.sum(held >= 0, axis=1) < lengths, Refusal.POSITIONS_MISSING),
    )
    counts = jnp.where(refused == Refusal.NONE, lengths, 0)
    nothing = jnp.zeros_like(lengths)
    most = min(count_pages(held.shape[1], page_size), books.tables.shape[1])
    claim = pool.claim_pages(
        books.references, nothing, lengths=nothing, counts=counts, page_size=page_size, most=most
    )
    held = jnp.where(claim.served[:, None], held, -1)
    page = jnp.take_along_axis(claim.pages, jnp.clip(held // page_size, 0, most - 1), axis=1)
    return Decision(
        books=dataclasses.replace(
            books.take(claim, into),
            length=slots.to_slots(named, claim.served, lengths, books.length),
        ),
        refused=jnp.where((counts > 0) & ~claim.served, jnp.int8(Refusal.NO_FREE_PAGE), refused),
        rows=Rows(positions=held, pages=jnp.where(held < 0, books.pages, page)),
    )


def share(
    books: Books, sources: jax.Array, into: jax.Array, lengths: jax.Array | None, *, page_size: int
) -> Decision:
    """Decide on free slots, `[n]`, that begin as others do; absent lengths: all of it."""
    batch = books.length.shape[0]
    asked, named = slots.which(sources, batch), slots.which(into, batch)
    held = jnp.sum(jnp.where(asked, books.length[None], 0), axis=1, dtype=jnp.int32)
    wanted = held if lengths is None else lengths
    refused = slots.first_reason(
        (~jnp.any(asked, axis=1), Refusal.SLOT_OUT_OF_RANGE),
        *slots.naming_reasons(named),
        (slots.of_entries(named, books.length > 0), Refusal.SLOT_IN_USE),
        (held == 0, Refusal.SLOT_EMPTY),
        slots.length_reason(wanted, held),
    )
    done = refused == Refusal.NONE
    rows = books.tables[jnp.where(done, sources, 0)]
    shared = Books(
        length=jnp.where(done, wanted, 0), tables=rows, references=books.references
    ).held(page_size)
    books = Books(
        length=slots.to_slots(named, done, wanted, books.length),
        tables=books.tables.at[jnp.where(done, into, batch)].set(rows, mode="drop"),
        references=refer(books.references, shared, 1),
    )
    return Decision(books=books, refused=refused)


def free(books: Books, which: jax.Array, *, page_size: int) -> Decision:
    """Decide on slots to empty, `[n]`."""
    named = slots.which(which, books.length.shape[0])
    refused = slots.freeing(named, books.length)
    length = slots.to_slots(named, refused == Refusal.NONE, 0, books.length)
    return Decision(books=_shorten(books, length, page_size), refused=refused)


def rewind(books: Books, lengths: jax.Array, *, page_size: int) -> Decision:
    """Decide on lengths to go back to, `[batch]`."""
    refused = slots.first_reason(slots.length_reason(lengths, books.length))
    length = jnp.where(refused == Refusal.NONE, lengths, books.length)
    return Decision(books=_shorten(books, length, page_size), refused=refused)


def reorder(books: Books, parents: jax.Array, *, group: int, page_size: int) -> Decision:
    """Decide on the slots that every slot continues, `[batch]`."""
    own = jnp.arange(parents.shape[0], dtype=jnp.int32)
    outside = slots.outside_group(parents, own, batch=parents.shape[0], group=group)
    parents = jnp.where(outside, own, parents)
    after = dataclasses.replace(books, length=books.length[parents], tables=books.tables[parents])
    references = refer(refer(books.references, after.held(page_size), 1), books.held(page_size), -1)
    return Decision(
        books=dataclasses.replace(after, references=references),
        refused=slots.first_reason((outside, Refusal.SLOT_OUT_OF_RANGE)),
    )


def _shorten(books: Books, length: jax.Array, page_size: int) -> Books:
    """Return the books after slots gave back the pages that they do not need for so many tokens."""
    first, end = count_pages(length, page_size), count_pages(books.length, page_size)
    given = used_entries(books.tables, first, end, pages=books.pages)
    return dataclasses.replace(books, length=length, references=refer(books.references, given, -1))
