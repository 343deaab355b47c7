"""Loops, branches and calls: walk the jaxprs that an equation contains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from shardwright.dims.bodies import bodies
from shardwright.inference.atoms import new_dim
from shardwright.inference.facts import Scan, new_origin
from shardwright.inference.step import ArrayFacts, InferenceStep

# Calls that `constrained` rebuilds. It leaves custom derivatives as they are.
CALLS: Final = frozenset({"pjit", "jit", "closed_call"})
REMATS: Final = frozenset({"checkpoint", "remat", "remat2"})


def rebuilds(equation: Any) -> bool:
    """Tell whether `constrained` can place constraints inside an equation."""
    name = equation.primitive.name
    # JAX sets `differentiated` on the part of a remat that the backward pass computes again.
    return name in CALLS or (name in REMATS and not equation.params["differentiated"])


def scan(step: InferenceStep) -> list[ArrayFacts]:
    """Walk the body once. A carry keeps its dims.

    All scanned arrays have the first dim in common. If parameters are among these arrays, the scan
    is recorded.
    """
    (loop_body,) = bodies(step.equation)
    constants, carries = loop_body.fixed, loop_body.carried
    split = constants + carries
    scanned = step.values[split:]
    # Number the scans, because in nested scans a value may be the carry of one scan and a row of
    # another scan.
    step.facts.loops += 1
    loop = step.facts.loops
    for value in scanned[1:]:
        step.same(scanned[0].dims[0], value.dims[0])
    starts = [
        dataclasses.replace(start, loops=start.loops | {(loop, "carry")})
        for start in _carried(step, step.values[constants:split])
    ]
    rows = [
        dataclasses.replace(
            value,
            dims=value.dims[1:],
            one_hot=None,
            loops=value.loops | {(loop, "scanned")} if value.is_weight else value.loops,
        )
        for value in scanned
    ]
    values = [*step.values[:constants], *starts, *rows]
    ends = step.walk(loop_body.jaxpr, values, place=step.place)
    _align(step, starts, ends)
    if any(value.is_weight for value in scanned):
        recorded = Scan(
            dim=scanned[0].dims[0],
            # A layer makes the next carry from the previous carry, by a matmul with its own
            # weights.
            is_of_layers=any((loop, "made") in end.loops for end in ends[:carries]),
            is_routed=any(value.data and value.learned for value in scanned),
            location=step.location,
        )
        step.facts.scans.append(recorded)
    # Drop the marks of this loop: outside of it, no value is its carry or a row of its weights.
    ends = [
        dataclasses.replace(end, loops=frozenset(pair for pair in end.loops if pair[0] != loop))
        for end in ends
    ]
    # Without a scanned array, the results are stacked along a dim that nothing else has.
    lead = scanned[0].dims[0] if scanned else new_dim(loop_body.rounds or 0)
    stacked = [dataclasses.replace(end, dims=(lead, *end.dims)) for end in ends[carries:]]
    return [*ends[:carries], *stacked]


def while_loop(step: InferenceStep) -> list[ArrayFacts]:
    """Walk the body once. A carry keeps its dims."""
    body, _ = bodies(step.equation)
    values = body.of_operands(step.values)
    starts = _carried(step, values[body.fixed :])
    # Pass no `place`, because `constrained` adds no constraints inside a `while` loop.
    ends = step.walk(body.jaxpr, [*values[: body.fixed], *starts])
    _align(step, starts, ends)
    return ends


def cond(step: InferenceStep) -> list[ArrayFacts]:
    """Walk every branch. The results of all branches have the same dims."""
    branches = [
        step.walk(branch.jaxpr, branch.of_operands(step.values)) for branch in bodies(step.equation)
    ]
    for other in branches[1:]:
        _align(step, branches[0], other)
    return [
        dataclasses.replace(
            ends[0],
            data=any(end.data for end in ends),
            learned=any(end.learned for end in ends),
            origin=new_origin([end.origin for end in ends if end.origin is not None])
            if any(end.data for end in ends)
            else None,
            inputs=frozenset().union(*(end.inputs for end in ends)),
            loops=frozenset().union(*(end.loops for end in ends)),
            leaf=None,
        )
        for ends in zip(*branches, strict=True)
    ]


def call(step: InferenceStep) -> list[ArrayFacts] | None:
    """Walk the jaxpr of a call (jit, remat, custom derivatives). If there is none, return None."""
    found = bodies(step.equation)
    if not found:
        return None
    (body,) = found
    values = body.of_operands(step.values)
    # Pass no place if `constrained` cannot place constraints inside the call. The walk then records
    # no intermediates there.
    place = step.place if rebuilds(step.equation) else None
    return step.walk(body.jaxpr, values, called_at=step.location.caller, place=place)


def _carried(step: InferenceStep, starts: Sequence[ArrayFacts]) -> list[ArrayFacts]:
    """Return the initial values of carries.

    Arrays are marked as dependent on everything that the loop reads. The reason is that
    accumulators start as zeros, which depend on nothing, and become results of the loop. Scalars
    stay as they are, because a scalar is often a counter.
    """
    every = step.result(())
    return [
        dataclasses.replace(
            every,
            dims=start.dims,
            origin=step.new_origin() if start.origin is None else new_origin([start.origin]),
            loops=start.loops,
            leaf=None,
        )
        if start.dims
        else start
        for start in starts
    ]


def _align(step: InferenceStep, before: Sequence[ArrayFacts], after: Sequence[ArrayFacts]) -> None:
    # `zip` is not strict: `after` has the carries, and then the stacked results of a scan, which
    # have no initial value.
    for first, second in zip(before, after, strict=False):
        for left, right in zip(first.dims, second.dims, strict=True):
            step.same(left, right)
