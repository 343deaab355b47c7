"""A paged engine: pages as texts grow, preemption, shared prefixes, windows, one table."""

from __future__ import annotations

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention, serving
from shardwright.manager import context
from shardwright.serving import Finish, Request
from shardwright.serving import arrays as arrays_module
from shardwright.testing import cpu_mesh
from shardwright.vocabulary.modes import MODE_DECODE
from tests.serving.stub import SHAPE, VOCAB, stub, text_of
from tests.serving.test_threads import serve_in_threads

SHIFT = 1


def make(*, pages: int, **options: Any) -> serving.Engine:
    given: dict[str, Any] = {
        "slots": 4,
        "capacity": 24,
        "prefill_chunk": 4,
        "shape": SHAPE,
        "cache": "paged",
        "cache_options": {"page_size": 4, "pages": pages},
    }
    return serving.Engine(stub, np.int32(SHIFT), **given | options)


def random_requests(count: int, *, prefix: int) -> list[Request]:
    draw = random.Random(5)
    starts = [[draw.randrange(VOCAB) for _ in range(prefix)] for _ in range(2)]
    return [
        Request(
            prompt=[
                *draw.choice(starts),
                *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 4))),
            ],
            max_new_tokens=draw.randint(1, 10),
        )
        for _ in range(count)
    ]


def assert_texts(requests: list[Request], results: list[serving.Completion]) -> None:
    for request, done in zip(requests, results, strict=True):
        assert list(done.tokens) == text_of(request.prompt, request.max_new_tokens, shift=SHIFT)
        assert done.finish is Finish.LENGTH


@pytest.mark.parametrize(
    "options",
    [{}, {"decode_steps": 3}, {"prefill_rows": 2}],
    ids=["one", "three steps", "two rows"],
)
@pytest.mark.full(but=["one"])
def test_preempted_requests_get_their_texts(options: dict[str, Any]) -> None:
    engine, requests = make(pages=9, **options), random_requests(40, prefix=8)
    assert_texts(requests, engine.run(requests))
    report = engine.report()
    assert report.preempted
    assert report.shared_pages > 20
    # Shared pages are not read again, although preempted requests read their texts again.
    assert report.prompt_tokens < sum(len(request.prompt) for request in requests)
    assert engine.cache_usage().pages == 0


def test_pages_are_taken_as_a_text_grows() -> None:
    engine = make(pages=12, slots=1)
    engine.submit(Request(prompt=[1, 2, 3], max_new_tokens=12))
    held = []
    while engine.step():
        held.append(engine.cache_usage().pages)
    # The last token is in flight when the pages are given back.
    assert held.pop() == 0
    assert held[0] == 1
    assert held[-1] == 4  # 14 tokens of 4 per page
    assert held == sorted(held)


def test_eight_threads_share_pages_and_lose_nothing() -> None:
    engine = make(pages=9, queue=64)
    handles = serve_in_threads(engine, 64, threads=8)
    for handle in handles:
        done = handle.result()
        text = text_of(handle.request.prompt, handle.request.max_new_tokens, shift=SHIFT)
        assert list(done.tokens) == text[: len(done.tokens)]
        assert done.finish is Finish.CANCELED or len(done.tokens) == len(text)
    assert (engine.cache_usage().pages, engine.idle) == (0, True)


def test_new_weights_share_no_page_of_the_old_ones() -> None:
    engine = make(pages=12, slots=1)
    request = Request(prompt=[1] * 9, max_new_tokens=2)
    engine.run([request, request])
    assert engine.report().shared_pages == 2
    engine.update_params(np.int32(SHIFT + 1))
    done = engine.run([request])[0]
    assert engine.report().shared_pages == 2
    assert list(done.tokens) == text_of(request.prompt, 2, shift=SHIFT + 1)
    engine.run([request])
    assert engine.report().shared_pages == 4


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("long", [1, 3])
def test_short_prompts_are_read_between_chunks_of_long_ones(long: int) -> None:
    """A prompt waits for one chunk of every other one, whatever their lengths."""
    engine = make(pages=300, capacity=400, prefill_chunk=2)
    for at in range(long):
        engine.submit(Request(prompt=[at] * 300, max_new_tokens=1))
    engine.step()
    short = engine.submit(Request(prompt=[1], max_new_tokens=1))
    steps = 0
    while short.completion is None:
        engine.step()
        steps += 1
    assert steps <= long + 1
    short.result()


