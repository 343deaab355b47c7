"""Rules of loops, branches and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from jax.sharding import NamedSharding, Sharding

from shardwright.dims.bodies import bodies
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.entries import LOOPS, TEMPORARY, Buffer, Peak
from shardwright.plan.walk.equations import called_jaxpr, run_bodies
from shardwright.plan.walk.events import WalkLocation, Work
from shardwright.plan.walk.liveness import Timeline
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import (
    Dims,
    ShardedValue,
    axes_of,
    dims_of_spec,
    merged_origins,
    with_kept,
)

# How often the body of a scan is walked to find the shardings of its carries. The first walk may
# change the sharding of a carry, and the second walk starts with the changed sharding.
_ROUNDS = 2
_CARRY: Final = "constrain the first value of the carry as the body does, with shard(...)"
_SUMMED: Final = "constrain the sum in the loop's body like its use after the loop, with shard(...)"
_STACK: Final = "move the mesh axis to another dim with shard(...) before the scan"
# The plan lists a `while` loop with collectives or matmuls under this name, among the primitives
# without a rule: the number of its runs is not known, so the plan counts too little.
UNKNOWN_RUNS: Final = "while (number of runs)"


def scan(step: PlanStep) -> list[ShardedValue]:
    """Follow a scan. Its body runs once per iteration, and each carry keeps one sharding."""
    (loop,) = bodies(step.equation)
    constants, carries, body = loop.fixed, loop.carried, loop.jaxpr
    avals, split = step.avals, constants + carries
    location = dataclasses.replace(step.location, runs=step.location.runs * (loop.rounds or 0))
    inputs = []
    for at in range(split, len(step.values)):
        value = step.values[at]
        # A sharded first dim is gathered before the loop.
        if value.dims[0]:
            step.doubt(value.dims[0], _STACK)
            value = step.move(at, ((), *value.dims[1:]))
        inputs.append(dataclasses.replace(value, dims=value.dims[1:], runs=location.runs))
    fixed, starts = step.values[:constants], step.values[constants:split]
    carry = _carried(step, body, (fixed, starts, inputs), location)
    for value, aval, goal in zip(starts, avals[constants:split], carry, strict=True):
        step.ledger.move(value, aval, goal.dims, step.location, origins=goal.origins)
    wanted = [value.dims for value in carry] + [None] * (len(body.outvars) - carries)
    outer = step.ledger.begin_inner()
    held = _with_carries(step, carry, body.invars[constants:split])
    sliced = _with_slices(step, inputs, body.invars[split:])
    before = len(step.ledger.events)
    ends = step.walk(body, [*fixed, *held, *sliced], location=location, wanted=wanted)
    summed = {
        axis
        for event in step.ledger.events[before:]
        if event.kind is Kind.ALL_REDUCE
        for axis in event.mesh_axes
    }
    for start, end, variable, later in zip(starts, ends, body.outvars, step.wanted, strict=False):
        if later is not None and start.free:
            # A compiler may reduce-scatter the sum of each step into the sharding of a later use.
            step.doubt(summed & axes_of(later) - end.mesh_axes, _SUMMED)
            if end.buffer is not None:
                part = step.ledger.local_bytes(variable.aval, later)
                end.buffer.min_bytes = min(end.buffer.min_bytes, part)
    for start, end, variable in zip(carry, ends, body.outvars, strict=False):
        if not start.free:
            # In XLA's `while`, a carry has the same sharding at the start and at the end of each
            # iteration.
            turned = [{*old} ^ {*new} for old, new in zip(start.dims, end.dims, strict=True)]
            step.doubt(frozenset().union(*turned), _CARRY)
            step.ledger.move(end, variable.aval, start.dims, location, origins=start.origins)
    stacked = [
        step.ledger.settle(end, variable.aval, location)
        for end, variable in zip(ends[carries:], body.outvars[carries:], strict=True)
    ]
    step.ledger.inner = step.ledger.end_inner(outer, ends[:carries], ends[carries:])
    return [
        *(_settled(value, runs=step.location.runs) for value in carry),
        *(
            dataclasses.replace(value, dims=((), *value.dims), runs=step.location.runs)
            for value in stacked
        ),
    ]


def _with_slices(step: PlanStep, values: list[ShardedValue], variables: Any) -> list[ShardedValue]:
    """Give each slice of a stacked operand its own buffer in the timeline of a loop's body."""
    if step.ledger.timeline is None:
        return values
    slices = [
        None
        if value.free
        else Buffer(
            size=step.ledger.local_bytes(variable.aval, value.dims),
            kind=TEMPORARY,
            operands=(),
            cheap=True,
        )
        for value, variable in zip(values, variables, strict=True)
    ]
    step.ledger.timeline.add(births=[part for part in slices if part is not None])
    pairs = zip(values, slices, strict=True)
    return [dataclasses.replace(value, buffer=part) for value, part in pairs]


