"""Rules of primitives whose result has the shape of its operands, and of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.primitives import ADDITIONS, KEEPS_SUM, NAMES
from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import (
    Dims,
    Value,
    axes_of,
    local_elements,
    merged_origins,
    most_sharded,
    shards,
)
from shardwright.trees.tensors import whole_bytes


def elementwise(step: Step) -> list[Value]:
    """Follow an elementwise primitive: all operands move to the sharding of the result."""
    if step.name in NAMES:
        return step.values
    if step.name in KEEPS_SUM:
        return [_converted(step, step.maybe_partial(0))]
    if step.name in ADDITIONS:
        operands = [step.maybe_partial(at) for at in range(len(step.values))]
        if _owe_alike(operands):
            alike = len({value.sum_dtype for value in operands}) == 1
            return [operands[0] if alike else replace(operands[0], sum_dtype="")]
    values = [step.whole(at) for at in range(len(step.values))]
    shape = step.results[0].shape
    full = [
        at
        for at, aval in enumerate(step.avals)
        if aval.ndim == len(shape) and aval.ndim and not values[at].free
    ]
    if not full:
        return step.anywhere() if all(value.free for value in values) else step.replicated()
    dims = _agreed(step, [values[at].dims for at in full])
    for at in full:
        # A dim of size 1 is broadcast, and has nothing to shard.
        sizes = step.avals[at].shape
        step.move(
            at,
            tuple(
                axes if size == whole else ()
                for axes, size, whole in zip(dims, sizes, shape, strict=True)
            ),
        )
    origins = merged_origins(values[at] for at in full)
    return [Value(dims=dims, origins=origins) for _ in step.results]


def bitcast(step: Step) -> list[Value]:
    """Follow a bitcast. Between types of different widths the rank changes: that has no rule."""
    if step.avals[0].ndim == step.results[0].ndim:
        return elementwise(step)
    step.ledger.unknown[step.name] += 1
    return step.replicated()


def _converted(step: Step, value: Value) -> Value:
    """Return an operand after a conversion, and record the element type that it had before."""
    before, after = step.avals[0].dtype, step.results[0].dtype
    if before == after or value.widened_from == after:
        return replace(value, widened_from="")
    if value.owed:
        return replace(value, sum_dtype=value.sum_dtype or str(before), widened_from="")
    return replace(value, widened_from=str(before) if after.itemsize > before.itemsize else "")


def _owe_alike(values: Sequence[Value]) -> bool:
    first = values[0]
    return bool(first.owed) and all(
        value.owed == first.owed and value.dims == first.dims and not value.free for value in values
    )


def _agreed(step: Step, operands: Sequence[Dims]) -> Dims:
    """Return the dims to which operands move: those of a constraint, else the most sharded ones."""
    wanted = step.wanted[0]
    if wanted is not None and wanted in operands:
        base = wanted
    else:
        base = most_sharded(operands, step.ledger.sizes)
    used = set(axes_of(base))
    agreed = list(base)
    for dims in operands:
        for at, axes in enumerate(dims):
            if not agreed[at] and axes and not used & set(axes):
                agreed[at] = axes
                used |= set(axes)
    if wanted is None:
        for axis in step.ledger.sizes:
            if len({at for dims in operands for at, axes in enumerate(dims) if axis in axes}) > 1:
                step.note_choice(axis)
    return tuple(agreed)


def cumulative(step: Step) -> list[Value]:
    """Follow a cumulative sum or maximum: its dim must be whole on each device."""
    value = step.whole(0)
    if value.free:
        return step.anywhere()
    axis = step.parameters["axis"]
    dims = tuple(() if at == axis else axes for at, axes in enumerate(value.dims))
    moved = step.move(0, dims)
    return [moved for _ in step.results]


def reduction(step: Step) -> list[Value]:
    """Follow a reduction. Over a sharded dim, a sum stays partial. A maximum is completed."""
    value = step.whole(0)
    if value.free:
        return step.anywhere()
    reduced = step.parameters.get("axes", step.parameters.get("dimensions", ()))
    groups = tuple(frozenset(value.dims[at]) for at in reduced if value.dims[at])
    owed = frozenset().union(*groups)
    dims = tuple(axes for at, axes in enumerate(value.dims) if at not in reduced)
    result = Value(
        dims=dims,
        owed=owed,
        groups=groups,
        origins=value.origins,
        widened_from=value.widened_from,
    )
    if step.name in ("argmax", "argmin"):
        return [_best(step, result)]
    if step.name in ("reduce_max", "reduce_min"):
        # The largest of converted values is the converted largest one, so it is sent before.
        result = replace(result, sum_dtype=value.widened_from)
    if step.name != "reduce_sum":
        result = step.settle(result)
    return [result for _ in step.results]


def _best(step: Step, value: Value) -> Value:
    """Follow an argmax or argmin: the devices gather the best element of each shard."""
    index, element = step.results[0], step.avals[0].dtype
    count = shards(value.owed, step.ledger.sizes)
    elements = local_elements(index.shape, value.dims, step.ledger.sizes) * count
    for dtype in (element, index.dtype):
        step.ledger.note(
            Kind.ALL_GATHER,
            value.owed,
            whole_bytes(elements, dtype),
            step.site,
            dtype=str(dtype),
            origins=value.origins,
        )
    return replace(value, owed=frozenset(), groups=())
