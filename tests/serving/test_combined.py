"""Everything at once: threads, preemption, shared prefixes, new weights and cancels."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from decoder.config import decoder_specs

import shardwright as sw
from shardwright import serving
from shardwright.serving import Completion, Finish, Handle, Request, Sampling
from shardwright.testing import cpu_mesh
from tests.serving.stub import SHAPE, VOCAB, stub
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
def weights_of(version: int) -> Any:
    """Return the weights of a version. No two versions are equal."""
    if not version:
        return weights()
    pm = manager_of("single")
    drawn = pm.init(decoder_specs(TINY), jax.random.key(40 + version))
    return jax.tree.map(lambda x: 1.5 * np.asarray(x), drawn)


@functools.cache
def single() -> serving.Engine:
    return engine("paged", manager_of("single"), slots=1)


@functools.cache
def alone(count: int, at: int, version: int) -> Completion:
    """Return what a version of the weights writes for one request without any other."""
    if single().version != version:
        single().update_params(weights_of(version), version=version)
    return single().run([ragged(count)[at]])[0]


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


def serve(
    running: serving.Engine, given: list[Request], *, threads: int, pushed: list[Any]
) -> list[Handle]:
    """Submit from several threads, of which one pushes weights, and cancel one request in five."""
    handles, new = dict[int, Handle](), iter(pushed)

    def submit(first: int) -> None:
        draw = random.Random(first)
        for at in range(first, len(given), threads):
            handles[at] = running.submit(given[at])
            if first == 0:  # each request of this thread is served by one version alone
                handles[at].result()
                for version in itertools.islice(new, 1):
                    running.update_params(version)
            elif draw.random() < 0.2:
                for _ in zip(range(draw.randint(1, 4)), handles[at], strict=False):
                    pass
                handles[at].cancel()
            elif draw.random() < 0.3:
                handles[at].result()
        for at in range(first, len(given), threads):
            handles[at].result()

    in_threads([functools.partial(submit, first) for first in range(threads)])
    return [handles[at] for at in range(len(given))]


def crowd(running: serving.Engine) -> list[Handle]:
    """Serve requests that preempt each other, share pages, and of which one is canceled.

    Whether the requests of the threads do so depends on the threads.
    """
    request = Request(prompt=[at % 11 for at in range(17)], max_new_tokens=24)
    handles = [running.submit(request) for _ in range(8)]
    assert handles[-1].cancel()
    for handle in handles:
        handle.result()
    return handles


def check_report(running: serving.Engine, handles: list[Handle], pushes: int) -> None:
    report, finishes = running.report(), {handle.completion.finish for handle in handles}
    assert finishes == {Finish.LENGTH, Finish.CANCELED}
    assert report.preempted > 0
    assert report.shared_pages > 0
    assert running.version == pushes
    assert sum(report.finished.values()) == report.requests == len(handles)
    assert (running.idle, running.cache_usage().pages) == (True, 0)


def check(strategy: str, count: int, **options: Any) -> None:
    """Compare each request that one version served with that version serving it alone."""
    running = engine("paged", manager_of(strategy), **TIGHT, **options)
    train = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=cpu_mesh("fsdp:4,tp:2"))
    specs = decoder_specs(TINY)
    pushed = [train.shard(weights_of(at), specs, role="param") for at in range(1, 5)]
    handles = serve(running, ragged(count), threads=8, pushed=pushed)
    served = []
    for at, handle in enumerate(handles):
        done = handle.completion
        assert done is not None
        assert list(done.versions) == sorted(set(done.versions))
        if len(done.versions) != 1:
            continue
        served.append(done.versions[0])
        expected = alone(count, at, served[-1])
        if done.finish is Finish.LENGTH:
            assert done.tokens == expected.tokens
        else:
            assert done.tokens == expected.tokens[: len(done.tokens)]
    assert len(set(served)) >= 3
    assert len(served) >= count // 4  # at most 7 of 8 slots are busy in each of 4 pushes
    check_report(running, [*handles, *crowd(running)], 4)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"decode_steps": 3}])
@pytest.mark.ci
def test_every_token_is_of_a_version_that_is_reported(options: dict[str, Any]) -> None:
    """The text of the stub shows which version drew each token, across preemption too."""
    count = 60
    running = serving.Engine(
        stub,
        np.int32(0),
        shape=SHAPE,
        capacity=64,
        prefill_chunk=8,
        cache="paged",
        **TIGHT,
        **options,
    )
    given = [
        dataclasses.replace(
            request,
            prompt=[token % VOCAB for token in request.prompt],
            max_new_tokens=request.max_new_tokens + 4,
            sampling=Sampling(),
        )
        for request in ragged(count)
    ]
    handles = serve(running, given, threads=8, pushed=[np.int32(at) for at in range(1, 5)])
    # The threads may push between two requests. This one meets a push for certain.
    handles.append(running.submit(Request(prompt=[3, 1], max_new_tokens=16)))
    next(iter(handles[-1]))
    running.update_params(np.int32(5))
    handles[-1].result()
    handles += crowd(running)
    several = 0
    for handle in handles:
        done = handle.completion
        assert done is not None
        total, drew = sum(handle.request.prompt), []
        for token in done.tokens:
            drew.append((token - 3 * total) % VOCAB)
            total += token
        assert drew == sorted(drew)
        assert {*drew} <= {*done.versions}
        assert list(done.versions) == sorted(set(done.versions))
        several += len({*drew}) > 1
    assert several > 0
    check_report(running, handles, 5)


@pytest.mark.full
def test_forty_requests_equal_requests_alone() -> None:
    check("serve_tp", 40)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"decode_steps": 3}, {"prefill_rows": 4}])
@pytest.mark.parametrize("strategy", ["single", "serve_tp", "serve_long_context"])
@pytest.mark.alternate
def test_sixty_four_requests_equal_requests_alone(strategy: str, options: dict[str, Any]) -> None:
    check(strategy, 64, **options)
