"""Threads and tasks share an engine: nobody waits in `submit`, and texts stay the same."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest

from shardwright import serving
from shardwright.errors import ServingError
from shardwright.serving import Finish, Request
from tests.serving.stub import SHAPE, stub, text_of

PROMPT = [1, 2, 3]
TEXT = text_of(PROMPT, 5, shift=1)


def make(**options: Any) -> serving.Engine:
    given: dict[str, Any] = {"slots": 3, "capacity": 16, "prefill_chunk": 4, "shape": SHAPE}
    return serving.Engine(stub, np.int32(1), **given | options)


def ask(**options: Any) -> Request:
    return Request(**{"prompt": PROMPT, "max_new_tokens": 5, **options})


def test_submit_and_cancel_do_not_wait_for_a_step() -> None:
    entered, leave = threading.Event(), threading.Event()

    def wait(token: int) -> None:
        entered.set()
        assert leave.wait(60)

    engine = make()
    first = engine.submit(ask(on_token=wait))
    driver = threading.Thread(target=first.result)
    driver.start()
    assert entered.wait(60)
    # The step of the other thread waits in the callback until `leave` is set.
    second, third = engine.submit(ask()), engine.submit(ask())
    assert third.cancel()
    assert (engine.waiting, third.completion) == (2, None)
    leave.set()
    driver.join(60)
    assert (list(first), list(second)) == (TEXT, TEXT)
    assert third.result().finish is Finish.CANCELED
    assert not third.cancel()
    assert engine.idle


@pytest.mark.full(but=["thread"])
@pytest.mark.parametrize("kind", ["thread", "task"])
def test_result_waits_for_the_callbacks_of_a_step(kind: str) -> None:
    """The last callback may still fail the request, so no result is given before it returns."""
    last, leave = threading.Event(), threading.Event()

    def fail(token: int) -> None:
        if len(handle.tokens) == 5:
            last.set()
            assert leave.wait(60)
            raise ValueError("the client is gone")

    engine, results = make(), list[Finish]()
    handle = engine.submit(ask(on_token=fail))
    if kind == "thread":
        driver = threading.Thread(target=handle.result)
    else:
        driver = threading.Thread(target=lambda: asyncio.run(handle.wait()))
    driver.start()
    assert last.wait(60)

    def wait_for_result() -> None:
        done = handle.result() if kind == "thread" else asyncio.run(handle.wait())
        results.append(done.finish)

    other = threading.Thread(target=wait_for_result)
    other.start()
    other.join(0.3)
    assert results == []
    leave.set()
    for thread in (driver, other):
        thread.join(60)
    assert results == [Finish.FAILED]


def test_step_within_a_step_is_refused_in_its_own_thread() -> None:
    engine = make()
    handle = engine.submit(ask(on_token=lambda token: engine.step()))
    error = handle.result().error
    assert isinstance(error, ServingError)
    assert "step() was called from within a step" in str(error)


def serve_in_threads(engine: serving.Engine, count: int, *, threads: int) -> list[serving.Handle]:
    """Submit from several threads, cancel some requests at random, and wait for all."""
    handles: list[serving.Handle] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            for _ in range(count // threads):
                prompt = [draw.randrange(13) for _ in range(draw.randint(1, 8))]
                handle = engine.submit(ask(prompt=prompt, max_new_tokens=draw.randint(1, 8)))
                handles.append(handle)
                if draw.random() < 0.3:
                    handle.cancel()
                if draw.random() < 0.5:
                    handle.result()
        except BaseException as error:
            errors.append(error)
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert errors == []
    for handle in handles:
        handle.result()
    return handles


def test_eight_threads_get_their_texts() -> None:
    engine = make(queue=64)
    handles = serve_in_threads(engine, 64, threads=8)
    assert len(handles) == 64
    finishes = set()
    for handle in handles:
        done = handle.result()
        finishes.add(done.finish)
        text = text_of(handle.request.prompt, handle.request.max_new_tokens, shift=1)
        assert list(done.tokens) == text[: len(done.tokens)]
        assert done.finish is Finish.CANCELED or len(done.tokens) == len(text)
    assert finishes == {Finish.CANCELED, Finish.LENGTH}
    assert sum(engine.report().finished.values()) == engine.report().requests == 64
    assert engine.idle


def test_tasks_iterate_over_tokens() -> None:
    engine, steps = make(), []
    run = engine._loop.step

    def counted() -> None:
        steps.append(threading.get_ident())
        run()

    engine._loop.step = counted  # type: ignore[method-assign]

    async def read(handle: serving.Handle) -> list[int]:
        return [token async for token in handle]

    async def leave_early(handle: serving.Handle) -> int:
        async for token in handle:
            return token
        raise AssertionError

    async def main() -> list[Any]:
        handles = [engine.submit(ask()) for _ in range(4)]
        left = asyncio.create_task(read(handles[3]))
        await asyncio.sleep(0)
        left.cancel()  # its task ends, its request does not
        reads = [read(handles[0]), read(handles[1]), leave_early(handles[2])]
        results = await asyncio.gather(*reads)
        return [*results, (await handles[3].wait()).tokens]

    assert asyncio.run(main()) == [TEXT, TEXT, TEXT[0], tuple(TEXT)]
    assert engine.idle
    # Tasks share steps: four requests in three slots take fewer than one after the other.
    assert len(steps) < 4 * len(TEXT)
    assert set(steps) != {threading.get_ident()}


def test_async_iteration_raises_the_error_of_a_step() -> None:
    engine = make()

    def fail() -> None:
        raise RuntimeError("injected")

    engine._loop._decode = fail  # type: ignore[method-assign]

    async def read() -> list[int]:
        return [token async for token in engine.submit(ask())]

    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(read())
