"""The only code that writes rows: scatters that run on the shards, so that only new rows are sent.

An array is `[slots, rows, ...]`; in a paged cache, pages take the place of slots. A new row that
must not be written gets a row number that is out of range. That number is never negative, because
JAX counts negative indices from the end. Each shard writes the rows of its own slots in place.
"""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

from shardwright.caches.sharding import PlacedArrays, axes_by_dim, local_numbers
from shardwright.resolution.partition_specs import spec_of

Buffers = dict[str, jax.Array]


def append_rows(buffers: PlacedArrays, new: Buffers, rows: jax.Array) -> Buffers:
    """Return buffers with new rows in every slot.

    New rows are sent only if they are not sharded like the buffers.

    Args:
      buffers: `[batch, rows, ...]` each.
      new: `[batch, q_length, ...]`, by the same names.
      rows: `[batch, q_length]` int32, the row number that each new row gets in its slot. No two new
        rows of a slot get the same number. A number out of range drops the new row.
    """
    specs = buffers.specs

    def local(old: Buffers, new: Buffers, rows: jax.Array) -> Buffers:
        # vmap keeps the batch a parallel dimension of the scatter.
        by_slot = jax.vmap(lambda buffer, new, rows: buffer.at[rows].set(new, mode="drop"))
        return {
            name: by_slot(x, new[name], _local(rows, specs[name], 1, x)) for name, x in old.items()
        }

    # Send new rows to every shard of their slot. A shard drops the rows that other shards hold.
    new_specs = {name: _replicated(specs[name], new[name].ndim, 1) for name in specs}
    return buffers.run(local, new, rows, specs=(new_specs, spec_of(buffers.leading_axes())))


def scatter_rows(
    buffers: PlacedArrays,
    new: Buffers,
    slots: jax.Array,
    rows: jax.Array,
    *,
    in_place: bool = False,
) -> Buffers:
    """Return buffers with new rows written to any slots. A shard gets the new rows of its heads.

    Args:
      buffers: `[slots, rows, ...]` each.
      new: `[n, m, ...]`, by the same names.
      slots: `[n, m]` or `[n, 1]` int32, the slot of each new row.
      rows: `[n, m]` int32, the row number that each new row gets in its slot. No two new rows of a
        slot get the same number. A slot or row number out of range drops the new row.
      in_place: Whether row i of `new` goes to row i of its slot, and `m` is the number of rows of a
        slot. Then a shard needs only its own rows, so new rows that are sharded like the buffers
        are not sent. Defaults to False.
    """
    specs = buffers.specs
    # One array of row numbers serves all buffers only if all buffers shard their rows alike.
    row_axes = {axes_by_dim(spec, 2)[1] for spec in specs.values()}
    in_place = in_place and len(row_axes) == 1
    gathered = (0,) if in_place else (0, 1)

    def local(old: Buffers, new: Buffers, slots: jax.Array, rows: jax.Array) -> Buffers:
        return {
            name: x.at[_local(slots, specs[name], 0, x), _local(rows, specs[name], 1, x)].set(
                new[name], mode="drop"
            )
            for name, x in old.items()
        }

    new_specs = {name: _replicated(specs[name], new[name].ndim, *gathered) for name in specs}
    row_spec = spec_of((), *row_axes) if in_place else PartitionSpec()
    return buffers.run(local, new, slots, rows, specs=(new_specs, PartitionSpec(), row_spec))


def take_slots(buffers: PlacedArrays, parents: jax.Array, *, group: int) -> Buffers:
    """Return a copy of all buffers in which slot b has the rows of slot `parents[b]`.

    Args:
      buffers: `[batch, ...]` each.
      parents: `[batch]` int32. Slot b and its parent are in the same group; see `KVCache.reorder`.
      group: Number of slots in a group. If every group is on one shard, nothing is sent; otherwise
        every shard receives the buffers of the whole batch.
    """
    axes = buffers.leading_axes()

    def local(old: Buffers, parents: jax.Array) -> Buffers:
        size = parents.shape[0]
        # If a shard holds whole groups, it also holds the parents, and local slot numbers suffice.
        if axes and size % group == 0:
            parents = parents - jax.lax.axis_index(axes) * size
        elif axes:
            old = {name: jax.lax.all_gather(x, axes, tiled=True) for name, x in old.items()}
        # Callers have replaced the parents that do not exist, so all numbers are in range, and XLA
        # need not clamp them.
        return {name: x.at[parents].get(mode="promise_in_bounds") for name, x in old.items()}

    return buffers.run(local, parents, specs=(spec_of(axes),))


def _local(numbers: jax.Array, spec: PartitionSpec, dim: int, shard: jax.Array) -> jax.Array:
    return local_numbers(numbers, axes_by_dim(spec, dim + 1)[dim], shard.shape[dim])


def _replicated(spec: PartitionSpec, rank: int, *dims: int) -> PartitionSpec:
    """Return a spec in which some dimensions are not sharded."""
    by_dim = axes_by_dim(spec, rank)
    return spec_of(*(() if dim in dims else axes for dim, axes in enumerate(by_dim)))
