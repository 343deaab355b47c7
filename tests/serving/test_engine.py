"""The engine with a model of arithmetic: order, streaming, ends of requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import _jax, serving
from shardwright.errors import QueueFullError, ServingError
from shardwright.serving import Finish, Phase, Request
from tests.raising import Facts, facts, raises
from tests.serving.stub import SHAPE, VOCAB, stub, text_of

SHIFT = 5
TEXT = [8, 6, 11, 5, 7, 2]  # after [1]
PAGED: dict[str, Any] = {"cache": "paged", "cache_options": {"page_size": 4, "pages": 5}}


def make(model: Any = stub, **options: Any) -> serving.Engine:
    given: dict[str, Any] = {
        "slots": 2,
        "capacity": 16,
        "prefill_chunk": 3,
        "shape": SHAPE,
    } | options
    return serving.Engine(model, np.int32(SHIFT), **given)


def assert_empty(engine: serving.Engine) -> None:
    held = engine.cache_usage()
    assert engine.idle
    assert set(held.slot_lengths) == {0}
    assert set(held.row_lengths) == {0}
    assert held.pages == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_rows": 2}, PAGED, PAGED | {"prefill_rows": 2}],
    ids=["one", "two", "paged", "paged two"],
)
@pytest.mark.full(but=["one"])
def test_ragged_requests_get_their_texts(options: dict[str, Any]) -> None:
    engine = make(**options)
    draw = np.random.default_rng(0)
    requests = [
        Request(
            prompt=draw.integers(0, VOCAB, draw.integers(1, 12)),
            max_new_tokens=int(draw.integers(1, 6)),
        )
        for _ in range(12)
    ]
    for request, done in zip(requests, engine.run(requests), strict=True):
        assert list(done.tokens) == text_of(request.prompt, request.max_new_tokens, shift=SHIFT)
        assert done.finish is Finish.LENGTH
    assert_empty(engine)


def test_tokens_stream_while_others_prefill() -> None:
    engine, seen = make(), []
    first = engine.submit(
        Request(prompt=[1], max_new_tokens=6, on_token=lambda token: seen.append(("first", token)))
    )
    second = engine.submit(
        Request(
            prompt=[1] * 9, max_new_tokens=2, on_token=lambda token: seen.append(("second", token))
        )
    )
    while engine.step():
        pass
    order = [name for name, _ in seen]
    # The second prompt takes three chunks; the first request gets a token beside each of them.
    assert order == ["first", "first", "first", "first", "second", "first", "second", "first"]
    assert [token for name, token in seen if name == "first"] == TEXT == list(first)
    assert second.result().tokens == tuple(text_of([1] * 9, 2, shift=SHIFT))
    assert_empty(engine)


def test_iterating_over_handle_drives_engine() -> None:
    engine = make()
    other = engine.submit(Request(prompt=[2], max_new_tokens=3))
    handle = engine.submit(Request(prompt=[3, 4], max_new_tokens=4))
    assert (handle.phase, handle.tokens, handle.completion) == (Phase.QUEUED, (), None)
    assert list(handle) == text_of([3, 4], 4, shift=SHIFT) == list(handle.tokens)
    assert other.result().tokens == tuple(text_of([2], 3, shift=SHIFT))
    assert not engine.step()
    assert_empty(engine)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ((), 6),
        ((0,), 6),
        ((8,), 0),
        ((5,), 3),
        (([8, 6],), 0),
        (([6, 11, 5],), 1),
        (([8, 0], [6, 5]), 6),
        (([11, 5, 7, 1], 7), 4),
        (([7, 2, 0],), 6),
    ],
)
def test_stop_sequence_is_not_part_of_text(stop: Any, kept: int) -> None:
    engine, seen = make(), []
    done = engine.submit(
        Request(prompt=[1], max_new_tokens=6, stop=stop, on_token=seen.append)
    ).result()
    assert list(done.tokens) == TEXT[:kept] == seen
    assert done.finish is (Finish.STOP if kept < 6 else Finish.LENGTH)
    assert_empty(engine)


def test_cancel_in_every_phase() -> None:
    engine = make(ahead=False)
    decoding, prefilling, queued, last = (
        engine.submit(Request(prompt=[at] * 5, max_new_tokens=9)) for at in (1, 2, 3, 4)
    )
    for _ in range(3):
        engine.step()
    assert [job.phase for job in (decoding, prefilling, queued)] == [
        Phase.DECODING,
        Phase.PREFILLING,
        Phase.QUEUED,
    ]
    assert [job.cancel() for job in (decoding, prefilling, queued, queued)] == [
        True,
        True,
        True,
        False,
    ]
    assert set(engine.cache_usage().slot_lengths) | set(engine.cache_usage().row_lengths) == {0}
    assert decoding.result().tokens == tuple(
        text_of([1] * 5, 9, shift=SHIFT)[: len(decoding.tokens)]
    )
    assert (len(decoding.tokens), queued.result().finish) == (3, Finish.CANCELED)
    assert list(last) == text_of([4] * 5, 9, shift=SHIFT)
    assert_empty(engine)


def test_callback_may_cancel_and_submit() -> None:
    engine, more = make(), []

    def on_token(token: int) -> None:
        if token == TEXT[2]:
            handle.cancel()
            more.append(engine.submit(Request(prompt=[1], max_new_tokens=2)))

    handle = engine.submit(Request(prompt=[1], max_new_tokens=6, on_token=on_token))
    assert handle.result().finish is Finish.CANCELED
    assert handle.tokens == tuple(TEXT[:3])
    assert list(more[0]) == TEXT[:2]
    assert_empty(engine)


@pytest.mark.parametrize("at", [0, 3, 5])
def test_failing_callback_fails_only_its_request(at: int) -> None:
    engine, error = make(), KeyError("theirs")

    def on_token(token: int) -> None:
        if token == TEXT[at]:
            raise error

    failing = engine.submit(Request(prompt=[1], max_new_tokens=6, on_token=on_token))
    other = engine.submit(Request(prompt=[1], max_new_tokens=6))
    assert list(other) == TEXT
    assert failing.completion is not None
    assert (failing.completion.finish, failing.completion.error) == (Finish.FAILED, error)
    assert engine.report().finished == {"length": 1, "stop": 0, "canceled": 0, "failed": 1}
    assert_empty(engine)


def test_step_inside_callback() -> None:
    engine = make()
    done = engine.submit(
        Request(prompt=[1], max_new_tokens=2, on_token=lambda token: engine.step())
    ).result()
    assert done.finish is Finish.FAILED
    with raises(ServingError, "step", path="on_token"):
        raise done.error or AssertionError
    assert_empty(engine)


def test_queue_is_bounded_and_run_waits() -> None:
    engine = make(queue=2)
    for _ in range(2):
        engine.submit(Request(prompt=[1], max_new_tokens=2))
    with raises(QueueFullError, 2, path="queue"):
        engine.submit(Request(prompt=[1], max_new_tokens=2))
    assert [done.tokens for done in engine.run([Request(prompt=[1], max_new_tokens=2)] * 5)] == [
        tuple(TEXT[:2])
    ] * 5
    assert engine.report().refused == 1
    assert_empty(engine)


def test_submit_refuses_impossible_requests() -> None:
    engine = make(**PAGED)
    for request, says in (
        (
            Request(prompt=[1] * 10, max_new_tokens=8),
            facts(10, 8, 17, 16, path="request", fix="sliding"),
        ),
        (
            Request(prompt=[1, VOCAB], max_new_tokens=1),
            facts(13, "model", path="prompt", fix="model"),
        ),
        (
            Request(prompt=[1], max_new_tokens=1, stop=[[2, 40]]),
            facts(40, "model", 13, path="stop", fix="model"),
        ),
    ):
        with raises(ServingError, says):
            engine.submit(request)
        with raises(ServingError, says):
            engine.run([Request(prompt=[1], max_new_tokens=1), request])
    assert (engine.report().requests, engine.report().refused) == (0, 3)
    assert_empty(engine)


def test_compile_leaves_nothing_to_compile() -> None:
    engine = make(slots=3)
    engine.compile()
    assert_empty(engine)
    with _jax.watch_compilations() as compilations:
        done = engine.run(
            [
                Request(prompt=[1], max_new_tokens=6),
                Request(prompt=[2] * 7, max_new_tokens=2, stop=[[1, 2]]),
            ]
        )
    assert compilations.compiled == []
    assert list(done[0].tokens) == TEXT
    assert_empty(engine)


def test_report_counts() -> None:
    now = iter(range(10_000))
    engine = make(clock=lambda: float(next(now)))
    engine.run([Request(prompt=[1] * 4, max_new_tokens=6), Request(prompt=[2], max_new_tokens=1)])
    report = engine.report()
    assert (
        report.requests,
        report.prompt_tokens,
        report.new_tokens,
        report.prefill_steps,
        report.decode_steps,
    ) == (2, 5, 7, 3, 5)
    assert (report.slots_in_use, report.slots, report.tokens_per_second) == (
        1.0,
        2,
        7 / report.busy,
    )
    assert report.first_token is not None
    assert report.per_token is not None
    assert report.per_token.p50 <= report.per_token.p90 <= report.per_token.p99
    assert "2 accepted, 0 refused" in str(report)
    assert report.to_json()["finished"]["length"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slots": 0}, facts(0, path="slots", fix="slots")),
        (
            {"slots": True, "queue": 1.5},
            (facts("True", path="slots", fix="1"), facts("1.5", path="queue", fix="1")),
        ),
        ({"prefill_chunk": -1}, facts(-1, path="prefill_chunk", fix="prefill_chunk")),
        (
            {"cache_options": {"overflow": "error"}},
            facts("overflow", "error", "step", path="cache_options"),
        ),
    ],
)
def test_invalid_counts(options: dict[str, Any], says: Facts) -> None:
    with raises(ServingError, says):
        make(**options)


def one_logit(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
    logits, new = stub(params, tokens, held, valid)
    return logits[:, 0], new


def half(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
    logits, new = stub(params, tokens, held, valid)
    return logits, new[:1]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (one_logit, facts("(2, 13)", "(2, 1)", path="model", fix="q_length")),
        (half, facts("caches", path="model", fix="q_length")),
    ],
)
def test_invalid_model_result(model: Any, says: Facts) -> None:
    with raises(ServingError, says):
        make(model)


def forgets(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
    """Append to the first cache only."""
    logits, new = stub(params, tokens, held, valid)
    return logits, [
        new[0],
        *(dataclasses.replace(cache, length=cache.length + 0) for cache in held[1:]),
    ]


def fills(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
    """Append padding too."""
    logits, _ = stub(params, tokens, held, valid)
    return logits, stub(params, tokens, held, jnp.ones_like(valid))[1]


def divides(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
    """Return logits that are not numbers, for the prompts that hold a 12."""
    logits, new = stub(params, tokens, held, valid)
    return logits / (tokens != 12)[:, :, None] * 0 + logits, new


@pytest.mark.full(but=["fills-says1"])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (forgets, facts(0, "tokens", "cache", fix="done.cache")),
        (
            fills,
            facts(0, "tokens", fix=("append_and_attend", "done.cache")),
        ),
        (divides, facts(0, "NaN", fix="model")),
    ],
)
def test_device_error_fails_request(model: Any, says: Facts) -> None:
    engine = make(model, slots=1)
    done = engine.submit(Request(prompt=[12], max_new_tokens=2)).result()
    assert done.finish is Finish.FAILED
    with raises(ServingError, says):
        raise done.error or AssertionError
    assert_empty(engine)


@pytest.mark.full(but=["3"])
@pytest.mark.parametrize("long", [1, 3])
def test_a_short_prompt_waits_for_one_turn_of_each_long_one(long: int) -> None:
    """At the default of one row, a prompt waits for four chunks of every other one."""
    engine = make(slots=4, capacity=200, prefill_chunk=2)
    others = [Request(prompt=[at] * 150, max_new_tokens=2) for at in range(long)]
    handles = [engine.submit(other) for other in others]
    engine.step()
    short, steps = engine.submit(Request(prompt=[1] * 5, max_new_tokens=1)), 0
    while short.completion is None:
        engine.step()
        steps += 1
    assert steps <= 4 * long + 3
    for handle in [*handles, short]:
        asked = handle.request
        text = text_of(asked.prompt, asked.max_new_tokens, shift=SHIFT)
        assert list(handle.result().tokens) == text
    assert_empty(engine)
