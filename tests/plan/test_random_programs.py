"""The walk against XLA: random annotated programs, compiled for eight CPU devices.

    python -m tests.plan.test_random_programs 0 200

prints one line per program and the distribution.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.plan.planner import PlanReport
from shardwright.testing import virtual_devices
from tests.plan.random_programs import HIDDEN, Drawn, draw, shape

# XLA makes all-reduces of reduce-scatters on CPUs. Both have the operand's bytes.
FOLDED = {"reduce_scatter": "all_reduce"}

Bytes = Counter[tuple[str, tuple[str, ...]]]


def planned(program: Drawn) -> PlanReport:
    pm = sw.PartitionManager(program.strategy, mesh=sw.abstract_mesh(program.mesh))
    report: PlanReport = pm.plan(
        program.function,
        *program.shapes(),
        specs=(program.specs(), HIDDEN),
        outputs=program.outputs(),
    )
    return report


def compiled(program: Drawn) -> Bytes:
    pm = sw.PartitionManager(program.strategy, mesh=sw.create_mesh(program.mesh))
    with pm:
        weights = pm.abstract(program.specs())
        x = jax.ShapeDtypeStruct(
            shape(*HIDDEN), jnp.float32, sharding=pm.sharding(HIDDEN, shape=shape(*HIDDEN))
        )
        result = jax.eval_shape(program.function, weights, x)
        outputs = pm.shardings(result, program.outputs(), role=None)
        step = jax.jit(program.function, out_shardings=outputs)
        text = step.lower(weights, x).compile()
    sent: Bytes = Counter()
    for collective in read_collectives(text, pm.mesh):
        kind = FOLDED.get(str(collective.kind), str(collective.kind))
        sent[kind, collective.mesh_axes] += collective.total_bytes or 0
    return sent


def walked(report: PlanReport) -> Bytes:
    sent: Bytes = Counter()
    for event in report.events:
        kind = FOLDED.get(str(event.kind), str(event.kind))
        sent[kind, event.mesh_axes] += event.logical_bytes * event.runs
    return sent


def unsure(report: PlanReport) -> bool:
    """Whether the plan itself says that a compiler may do something else."""
    walk = report.walked
    return bool(walk.choices or walk.idle or not walk.complete)


def check(seed: int) -> None:
    program = draw(seed)
    report = planned(program)
    if not unsure(report):
        assert walked(report) == compiled(program), program.text


# In 331, gradients are partial sums over two dims, and their results are sharded, too.
@pytest.mark.parametrize("seed", [*range(3), 331])
def test_a_plan_without_doubt_equals_xla(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 25))
def test_plans_without_doubt_equal_xla(start: int) -> None:
    for seed in range(start, start + 25):
        check(seed)


def main(first: int, last: int) -> None:
    counts: Counter[Any] = Counter()
    for seed in range(first, last):
        program = draw(seed)
        report = planned(program)
        same = walked(report) == compiled(program)
        marks = [
            name
            for name, there in (
                ("chosen", report.walked.choices),
                ("idle", report.walked.idle),
                ("incomplete", report.walked.unknown),
            )
            if there
        ]
        print(seed, "exact" if same else "differs", *marks, "" if same else program.text)
        counts["exact" if same else "differs", "marked" if marks else "unmarked"] += 1
    print(dict(counts))


if __name__ == "__main__":
    virtual_devices(8)
    main(int(sys.argv[1]), int(sys.argv[2]))
