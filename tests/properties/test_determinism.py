"""Every process gets the same answers, whatever its hash seed: all hosts build one program."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.resolution.decisions import Outcome, Reason
from tests.properties import sample

ROOT = Path(__file__).resolve().parents[2]


def in_a_process(seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "tests.properties.sample"]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", ["0", "20260101"])
@pytest.mark.full(but=["0"])
def test_same_answers_in_every_process(seed: str) -> None:
    assert in_a_process(seed) == sample.text(300) + "\n"


def test_sample_has_every_outcome_and_reason() -> None:
    outcomes, reasons, problems = (
        collections.Counter[Outcome](),
        collections.Counter[Reason](),
        collections.Counter[str](),
    )
    for answer in sample.answers(1000):
        outcomes.update(decision.outcome for decision in answer.decisions)
        reasons.update(skip.reason for decision in answer.decisions for skip in decision.skipped)
        problems.update(problem.error.__name__ for problem in answer.problems)
    assert {*outcomes} == {*Outcome}
    assert {*reasons} == {*Reason}
    assert {*problems} == {
        "AxisConflictError",
        "IndivisibleError",
        "ShapeRequiredError",
        "StrategyError",
    }
    assert min(*outcomes.values(), *reasons.values(), *problems.values()) >= 5
