"""Page ownership, computed identically on every shard: which slot uses which pages.

Each function takes the ownership before an operation and the caller's arguments, and returns a
decision: the new ownership, the refusals, and the rows to write. No function needs keys or values.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from shardwright.caches import refusals
from shardwright.caches.paged import claims
from shardwright.caches.paged.claims import PageClaim, count_pages, refer, used_entries
from shardwright.caches.positions import of_tokens
from shardwright.caches.refusals import Refusal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ownership:
    """Which slot uses which pages. The fields are those of `PagedCache`."""

    length: jax.Array
    tables: jax.Array
    references: jax.Array

    @property
    def pages(self) -> int:
        """Number of pages in the pool."""
        return self.references.shape[0]

    def held(self, page_size: int) -> jax.Array:
        """Return `[batch, pages_per_slot]`: the pages that each slot uses, elsewhere "no page"."""
        end = count_pages(self.length, page_size)
        return used_entries(self.tables, jnp.zeros_like(end), end, pages=self.pages)

    def at(self, columns: jax.Array) -> jax.Array:
        """Return `[batch, n]`: the pages in columns of the tables. Column numbers are clipped."""
        return jnp.take_along_axis(
            self.tables, jnp.clip(columns, 0, self.tables.shape[1] - 1), axis=1
        )

    def take(self, claim: PageClaim, slots: jax.Array) -> Ownership:
        """Return the ownership after slots got the pages of a claim.

        Row i of the claim belongs to `slots[i]`.
        """
        # A slot that gets a copy of a shared page gives up its reference to the shared page.
        references = refer(refer(self.references, claim.pages, 1), claim.shared, -1)
        return dataclasses.replace(
            self,
            tables=claims.enter(self.tables, claim, slots, pages=self.pages),
            references=references,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """The rows that an operation writes.

    Attributes:
      positions: `[n, m]` int32, positions of the tokens; -1 for a token that is not written.
      pages: `[n, m]` int32, the page of each token, or "no page".
      shared: `[n]` int32, pages to copy first, or "no page". None if the operation never copies
        pages.
      copies: `[n]` int32, the page to which each shared page is copied.
    """

    positions: jax.Array
    pages: jax.Array
    shared: jax.Array | None = None
    copies: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What an operation does.

    Attributes:
      owned: The ownership after the operation.
      refused: As in `Change`.
      rows: The rows to write. None if the operation never writes rows.
    """

    owned: Ownership
    refused: jax.Array
    rows: SlotRows | None = None


