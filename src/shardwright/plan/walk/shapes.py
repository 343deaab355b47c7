"""Rules of primitives that move, add or cut dims."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from jax.extend.core import Literal
from jax.sharding import NamedSharding

from shardwright.dims.primitives import CUMULATIVE
from shardwright.dims.table import correspondence
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.follow import follow
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import (
    Dims,
    ShardedValue,
    axes_of,
    explicit_axes,
    merged_origins,
    on_host,
    shards,
    typed_dims,
    with_kept,
)

_GATHER: Final = "gather the dim with shard(...) before this {}"
# Compilers have only one way to partition these primitives, so the plan notes no doubt.
_SURE: Final = CUMULATIVE | {"dynamic_slice"}


def view(step: PlanStep) -> list[ShardedValue]:
    """Follow a transpose, a reshape or a broadcast. The new dims of a broadcast are replicated.

    If no sharding of the result fits, the value is gathered.
    """
    known = correspondence(step.equation)
    assert known is not None
    if not step.values:
        return step.anywhere()
    value = step.maybe_partial(0) if known.adds else step.whole(0)
    return follow(step, known, [value], doubt=_GATHER.format(step.name))


def cut(step: PlanStep) -> list[ShardedValue]:
    """Follow a primitive that cuts, joins or sorts along dims. Sharded ones are gathered.

    The plan notes a doubt about such a gather, because compilers may exchange the edges of shards
    instead.
    """
    known = correspondence(step.equation)
    assert known is not None
    values = [step.whole(at) for at in range(len(step.values))]
    sides = zip(values, known.operands, strict=True)
    arrays = [value for value, side in sides if any(side)]
    if all(value.free for value in arrays or values):
        return step.anywhere()
    doubt = "" if step.name in _SURE else _GATHER.format(step.name)
    results = follow(step, known, values, doubt=doubt)
    # The elements of the result correspond to those of the operand, so XLA gives the result the
    # sharding of the operand again, also along the gathered dim.
    return [values[0]] if step.name in CUMULATIVE else results


def callback(step: PlanStep) -> list[ShardedValue]:
    """Follow `jax.debug.print` or `jax.debug.callback`, which have no results.

    One device calls the function, with whole arrays, so each operand is gathered. With
    `partitioned=True`, each device calls the function with its own shard, and nothing is gathered.
    """
    for at, aval in enumerate(step.avals):
        if step.parameters.get("partitioned"):
            step.whole(at)
        else:
            step.move(at, ((),) * aval.ndim)
    return []


def slice_(step: PlanStep) -> list[ShardedValue]:
    """Follow a slice.

    XLA computes a slice of one position of a sharded dim as a sum over the devices.
    """
    shape, result = step.avals[0].shape, step.results[0].shape
    changed = [at for at, size in enumerate(shape) if size != result[at]]
    if all(result[at] == 1 for at in changed):
        return [_picked(step, changed)]
    return cut(step)


def _picked(step: PlanStep, changed: Sequence[int]) -> ShardedValue:
    """Follow a slice of size 1 of a sharded dim: a sum over devices copies the slice to all.

    If the slice is not in the first shard, XLA sends it to the first device before the sum.
    """
    value = step.whole(0)
    if value.free:
        return step.anywhere()[0]
    dims = tuple(() if at in changed else axes for at, axes in enumerate(value.dims))
    owed = value.mesh_axes - axes_of(dims)
    starts, sizes = step.parameters["start_indices"], step.ledger.sizes
    result = step.results[0]
    size, dtype = step.ledger.local_bytes(result, dims), str(result.dtype)
    for at in changed:
        if starts[at] >= step.avals[0].shape[at] // shards(value.dims[at], sizes):
            step.ledger.note(
                Kind.PERMUTE,
                value.dims[at],
                size,
                step.location,
                dtype=dtype,
                origins=value.origins,
            )
    picked = ShardedValue(dims=dims, owed=owed, origins=value.origins)
    return step.settle(picked, wanted=step.wanted[0])


def constraint(step: PlanStep) -> list[ShardedValue]:
    """Follow a constraint. Equal constraints on one variable share a move."""
    target = step.scope.target(step.equation)
    variable, value = step.equation.invars[0], step.maybe_partial(0)
    if target is None or isinstance(variable, Literal):
        return step.values
    if step.name == "annotate_axes" and explicit_axes(step.results[0]):
        # A reshard before the annotation has moved the value. The annotation adds its origins.
        return [dataclasses.replace(value, origins={**value.origins, **target.origins})]
    dims = typed_dims(step.results[0], with_kept(target.dims, value.dims), step.ledger.sizes)
    if step.name == "reshard" and value.free and dims == value.dims:
        # Keep `free`: a scatter into the value then adds each update on the device that has it.
        return [value]
    if value.owed and not value.owed & axes_of(dims):
        dims = _scattered_later(step, value, dims)
    # The key is that of `PlanStep.move` with `use=None`, so later gathers to these dims share it.
    key = (variable, dims, None)
    if key not in step.scope.moved:
        # A spec that is written by hand names no semantic axes, so keep the origins of an
        # annotation before it.
        origins = merged_origins([target, value])
        moved = step.ledger.move(value, step.avals[0], dims, step.location, origins=origins)
        step.scope.moved[key] = moved
    return [step.scope.moved[key]]


def device_put(step: PlanStep) -> list[ShardedValue]:
    """Follow moves to a sharding, or between the memory of the host and that of the device.

    A move that names only a memory keeps the sharding. Remat adds moves of this kind.
    """
    results = []
    for at, (place, before, after) in enumerate(
        zip(step.parameters["devices"], step.avals, step.results, strict=True)
    ):
        value = step.whole(at)
        if isinstance(place, NamedSharding):
            value = step.move(at, step.ledger.dims_of(place.spec, before.ndim))
        if on_host(before) != on_host(after):
            step.ledger.cross_host_link(before, value, step.location.runs)
        results.append(value)
    return results


def _scattered_later(step: PlanStep, value: ShardedValue, dims: Dims) -> Dims:
    """Return the sharding of a later constraint if it shards the sum over devices, else `dims`.

    Compilers then turn the all-reduce into a reduce-scatter, unless the sum has other uses.
    """
    later, variable = step.wanted[0], step.equation.outvars[0]
    if later is None or step.scope.uses[variable] != 1 or not value.owed <= axes_of(later):
        return dims
    # If the later constraint only slices further, go to its sharding now. Then the sum needs no
    # other move.
    refines = all(axes == part[: len(axes)] for axes, part in zip(dims, later, strict=True))
    return later if refines else dims