def _with_carries(
    step: PlanStep, carry: Sequence[ShardedValue], variables: Any
) -> list[ShardedValue]:
    """Return the carries of a scan. In a pipeline, each has a buffer in the body; else, none has.

    A carry is in memory during the whole scan, so it is counted outside, with the results. In a
    pipeline, this would count the received microbatch twice: it is dead long before the next
    microbatch arrives, and a compiler reuses its memory in between. So in a pipeline, the carries
    are counted in the body.
    """
    ledger = step.ledger
    if not ledger.in_stage or ledger.timeline is None:
        return [dataclasses.replace(value, buffer=None) for value in carry]
    held = []
    for value, later, variable in zip(carry, step.wanted, variables, strict=False):
        size = ledger.local_bytes(variable.aval, value.dims)
        # XLA may keep only the shard that is used after the loop: see `_shard_sums` of `buffers`.
        part = size if later is None else min(size, ledger.local_bytes(variable.aval, later))
        buffer = Buffer(size=size, kind=LOOPS, min_bytes=part, dtype=str(variable.aval.dtype))
        buffer.shape = ledger.local_shape(variable.aval, value.dims)
        buffer.source = step.location.source
        ledger.timeline.carries.append(buffer)
        held.append(dataclasses.replace(value, buffer=buffer))
    ledger.timeline.add(births=ledger.timeline.carries)
    return held


def _carried(
    step: PlanStep,
    body: Any,
    values: tuple[list[ShardedValue], list[ShardedValue], list[ShardedValue]],
    location: WalkLocation,
) -> list[ShardedValue]:
    """Return the shardings that the carries of a scan keep.

    A carry keeps the sharding of its first value, except in two cases: the body returns it with
    more shards, or every device can make the first value by itself. In both cases, the carry gets
    the sharding in which the body returns it.
    """
    fixed, starts, inputs = values
    carry = [_settled(value, runs=location.runs) for value in starts]
    for _ in range(_ROUNDS):
        ends = step.walk(body, [*fixed, *carry, *inputs], ledger=step.ledger.blank())
        taken = [_takes(start, end) for start, end in zip(carry, ends, strict=False)]
        if not any(taken):
            break
        carry = [
            _settled(end, runs=location.runs) if takes else start
            for start, end, takes in zip(carry, ends, taken, strict=False)
        ]
    return carry


def _takes(start: ShardedValue, end: ShardedValue) -> bool:
    if end.free:
        return False
    refined = all(
        not old or old == new[: len(old)] for old, new in zip(start.dims, end.dims, strict=True)
    )
    return start.free or (refined and start.dims != end.dims)


def _settled(value: ShardedValue, *, runs: int) -> ShardedValue:
    return dataclasses.replace(value, owed=frozenset(), groups=(), runs=runs)


def while_loop(step: PlanStep) -> list[ShardedValue]:
    """Follow a while loop. Its number of runs is not known, so its collectives are not counted."""
    location = step.location
    loop, asked = bodies(step.equation)
    body, condition = loop.jaxpr, asked.jaxpr
    values = loop.of_operands(step.values)
    fixed, starts = values[: loop.fixed], values[loop.fixed :]
    carry = _carried(step, body, (fixed, starts, []), location)
    for value, aval, goal in zip(starts, step.avals[-len(starts) :], carry, strict=True):
        step.ledger.move(value, aval, goal.dims, location, origins=goal.origins)
    inner = step.ledger.blank()
    inner.timeline = None if step.ledger.timeline is None else Timeline()
    # The carry has its buffer outside of the loop, as in a scan, so it has none inside.
    held = [dataclasses.replace(value, buffer=None) for value in carry]
    ends = step.walk(body, [*fixed, *held], ledger=inner)
    for first, end, variable in zip(carry, ends, body.outvars, strict=True):
        if not first.free:
            inner.move(end, variable.aval, first.dims, location, origins=first.origins)
    if inner.timeline is not None:
        buffers = [end.buffer for end in ends if end.buffer is not None]
        step.ledger.inner = inner.timeline.peak(buffers, within=True)
        inner.timeline = None
    shared = asked.of_operands(step.values)[: -len(carry)]
    [again] = step.walk(condition, [*shared, *carry], ledger=inner)
    inner.move(again, condition.outvars[0].aval, (), location, origins=again.origins)
    if inner.events or inner.work.flops:
        step.ledger.unknown[UNKNOWN_RUNS] += 1
    step.ledger.unknown.update(inner.unknown)
    return carry


