"""Random requests, cancels and failures everywhere in an engine: no leak and no wrong text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardwright import serving
from shardwright.errors import QueueFullError
from shardwright.serving import Finish, Handle, Request
from tests.serving.stub import SHAPE, VOCAB, stub, text_of

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"cache": "dense", "prefill_rows": 2},
    "dense in turns": {"cache": "dense", "prefill_chunk": 1},
    "dense, read at once": {"cache": "dense", "prefill_rows": 2, "ahead": False},
    "paged": {"cache": "paged", "cache_options": {"page_size": 4, "pages": 6}},
}
PARTS = ("prefill", "insert", "park", "resume", "decode", "clear_rows", "clear_slots")


class Injected(Exception):
    """An error that the test injects."""


class Faults:
    """Makes calls of an engine's arrays fail, before or after the arrays have changed."""

    def __init__(self, engine: serving.Engine, draw: random.Random) -> None:
        self.draw, self.chance, self.raised = draw, 0.0, 0
        for name in PARTS:
            arrays: Any = engine._arrays
            if hasattr(arrays, name):
                setattr(arrays, name, self.around(getattr(arrays, name)))

    def around(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            self.maybe()
            actual = operation(*args, **options)
            self.maybe()
            return actual

        return failing

    def maybe(self) -> None:
        if self.draw.random() < self.chance:
            self.raised += 1
            raise Injected


def request(draw: random.Random, faults: Faults) -> Request:
    def on_token(token: int) -> None:
        faults.maybe()

    prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 10))]
    stop = [draw.randrange(VOCAB)] if draw.random() < 0.3 else []
    return Request(prompt=prompt, max_new_tokens=draw.randint(1, 7), stop=stop, on_token=on_token)


def expected(requests: Request) -> list[int]:
    """Return the whole text, without its stop."""
    text = text_of(requests.prompt, requests.max_new_tokens, shift=1)
    ends = [
        text.index(stop[0])
        for stop in requests.stop
        if not isinstance(stop, int) and stop[0] in text
    ]
    return text[: min(ends, default=len(text))]


def assert_right(handle: Handle) -> None:
    done, text = handle.completion, expected(handle.request)
    assert done is not None
    if done.finish in (Finish.LENGTH, Finish.STOP):
        assert list(done.tokens) == text
    else:
        assert list(done.tokens) == text[: len(done.tokens)]
    assert (done.error is None) == (done.finish is not Finish.FAILED)


def run(kind: str, operations: int, *, seed: int, chance: float) -> tuple[list[Handle], Faults]:
    engine = serving.Engine(
        stub,
        np.int32(1),
        shape=SHAPE,
        slots=3,
        capacity=16,
        queue=4,
        **{"prefill_chunk": 4, **KINDS[kind]},
    )
    draw = random.Random(seed)
    faults, handles = Faults(engine, draw), []
    for _ in range(operations):
        what = draw.choice(["submit", "submit", "step", "step", "step", "step", "cancel"])
        faults.chance = chance
        try:
            if what == "submit":
                handles.append(engine.submit(request(draw, faults)))
            elif what == "step":
                engine.step()
            elif handles:
                draw.choice(handles).cancel()
        except (Injected, QueueFullError):
            pass
        faults.chance = 0.0
        if draw.random() < 0.02:
            assert_held_is_known(engine)
    finish(engine)
    for handle in handles:
        assert_right(handle)
    held = engine.cache_usage()
    assert (set(held.slot_lengths), set(held.row_lengths), held.pages) == ({0}, {0}, 0)
    assert sum(engine.report().finished.values()) == engine.report().requests == len(handles)
    return handles, faults


def finish(engine: serving.Engine) -> None:
    while engine.step():
        pass


def assert_held_is_known(engine: serving.Engine) -> None:
    """Check that the devices hold what the scheduler knows: jobs, and dirty rows and slots."""
    held, scheduler = engine.cache_usage(), engine._scheduler
    for slot, length in enumerate(held.slot_lengths):
        job = scheduler.decoding().get(slot)
        reading = scheduler.slots.get(slot)
        if reading is not None and reading.row is None and job is None:
            assert length == reading.read
        elif job is not None:
            assert length == len(job.request.prompt) + len(job.written) - 1
        elif reading is not None:
            assert length <= reading.read  # what it held after an earlier turn
        else:
            assert length == 0 or slot in scheduler.dirty_slots
    for row, length in enumerate(held.row_lengths):
        if scheduler.space.in_place:
            assert length == 0  # prompts are read in the pages of their slots
        elif row in scheduler.rows:
            assert length == scheduler.rows[row].read
        elif row not in scheduler.dirty_rows:
            assert length == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(but=["dense"])
def test_random_failures_leak_nothing(kind: str) -> None:
    handles, faults = run(kind, 300, seed=4, chance=0.03)
    whys = [handle.completion.finish for handle in handles if handle.completion]
    assert set(whys) == set(Finish)
    assert faults.raised > 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full
def test_no_request_fails_without_failures(kind: str) -> None:
    handles, _ = run(kind, 400, seed=2, chance=0.0)
    whys = [handle.completion.finish for handle in handles if handle.completion]
    assert set(whys) == {Finish.LENGTH, Finish.STOP, Finish.CANCELED}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_operations_leak_nothing(kind: str) -> None:
    handles, faults = run(kind, 10_000, seed=3, chance=0.01)
    assert len(handles) > 500
    assert faults.raised > 100


@pytest.mark.parametrize("part", [part for part in PARTS if part != "clear_rows"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_failure_fails_only_requests_with_lost_arrays(part: str, after: bool) -> None:
    engine = serving.Engine(
        stub,
        np.int32(1),
        shape=SHAPE,
        slots=3,
        capacity=16,
        prefill_chunk=1,
        queue=4,
        **KINDS["dense"],
    )
    requests = [Request(prompt=[at] * 6, max_new_tokens=5) for at in range(5)]
    handles = [engine.submit(item) for item in requests[:4]]
    arrays: Any = engine._arrays
    operation, raised = getattr(arrays, part), []

    def failing(*args: Any, **options: Any) -> Any:
        if raised:
            return operation(*args, **options)
        raised.append(part)
        if after:
            operation(*args, **options)
        raise Injected

    setattr(arrays, part, failing)
    with pytest.raises(Injected, match=r"^$"):
        finish(engine)
    handles.append(engine.submit(requests[4]))
    finish(engine)
    for handle in handles:
        assert_right(handle)
    failed = [
        handle
        for handle in handles
        if handle.completion and handle.completion.finish is Finish.FAILED
    ]
    # Slots hold prompts that wait for their next turn, so an insert may lose them.
    assert bool(failed) == (after and part != "park")
    assert all(
        "were lost" in str(handle.completion.error) for handle in failed if handle.completion
    )
    assert handles[4] not in failed
