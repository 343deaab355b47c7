"""Which process the watchdog names, from the beats of all; real processes: tests/multiprocess."""

from __future__ import annotations

import atexit
import json
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright import _jax
from shardwright.processes import watchdog
from shardwright.processes.compare import ProcessGroup
from shardwright.processes.watchdog import Watchdog, _Beat, _State
from tests.processes.simulated_store import SimulatedStore

LOST = {"state": _State.RAISED, "text": "JaxRuntimeError: closed by peer", "jax_error": True}


class Clock:
    """Time that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


STORE: Any = type("Store", (), {"rank": 0})()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog.time, "monotonic", clock)
    return clock


def watch(clock: Clock, beats: dict[int, dict[str, Any]], seconds: float) -> tuple[float, str]:
    """Return when process 0 names others, and what it says; ranks without beats are silent."""
    group: Any = ProcessGroup(store=STORE, ranks=(0, 1, 2, 3))
    dog = Watchdog(group, 8)
    atexit.unregister(dog._leave)
    number = 0
    while clock.now < 100 + seconds:
        number += 1
        alive = {rank: _Beat(number=number, **about) for rank, about in beats.items()}
        silent = {rank: _Beat(number=1) for rank in group.ranks if rank not in beats}
        missing = dog._missing({**silent, **alive})
        if missing:
            return clock.now - 100, "; ".join(missing.values())
        clock.now += dog._interval
    return clock.now - 100, ""


def test_healthy_processes(clock: Clock) -> None:
    assert watch(clock, {0: {}, 1: {}, 2: {}, 3: {}}, 60)[1] == ""


@pytest.mark.parametrize("others", [{0: {}, 1: {}, 2: {}}, {0: {}, 1: LOST, 2: LOST}])
def test_the_silent_process_is_named(clock: Clock, others: dict[int, dict[str, Any]]) -> None:
    """Also if the collectives of others raise an error before it has been silent for long."""
    seconds, text = watch(clock, others, 60)
    assert text in [f"process 3 has given no sign of life for {wait} s" for wait in ("7.5", "8.0")]
    assert seconds <= 8


def test_late_beats_of_a_killed_process(clock: Clock) -> None:
    """The last beat of the killed process is read after the error of another one."""
    group: Any = ProcessGroup(store=STORE, ranks=(0, 1, 2))
    dog = Watchdog(group, 8)
    atexit.unregister(dog._leave)
    missing: dict[int, str] = {}
    while not missing:
        number = int(clock.now * 10)
        late = 1 if clock.now < 102 else 2
        missing = dog._missing(
            {0: _Beat(number=number), 1: _Beat(number=number, **LOST), 2: _Beat(number=late)}
        )
        clock.now += 0.5
    assert list(missing) == [2]
    assert clock.now - 100 <= 9


def test_own_errors_are_named_at_once(clock: Clock) -> None:
    raised = {"state": _State.RAISED, "text": "ValueError: no space"}
    assert watch(clock, {0: {}, 1: raised, 2: LOST, 3: {}}, 60) == (
        0,
        "process 1 raised ValueError: no space",
    )


def test_errors_of_jax_alone_are_named(clock: Clock) -> None:
    """If no process is silent, such an error is the cause."""
    seconds, text = watch(clock, {0: {}, 1: {}, 2: LOST, 3: {}}, 60)
    assert (seconds, text) == (7.5, "process 2 raised JaxRuntimeError: closed by peer")


@pytest.mark.parametrize(("compiles", "blamed"), [(True, ""), (False, "process 3 is at a.py:1")])
def test_compiling_is_not_missing(clock: Clock, compiles: bool, blamed: str) -> None:
    """Process 3 compiles for nine minutes, and the others wait for it in a collective."""
    group: Any = ProcessGroup(store=STORE, ranks=(0, 1, 2, 3))
    dog = Watchdog(group, 8)
    atexit.unregister(dog._leave)
    missing: dict[int, str] = {}
    begun = clock.now
    while clock.now < begun + 540 and not missing:
        about: dict[str, Any] = {"number": int(clock.now * 10), "waits_s": clock.now - begun}
        waits = _Beat(**about, place="a.py:2")
        other = _Beat(number=about["number"], place="a.py:1", compiles=compiles)
        missing = dog._missing({0: waits, 1: waits, 2: waits, 3: other})
        clock.now += dog._interval
    assert missing.get(3, "") == blamed


def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatedStore, list[Watchdog]]:
    """Return watchdogs of two processes. The test runs their steps, so `_leave` need not wait."""
    store = SimulatedStore()
    dogs = [Watchdog(ProcessGroup(store=store.of(rank), ranks=(0, 1)), 8) for rank in range(2)]
    monkeypatch.setattr(Watchdog, "join", lambda self: None)
    for dog in dogs:
        atexit.unregister(dog._leave)
    return store, dogs


def state(store: SimulatedStore, rank: int) -> str:
    return str(json.loads(store.values[f"shardwright/watchdog/beats/{rank}"])["state"])


def test_without_a_leader_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 has no watchdog."""
    store, (_, dog) = pair(monkeypatch)
    assert not dog._step()
    dog._leave()
    assert dog._step()
    assert state(store, 1) == "ended"


def test_with_a_leader_a_process_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (leader, dog) = pair(monkeypatch)
    assert not leader._step()
    dog._leave()
    assert not dog._step()
    leader._leave()
    assert leader._step()
    assert dog._step()


def test_an_end_in_the_middle_of_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next beat tells it, and no beat loses it."""
    store, (_, dog) = pair(monkeypatch)

    def compiles(frame: Any) -> bool:
        dog._leave()
        return False

    monkeypatch.setattr(_jax, "compiles", compiles)
    assert not dog._step()
    assert state(store, 1) == "runs"
    assert dog._step()
    assert state(store, 1) == "ended"


def test_frames_that_compile() -> None:
    """A thread observes compilations of the main thread, as many as it takes until it meets one."""
    compiles, met = threading.Event(), threading.Event()
    ended = threading.Event()
    main = threading.main_thread().ident

    def observe() -> None:
        while not ended.wait(0.002):
            if compiles.is_set() and _jax.compiles(sys._current_frames()[main or 0]):
                met.set()

    def traced(x: Any) -> Any:
        assert _jax.compiles(sys._getframe())
        for _ in range(40):
            x = jnp.sin(x @ x)
        return x

    thread = threading.Thread(target=observe)
    thread.start()
    for size in range(8, 100):
        lowered = jax.jit(traced).lower(jnp.ones((size, size)))
        assert not _jax.compiles(sys._getframe())
        compiles.set()
        lowered.compile()
        compiles.clear()
        if met.is_set():
            break
    ended.set()
    thread.join()
    assert met.is_set()