def cond(step: PlanStep) -> list[ShardedValue]:
    """Follow a `cond`. Every branch is walked, and its collectives are marked as `maybe`.

    The work of the `cond` is the work of its largest branch. The work of its smallest branch is
    kept too, for the lower end of the time.
    """
    location = dataclasses.replace(step.location, maybe=True)
    values = [step.whole(at) for at in range(1, len(step.values))]
    branches, peaks, work = [], [], []
    before = step.ledger.work
    for branch in run_bodies(step.equation):
        outer = step.ledger.begin_inner()
        step.ledger.work = Work()
        branches.append(step.walk(branch.jaxpr, values, location=location, wanted=step.wanted))
        work.append(step.ledger.work)
        peaks.append(step.ledger.end_inner(outer, branches[-1]))
    step.ledger.work = before + Work.either(work)
    results = []
    for number, aval in enumerate(step.results):
        ends = [branch[number] for branch in branches]
        # If a branch returns a value that every device can make, the result has the sharding that
        # another branch returns.
        goal = next((end for end in ends if not end.free), ends[0])
        for end in ends:
            step.ledger.move(end, aval, goal.dims, location, origins=goal.origins)
        results.append(
            ShardedValue(
                dims=goal.dims,
                free=goal.free,
                runs=step.location.runs,
                origins=merged_origins(ends),
            )
        )
    step.ledger.inner = Peak.most(peaks)
    return results


def call(step: PlanStep) -> list[ShardedValue] | None:
    """Follow a primitive that runs a jaxpr (jit, remat, custom derivatives), or return None."""
    body = called_jaxpr(step.equation)
    if body is None:
        return None
    values = step.values[len(step.values) - len(body.invars) :]
    if step.parameters.get("differentiated") and step.parameters.get("prevent_cse"):
        # An optimization barrier keeps XLA from moving the recomputation out of its loop. So the
        # recomputation runs in every step of the loop.
        values = [dataclasses.replace(value, runs=step.location.runs) for value in values]
        for value in values:
            if value.buffer is not None:
                # Nothing is fused across the barrier, so the operand is in memory.
                value.buffer.operands = None
    for at, dims in enumerate(_own_dims(step, "in_shardings", step.avals)):
        if dims is not None:
            values[at] = step.move(at, with_kept(dims, values[at].dims))
    exits = _own_dims(step, "out_shardings", step.results)
    wanted = [own or later for own, later in zip(exits, step.wanted, strict=True)]
    ends = step.walk(body, values, wanted=wanted)
    return [
        end
        if dims is None
        else step.ledger.move(
            end, aval, with_kept(dims, end.dims), step.location, origins=end.origins
        )
        for end, dims, aval in zip(ends, exits, step.results, strict=True)
    ]


def _own_dims(step: PlanStep, key: str, avals: Sequence[Any]) -> list[Dims | None]:
    """Return the shardings (mesh axes of each dim) that a `jit` requires of arguments or results.

    None stands for an array for which the `jit` names no sharding.
    """
    shardings = step.parameters.get(key) or [None] * len(avals)
    return [
        _dims_of(step, sharding, aval.ndim) if isinstance(sharding, Sharding) else None
        for sharding, aval in zip(shardings, avals, strict=True)
    ]


def _dims_of(step: PlanStep, sharding: Sharding, ndim: int) -> Dims | None:
    """Return the mesh axes of each dim in a sharding.

    If the sharding is on another mesh, return None, and record that the plan is incomplete.
    """
    sizes = step.ledger.sizes
    if isinstance(sharding, NamedSharding):
        held = {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
        if held == sizes:
            return dims_of_spec(sharding.spec.partitions, ndim, sizes)
    step.ledger.unknown["jit (a sharding that is not of the mesh)"] += 1
    return None
