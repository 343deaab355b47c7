"""Rules of reads and writes at computed positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jax.extend.core import Literal

from shardwright.dims.primitives import SCATTERS
from shardwright.dims.table import correspondence
from shardwright.plan.walk.equations import for_gpus
from shardwright.plan.walk.lookups import Lookup, LookupMove, Name, partition, shared_axes
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import Dims, Origin, ShardedValue, axes_of, most_runs, shards

_ADDS: Final = frozenset({"scatter-add", "scatter_add"})
_COMBINES: Final = SCATTERS - {"scatter"}
_SHARED: Final = "gather the table, or constrain its gradient, over this mesh axis with shard(...)"
# Bytes of one row of a TPU tile: 128 numbers of 32 bits.
_TILE: Final = 512
_WRITES: Final = "write to a sharded dim inside sw.shard_map"


def dynamic_update_slice(step: PlanStep) -> list[ShardedValue]:
    """Follow a write at a computed position: the update moves to the operand's sharding."""
    value, update = step.whole(0), step.whole(1)
    if value.free:
        dims = step.wanted[0] or update.dims
        value = ShardedValue(dims=dims, origins=update.origins)
    known = correspondence(step.equation)
    assert known is not None
    whole, new = known.operands[:2]
    # Along a dim that is written in part, each device gets the whole update. XLA does so if the
    # update has one element there. If it has more elements, XLA for CPUs gathers the operand.
    cut = [at for at, own in enumerate(whole) if own not in new and step.avals[1].shape[at] > 1]
    step.doubt({axis for at in cut for axis in value.dims[at]}, _WRITES)
    step.move(1, tuple(value.dims[at] if own in whole else () for at, own in enumerate(new)))
    return [value]


def scatter(step: PlanStep) -> list[ShardedValue]:
    """Follow a scatter: updates move to the shards that they are written to.

    Batch dims of the operand stay sharded, so that appending to a cache sends nothing. If every
    device can make the operand, such as an array of zeros, the updates that are combined with it
    stay where they are. The result is then a partial sum.
    """
    value = step.whole(0)
    shape, update_rank = step.avals[0].shape, step.avals[2].ndim
    known = correspondence(step.equation)
    assert known is not None
    # Operand dim -> update dim, for the dims that both share.
    of_table, _, of_updates = known.operands
    pairs = {at: of_updates.index(own) for at, own in enumerate(of_table) if own in of_updates}
    updates = step.equation.invars[2]
    if value.free and step.wanted[0] is not None and not isinstance(updates, Literal):
        # If the updates are partial sums, complete them with their columns sharded as in the
        # result.
        columns = _targets(step.wanted[0], step.values[2].dims, pairs)
        step.scope.asked.setdefault(updates, columns)
    update = step.whole(2)
    made, rows = value.free, [at for at in range(update_rank) if at not in pairs.values()]
    if made:
        update = _with_rows(step, update)
        dims = step.wanted[0] or tuple(
            update.dims[pairs[at]] if at in pairs else axes for at, axes in enumerate(value.dims)
        )
        value = ShardedValue(dims=dims, origins=update.origins)
    held: dict[Name, Dims] = {
        "table": value.dims,
        "index": step.whole(1).dims,
        "rows": update.dims,
    }
    lookup = _lookup(step, pairs, adds=True)
    if made and step.name in _COMBINES and lookup is not None and shared_axes(lookup, held):
        return [_partitioned(step, lookup, held, value.origins)]
    # Each device adds its rows to its own copy of the operand, as XLA does in
    # `PartitionScatterIndexPassthroughDimensions`.
    owed = frozenset(axis for at in rows for axis in update.dims[at]) - value.mesh_axes
    targets = list(_targets(value.dims, update.dims, pairs))
    if step.name in _COMBINES and owed:
        for at in rows:
            targets[at] = tuple(axis for axis in update.dims[at] if axis in owed)
        step.move(2, tuple(targets))
        result = ShardedValue(dims=value.dims, owed=owed, origins=update.origins)
        if step.name not in _ADDS:  # only sums may stay partial, not maxima
            return [step.settle(result)]
        return [replace(result, lookups=frozenset([(step.place, owed)]))]
    written = [at for at in range(len(shape)) if at not in pairs]
    if not made:
        step.doubt({axis for at in written for axis in value.dims[at]}, _WRITES)
    if not update.free:
        step.move(2, tuple(targets))
    # XLA moves only sharded indices. If each index has several coordinates, XLA moves the indices
    # earlier, before it joins their coordinates.
    if update.free or (not made and step.avals[1].shape[-1] == 1):
        windows = step.parameters["dimension_numbers"].update_window_dims
        if not step.whole(1).free:
            step.move(1, (*(axes for at, axes in enumerate(targets) if at not in windows), ()))
    return [ShardedValue(dims=value.dims, origins=value.origins)]


