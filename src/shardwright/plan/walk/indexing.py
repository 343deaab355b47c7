"""Rules of reads and writes at computed positions."""

from __future__ import annotations

from typing import Any

from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import Dims, Value


def dynamic_slice(step: Step) -> list[Value]:
    """Follow a slice at a computed position: a dim that is cut must be whole."""
    value, aval, result = step.whole(0), step.avals[0], step.results[0]
    if value.free:
        return step.anywhere()
    return [step.move(0, _kept(value.dims, aval.shape, result.shape))]


def dynamic_update_slice(step: Step) -> list[Value]:
    """Follow a write at a computed position: the update moves to where it is written."""
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

    Batch dims of the operand stay sharded, so that appending to a cache sends nothing.
    """
    value, update = step.whole(0), step.whole(2)
    if value.free:
        value = Value(dims=step.wanted[0] or value.dims, origins=update.origins)
    numbers, rank = step.parameters["dimension_numbers"], step.avals[0].ndim
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    window = [
        dim
        for dim in range(rank)
        if dim not in numbers.inserted_window_dims and dim not in batching
    ]
    shape, part = step.avals[0].shape, step.avals[2].shape
    dims: list[tuple[str, ...]] = [()] * step.avals[2].ndim
    for dim, at in zip(window, numbers.update_window_dims, strict=False):
        if shape[dim] == part[at]:
            dims[at] = value.dims[dim]
    rows = [at for at in range(step.avals[2].ndim) if at not in numbers.update_window_dims]
    for dim, at in zip(sorted(batching), rows, strict=False):
        dims[at] = value.dims[dim]
    if not update.free:
        step.move(2, tuple(dims))
    return [Value(dims=value.dims, origins=value.origins)]


def gather(step: Step) -> list[Value]:
    """Follow a gather: along a sharded dim it is a masked lookup, whose results are added."""
    value, index, result = step.whole(0), step.whole(1), step.results[0]
    numbers, shape = step.parameters["dimension_numbers"], step.avals[0].shape
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    dims: list[tuple[str, ...]] = [()] * result.ndim
    window = [
        dim
        for dim in range(len(shape))
        if dim not in numbers.collapsed_slice_dims and dim not in batching
    ]
    for at, dim in zip(numbers.offset_dims, window, strict=False):
        if step.parameters["slice_sizes"][dim] == shape[dim]:
            dims[at] = value.dims[dim]
    used = {axis for axes in dims for axis in axes}
    rows = [at for at in range(result.ndim) if at not in numbers.offset_dims]
    for at, dim in zip(rows, range(step.avals[1].ndim - 1), strict=False):
        if not index.free and not set(index.dims[dim]) & used:
            dims[at] = index.dims[dim]
            used |= set(dims[at])
    owed = (
        frozenset(axis for dim in numbers.collapsed_slice_dims for axis in value.dims[dim]) - used
    )
    found = Value(dims=tuple(dims), owed=owed, origins={**index.origins, **value.origins})
    return [step.ledger.settle(found, result, step.site)]
