"""Pages of a pool: which are free, who takes them, what is copied before a shared one is written to.

A page is free while nothing refers to it: `references[page]` counts the entries of tables that are in use and name it. All of
it is arithmetic on small integers, the same on every shard; it runs inside `jit`. A page number that no page has, the number of
pages, stands for none: never a negative one, which JAX wraps.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.caches.base import View
from shardwright.caches.scatter import Buffers, Specs
from shardwright.caches.sharding import Shards, entries, specs_of
from shardwright.resolution.partition_specs import spec_of
from shardwright.vocabulary.axes import EMPTY, KV_HEAD, KV_HEAD_DIM, PAGE

PAGE_AXES = (PAGE, EMPTY, KV_HEAD, KV_HEAD_DIM)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claim:
    """The pages that slots get for their next tokens.

    Attributes:
      served: `[batch]` bool, which of the slots that asked get what they need; the others get nothing.
      pages: `[batch, most]` int32, the new pages of each, those of its tokens in order; then none.
      columns: `[batch, most]` int32, where in its table each goes.
      shared: `[batch]` int32, the page of which the first new one must become a copy, since others refer to it too; or none.
    """

    served: jax.Array
    pages: jax.Array
    columns: jax.Array
    shared: jax.Array


Tokens = TypeVar("Tokens", int, jax.Array)


def count_pages(tokens: Tokens, page_size: int) -> Tokens:
    """Return how many pages tokens fill, the last one perhaps in part."""
    return (tokens + page_size - 1) // page_size


def claim_pages(
    references: jax.Array,
    last: jax.Array,
    *,
    lengths: jax.Array,
    counts: jax.Array,
    page_size: int,
    most: int,
) -> Claim:
    """Choose pages for the next tokens of slots: the free ones with the lowest numbers, for one slot after the other.

    A slot that cannot have all the pages that it needs takes none, and the next one may have them. A partly filled page to which
    others refer is not written to: the slot gets another one for it. The last that still refers to it needs none.

    Args:
      references: `[pages]` int32.
      last: `[batch]` int32, the partly filled page of each slot; anything where there is none.
      lengths: `[batch]` int32, tokens that each holds.
      counts: `[batch]` int32, tokens that each gets; 0 for a slot that does not ask.
      page_size: rows of a page.
      most: pages that one slot may need.
    """
    pages, batch = references.shape[0], lengths.shape[0]
    numbers = jnp.arange(batch, dtype=jnp.int32)
    partial = (lengths % page_size > 0) & (counts > 0)
    holders = jnp.where(partial, references.at[last].get(mode="fill", fill_value=0), 0)
    before = (
        partial[None, :] & (last[:, None] == last[None, :]) & (numbers[:, None] > numbers[None, :])
    )

    def needs(asking: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what is needed, the first column of it, and who needs a copy, if all that ask are served."""
        left_it = jnp.sum(before & asking[None, :], axis=1, dtype=jnp.int32)
        copies = asking & (holders - left_it > 1)
        first = count_pages(lengths, page_size) - copies.astype(jnp.int32)
        need = count_pages(lengths + counts, page_size) - first
        return jnp.where(asking, need, 0), first, copies

    free = jnp.sum(references == 0, dtype=jnp.int32)

    def lacks(asking: jax.Array) -> jax.Array:
        return jnp.sum(needs(asking)[0]) > free

    def refuse(asking: jax.Array) -> jax.Array:
        # All before the first that lacks pages are served. Of those after it none that needs more than is left ever will be:
        # what is left shrinks, and what they need only grows when one less leaves a shared page.
        need = needs(asking)[0]
        left = free - (jnp.cumsum(need) - need)
        at = jnp.argmax(need > left)
        return asking & ~((numbers >= at) & (need > left[at]))

    served = jax.lax.while_loop(lacks, refuse, counts > 0)
    need, first, copies = needs(served)
    some = jnp.nonzero(references == 0, size=min(batch * most, pages), fill_value=pages)[0].astype(
        jnp.int32
    )
    steps = jnp.arange(most, dtype=jnp.int32)[None, :]
    place = jnp.where(steps < need[:, None], (jnp.cumsum(need) - need)[:, None] + steps, pages)
    return Claim(
        served=served,
        pages=some.at[place].get(mode="fill", fill_value=pages),
        columns=first[:, None] + steps,
        shared=jnp.where(copies, last, pages),
    )


def enter(tables: jax.Array, claim: Claim, slots: jax.Array, *, pages: int) -> jax.Array:
    """Return tables with the pages of a claim, whose i-th row is that of `slots[i]`."""
    columns = jnp.where(claim.pages < pages, claim.columns, tables.shape[1])
    return tables.at[slots[:, None], columns].set(claim.pages, mode="drop")