def _with_rows(step: PlanStep, update: ShardedValue) -> ShardedValue:
    """Return the updates, sharded like their indices if every device can make the updates."""
    index = step.whole(1)
    if not update.free or index.free:
        return update
    windows = step.parameters["dimension_numbers"].update_window_dims
    rows = [at for at in range(len(update.dims)) if at not in windows]
    dims = list(update.dims)
    for at, axes in zip(rows, index.dims[:-1], strict=False):
        dims[at] = axes
    return ShardedValue(dims=tuple(dims), free=True, origins=index.origins)


def _targets(dims: Dims, update: Dims, pairs: dict[int, int]) -> Dims:
    """Return the sharding that updates need before they are written to an operand with `dims`."""
    targets: list[tuple[str, ...]] = [()] * len(update)
    for dim, at in pairs.items():
        targets[at] = dims[dim]
    return tuple(targets)


def gather(step: PlanStep) -> list[ShardedValue]:
    """Follow a gather. Along a sharded dim, devices look up their own rows, and add the results."""
    value, index, result = step.whole(0), step.whole(1), step.results[0]
    numbers, shape = step.parameters["dimension_numbers"], step.avals[0].shape
    entries = _entries(step, adds=False)
    # A device has zeros for rows that it lacks (`PartitionGatherTrivialSlicedOperandDimensions`).
    owed = frozenset(axis for dim in entries for axis in value.dims[dim])
    # Along a dim that the gather takes whole, each device has its part of each row.
    taken = step.parameters["slice_sizes"]
    pairs = _windows(step, adds=False)
    columns = {dim: at for dim, at in pairs.items() if taken[dim] == shape[dim]}
    dims: list[tuple[str, ...]] = [()] * result.ndim
    for dim, at in columns.items():
        dims[at] = value.dims[dim]
    lookup = _lookup(step, columns, adds=False)
    held: dict[Name, Dims] = {"table": value.dims, "index": index.dims, "rows": ()}
    decided = not index.free or step.wanted[0] is not None
    if lookup is not None and decided and not value.free:
        # Without a later constraint, the rows keep the mesh axes of the table, then of the indices.
        natural: list[tuple[str, ...]] = [()] * result.ndim
        for at, to in lookup.columns.items():
            natural[to] = value.dims[at]
        columned = axes_of(tuple(natural))
        for at, to in lookup.tokens.items():
            natural[to] = () if columned & {*index.dims[at]} else index.dims[at]
        held["rows"] = step.wanted[0] or tuple(natural)
        if shared_axes(lookup, held):
            return [_partitioned(step, lookup, held, {**index.origins, **value.origins})]
    used = {axis for axes in dims for axis in axes} | owed
    rows = [at for at in range(result.ndim) if at not in numbers.offset_dims]
    kept: list[tuple[str, ...]] = [()] * step.avals[1].ndim
    for at, dim in zip(rows, range(step.avals[1].ndim - 1), strict=False):
        if not index.free and not set(index.dims[dim]) & used:
            dims[at] = kept[dim] = index.dims[dim]
            used |= set(dims[at])
    if not index.free:
        # Every device along a sharded dim needs all indices, to find those of its own rows.
        step.move(1, tuple(kept))
    looked_up = ShardedValue(
        dims=tuple(dims), owed=owed, origins={**index.origins, **value.origins}
    )
    return [step.settle(looked_up)]


def _lookup(step: PlanStep, columns: Mapping[int, int], *, adds: bool) -> Lookup | None:
    """Return the `Lookup` of a gather or scatter.

    Return None if there are batching dims, or if a dim of the table is neither in `columns` nor in
    `entries` (see `Lookup`).
    """
    numbers = step.parameters["dimension_numbers"]
    table, index = step.avals[0], step.avals[1]
    rows = step.avals[2] if adds else step.results[0]
    entries = _entries(step, adds=adds)
    windows = numbers.update_window_dims if adds else numbers.offset_dims
    if getattr(numbers, "operand_batching_dims", ()) or {*entries, *columns} != {
        *range(table.ndim)
    }:
        return None
    places = [at for at in range(rows.ndim) if at not in windows]
    arrays: dict[Name, Any] = {"table": table, "index": index, "rows": rows}
    return Lookup(
        shapes={name: aval.shape for name, aval in arrays.items()},
        itemsizes={name: aval.dtype.itemsize for name, aval in arrays.items()},
        columns=columns,
        entries=entries,
        tokens=dict(zip(range(index.ndim - 1), places, strict=True)),
        adds=adds,
        sizes=step.ledger.sizes,
    )


