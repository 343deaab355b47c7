"""The messages and bytes of comparisons, and of the watchdog, do not grow with the processes."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.errors import AgreementError
from shardwright.processes import agreement, meeting, watchdog
from shardwright.processes import compare as comparing
from shardwright.processes.compare import Fact, ProcessGroup
from shardwright.processes.meeting import Meeting, collect
from tests.processes.simulated_store import SimulatedStore

COUNTS = [
    8,
    64,
    pytest.param(512, marks=pytest.mark.full),
    pytest.param(2048, marks=pytest.mark.full),
]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SimulatedStore:
    """A store whose time is that of all meetings."""
    simulated = SimulatedStore()
    clock = SimpleNamespace(monotonic=lambda: simulated.now)
    monkeypatch.setattr(meeting, "time", clock)
    return simulated


def together(store: SimulatedStore, count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run a function for every rank at the same time. Return the results, or the disagreements."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except AgreementError as error:
            results[rank] = error

    store.together(count, run)
    return results


def group(store: SimulatedStore, rank: int, count: int) -> ProcessGroup:
    return ProcessGroup(store=store.of(rank), ranks=tuple(range(count)))


def compare(at: ProcessGroup, text: str, **options: Any) -> None:
    facts = {"x": Fact(text, "here"), "y": Fact("int32[]")}
    options = {"patience": 300.0, **options}
    comparing.compare(at, "tree", facts, what="pm.agree", fix="build the same tree", **options)


@pytest.mark.parametrize("count", COUNTS)
def test_messages_of_a_comparison(count: int, store: SimulatedStore) -> None:
    for number in range(7):  # old keys are deleted, too
        store.reset()
        errors = together(
            store, count, lambda rank: compare(group(store, rank, count), "float32[8,4]")
        )
        assert errors == [None] * count
        assert max(store.messages.values()) <= 6
        assert store.bytes <= 500 * count
        assert len(store.values) <= count * min(number + 2, comparing._KEPT + 1) + 40
    store.reset()
    texts = {count // 2: "float32[8,5]"}
    errors = together(
        store,
        count,
        lambda rank: compare(group(store, rank, count), texts.get(rank, "float32[8,4]")),
    )
    assert all(isinstance(error, AgreementError) for error in errors)
    assert f"process {count // 2} has float32[8,5]" in str(errors[0])
    assert max(store.messages.values()) <= 8
    assert store.bytes <= 800 * count


@pytest.mark.parametrize("count", COUNTS)
def test_messages_of_an_entry(count: int, store: SimulatedStore) -> None:
    errors = together(store, count, lambda rank: entry(group(store, rank, count)))
    assert errors == [None] * count
    assert max(store.messages.values()) <= 6
    assert store.bytes <= 1000 * count


@pytest.mark.parametrize("count", COUNTS)
def test_bytes_of_the_watchdog(count: int, store: SimulatedStore) -> None:
    dogs = []
    for rank in range(count):
        dog = watchdog.Watchdog(group(store, rank, count), 8)
        atexit.unregister(dog._leave)
        dogs.append(dog)
    for _ in range(2):
        store.reset()
        for dog in dogs:
            assert not dog._step()
        assert max(store.messages.values()) <= 3
        assert store.bytes <= 1000 * count


def test_calls_that_fail_start_anew(store: SimulatedStore) -> None:
    """One process is late, and the call fails in all others at once. The next call is right."""

    def call(rank: int) -> Any:
        own = group(store, rank, 4)
        if rank == 3:
            store.sleep(10)
            compare(own, "same")
            return "agreed"
        with pytest.raises(AgreementError) as caught:
            compare(own, "same", patience=5)
        compare(own, "same")
        return str(caught.value)

    *told, late = together(store, 4, call)
    assert late == "agreed"
    assert len(set(told)) == 1
    assert "process 3 did not reach pm.agree within 5 s" in told[0]


def test_a_process_that_compiles_is_not_late(store: SimulatedStore) -> None:
    beat = b'{"state": "runs", "compiles": true}'
    store.of(2).set("shardwright/watchdog/beats/2", beat)

    def call(rank: int) -> None:
        if rank == 2:
            store.sleep(20)
        compare(group(store, rank, 3), "same", patience=6)

    assert together(store, 3, call) == [None] * 3
    store.of(2).set("shardwright/watchdog/beats/2", beat.replace(b"true", b"false"))
    errors = together(store, 3, call)
    assert [type(error) for error in errors] == [AgreementError] * 3


def entry(at: ProcessGroup) -> None:
    agreement.agree_on_manager(at, "PartitionManager('fsdp')", {"mode": Fact("train")})


@pytest.mark.parametrize(
    ("call", "room"),
    [
        (lambda at: compare(at, "same", patience=8), "shardwright/tree/"),
        (entry, "shardwright/manager/meetings/"),
    ],
    ids=["compare", "enter"],
)
def test_the_last_process_ends_before_its_verdict(
    call: Callable[[ProcessGroup], None],
    room: str,
    store: SimulatedStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All have arrived, so none is absent, and none compiles. Each closes the meeting once."""

    def decide(self: Meeting, verdict: meeting.MeetingVerdict) -> None:
        raise AgreementError("killed")

    monkeypatch.setattr(Meeting, "decide", decide)
    texts = sorted(
        str(error) for error in together(store, 3, lambda rank: call(group(store, rank, 3)))
    )
    assert "killed" in texts.pop(next(at for at, text in enumerate(texts) if "killed" in text))
    for text in texts:
        assert "but the last process has not compared them" in text
        assert "look in the output of the other processes" in text
    arrived = [
        int(value)
        for key, value in store.values.items()
        if key.startswith(room) and key.endswith("/arrived")
    ]
    assert arrived == [3 + 2 * meeting._CLOSED]


def test_a_wait_ends_after_the_first_process(store: SimulatedStore) -> None:
    """The first process extends the wait once, and ends. The second one waits once more."""
    first, second = (Meeting(store.of(rank), "room", 3, 0) for rank in range(2))
    first.arrive()
    second.arrive()
    assert first.extends(lambda: False)
    extensions: list[bool] = []
    extends = second.extends

    def observed(is_late: Callable[[], bool]) -> bool:
        assert len(extensions) < 2, "it waits forever"
        extensions.append(extends(is_late))
        return extensions[-1]

    second.extends = observed  # type: ignore[method-assign]
    verdict = collect(
        second,
        decide=dict,
        look=lambda waited: None,
        fail=lambda: {"error": "not all have come"},
        is_late=lambda: False,
        patience=-0.9,
        first_look=1.0,
    )
    assert verdict == {"error": "not all have come"}
    assert extensions == [True, False]


def test_the_first_process_extends_each_time(store: SimulatedStore) -> None:
    first, second = (Meeting(store.of(rank), "room", 3, 0) for rank in range(2))
    first.arrive()
    second.arrive()
    for _ in range(3):
        assert first.extends(lambda: False)
        assert second.extends(lambda: False)
    assert not first.extends(lambda: True)
    assert not second.extends(lambda: False)
