"""Rules of loops, branches and calls."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright import _jax
from shardwright.plan.walk.events import Site
from shardwright.plan.walk.liveness import TEMPORARY, Buffer, Peak
from shardwright.plan.walk.step import Step
from shardwright.plan.walk.values import Value, merged_origins

# Number of walks over the body of a scan that find the shardings of its carries. The first walk may
# change the sharding of a carry, and the second walk starts with that sharding.
_ROUNDS = 2
# The name under which a `while` loop that sends or multiplies counts as unknown, like a primitive
# without a rule. The number of its runs is not known, so the plan counts too little.
UNKNOWN_RUNS: Final = "while (number of runs)"


def scan(step: Step) -> list[Value]:
    """Follow a scan. Its body runs `length` times, and each carry keeps one sharding."""
    parameters = step.parameters
    constants, carries, body = _jax.scan_parts(parameters)
    avals, split = step.avals, constants + carries
    site = dataclasses.replace(step.site, runs=step.site.runs * parameters["length"])
    inputs = [
        dataclasses.replace(_unstacked(step, at), runs=site.runs)
        for at in range(split, len(step.values))
    ]
    fixed, starts = step.values[:constants], step.values[constants:split]
    carry = _carried(step, body, (fixed, starts, inputs), site)
    for value, aval, goal in zip(starts, avals[constants:split], carry, strict=True):
        step.ledger.move(value, aval, goal.dims, step.site, origins=goal.origins)
    wanted = [value.dims for value in carry] + [None] * (len(body.outvars) - carries)
    outer = step.ledger.begin_inner()
    # A carry is in memory during the whole scan. It is counted outside, with the scan's results.
    held = [dataclasses.replace(value, buffer=None) for value in carry]
    sliced = _with_slices(step, inputs, body.invars[split:])
    ends = step.walk(body, [*fixed, *held, *sliced], site=site, wanted=wanted)
    for start, end, variable in zip(carry, ends, body.outvars, strict=False):
        if not start.free:
            step.ledger.move(end, variable.aval, start.dims, site, origins=start.origins)
    stacked = [
        step.ledger.settle(end, variable.aval, site)
        for end, variable in zip(ends[carries:], body.outvars[carries:], strict=True)
    ]
    step.ledger.inner = step.ledger.end_inner(outer, ends)
    return [
        *(_settled(value, runs=step.site.runs) for value in carry),
        *(
            dataclasses.replace(value, dims=((), *value.dims), runs=step.site.runs)
            for value in stacked
        ),
    ]


def _with_slices(step: Step, values: list[Value], variables: Any) -> list[Value]:
    """Give each slice of a stacked operand its own buffer in the timeline of a loop's body."""
    if step.ledger.timeline is None:
        return values
    slices = [
        None
        if value.free
        else Buffer(size=step.ledger.local_bytes(variable.aval, value.dims), kind=TEMPORARY)
        for value, variable in zip(values, variables, strict=True)
    ]
    step.ledger.timeline.add(births=[part for part in slices if part is not None])
    pairs = zip(values, slices, strict=True)
    return [dataclasses.replace(value, buffer=part) for value, part in pairs]


def _unstacked(step: Step, at: int) -> Value:
    """Return one slice of a stacked operand. A sharded first dim is gathered before the loop."""
    value = step.values[at]
    if value.dims[0]:
        value = step.move(at, ((), *value.dims[1:]))
    return dataclasses.replace(value, dims=value.dims[1:])


def _carried(
    step: Step, body: Any, values: tuple[list[Value], list[Value], list[Value]], site: Site
) -> list[Value]:
    """Return the shardings that the carries of a scan keep.

    A carry has the sharding of its first value, unless the body returns it with more shards, or
    every device can make the first value by itself.
    """
    fixed, starts, inputs = values
    carry = [_settled(value, runs=site.runs) for value in starts]
    for _ in range(_ROUNDS):
        ends = step.walk(body, [*fixed, *carry, *inputs], ledger=step.ledger.blank())
        taken = [_takes(start, end) for start, end in zip(carry, ends, strict=False)]
        if not any(taken):
            break
        carry = [
            _settled(end, runs=site.runs) if takes else start
            for start, end, takes in zip(carry, ends, taken, strict=False)
        ]
    return carry


def _takes(start: Value, end: Value) -> bool:
    if end.free:
        return False
    refined = all(
        not old or old == new[: len(old)] for old, new in zip(start.dims, end.dims, strict=True)
    )
    return start.free or (refined and start.dims != end.dims)


def _settled(value: Value, *, runs: int) -> Value:
    return dataclasses.replace(value, owed=frozenset(), groups=(), runs=runs)


def while_loop(step: Step) -> list[Value]:
    """Follow a while loop. Its number of runs is not known, so its collectives are not counted."""
    parameters = step.parameters
    start = parameters["cond_nconsts"]
    split = start + parameters["body_nconsts"]
    body = parameters["body_jaxpr"].jaxpr
    carry = [
        step.ledger.settle(value, aval, step.site)
        for value, aval in zip(step.values[split:], step.avals[split:], strict=True)
    ]
    inner = step.ledger.blank()
    ends = step.walk(body, [*step.values[start:split], *carry], ledger=inner)
    for first, end, variable in zip(carry, ends, body.outvars, strict=True):
        if not first.free:
            inner.move(end, variable.aval, first.dims, step.site, origins=first.origins)
    if inner.events or inner.flops:
        step.ledger.unknown[UNKNOWN_RUNS] += 1
    step.ledger.unknown.update(inner.unknown)
    return carry


def cond(step: Step) -> list[Value]:
    """Follow a `cond`. Every branch is walked, and its collectives are marked as `maybe`."""
    site = dataclasses.replace(step.site, maybe=True)
    values = [step.whole(at) for at in range(1, len(step.values))]
    branches, peaks = [], []
    for branch in step.parameters["branches"]:
        outer = step.ledger.begin_inner()
        branches.append(step.walk(branch.jaxpr, values, site=site, wanted=step.wanted))
        peaks.append(step.ledger.end_inner(outer, branches[-1]))
    results = []
    for number, aval in enumerate(step.results):
        ends = [branch[number] for branch in branches]
        # If a branch returns a value that every device can make, the result has the sharding that
        # another branch returns.
        goal = next((end for end in ends if not end.free), ends[0])
        for end in ends:
            step.ledger.move(end, aval, goal.dims, site, origins=goal.origins)
        results.append(Value(dims=goal.dims, free=goal.free, origins=merged_origins(ends)))
    step.ledger.inner = Peak.most(peaks)
    return results


def call(step: Step) -> list[Value] | None:
    """Follow a primitive that holds a jaxpr (jit, remat, custom derivatives), or return None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = step.parameters.get(key)
        if inner is not None:
            body = getattr(inner, "jaxpr", inner)
            values = step.values[len(step.values) - len(body.invars) :]
            if step.parameters.get("differentiated") and step.parameters.get("prevent_cse"):
                # An optimization barrier prevents XLA from moving this recomputation out of a loop.
                values = [dataclasses.replace(value, runs=step.site.runs) for value in values]
            return step.walk(body, values, wanted=step.wanted)
    return None