def _entries(step: PlanStep, *, adds: bool) -> tuple[int, ...]:
    """Return the dims of the table from which indices select single entries.

    The rows do not have such a dim, or have it with size 1: `vmap` of a slice or of `x[i]` keeps
    the dim.
    """
    numbers, shape = step.parameters["dimension_numbers"], step.avals[0].shape
    removed = numbers.inserted_window_dims if adds else numbers.collapsed_slice_dims
    rows = step.avals[2] if adds else step.results[0]
    pairs = _windows(step, adds=adds).items()
    return (*removed, *(dim for dim, at in pairs if rows.shape[at] == 1 and shape[dim] > 1))


def _windows(step: PlanStep, *, adds: bool) -> dict[int, int]:
    """Return table dim -> row dim for the dims of a window.

    A window is the slice that one index selects. The parameters that list the dims of a window have
    different names in a scatter and in a gather.
    """
    numbers = step.parameters["dimension_numbers"]
    removed = numbers.inserted_window_dims if adds else numbers.collapsed_slice_dims
    batching = getattr(numbers, "operand_batching_dims", ())
    kept = [dim for dim in range(step.avals[0].ndim) if dim not in (*removed, *batching)]
    windows = numbers.update_window_dims if adds else numbers.offset_dims
    return dict(zip(kept, windows, strict=True))


def _partitioned(
    step: PlanStep, lookup: Lookup, held: Mapping[Name, Dims], origins: Mapping[str, Origin]
) -> ShardedValue:
    """Follow a lookup whose table and rows are sharded over the same mesh axes."""
    moves, sure = partition(lookup, held)
    if not sure:
        step.doubt(shared_axes(lookup, held), _SHARED)
    operands: dict[Name, int] = {"table": 0, "index": 1, "rows": 2}
    result: Name = "table" if lookup.adds else "rows"
    aval, runs = step.results[0], most_runs(step.values)
    for move in moves:
        if move.name != result:
            at = operands[move.name]
            key = step.equation.invars[at], move.goal, move.held
            if key not in step.scope.moved:
                value = replace(step.whole(at), dims=move.held)
                step.scope.moved[key] = step.ledger.move(
                    value, step.avals[at], move.goal, step.location, origins=value.origins
                )
            continue
        value = ShardedValue(dims=move.held, owed=move.summed, runs=runs, origins=origins)
        # Without a reduce-scatter, an all-reduce completes the sum, and the next move slices it.
        if not _scatters(lookup, move):
            value = step.ledger.move(value, aval, move.held, step.location, origins=origins)
        step.ledger.move(value, aval, move.goal, step.location, origins=origins)
    axes = frozenset(axis for dims in held.values() for axis in axes_of(dims))
    # Only the gradient of a lookup records `lookups`: `Ledger.doubt_lookups` reads them where the
    # gradients of two lookups in one table are added.
    if not lookup.adds:
        return ShardedValue(dims=held[result], origins=origins)
    table_moves = tuple(
        (move.goal, move.held)
        for move in reversed(moves)
        if move.name == result and move.goal != move.held
    )
    return ShardedValue(
        dims=held[result],
        origins=origins,
        lookups=frozenset([(step.place, axes)]),
        table_moves=table_moves,
    )


def _scatters(lookup: Lookup, move: LookupMove) -> bool:
    """Tell whether each device keeps only a part of a sum, so that the sum can be reduce-scattered.

    Compilers for TPUs reduce-scatter the last dim only if each part consists of whole tiles.
    """
    pairs = list(zip(move.held, move.goal, strict=True))
    cut = axes_of(move.goal) - axes_of(move.held)
    if not move.summed <= cut or any(goal[: len(held)] != held for held, goal in pairs):
        return False
    old, new = pairs[-1]
    part = lookup.shapes[move.name][-1] // shards(new, lookup.sizes)
    return old == new or for_gpus() or part % (_TILE // lookup.itemsizes[move.name]) == 0
