"""Copy pages before a write to a shared page, and read the pages of sequences as rows.

"No page" is written as a page number that is out of range: the number of pages of the pool. It is
not a negative number, because JAX counts negative indices from the end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.caches.base import View
from shardwright.caches.paged.claims import count_pages, used_entries
from shardwright.caches.scatter import Buffers
from shardwright.caches.sharding import CacheSharding, PlacedArrays, axes_by_dim, local_numbers
from shardwright.resolution.partition_specs import spec_of
from shardwright.vocabulary.axes import EMPTY, KV_HEAD, KV_HEAD_DIM, PAGE

PAGE_AXES = (PAGE, EMPTY, KV_HEAD, KV_HEAD_DIM)


def copy_pages(buffers: PlacedArrays, sources: jax.Array, targets: jax.Array) -> Buffers:
    """Copy pages of buffers to other pages of the same buffers, in place, and return the buffers.

    Nothing is sent unless the buffers are sharded by page.

    Args:
      buffers: `[pages, page_size, ...]` each.
      sources: `[n]` int32, pages, or "no page".
      targets: `[n]` int32, the page that each page of `sources` is copied to.
    """
    pages = next(iter(buffers.arrays.values())).shape[0]
    targets = jnp.where(sources < pages, targets, pages)
    axes = buffers.leading_axes()

    def local(old: Buffers, sources: jax.Array, targets: jax.Array) -> Buffers:
        def copy(_: jax.Array, old: Buffers) -> Buffers:
            return {name: _copy(x, sources, targets, axes) for name, x in old.items()}

        # Use a loop of zero or one steps instead of a conditional: XLA updates the buffers of a
        # loop in place, and would copy those of a conditional.
        steps = jnp.any(sources < pages).astype(jnp.int32)
        copied: Buffers = jax.lax.fori_loop(0, steps, copy, old)
        return copied

    everywhere = PartitionSpec()
    return buffers.run(local, sources, targets, specs=(everywhere, everywhere))


def read_rows(view: View, sharding: CacheSharding) -> View:
    """Return a copy of the pages of a view in which the rows of each sequence are adjacent.

    Args:
      view: The view of a paged cache.
      sharding: The sharding of that cache.
    """
    assert view.tables is not None
    pages = sharding.with_specs({"k": view.k, "v": view.v}, {"k": PAGE_AXES, "v": PAGE_AXES})
    axes = pages.leading_axes()

    def local(pages: Buffers, tables: jax.Array) -> Buffers:
        return {name: _read(x, tables, axes) for name, x in pages.items()}

    lengths = sharding.place(view.lengths, (EMPTY,))
    page_size, count = view.k.shape[1], view.k.shape[0]
    tables = used_entries(
        sharding.place(view.tables, (EMPTY, EMPTY)),
        jnp.zeros_like(lengths),
        count_pages(lengths, page_size),
        pages=count,
    )
    # [slots, pages_per_slot, page_size, kv_heads, dim]: not sharded by page any more.
    specs = {name: spec_of((), (), *axes_by_dim(spec, 4)[1:]) for name, spec in pages.specs.items()}
    read: Buffers = sharding.run(
        local, (pages.arrays, tables), (pages.specs, PartitionSpec()), out_specs=specs
    )
    rows = {name: x.reshape(x.shape[0], -1, *x.shape[3:]) for name, x in read.items()}
    positions = jnp.arange(tables.shape[1] * page_size, dtype=jnp.int32)[None]
    return View(**rows, positions=positions, lengths=lengths)


def _read(buffer: jax.Array, pages: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    pages = local_numbers(pages, axes, buffer.shape[0])
    local_pages = buffer.at[_rows(pages, buffer)].get(mode="fill", fill_value=0)
    if not axes:
        return local_pages
    # One shard has the page and the others have zeros. Sum the bits as integers, which keeps every
    # bit.
    bits = jax.lax.bitcast_convert_type(local_pages, jnp.dtype(f"uint{8 * buffer.dtype.itemsize}"))
    read: jax.Array = jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes), buffer.dtype)
    return read


def _copy(
    buffer: jax.Array, sources: jax.Array, targets: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    targets = local_numbers(targets, axes, buffer.shape[0])
    return buffer.at[_rows(targets, buffer)].set(_read(buffer, sources, axes), mode="drop")


def _rows(pages: jax.Array, buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Index single rows, as a write of tokens does. If whole pages were indexed, XLA for TPUs would
    # choose another layout of the buffer, and copy the whole buffer.
    return pages[..., None], jnp.arange(buffer.shape[1], dtype=jnp.int32)
