"""Rules of primitives whose result has the shape of its operands, and of reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from shardwright.dims.primitives import ADDITIONS, KEEPS_SUM, NAMES
from shardwright.dims.table import Correspondence, correspondence
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.factors import AxesByFactor, placed
from shardwright.plan.walk.follow import follow, most_sharded
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import ShardedValue, axes_of, local_elements, shards
from shardwright.trees.tensors import whole_bytes

_EXACT: Final = "biu"  # `dtype.kind` of bools and integers, sent in the type of their reduction


def elementwise(step: PlanStep) -> list[ShardedValue]:
    """Follow an elementwise primitive: all operands move to the sharding of the result."""
    if step.name in NAMES:
        return step.values
    if step.name in KEEPS_SUM:
        return [_converted(step, replace(step.maybe_partial(0), table_moves=()))]
    if step.name in ADDITIONS:
        operands = [step.maybe_partial(at) for at in range(len(step.values))]
        # XLA's AllReduceReassociate turns the sum of two all-reduces into one all-reduce of a sum.
        # On TPUs, the all-reduce of a scatter and that of a matmul stay separate, as for a tied
        # table under ddp.
        first = operands[0]
        if first.owed and all(
            value.owed == first.owed
            and value.dims == first.dims
            and bool(value.lookups) == bool(first.lookups)
            and not value.free
            for value in operands
        ):
            alike = len({value.sum_dtype for value in operands}) == 1
            return [operands[0] if alike else replace(operands[0], sum_dtype="")]
    values = [step.whole(at) for at in range(len(step.values))]
    known = correspondence(step.equation)
    if known is None:
        return step.anywhere() if all(value.free for value in values) else step.replicated()
    results = follow(step, known, values, choose=_agreed)
    if step.name in ADDITIONS:
        step.ledger.doubt_lookups(values, step.location)
        step.ledger.doubt_sums(step.values, step.location)
        _move_table(step, values)
        lookups = frozenset().union(*(value.lookups for value in values))
        results = [replace(value, lookups=lookups) for value in results]
    return results


def _move_table(step: PlanStep, terms: Sequence[ShardedValue]) -> None:
    """Move a gradient to which the rows of a lookup are added, as for a tied embedding table.

    XLA's simplifier turns `y + scatter(zeros, rows)` into `scatter(y, rows)` before it partitions.
    """
    moves = next((term.table_moves for term in terms if term.table_moves), ())
    others = [term for term in terms if not term.lookups and not term.free]
    for term in others[:1]:
        for held, goal in moves:
            value = replace(term, dims=held)
            step.ledger.move(value, step.results[0], goal, step.location, origins=term.origins)


def bitcast(step: PlanStep) -> list[ShardedValue]:
    """Follow a bitcast. If the two types differ in width, there is no rule: the rank changes."""
    if step.avals[0].ndim == step.results[0].ndim:
        return elementwise(step)
    step.ledger.unknown[step.name] += 1
    return step.replicated()


def _converted(step: PlanStep, value: ShardedValue) -> ShardedValue:
    """Return an operand after a conversion, and record the element type that it had before."""
    before, after = step.avals[0].dtype, step.results[0].dtype
    # JAX adds bfloat16 in float32 and converts the result back. Compilers send the bfloat16 sums of
    # the shards, so a pair of conversions leaves no trace.
    if before == after or value.widened_from == after:
        return replace(value, widened_from="")
    if value.owed:
        return replace(value, sum_dtype=value.sum_dtype or str(before), widened_from="")
    wider = after.itemsize > before.itemsize and before.kind not in _EXACT
    return replace(value, widened_from=str(before) if wider else "")


def _agreed(
    step: PlanStep, known: Correspondence, held: Mapping[int, AxesByFactor]
) -> AxesByFactor:
    """Return one sharding for all operands: that of a constraint, else of the most sharded operand.

    If another operand shards a dim that has no mesh axes in this sharding, the dim gets the mesh
    axes of the other operand, unless this sharding already uses one of them.
    """
    wanted, sizes = step.wanted[0], step.ledger.sizes
    asked = None if wanted is None else placed(known, known.results[0], wanted, sizes)
    agreed = dict(asked if asked in held.values() and asked else most_sharded(step, known, held))
    used = {*axes_of(tuple(agreed.values()))}
    for order in held.values():
        for factor, axes in order.items():
            if factor not in agreed and not used & {*axes}:
                agreed[factor] = axes
                used |= {*axes}
    if wanted is None:
        for axis in sizes:
            places = {f for order in held.values() for f, axes in order.items() if axis in axes}
            if len(places) > 1:
                step.note_choice(axis)
    return agreed


def reduction(step: PlanStep) -> list[ShardedValue]:
    """Follow a reduction.

    Over a sharded dim, a sum stays partial, and a maximum is completed by a collective.
    """
    known = correspondence(step.equation)
    assert known is not None
    value = step.maybe_partial(0) if known.adds else step.whole(0)
    if value.free:
        return step.anywhere()
    result = replace(follow(step, known, [value])[0], widened_from=value.widened_from)
    if step.name in ("argmax", "argmin"):
        return [_best(step, result)]
    if step.name in ("reduce_max", "reduce_min"):
        # A maximum commutes with a conversion. So devices send the maxima in the type that the
        # operand had before it was converted.
        result = replace(result, sum_dtype=value.widened_from)
    if step.name != "reduce_sum":
        result = step.settle(result)
    return [result for _ in step.results]


def _best(step: PlanStep, value: ShardedValue) -> ShardedValue:
    """Follow an argmax or argmin: the devices gather the best element of each shard."""
    index, element = step.results[0], step.avals[0].dtype
    count = shards(value.owed, step.ledger.sizes)
    elements = local_elements(index.shape, value.dims, step.ledger.sizes) * count
    for dtype in (element, index.dtype):
        step.ledger.note(
            Kind.ALL_GATHER,
            value.owed,
            whole_bytes(elements, dtype),
            step.location,
            dtype=str(dtype),
            origins=value.origins,
        )
    return replace(value, owed=frozenset(), groups=())