def append(
    owned: Ownership,
    is_token: jax.Array,
    *,
    capacity: int,
    page_size: int,
    every: bool,
) -> Decision:
    """Decide on the next tokens of every slot.

    Args:
      owned: The ownership before the operation.
      is_token: `[batch, q_length]` bool.
      capacity: Largest number of tokens of a slot.
      page_size: Number of rows of a page.
      every: Whether all rows are tokens.
    """
    counts = jnp.sum(is_token, axis=1, dtype=jnp.int32)
    over = owned.length + counts > capacity
    # Tokens that start inside a page can touch one page more than tokens that start in the first
    # row of a page.
    most = min(count_pages(is_token.shape[1] - 1, page_size) + 1, owned.tables.shape[1])
    claim = claims.claim_pages(
        owned.references,
        # The page of the next position. A slot has this page already unless the position is the
        # first one of the page.
        owned.at(owned.length[:, None] // page_size)[:, 0],
        lengths=owned.length,
        counts=jnp.where(over, 0, counts),
        page_size=page_size,
        most=most,
    )
    owned = owned.take(claim, jnp.arange(counts.shape[0], dtype=jnp.int32))
    positions = of_tokens(owned.length, is_token, every=every)
    positions = jnp.where(is_token & claim.served[:, None], positions, -1)
    return Decision(
        owned=dataclasses.replace(owned, length=owned.length + jnp.where(claim.served, counts, 0)),
        refused=refusals.first_refusal(
            (over, Refusal.OVERFLOW), ((counts > 0) & ~claim.served, Refusal.NO_FREE_PAGE)
        ),
        rows=SlotRows(
            positions=positions,
            pages=jnp.where(positions < 0, owned.pages, owned.at(positions // page_size)),
            shared=claim.shared,
            # The page to copy is the partly filled page of the slot. Its copy is the first new
            # page.
            copies=claim.pages[:, 0],
        ),
    )


def insert(
    owned: Ownership,
    positions: jax.Array,
    lengths: jax.Array,
    into: jax.Array,
    *,
    capacity: int,
    page_size: int,
) -> Decision:
    """Decide on sequences that are copied into free slots.

    Args:
      owned: The ownership before the operation.
      positions: `[n or 1, rows]` int32 of the sequences' rows, -1 for an empty row.
      lengths: `[n]` int32, number of tokens of each sequence.
      into: `[n]` int32, slots.
      capacity: Largest number of tokens of a slot.
      page_size: Number of rows of a page.
    """
    row_positions = jnp.where(positions < lengths[:, None], positions, -1)
    named = refusals.named_slots(into, owned.length.shape[0])
    refused = refusals.first_refusal(
        *refusals.invalid_names(named),
        (refusals.at_named(named, owned.length > 0), Refusal.SLOT_IN_USE),
        (lengths > capacity, Refusal.OVERFLOW),
        (jnp.sum(row_positions >= 0, axis=1) < lengths, Refusal.POSITIONS_MISSING),
    )
    counts = jnp.where(refused == Refusal.NONE, lengths, 0)
    # A free slot has no tokens and no partly filled page.
    nothing = jnp.zeros_like(lengths)
    most = min(count_pages(row_positions.shape[1], page_size), owned.tables.shape[1])
    claim = claims.claim_pages(
        owned.references, nothing, lengths=nothing, counts=counts, page_size=page_size, most=most
    )
    row_positions = jnp.where(claim.served[:, None], row_positions, -1)
    # An empty row has position -1. Its page is clipped here and replaced by "no page" below.
    page = jnp.take_along_axis(
        claim.pages, jnp.clip(row_positions // page_size, 0, most - 1), axis=1
    )
    return Decision(
        owned=dataclasses.replace(
            owned.take(claim, into),
            length=refusals.set_named(owned.length, named, claim.served, lengths),
        ),
        refused=jnp.where((counts > 0) & ~claim.served, jnp.int8(Refusal.NO_FREE_PAGE), refused),
        rows=SlotRows(
            positions=row_positions, pages=jnp.where(row_positions < 0, owned.pages, page)
        ),
    )


def share(
    owned: Ownership,
    sources: jax.Array,
    into: jax.Array,
    lengths: jax.Array | None,
    *,
    page_size: int,
) -> Decision:
    """Decide on free slots that start with the tokens of other slots.

    Args:
      owned: The ownership before the operation.
      sources: `[n]` int32, the slots whose tokens are shared.
      into: `[n]` int32, the free slots.
      lengths: `[n]` int32, number of tokens to share. None for all tokens.
      page_size: Number of rows of a page.
    """
    batch = owned.length.shape[0]
    sourced, named = refusals.named_slots(sources, batch), refusals.named_slots(into, batch)
    source_lengths = jnp.sum(jnp.where(sourced, owned.length[None], 0), axis=1, dtype=jnp.int32)
    shared_lengths = source_lengths if lengths is None else lengths
    refused = refusals.first_refusal(
        (~jnp.any(sourced, axis=1), Refusal.SLOT_OUT_OF_RANGE),
        *refusals.invalid_names(named),
        (refusals.at_named(named, owned.length > 0), Refusal.SLOT_IN_USE),
        (source_lengths == 0, Refusal.SLOT_EMPTY),
        refusals.invalid_length(shared_lengths, source_lengths),
    )
    done = refused == Refusal.NONE
    # Refused entries read the table of slot 0, but use none of its pages: their length is 0.
    rows = owned.tables[jnp.where(done, sources, 0)]
    shared = Ownership(
        length=jnp.where(done, shared_lengths, 0), tables=rows, references=owned.references
    ).held(page_size)
    owned = Ownership(
        length=refusals.set_named(owned.length, named, done, shared_lengths),
        tables=owned.tables.at[jnp.where(done, into, batch)].set(rows, mode="drop"),
        references=refer(owned.references, shared, 1),
    )
    return Decision(owned=owned, refused=refused)


def free(owned: Ownership, which: jax.Array, *, page_size: int) -> Decision:
    """Decide on slots to empty; `which` is `[n]` int32."""
    named = refusals.named_slots(which, owned.length.shape[0])
    refused = refusals.refuse_free(named, owned.length)
    length = refusals.set_named(owned.length, named, refused == Refusal.NONE, 0)
    return Decision(owned=_shorten(owned, length, page_size), refused=refused)


def rewind(owned: Ownership, lengths: jax.Array, *, page_size: int) -> Decision:
    """Decide on cutting slots to `lengths`, `[batch]` int32."""
    refused = refusals.first_refusal(refusals.invalid_length(lengths, owned.length))
    length = jnp.where(refused == Refusal.NONE, lengths, owned.length)
    return Decision(owned=_shorten(owned, length, page_size), refused=refused)


def reorder(owned: Ownership, parents: jax.Array, *, group: int, page_size: int) -> Decision:
    """Decide on slots that continue the sequences of `parents`, `[batch]` int32."""
    own = jnp.arange(parents.shape[0], dtype=jnp.int32)
    outside = refusals.outside_group(parents, own, group=group)
    parents = jnp.where(outside, own, parents)
    # Each slot references the pages of its parent. Each page that a slot used before loses one
    # reference.
    after = dataclasses.replace(owned, length=owned.length[parents], tables=owned.tables[parents])
    references = refer(refer(owned.references, after.held(page_size), 1), owned.held(page_size), -1)
    return Decision(
        owned=dataclasses.replace(after, references=references),
        refused=refusals.first_refusal((outside, Refusal.SLOT_OUT_OF_RANGE)),
    )


def _shorten(owned: Ownership, length: jax.Array, page_size: int) -> Ownership:
    """Return the ownership after slots gave back the pages beyond `length` tokens."""
    first, end = count_pages(length, page_size), count_pages(owned.length, page_size)
    unneeded = used_entries(owned.tables, first, end, pages=owned.pages)
    return dataclasses.replace(
        owned, length=length, references=refer(owned.references, unneeded, -1)
    )
