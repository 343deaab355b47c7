"""Two processes of `jax.distributed` with four virtual devices each; `worker.py` has the cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess import divergent, pairs
from tests.multiprocess.worker import CASES, LONG_CASES

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[pairs.Ended]:
    return pairs.run("tests.multiprocess.worker", [], tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_case(name: str, ended: list[pairs.Ended]) -> None:
    """A missing case failed, or came after one that failed. The output shows which."""
    for rank, process in enumerate(ended):
        # Not by line: the collectives' own messages may begin in the middle of one.
        assert name in re.findall(r"ok (\w+)", process.text), f"process {rank}:\n{process.text}"


@pytest.mark.full
def test_long_cases(tmp_path: Path) -> None:
    ended = pairs.run("tests.multiprocess.worker", ["long"], tmp_path)
    for process in ended:
        passed = re.findall(r"ok (\w+)", process.text)
        assert passed == [case.__name__ for case in LONG_CASES], process.text
    assert [process.code for process in ended] == [0, 0]


def test_differences_are_told(ended: list[pairs.Ended]) -> None:
    for rank, process in enumerate(ended):
        told = re.findall(r"told (\w+)", process.text)
        expected = [case.__name__ for case in divergent.PARTS["quick"]]
        assert told == expected, f"process {rank}:\n{process.text}"


def test_both_processes_exit_normally(ended: list[pairs.Ended]) -> None:
    assert [process.code for process in ended] == [0, 0], "\n".join(
        process.text for process in ended
    )