def used_entries(tables: jax.Array, first: jax.Array, end: jax.Array, *, pages: int) -> jax.Array:
    """Return the tables' pages from column `first[b]` up to `end[b]`, elsewhere none; `[batch, columns]`."""
    columns = jnp.arange(tables.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where((columns >= first[:, None]) & (columns < end[:, None]), tables, pages)


def refer(references: jax.Array, pages: jax.Array, by: int) -> jax.Array:
    """Return the references after pages of any shape gained or lost some; none do not count."""
    return references.at[pages].add(by, mode="drop")


def copy_pages(
    buffers: Buffers, sources: jax.Array, targets: jax.Array, *, shards: Shards, specs: Specs
) -> Buffers:
    """Return buffers with pages copied, in place. Where they lie by page, shards exchange the copied pages, if there are any.

    Args:
      buffers: `[pages, page_size, ...]` each.
      sources: `[n]` int32, pages; or none.
      targets: `[n]` int32, where each goes.
      shards: under which manager.
      specs: of the buffers.
    """
    pages = next(iter(buffers.values())).shape[0]
    targets = jnp.where(sources < pages, targets, pages)

    def local(buffers: Buffers, sources: jax.Array, targets: jax.Array) -> Buffers:
        def step(_: jax.Array, buffers: Buffers) -> Buffers:
            return {
                name: _copy(buffer, sources, targets, entries(specs[name], 1)[0])
                for name, buffer in buffers.items()
            }

        # A loop of one step or none: its buffers are written in place, those of a conditional are copied.
        copied: Buffers = jax.lax.fori_loop(
            0, jnp.any(sources < pages).astype(jnp.int32), step, buffers
        )
        return copied

    everywhere = PartitionSpec()
    copied: Buffers = shards.run(
        local,
        (buffers, sources, targets),
        (dict(specs), everywhere, everywhere),
        out_specs=dict(specs),
    )
    return copied


def in_rows(view: View, shards: Shards) -> View:
    """Return a view with the rows of each sequence side by side: a copy of its pages, or itself if it has none.

    Args:
      view: of a cache.
      shards: under which manager that lies.
    """
    if view.tables is None:
        return view
    buffers = {"k": view.k, "v": view.v}
    specs = specs_of(shards, buffers, dict.fromkeys(buffers, PAGE_AXES))

    def local(buffers: Buffers, tables: jax.Array) -> Buffers:
        return {
            name: _read(buffer, tables, entries(specs[name], 1)[0])
            for name, buffer in buffers.items()
        }

    lengths, tables = (
        shards.place(view.lengths, (EMPTY,)),
        shards.place(view.tables, (EMPTY, EMPTY)),
    )
    page_size, pages = view.k.shape[1], view.k.shape[0]
    tables = used_entries(
        tables, jnp.zeros_like(lengths), count_pages(lengths, page_size), pages=pages
    )
    everywhere = PartitionSpec()
    found = {name: spec_of((), (), *entries(spec, 4)[1:]) for name, spec in specs.items()}
    read: Buffers = shards.run(local, (buffers, tables), (specs, everywhere), out_specs=found)
    rows = {name: x.reshape(x.shape[0], -1, *x.shape[3:]) for name, x in read.items()}
    return View(
        **rows,
        positions=jnp.arange(tables.shape[1] * page_size, dtype=jnp.int32)[None],
        lengths=lengths,
    )


def plain(x: jax.Array, scale: jax.Array | None, dtype: str) -> jax.Array:
    """Return keys or values as callers gave them, `x * scale` where they are quantised."""
    return x if scale is None else (x.astype(jnp.float32) * scale[..., None]).astype(dtype)


def _read(buffer: jax.Array, pages: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    found = buffer.at[_rows(_local(pages, axes, buffer), buffer)].get(mode="fill", fill_value=0)
    if not axes:
        return found
    # As integers, so that what is summed with zeros stays what it is, bit by bit.
    bits = jax.lax.bitcast_convert_type(found, jnp.dtype(f"uint{8 * buffer.dtype.itemsize}"))
    whole: jax.Array = jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes), buffer.dtype)
    return whole


def _copy(
    buffer: jax.Array, sources: jax.Array, targets: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    return buffer.at[_rows(_local(targets, axes, buffer), buffer)].set(
        _read(buffer, sources, axes), mode="drop"
    )


def _rows(pages: jax.Array, buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Row by row, as tokens are written: for whole pages XLA would lay out the buffer differently on a TPU, and copy all of it.
    return pages[..., None], jnp.arange(buffer.shape[1], dtype=jnp.int32)


def _local(pages: jax.Array, axes: tuple[str, ...], shard: jax.Array) -> jax.Array:
    """Return pages as the shard counts its own; its size for those that it does not have."""
    size = shard.shape[0]
    own = pages - jax.lax.axis_index(axes) * size if axes else pages
    return jnp.where((own >= 0) & (own < size), own, size)
