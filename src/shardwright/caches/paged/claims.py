"""Choose free pages for the next tokens of slots.

`references[page]` counts the table entries in use that name a page. A page with count 0 is free.
Every shard has all of these integers, and every shard computes the same result.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageClaim:
    """The pages that slots get for their next tokens.

    Attributes:
      served: `[batch]` bool, True for slots that get new tokens, and get all pages for these
        tokens. Other slots get no page.
      pages: `[batch, most]` int32, the new pages of each slot in the order of its tokens, then "no
        page".
      columns: `[batch, most]` int32, the table column of each new page.
      shared: `[batch]` int32, the page to copy into the first new page of the slot, because other
        slots use it too. "No page" for a slot that needs no copy.
    """

    served: jax.Array
    pages: jax.Array
    columns: jax.Array
    shared: jax.Array


TokenCount = TypeVar("TokenCount", int, jax.Array)


def count_pages(tokens: TokenCount, page_size: int) -> TokenCount:
    """Return how many pages a number of tokens needs. The last page may be only partly filled."""
    return (tokens + page_size - 1) // page_size


def claim_pages(
    references: jax.Array,
    last: jax.Array,
    *,
    lengths: jax.Array,
    counts: jax.Array,
    page_size: int,
    most: int,
) -> PageClaim:
    """Choose pages for the next tokens of slots: free pages in order, for one slot after the other.

    If a slot cannot get all the pages that it needs, it gets none, and the next slot may get the
    free pages. A slot does not write to a partly filled page that other slots use too: its first
    new page becomes a copy of that page. The last slot that still uses a page needs no copy.

    Args:
      references: `[pages]` int32.
      last: `[batch]` int32, the partly filled page of each slot; any number where there is none.
      lengths: `[batch]` int32, number of tokens that each slot holds.
      counts: `[batch]` int32, number of tokens to add to each slot; 0 for a slot that gets none.
      page_size: Number of rows of a page.
      most: Largest number of new pages that a slot may need.
    """
    pages, batch = references.shape[0], lengths.shape[0]
    numbers = jnp.arange(batch, dtype=jnp.int32)
    partial = (lengths % page_size > 0) & (counts > 0)
    holders = jnp.where(partial, references.at[last].get(mode="fill", fill_value=0), 0)
    # before[i, j]: slot j comes before slot i, has the same last page, and writes to that page.
    before = (
        partial[None, :] & (last[:, None] == last[None, :]) & (numbers[:, None] > numbers[None, :])
    )

    def needs(asking: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return how many new pages each slot needs, their first column, and who needs a copy.

        Only slots in `asking` need new pages.
        """
        earlier_copies = jnp.sum(before & asking[None, :], axis=1, dtype=jnp.int32)
        copies = asking & (holders - earlier_copies > 1)
        first = count_pages(lengths, page_size) - copies.astype(jnp.int32)
        need = count_pages(lengths + counts, page_size) - first
        return jnp.where(asking, need, 0), first, copies

    free = jnp.sum(references == 0, dtype=jnp.int32)

    def lacks(asking: jax.Array) -> jax.Array:
        return jnp.sum(needs(asking)[0]) > free

    def refuse(asking: jax.Array) -> jax.Array:
        # Slot `at` is the first slot that lacks pages; all slots before it are served. Refuse slot
        # `at`, and each later slot that needs more pages than are left for slot `at`: no more pages
        # are left for a later slot. A refusal never lowers the number of pages that another slot
        # needs. (It may add one: a slot needs a copy if an earlier slot that shares its last page
        # no longer copies that page.)
        need = needs(asking)[0]
        left = free - (jnp.cumsum(need) - need)
        at = jnp.argmax(need > left)
        return asking & ~((numbers >= at) & (need > left[at]))

    # Each iteration refuses a slot, so there are at most `batch` iterations, or 0 if pages suffice.
    served = jax.lax.while_loop(lacks, refuse, counts > 0)
    need, first, copies = needs(served)
    # `size` makes the shape static: no call needs more pages than this.
    free_pages = jnp.nonzero(references == 0, size=min(batch * most, pages), fill_value=pages)[0]
    steps = jnp.arange(most, dtype=jnp.int32)[None, :]
    # The free pages go to the slots in order: the first ones to slot 0, the next ones to slot 1.
    ordinals = jnp.where(steps < need[:, None], (jnp.cumsum(need) - need)[:, None] + steps, pages)
    return PageClaim(
        served=served,
        pages=free_pages.astype(jnp.int32).at[ordinals].get(mode="fill", fill_value=pages),
        columns=first[:, None] + steps,
        shared=jnp.where(copies, last, pages),
    )


def enter(tables: jax.Array, claim: PageClaim, slots: jax.Array, *, pages: int) -> jax.Array:
    """Return tables with the pages of a claim entered. Row i of the claim belongs to `slots[i]`."""
    # An entry that is not a page gets a column out of range, so that the scatter drops it.
    columns = jnp.where(claim.pages < pages, claim.columns, tables.shape[1])
    return tables.at[slots[:, None], columns].set(claim.pages, mode="drop")


def used_entries(tables: jax.Array, first: jax.Array, end: jax.Array, *, pages: int) -> jax.Array:
    """Return `[batch, columns]`: pages in the columns from `first` up to `end`, else "no page"."""
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where((columns >= first[:, None]) & (columns < end[:, None]), tables, pages)


def refer(references: jax.Array, pages: jax.Array, by: int) -> jax.Array:
    """Return the references with `by` added for each of `pages`, which has any shape."""
    return references.at[pages].add(by, mode="drop")
