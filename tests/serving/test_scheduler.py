"""The scheduler: random operations lose no slot, row or page, and overtake nobody."""

from __future__ import annotations

import random

import pytest

from shardwright.errors import QueueFullError, ServingError
from shardwright.serving.jobs import Job, Limits, Phase
from shardwright.serving.pages import NO_PAGE
from shardwright.serving.request import Finish, Request
from shardwright.serving.scheduler import Scheduler
from shardwright.serving.space import PageSpace
from tests.raising import Facts, facts, raises

LIMITS = Limits(
    slots=3, capacity=20, prefill_rows=2, chunk=2, quantum=2, queue=5, pages=9, page_size=4
)


def job(number: int, prompt: int, new: int) -> Job:
    return Job(number=number, request=Request(prompt=[1] * prompt, max_new_tokens=new, stop=[7]))


def assert_consistent(scheduler: Scheduler, jobs: list[Job]) -> None:
    """Check that every row and slot belongs to one job, is free, or is dirty."""
    assert scheduler.rows.keys().isdisjoint(scheduler.dirty_rows)
    assert scheduler.slots.keys().isdisjoint(scheduler.dirty_slots)
    for number, phases in (
        (scheduler.rows, (Phase.PREFILLING,)),
        (scheduler.slots, (Phase.PREFILLING, Phase.DECODING)),
    ):
        assert all(held.phase in phases for held in number.values())
        assert len(set(map(id, number.values()))) == len(number)
    reading = {id(job) for job in scheduler.slots.values() if job.phase is Phase.PREFILLING}
    has_row = set(map(id, scheduler.rows.values()))
    waits = list(map(id, scheduler.rowless))
    assert has_row.isdisjoint(waits)
    assert sorted([*has_row, *waits]) == sorted(reading)
    assert len(scheduler.slots) + len(scheduler.dirty_slots) <= LIMITS.slots
    assert len(scheduler.rows) + len(scheduler.dirty_rows) <= LIMITS.prefill_rows
    assert 0 <= scheduler.space.free_pages <= 9
    assert [item.number for item in scheduler.queue] == sorted(
        item.number for item in scheduler.queue
    )
    assert all((item.completion is None) == (item.phase is not Phase.DONE) for item in jobs)


def operate(scheduler: Scheduler, draw: random.Random, jobs: list[Job]) -> None:
    """Do one thing that an engine may do at this time."""
    what = draw.choice(
        [
            "submit",
            "submit",
            "admit",
            "read",
            "move",
            "write",
            "write",
            "write",
            "cancel",
            "fail",
            "clean",
            "lose",
        ]
    )
    if what == "submit":
        new = job(len(jobs), draw.randint(1, 12), draw.randint(1, 8))
        if scheduler.waiting < LIMITS.queue:
            scheduler.check_queue()
            scheduler.submit(new)
            jobs.append(new)
        else:
            with raises(QueueFullError, 5, path="queue"):
                scheduler.check_queue()
    elif what == "admit":
        scheduler.admit()
        scheduler.park([move.job for move in scheduler.expired()])
        scheduler.take(scheduler.next_rows())
    elif what == "read":
        chunks = scheduler.chunks()
        assert all(0 < len(chunk.tokens) <= LIMITS.chunk for chunk in chunks)
        scheduler.advance(chunks)
        for move in scheduler.ready():
            if not move.job.written:
                scheduler.write(move.job, draw.randint(0, 7))
    elif what == "move":
        scheduler.move([move.job for move in scheduler.ready() if move.job.written])
    elif what == "write":
        for item in scheduler.decoding().values():
            scheduler.write(item, draw.randint(0, 7))
    elif what in ("cancel", "fail") and jobs:
        item = draw.choice(jobs)
        scheduler.end(item, Finish.CANCELED) if what == "cancel" else scheduler.fail(
            item, RuntimeError("injected")
        )
    elif what == "clean":
        scheduler.clean(rows=list(scheduler.dirty_rows), slots=list(scheduler.dirty_slots))
    elif what == "lose" and draw.random() < 0.2:
        for item in scheduler.holding(draw.choice(["rows", "slots"])):
            scheduler.end(item, Finish.FAILED, RuntimeError("injected"))


def run(operations: int, seed: int) -> None:
    scheduler, draw, jobs = Scheduler(LIMITS), random.Random(seed), []
    for _ in range(operations):
        operate(scheduler, draw, jobs)
        assert_consistent(scheduler, jobs)
    for item in jobs:
        scheduler.end(item, Finish.CANCELED)
    scheduler.clean(rows=range(2), slots=range(3))
    assert scheduler.idle
    assert scheduler.space.free_pages == 9
    assert {item.phase for item in jobs} == {Phase.DONE}
    assert len(scheduler.take_ended()) == len(jobs)
    whys = {item.completion.finish for item in jobs if item.completion}
    assert whys == set(Finish)


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_lose_nothing(seed: int) -> None:
    run(1_000, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3, 13))
def test_ten_thousand_random_operations_lose_nothing(seed: int) -> None:
    run(10_000, seed)


def test_request_waiting_for_pages_is_not_overtaken() -> None:
    scheduler = Scheduler(LIMITS)
    large, larger, small = job(0, 12, 8), job(1, 13, 8), job(2, 1, 1)
    for item in (large, larger, small):
        scheduler.submit(item)
    assert scheduler.admit() == [large]  # 5 pages of 9: the next needs 5 too
    assert scheduler.space.free_pages == 4
    scheduler.end(large, Finish.CANCELED)
    assert scheduler.admit() == []  # until the device has emptied what it had
    scheduler.clean(rows=[0], slots=[0])
    assert scheduler.admit() == [larger, small]


@pytest.mark.parametrize(
    ("prompt", "new", "limits", "says"),
    [
        (13, 9, LIMITS, facts(13, 9, 21, 20, path="request", fix="sliding")),
        (
            30,
            8,
            Limits(slots=1, capacity=None, prefill_rows=1, chunk=4, queue=1, pages=9, page_size=4),
            facts(37, 10, 4, 9, path="request"),
        ),
    ],
)
def test_impossible_requests(prompt: int, new: int, limits: Limits, says: Facts) -> None:
    with raises(ServingError, says):
        limits.check(job(0, prompt, new).request)
    limits.check(job(0, prompt - 1, new).request)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_page_stays_while_a_query_sees_it(size: int) -> None:
    """The next query sees its own position and the `window - 1` before it, and no other."""
    window, new = 6, 15
    limits = Limits(
        slots=1, capacity=32, prefill_rows=1, chunk=5, queue=1, pages=32, page_size=size
    )
    scheduler = Scheduler(limits, PageSpace(limits, window=window))
    one = job(0, 11, new)
    scheduler.submit(one)
    scheduler.admit()
    scheduler.take(scheduler.next_rows())

    def check(held: int) -> None:
        assert scheduler.cached(one) == held
        visible = range(max(held - window + 1, 0), held)
        kept = [at for at, page in enumerate(scheduler.space.pages(one)) if page != NO_PAGE]
        assert kept == sorted({position // size for position in visible})

    for held in (5, 10, 11):
        scheduler.advance(scheduler.chunks())
        check(held)
    scheduler.move([move.job for move in scheduler.ready()])
    scheduler.write(one, 1)
    for held in range(12, 11 + new - 1):
        scheduler.grow(1)
        scheduler.write(one, 1)
        scheduler.wrote(one)
        check(held)
