"""Rules of reads and writes at computed positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from shardwright.plan.walk.primitives import SCATTERS
from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import Dims, Value

_ADDS: Final = frozenset({"scatter-add", "scatter_add"})
_COMBINES: Final = SCATTERS - {"scatter"}
_WRITES: Final = "write to a sharded dim inside sw.shard_map"


def dynamic_slice(step: Step) -> list[Value]:
    """Follow a slice at a computed position: a dim that is cut must not be sharded."""
    value, aval, result = step.whole(0), step.avals[0], step.results[0]
    if value.free:
        return step.anywhere()
    return [step.move(0, _kept(value.dims, aval.shape, result.shape))]


def dynamic_update_slice(step: Step) -> list[Value]:
    """Follow a write at a computed position: the update moves to the operand's sharding."""
    value, update = step.whole(0), step.whole(1)
    shape, part = step.avals[0].shape, step.avals[1].shape
    if value.free:
        dims = step.wanted[0] or update.dims
        value = Value(dims=dims, origins=update.origins)
    step.move(1, _kept(value.dims, shape, part))
    return [value]


def _kept(dims: Dims, shape: Any, part: Any) -> Dims:
    return tuple(
        axes if size == cut else () for axes, size, cut in zip(dims, shape, part, strict=True)
    )


def scatter(step: Step) -> list[Value]:
    """Follow a scatter: updates move to the shards that they are written to.

    Batch dims of the operand stay sharded, so that appending to a cache sends nothing. Rows that
    are combined with a value that every device can make stay where they are. The result is then
    partial.
    """
    value, update = step.whole(0), step.whole(2)
    numbers, shape = step.parameters["dimension_numbers"], step.avals[0].shape
    pairs, update_rank = _update_dims(numbers, shape, step.avals[2].shape), step.avals[2].ndim
    made, rows = value.free, [at for at in range(update_rank) if at not in pairs.values()]
    if made:
        update = _with_rows(step, update)
        dims = step.wanted[0] or _followed(value.dims, update.dims, pairs)
        value = Value(dims=dims, origins=update.origins)
    owed = frozenset(axis for at in rows for axis in update.dims[at]) - value.mesh_axes
    targets = list(_targets(value.dims, update.dims, pairs))
    if step.name in _COMBINES and owed:
        for at in rows:
            targets[at] = tuple(axis for axis in update.dims[at] if axis in owed)
        step.move(2, tuple(targets))
        result = Value(dims=value.dims, owed=owed, origins=update.origins)
        if step.name not in _ADDS:  # a largest element is not a sum, which may stay partial
            result = step.settle(result)
        return [result]
    written = [at for at in range(len(shape)) if at not in pairs]
    if not made:
        step.doubt({axis for at in written for axis in value.dims[at]}, _WRITES)
    if not update.free:
        step.move(2, tuple(targets))
    # XLA moves indices of several dims before it joins them, and only those that are sharded.
    if update.free or (not made and step.avals[1].shape[-1] == 1):
        _move_indices(step, targets)
    return [Value(dims=value.dims, origins=value.origins)]


def _move_indices(step: Step, updates: Sequence[tuple[str, ...]]) -> None:
    """Move the indices to where their updates are."""
    if not step.whole(1).free:
        windows = step.parameters["dimension_numbers"].update_window_dims
        step.move(1, (*(axes for at, axes in enumerate(updates) if at not in windows), ()))


def _with_rows(step: Step, update: Value) -> Value:
    """Return updates that every device can make with the sharding of their indices."""
    index = step.whole(1)
    if not update.free or index.free:
        return update
    windows = step.parameters["dimension_numbers"].update_window_dims
    rows = [at for at in range(len(update.dims)) if at not in windows]
    dims = list(update.dims)
    for at, axes in zip(rows, index.dims[:-1], strict=False):
        dims[at] = axes
    return Value(dims=tuple(dims), free=True, origins=index.origins)


def _update_dims(numbers: Any, shape: Any, part: Any) -> dict[int, int]:
    """Return operand dim -> update dim, for the dims that operand and updates share."""
    batching = sorted(getattr(numbers, "operand_batching_dims", ()))
    window = [
        dim
        for dim in range(len(shape))
        if dim not in numbers.inserted_window_dims and dim not in batching
    ]
    rows = [at for at in range(len(part)) if at not in numbers.update_window_dims]
    pairs = {
        dim: at
        for dim, at in zip(window, numbers.update_window_dims, strict=False)
        if shape[dim] == part[at]
    }
    return pairs | dict(zip(batching, rows, strict=False))


def _followed(dims: Dims, update: Dims, pairs: dict[int, int]) -> Dims:
    """Return the dims of an operand that takes the sharding of its updates."""
    return tuple(update[pairs[at]] if at in pairs else axes for at, axes in enumerate(dims))


def _targets(dims: Dims, update: Dims, pairs: dict[int, int]) -> Dims:
    """Return the dims that updates must have before they are written to an operand with `dims`."""
    targets: list[tuple[str, ...]] = [()] * len(update)
    for dim, at in pairs.items():
        targets[at] = dims[dim]
    return tuple(targets)


def gather(step: Step) -> list[Value]:
    """Follow a gather. Along a sharded dim, devices look up their own rows, and add the results."""
    value, index, result = step.whole(0), step.whole(1), step.results[0]
    numbers, shape = step.parameters["dimension_numbers"], step.avals[0].shape
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    owed = frozenset(axis for dim in numbers.collapsed_slice_dims for axis in value.dims[dim])
    dims: list[tuple[str, ...]] = [()] * result.ndim
    window = [
        dim
        for dim in range(len(shape))
        if dim not in numbers.collapsed_slice_dims and dim not in batching
    ]
    for at, dim in zip(numbers.offset_dims, window, strict=False):
        if step.parameters["slice_sizes"][dim] == shape[dim]:
            dims[at] = value.dims[dim]
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
    looked_up = Value(dims=tuple(dims), owed=owed, origins={**index.origins, **value.origins})
    return [step.settle(looked_up)]
