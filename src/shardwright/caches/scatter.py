"""The one place that writes rows: dropping scatters on the shards, so that only new rows ever move.

A buffer is `[slots, rows, ...]`; pages are slots of a kind. A row that is not to be written has a number that no row has; never
a negative one, which JAX wraps. Each shard writes what falls into its slots and rows, in place.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright.caches.sharding import Shards, entries
from shardwright.resolution.partition_specs import spec_of

Buffers = dict[str, jax.Array]
Specs = Mapping[str, PartitionSpec]


def append_rows(
    buffers: Buffers, new: Buffers, rows: jax.Array, *, shards: Shards, specs: Specs
) -> Buffers:
    """Return buffers with new rows in every slot, each slot its own. Sends nothing but new rows that lie elsewhere.

    Args:
      buffers: `[batch, rows, ...]` each.
      new: `[batch, q_length, ...]`, by the same names.
      rows: `[batch, q_length]` int32, where each goes; the number of rows or more: nowhere. None twice.
      shards: under which manager.
      specs: of the buffers.
    """

    def local(buffers: Buffers, new: Buffers, rows: jax.Array) -> Buffers:
        return {
            name: _write(buffer, new[name], _local(rows, specs[name], 1, buffer))
            for name, buffer in buffers.items()
        }

    arrive = {name: _with(specs[name], new[name].ndim, 1, ()) for name in buffers}
    batch = spec_of(next(entries(spec, 1)[0] for spec in specs.values()))
    written: Buffers = shards.run(
        local, (buffers, new, rows), (dict(specs), arrive, batch), out_specs=dict(specs)
    )
    return written


def scatter_rows(
    buffers: Buffers,
    new: Buffers,
    slots: jax.Array,
    rows: jax.Array,
    *,
    shards: Shards,
    specs: Specs,
) -> Buffers:
    """Return buffers with new rows in any slots. Every shard gets the new rows, of its heads.

    Args:
      buffers: `[slots, rows, ...]` each.
      new: `[n, m, ...]`, by the same names.
      slots: `[n, m]` or `[n, 1]` int32, the slot of each; the number of slots or more: none.
      rows: `[n, m]` int32, its row; the number of rows or more: none. No slot and row twice.
      shards: under which manager.
      specs: of the buffers.
    """

    def local(buffers: Buffers, new: Buffers, slots: jax.Array, rows: jax.Array) -> Buffers:
        return {
            name: buffer.at[
                _local(slots, specs[name], 0, buffer), _local(rows, specs[name], 1, buffer)
            ].set(new[name], mode="drop")
            for name, buffer in buffers.items()
        }

    arrive = {
        name: _with(_with(specs[name], new[name].ndim, 0, ()), new[name].ndim, 1, ())
        for name in buffers
    }
    everywhere = PartitionSpec()
    written: Buffers = shards.run(
        local,
        (buffers, new, slots, rows),
        (dict(specs), arrive, everywhere, everywhere),
        out_specs=dict(specs),
    )
    return written


@functools.partial(jax.vmap, in_axes=(0, 0, 0))
def _write(buffer: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    # A vmapped scatter: the batch stays a parallel dim of it.
    return buffer.at[rows].set(new, mode="drop")


def _local(numbers: jax.Array, spec: PartitionSpec, dim: int, shard: jax.Array) -> jax.Array:
    """Return numbers of slots or rows as the shard counts its own; its size for those that it does not have."""
    axes, size = entries(spec, dim + 1)[dim], shard.shape[dim]
    own = numbers - jax.lax.axis_index(axes) * size if axes else numbers
    return jnp.where((own >= 0) & (own < size), own, size)


def _with(spec: PartitionSpec, rank: int, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    dims = list(entries(spec, rank))
    dims[dim] = axes
    return spec_of(*dims)


def take_slots(
    buffers: Buffers, parents: jax.Array, *, group: int, shards: Shards, specs: Specs
) -> Buffers:
    """Return buffers whose slot b is what slot `parents[b]` was; a copy of all.

    Args:
      buffers: `[batch, ...]` each.
      parents: `[batch]` int32, each in its aligned group of slots.
      group: size of those groups. Where no group lies on several shards nothing is sent, else every shard gets the buffers' whole batch.
      shards: under which manager.
      specs: of the buffers.
    """
    axes = next(entries(spec, 1)[0] for spec in specs.values())

    def local(buffers: Buffers, parents: jax.Array) -> Buffers:
        size = parents.shape[0]
        if axes and size % group == 0:
            parents = parents - jax.lax.axis_index(axes) * size
        elif axes:
            buffers = {
                name: jax.lax.all_gather(buffer, axes, tiled=True)
                for name, buffer in buffers.items()
            }
        return {
            name: buffer.at[parents].get(mode="promise_in_bounds")
            for name, buffer in buffers.items()
        }

    batch = spec_of(axes)
    taken: Buffers = shards.run(
        local, (buffers, parents), (dict(specs), batch), out_specs=dict(specs)
    )
    return taken
