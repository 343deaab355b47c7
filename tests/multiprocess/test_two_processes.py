"""Two processes of `jax.distributed` with four virtual devices each; `worker.py` has the cases."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.worker import CASES

ROOT = Path(__file__).resolve().parents[2]
WALL_S = 120

pytestmark = pytest.mark.multiprocess


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Exit code, passed cases and output of one process."""

    code: int
    passed: frozenset[str]
    text: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(port: int, rank: int, folder: Path) -> subprocess.Popen[str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)  # a number of devices there would win over the four
    with (folder / f"{rank}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.worker", str(port), str(rank)],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all. End the rest after a failure, because they would wait in a collective."""
    deadline = time.monotonic() + WALL_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(1)  # the other one may have something to say too
            break
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    folder = tmp_path_factory.mktemp("processes")
    port = free_port()
    processes = [start(port, rank, folder) for rank in range(2)]
    wait(processes)
    actual = []
    for rank, process in enumerate(processes):
        text = (folder / f"{rank}.txt").read_text()
        # Not by line: the collectives' own messages may begin in the middle of one.
        passed = frozenset(re.findall(r"ok (\w+)", text))
        actual.append(Ended(code=process.returncode, passed=passed, text=text))
    return actual


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_case(name: str, ended: list[Ended]) -> None:
    """A missing case failed, or came after one that failed. The output shows which."""
    for rank, process in enumerate(ended):
        assert name in process.passed, f"process {rank}:\n{process.text}"


def test_both_processes_exit_normally(ended: list[Ended]) -> None:
    assert [process.code for process in ended] == [0, 0], "\n".join(
        process.text for process in ended
    )
