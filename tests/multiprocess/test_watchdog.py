"""If one process fails, the others say so and end within 10 seconds; see `failing.py`.

A machine that is short of processors gets more time, but less than JAX itself takes.
"""

from __future__ import annotations

import atexit
import re
import signal
import types
from pathlib import Path
from typing import Any

import pytest

from shardwright.processes import watchdog
from shardwright.processes.watchdog import EXIT_CODE
from tests.multiprocess import pairs

pytestmark = pytest.mark.multiprocess

LIMIT_S = 60
# Each process may find it first, or read what another one has found.
WAITS = r"process \d+ has waited \d+\.\d s at failing\.py:\d+; "
SAYS = {
    "raise": r"process {last} raised ValueError: the last process raises",
    "kill": r"process {last} has given no sign of life for \d+\.\d s",
    "sleep": WAITS + r"process {last} is at failing\.py:\d+",
    "part": WAITS + r"process {last} is at failing\.py:\d+",
    "end": WAITS + r"process {last} has ended",
}


def run(folder: Path, count: int, how: str, seconds: float) -> tuple[list[pairs.Ended], str]:
    ended = pairs.run(
        "tests.multiprocess.failing", [count, how, seconds], folder, count=count, together=False
    )
    return ended, "\n".join(f"process {rank}:\n{done.text}" for rank, done in enumerate(ended))


@pytest.mark.full
@pytest.mark.parametrize(
    ("count", "how"),
    [
        pytest.param(2, "raise", marks=pytest.mark.ci),
        *[(count, how) for count in (2, 4) for how in SAYS if (count, how) != (2, "raise")],
    ],
)
def test_every_survivor_says_who_is_missing(how: str, count: int, tmp_path: Path) -> None:
    ended, output = run(tmp_path, count, how, 8)
    *survivors, culprit = ended
    failed_at = float(re.findall(r"fails at ([\d.]+)", culprit.text)[0])
    for rank, process in enumerate(survivors):
        says = SAYS[how].format(last=count - 1)
        assert re.search(rf"watchdog in process {rank}: .*{says}", process.text), output
        # Process 0 has JAX's store. When it ends, JAX aborts others that are about to end.
        assert process.code in ((EXIT_CODE, -signal.SIGABRT) if rank else (EXIT_CODE,)), output
        assert process.at - failed_at < LIMIT_S, output
    if how == "raise":  # as Python exits
        assert culprit.code == 1, output
    elif how != "kill":
        assert culprit.code == EXIT_CODE, output


@pytest.mark.full
def test_the_others_end_without_the_coordinator(tmp_path: Path) -> None:
    """JAX aborts them."""
    ended, output = run(tmp_path, 2, "coordinator", 8)
    failed_at = float(re.findall(r"fails at ([\d.]+)", ended[0].text)[0])
    assert ended[1].code not in (0, None), output
    assert ended[1].at - failed_at < LIMIT_S, output
    assert re.search(r"watchdog|JAX distributed service detected fatal errors", ended[1].text)


@pytest.mark.full
def test_healthy_processes_are_left_alone(tmp_path: Path) -> None:
    """Steps that wait, one process that is slow for a while, and one that ends later."""
    ended, output = run(tmp_path, 2, "healthy", 4)
    assert [process.code for process in ended] == [0, 0], output
    assert all("all is well" in process.text for process in ended), output
    assert "watchdog" not in output


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(watchdog, "time", clock)


def waiting() -> Any:
    """The watchdog of process 0, which has waited for 7.9 of 8 seconds."""
    group: Any = types.SimpleNamespace(store=None, rank=0, ranks=(0, 1))
    dog = watchdog.Watchdog(group, 8)
    atexit.unregister(dog._leave)
    dog._own = watchdog._Beat(waits_s=7.9, place="train.py:3")
    return dog


WAITED = "process 0 has waited 7.9 s at train.py:3"


@pytest.mark.parametrize(
    ("beat", "says"),
    [
        (watchdog._Beat(state="ended"), "process 1 has ended"),
        (watchdog._Beat(place="train.py:4"), "process 1 is at train.py:4"),
    ],
)
def test_a_process_that_just_left_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, beat: Any, says: str
) -> None:
    """It may have taken part in the collective just before; the waiting one needs time to wake."""
    clock, dog = Clock(monkeypatch), waiting()
    beats = {0: dog._own, 1: beat}
    assert dog._elsewhere(beats) == {}
    clock.now += 3.9
    assert dog._elsewhere(beats) == {}
    clock.now += 0.2
    assert dog._elsewhere(beats) == {0: WAITED, 1: says}


def test_a_process_that_comes_to_the_line_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, dog = Clock(monkeypatch), waiting()
    elsewhere = {0: dog._own, 1: watchdog._Beat(place="train.py:2")}
    assert dog._elsewhere(elsewhere) == {}
    clock.now += 3.9
    assert dog._elsewhere({0: dog._own, 1: dog._own}) == {}
    clock.now += 0.2
    assert dog._elsewhere(elsewhere) == {}


def test_a_process_without_a_beat_for_a_moment_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that compiles or is short of processors may miss several beats."""
    clock, dog = Clock(monkeypatch), waiting()
    beats = {0: dog._own, 1: watchdog._Beat(number=5, place="train.py:2")}
    dog._silent(beats, 8)
    clock.now += 2.3
    assert dog._elsewhere(beats) == {}
    clock.now += 1.8
    assert dog._elsewhere(beats) == {0: WAITED, 1: watchdog._no_sign(1, clock.now - 100)}
