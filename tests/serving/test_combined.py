"""Everything at once: threads, preemption, shared prefixes, new weights and cancels."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decoder.config import decoder_specs

import shardwright as sw
from shardwright import serving
from shardwright.serving import Completion, Finish, Handle, Request, Sampling
from shardwright.testing import cpu_mesh
from tests.serving.test_same_text import TINY, engine, manager_of, weights

# Pages for one text of the longest kind and a half, so that eight slots compete for them.
TIGHT: dict[str, Any] = {"cache_options": {"page_size": 8, "pages": 12}, "slots": 8}


def ragged(count: int) -> list[Request]:
    """Prompts of 1 to 40 tokens. Two of three begin with one of two common starts."""
    draw = np.random.default_rng(11)
    starts = [draw.integers(0, 256, 16) for _ in range(2)]
    values = []
    for at in range(count):
        start = starts[at % 3][: 16 if at % 2 else 8] if at % 3 < 2 else starts[0][:0]
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=at) if at % 2 else Sampling()
        values.append(
            Request(
                prompt=[*start, *draw.integers(0, 256, int(draw.integers(1, 24)))],
                max_new_tokens=int(draw.integers(1, 25)),
                sampling=sampling,
            )
        )
    return values


@functools.cache
def alone(count: int) -> list[Completion]:
    single = engine("paged", manager_of("single"), slots=1)
    return [single.run([request])[0] for request in ragged(count)]


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run functions, each in a thread of its own. Raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def serve(running: serving.Engine, count: int, *, threads: int) -> list[Handle]:
    """Submit from several threads, cancel one request in five, and push weights meanwhile."""
    given, handles = ragged(count), dict[int, Handle]()
    train = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    pushed = train.shard(weights(), decoder_specs(TINY), role="param")

    def submit(first: int) -> None:
        draw = random.Random(first)
        for at in range(first, count, threads):
            handles[at] = running.submit(given[at])
            if draw.random() < 0.2:
                for _ in zip(range(draw.randint(1, 4)), handles[at], strict=False):
                    pass
                handles[at].cancel()
            elif draw.random() < 0.3:
                handles[at].result()

    def push() -> None:
        for _ in range(4):
            running.update_params(pushed)

    in_threads([functools.partial(submit, first) for first in range(threads)] + [push])
    for handle in handles.values():
        handle.result()
    return [handles[at] for at in range(count)]


def check(strategy: str, count: int, **options: Any) -> None:
    running = engine("paged", manager_of(strategy), **TIGHT, **options)
    handles = serve(running, count, threads=8)
    finishes = set()
    for handle, expected in zip(handles, alone(count), strict=True):
        done = handle.completion
        assert done is not None
        finishes.add(done.finish)
        if done.finish is Finish.LENGTH:
            assert done.tokens == expected.tokens
        else:
            assert done.finish is Finish.CANCELED
            assert done.tokens == expected.tokens[: len(done.tokens)]
    assert finishes == {Finish.LENGTH, Finish.CANCELED}
    report = running.report()
    assert report.preempted > 0
    assert report.shared_pages > 0
    assert running.version == 4
    assert sum(report.finished.values()) == report.requests == count
    assert (running.idle, running.held().pages) == (True, 0)


@pytest.mark.wide
def test_forty_requests_equal_requests_alone() -> None:
    check("serve_tp", 40)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"decode_steps": 3}, {"prefill_rows": 4}])
@pytest.mark.parametrize("strategy", ["single", "serve_tp", "serve_long_context"])
def test_sixty_four_requests_equal_requests_alone(strategy: str, options: dict[str, Any]) -> None:
    check(strategy, 64, **options)