def placed(x: Any) -> Any:
    """Return activations sharded by batch alone: Explicit axes must be told."""
    return x if context.current() is None else sw.shard(x, sw.BATCH, *[sw.EMPTY] * (x.ndim - 1))


def attending(layers: int, window: int | None) -> Any:
    """Return a model whose layers attend, in decode with the compiled program of an engine."""

    def model(params: Any, tokens: Any, caches: Any, valid: Any) -> Any:
        # Not `params[tokens]`: over Explicit axes, an index must not be sharded.
        rows = jax.nn.one_hot(tokens, 16) @ params
        x = placed(rows.reshape(*tokens.shape, 2, 8))
        out = []
        for cache in caches:
            done = attention.append_and_attend(
                x, x, x, cache, valid=valid, window=None if window is None else (window - 1, 0)
            )
            x = x + placed(done.o)
            out.append(done.cache)
        return jnp.einsum("bthd,vhd->btv", x, params.reshape(-1, 2, 8)), out

    model.__name__ = f"model_{layers}"
    return model


def attending_engine(
    layers: int, *, pm: Any = None, window: int | None = None, **options: Any
) -> serving.Engine:
    shape = serving.CacheShape(
        layers=layers, kv_heads=2, head_dim=8, dtype="float32", window=window
    )
    params = jax.random.normal(jax.random.key(0), (16, 16))
    if pm is not None:
        params = pm.shard(params, (sw.EMPTY, sw.EMPTY), role="param")
    given: dict[str, Any] = {
        "slots": 4,
        "capacity": 64,
        "prefill_chunk": 8,
        "cache": "paged",
        "cache_options": {"page_size": 4, "pages": 32},
        "manager": pm,
        "shape": shape,
    }
    return serving.Engine(attending(layers, window), params, **given | options)


@pytest.mark.full
def test_pages_outside_of_a_window_are_given_back() -> None:
    engine = attending_engine(1, window=6, slots=1)
    request = Request(prompt=[3] * 20, max_new_tokens=30)
    handle, most = engine.submit(request), 0
    while engine.step():
        most = max(most, engine.cache_usage().pages)
    # A window of 6 touches three pages, and a chunk of 8 two more.
    assert most <= 5
    dense = attending_engine(1, window=6, slots=1, cache="dense", cache_options={})
    assert handle.result().tokens == dense.run([request])[0].tokens


MESHES = {"serve_tp": "dp:2,tp:2", "serve_long_context": "dp:2,sp:2,tp:2"}


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("preset", MESHES)
@pytest.mark.full
def test_sharded_pages_change_no_text(preset: str, axis_types: Any) -> None:
    mesh = cpu_mesh(MESHES[preset], axis_types=axis_types)
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=mesh)
    requests = random_requests(8, prefix=8)
    tight = {"page_size": 4, "pages": 12}
    sharded = attending_engine(1, pm=pm, cache_options=tight, decode_steps=2)
    single = attending_engine(1, slots=1)
    results = sharded.run(requests)
    assert sharded.report().shared_pages > 0
    assert [done.tokens for done in results] == [
        single.run([request])[0].tokens for request in requests
    ]


def integer_collectives(engine: serving.Engine) -> tuple[int, int]:
    """Return the collectives of integers in a decode step, and all collectives."""
    arrays: Any = engine._arrays
    setup = arrays._setup
    batch = arrays._batch(4, {})
    with setup.under(MODE_DECODE):
        program = arrays_module._decode_pages.lower(
            setup.model, arrays.spec, 1, arrays.pools, arrays.last, setup.params, batch
        ).compile()
    results = re.findall(
        r"= (\S+) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)",
        program.as_text(),
    )
    return sum(result.startswith(("s32", "pred")) for result in results), len(results)


@pytest.mark.full
def test_tables_are_gathered_once_for_all_layers() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("serve_long_context"), mesh=cpu_mesh("dp:2,sp:2,tp:2")
    )
    counts = [integer_collectives(attending_engine(layers, pm=pm)) for layers in (1, 3)]
    assert counts[0][0] == counts[1][0] <= 2
    assert counts[0][1] < counts[1][1]
