"""The walk against XLA: random annotated programs, compiled for eight CPU devices.

    python -m tests.plan.test_random_programs 0 200

prints one line per program, the distribution, and whether each condition of `judge` holds.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.planner import PlanReport
from shardwright.testing import virtual_devices
from tests.plan.against_xla import Bytes, compiled_bytes, planned_bytes
from tests.plan.random_programs import HIDDEN, Drawn, draw, shape

LIMIT = 0.02  # a plan without marks may differ by this share of the compiled bytes


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
    return compiled_bytes(pm, program.function, (weights, x), program.outputs())


def unsure(report: PlanReport) -> bool:
    """Whether the plan itself says that a compiler may do something else."""
    walk = report.walked
    return bool(walk.choices or walk.idle or not walk.complete)


def check(seed: int) -> None:
    program = draw(seed)
    report = planned(program)
    memory = report.memory
    assert memory.sure <= memory.low <= memory.high, program.text
    if not unsure(report):
        assert planned_bytes(report) == compiled(program), program.text


# In 331, gradients are partial sums over two dims, and their results are sharded, too.
@pytest.mark.full(but=["0", "331"])
@pytest.mark.parametrize("seed", [*range(3), 331])
@pytest.mark.ci
def test_a_plan_without_doubt_equals_xla(seed: int) -> None:
    check(seed)


@pytest.mark.full
@pytest.mark.product(but=["0", "25", "50", "75"])
@pytest.mark.parametrize("start", range(0, 200, 25))
def test_plans_without_doubt_equal_xla(start: int) -> None:
    for seed in range(start, start + 25):
        check(seed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a plan compares with its compiled program.

    Attributes:
      text: What the program is.
      error: Bytes that differ, over all kinds and mesh axes / compiled bytes.
      marks: Why the plan itself was unsure before the compile.
    """

    text: str
    error: float
    marks: tuple[str, ...]


def outcome(seed: int) -> Outcome:
    program = draw(seed)
    report = planned(program)
    plan, real = planned_bytes(report), compiled(program)
    wrong = sum(abs(plan[key] - real[key]) for key in plan.keys() | real.keys())
    marks = {
        "chosen": report.walked.choices,
        "idle": report.walked.idle,
        "incomplete": report.walked.unknown,
    }
    return Outcome(
        text=program.text,
        error=wrong / max(real.total(), 1),
        marks=tuple(name for name, places in marks.items() if places),
    )


def judge(outcomes: list[Outcome]) -> dict[str, bool]:
    """Return what must hold, with the numbers behind it, and whether it does."""
    busy = [each for each in outcomes if "idle" not in each.marks]
    exact = sum(each.error == 0 for each in busy)
    unmarked = [each for each in outcomes if not each.marks]
    wrong = sum(each.error > LIMIT for each in unmarked)
    chosen = sum("chosen" in each.marks for each in outcomes)
    return {
        f"{wrong} of {len(unmarked)} programs without marks differ by more than 2%": not wrong,
        f"{exact} of {len(busy)} programs without idle axes are exact": exact >= 0.95 * len(busy),
        f"{chosen} of {len(outcomes)} are marked as chosen": chosen <= 0.1 * len(outcomes),
    }


def main(first: int, end: int) -> int:
    """Compare the programs of the seeds from `first` up to `end`, which is not included."""
    if end <= first:
        print(
            f"no seed is in range({first}, {end}): pass the first one and the end", file=sys.stderr
        )
        return 2
    outcomes: list[Outcome] = []
    for seed in range(first, end):
        outcomes.append(outcome(seed))
        latest = outcomes[-1]
        words = "exact" if latest.error == 0 else f"differs by {latest.error:.1%}"
        print(seed, words, *latest.marks, *([latest.text] if latest.error else []), flush=True)
    counts = Counter((" ".join(each.marks) or "no mark", bucket(each.error)) for each in outcomes)
    for (marks, size), count in sorted(counts.items()):
        print(f"{marks:16} {size:14} {count}")
    verdicts = judge(outcomes)
    for words, holds in verdicts.items():
        print(f"{'pass' if holds else 'FAIL'}: {words}")
    return 0 if all(verdicts.values()) else 1


def bucket(error: float) -> str:
    for limit, words in ((0.0, "exact"), (LIMIT, "up to 2%"), (0.1, "2% to 10%")):
        if error <= limit:
            return words
    return "more than 10%"


if __name__ == "__main__":
    virtual_devices(8)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
