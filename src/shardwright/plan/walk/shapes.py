"""Rules of primitives that move, add or cut dims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from shardwright.dims.table import correspondence
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.follow import follow
from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import (
    Dims,
    Value,
    axes_of,
    merged_origins,
    most_sharded,
    shards,
    with_kept,
)

_GATHER: Final = "gather the dim with shard(...) before this {}"


def view(step: Step) -> list[Value]:
    """Follow a transpose or a reshape. If no sharding of the result fits, the value is gathered.

    A broadcast is followed too. Its new dims are replicated.
    """
    known = correspondence(step.equation)
    assert known is not None
    if not step.values:
        return step.anywhere()
    value = step.maybe_partial(0) if known.adds else step.whole(0)
    return follow(step, known, [value], doubt=_GATHER.format(step.name))


def whole_along(step: Step) -> list[Value]:
    """Follow a sort or `rev`: its dim must not be sharded."""
    known = correspondence(step.equation)
    assert known is not None
    values = [step.whole(at) for at in range(len(step.values))]
    return follow(step, known, values, doubt=_GATHER.format(step.name))


def callback(step: Step) -> list[Value]:
    """Follow `jax.debug.print` or `jax.debug.callback`, which have no results.

    One device calls the function, with whole arrays: each operand is gathered. With
    `partitioned=True`, each device calls it with its own part.
    """
    for at, aval in enumerate(step.avals):
        if step.parameters.get("partitioned"):
            step.whole(at)
        else:
            step.move(at, ((),) * aval.ndim)
    return []


def top_k(step: Step) -> list[Value]:
    """Follow `top_k`: its dim must not be sharded."""
    axis = step.parameters.get("axis", -1)
    return _cut(step, (axis % step.avals[0].ndim,))


def cut(step: Step) -> list[Value]:
    """Follow a slice, pad or split: a dim whose size changes must not be sharded."""
    shape = step.avals[0].shape
    changed = [
        at for at, size in enumerate(shape) if any(size != r.shape[at] for r in step.results)
    ]
    if step.name == "slice" and all(step.results[0].shape[at] == 1 for at in changed):
        return [_picked(step, changed)]
    return _cut(step, changed)


def _picked(step: Step, changed: Sequence[int]) -> Value:
    """Follow a slice of size 1 of a sharded dim: a sum gives it to all devices.

    If it is not in the first shard, XLA sends it to the first device before the sum.
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
                Kind.PERMUTE, value.dims[at], size, step.site, dtype=dtype, origins=value.origins
            )
    picked = Value(dims=dims, owed=owed, origins=value.origins)
    return step.settle(picked, wanted=step.wanted[0])


def tile(step: Step) -> list[Value]:
    """Follow `tile`: a dim that is repeated must not be sharded."""
    return _cut(step, [at for at, times in enumerate(step.parameters["reps"]) if times > 1])


def stack(step: Step) -> list[Value]:
    """Follow a stack: the operands agree, and the new dim is replicated."""
    axis = step.parameters["axis"] % step.results[0].ndim
    (joined,) = _agreed(step, (), step.avals[0].ndim)
    if joined.free:
        return step.anywhere()
    return [joined.with_dims((*joined.dims[:axis], (), *joined.dims[axis:]))]


def concatenate(step: Step) -> list[Value]:
    """Follow a concatenation: the joined dim must not be sharded, other dims are sharded alike."""
    return _cut(step, (step.parameters["dimension"],))


def _cut(step: Step, whole: Iterable[int]) -> list[Value]:
    """Bring all operands to one sharding, with the dims in `whole` replicated.

    Compilers may exchange the edges of shards instead, so a sharded dim among them is a doubt.
    """
    gathered = set(whole)
    sharded = {
        axis
        for value, aval in zip(step.values, step.avals, strict=True)
        if not value.free and aval.ndim == step.results[0].ndim
        for at in gathered
        for axis in value.dims[at]
    }
    step.doubt(sharded, f"gather the dim with shard(...) before this {step.name}")
    return _agreed(step, gathered, step.results[0].ndim)


def _agreed(step: Step, gathered: Iterable[int], rank: int) -> list[Value]:
    """Bring all operands of a rank to one sharding, with the dims in `gathered` replicated."""
    values = [step.whole(at) for at in range(len(step.values))]
    full = [at for at, value in enumerate(values) if step.avals[at].ndim == rank and not value.free]
    if not full:
        return step.anywhere()
    base = most_sharded((values[at].dims for at in full), step.ledger.sizes)
    dims = tuple(() if at in gathered else axes for at, axes in enumerate(base))
    for at in full:
        step.move(at, dims)
    origins = merged_origins(values[at] for at in full)
    return [Value(dims=dims, origins=origins) for _ in step.results]


def constraint(step: Step) -> list[Value]:
    """Follow a constraint. Equal constraints on one variable share a move."""
    target = step.scope.target(step.equation)
    if target is None:
        return step.values
    variable, value = step.equation.invars[0], step.maybe_partial(0)
    dims = with_kept(target.dims, value.dims)
    if value.owed and not value.owed & axes_of(dims):
        dims = _scattered_later(step, value, dims)
    key = (variable, dims, None)
    if key not in step.scope.moved:
        moved = step.ledger.move(value, step.avals[0], dims, step.site, origins=target.origins)
        step.scope.moved[key] = moved
    return [step.scope.moved[key]]


def _scattered_later(step: Step, value: Value, dims: Dims) -> Dims:
    """Return the dims of a later constraint if it keeps only a part of a sum, else `dims`.

    Compilers then turn the all-reduce into a reduce-scatter, unless the sum has other uses.
    """
    later, variable = step.wanted[0], step.equation.outvars[0]
    if later is None or step.scope.uses[variable] != 1 or not value.owed <= axes_of(later):
        return dims
    refines = all(axes == part[: len(axes)] for axes, part in zip(dims, later, strict=True))
    return later if refines else dims
