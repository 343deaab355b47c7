"""Steps that begin before the tokens of the step before them are read change no request."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from shardwright import serving
from shardwright.errors import ServingError
from shardwright.serving import Completion, Finish, Handle, Request, Sampling
from tests.raising import raises
from tests.serving.stub import SHAPE, VOCAB, stub, text_of
from tests.serving.test_same_text import engine as engine_of_decoder
from tests.serving.test_same_text import manager_of

KINDS: dict[str, dict[str, Any]] = {
    "dense": {"cache": "dense", "prefill_rows": 2},
    "dense in turns": {"cache": "dense", "prefill_chunk": 1},
    "sliding": {"cache": "sliding", "shape": dataclasses.replace(SHAPE, window=6)},
    "quantized": {"cache": "quantized"},
    "paged": {"cache": "paged", "cache_options": {"page_size": 4, "pages": 8}, "prefill_rows": 2},
    "paged rows": {"cache": "paged", "cache_options": {"page_size": 4, "pages": 15}},
}
CASES = [(kind, decode_steps) for kind in KINDS for decode_steps in (1, 3)]


def make(kind: str = "dense", model: Any = stub, **options: Any) -> serving.Engine:
    given = {"shape": SHAPE, "slots": 4, "capacity": 20, "prefill_chunk": 3, **KINDS[kind]}
    if kind == "paged rows":
        # Prefill with weights of its own reads into dense rows.
        given["prefill_params"] = np.int32(1)
    return serving.Engine(model, np.int32(1), **given | options)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and what its callback does: it raises an error or cancels at a token."""

    request: Request
    breaks_at: int | None
    cancels_at: int | None


def asked(count: int, vocabulary: int = VOCAB, longest: int = 12) -> list[Asked]:
    draw, given = random.Random(count), []
    for at in range(count):
        sampling = Sampling(
            temperature=draw.choice([0.7, 3.0]), top_k=draw.choice([None, 5]), seed=at
        )
        stop = [draw.randrange(vocabulary), [draw.randrange(vocabulary) for _ in range(2)]]
        request = Request(
            prompt=[draw.randrange(vocabulary) for _ in range(draw.randint(1, longest))],
            # The longest text fills its slot.
            max_new_tokens=draw.choice([1, 2, draw.randint(3, 8), 9]),
            sampling=draw.choice([sampling, Sampling()]),
            stop=stop if draw.random() < 0.5 else [],
        )
        breaks, cancels = (draw.randint(1, 4) if draw.random() < 0.15 else None for _ in range(2))
        given.append(Asked(request, breaks, cancels))
    return given


def serve(engine: serving.Engine, given: list[Asked]) -> list[tuple[Completion, list[int]]]:
    """Return the result of each request, and the tokens that its callback got."""
    results, handles = [], dict[int, Handle]()
    for at, each in enumerate(given):
        seen: list[int] = []

        def on_token(token: int, at: int = at, each: Asked = each, seen: list[int] = seen) -> None:
            seen.append(token)
            if len(seen) == each.breaks_at:
                raise KeyError(at)
            if len(seen) == each.cancels_at:
                handles[at].cancel()

        handles[at] = engine.submit(dataclasses.replace(each.request, on_token=on_token))
        results.append(seen)
    finish(engine)
    held = engine.cache_usage()
    assert (set(held.slot_lengths), set(held.row_lengths), held.pages) == ({0}, {0}, 0)
    assert sum(engine.report().finished.values()) == len(given)
    return [(handles[at].result(), seen) for at, seen in enumerate(results)]


def assert_equal(engines: Callable[[bool], serving.Engine], given: list[Asked]) -> None:
    ahead, waiting = (serve(engines(is_ahead), given) for is_ahead in (True, False))
    for (done, seen), (expected, expected_seen) in zip(ahead, waiting, strict=True):
        assert (done.tokens, done.finish, seen) == (
            expected.tokens,
            expected.finish,
            expected_seen,
        )
        assert done.logprobs == expected.logprobs
        assert done.versions == expected.versions == (0,)
        assert repr(done.error) == repr(expected.error)
    assert {done.finish for done, _ in ahead} == set(Finish)


@pytest.mark.parametrize(("kind", "decode_steps"), CASES)
@pytest.mark.full
def test_requests_equal_those_without_ahead(kind: str, decode_steps: int) -> None:
    """600 requests, over all cases."""
    assert_equal(lambda ahead: make(kind, decode_steps=decode_steps, ahead=ahead), asked(50))


@pytest.mark.full(but=["dense"])
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_some_requests_equal_those_without_ahead(kind: str) -> None:
    assert_equal(lambda ahead: make(kind, ahead=ahead), asked(40))


@pytest.mark.full
@pytest.mark.parametrize("decode_steps", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "sliding", "quantized", "paged"])
@pytest.mark.alternate
def test_requests_on_a_mesh_equal_those_without_ahead(kind: str, decode_steps: int) -> None:
    assert_equal(
        lambda ahead: engine_of_decoder(
            kind,
            manager_of("serve_tp"),
            slots=4,
            prefill_rows=2,
            decode_steps=decode_steps,
            ahead=ahead,
        ),
        asked(40, vocabulary=256, longest=15),
    )


def finish(engine: serving.Engine) -> None:
    while engine.step():
        pass


def in_flight(engine: serving.Engine) -> int:
    return len(engine._loop._in_flight)


@pytest.mark.full(but=["dense"])
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_a_late_stop_leaves_no_row(kind: str) -> None:
    """A step has begun when the stop is read. Its token and its row are dropped."""
    engine, text = make(kind, slots=1), text_of([1, 2], 6, shift=1)
    handle = engine.submit(Request(prompt=[1, 2], max_new_tokens=6, stop=[text[3]]))
    next_handle = engine.submit(Request(prompt=[3], max_new_tokens=4))
    assert handle.result().tokens == tuple(text[: text.index(text[3])])
    assert len(handle.result().logprobs) == len(handle.tokens)
    assert set(engine.cache_usage().slot_lengths) == {0}
    assert next_handle.result().tokens == tuple(text_of([3], 4, shift=1))
    assert engine.report().new_tokens == text.index(text[3]) + 1 + 4


@pytest.mark.full
def test_no_slot_writes_more_than_its_request() -> None:
    """The devices know the limits, so that no call in flight fills a row or a page too many."""
    engine = make("paged rows", slots=2)
    # Both fill their pages, and together the pool but one page.
    requests = [Request(prompt=[at] * 10, max_new_tokens=11, stop=[VOCAB - 1]) for at in (1, 2)]
    handles = [engine.submit(request) for request in requests]
    while engine.step():
        lengths = np.asarray(engine._arrays.slots.caches[0].length)
        assert np.max(lengths) <= requests[0].rows == 20
    for handle, request in zip(handles, requests, strict=True):
        text = text_of(request.prompt, 11, shift=1)
        kept = text.index(VOCAB - 1) if VOCAB - 1 in text else 11
        assert handle.result().tokens == tuple(text[:kept])


def test_held_reads_the_step_in_flight_first() -> None:
    engine = make()
    handle = engine.submit(Request(prompt=[1, 2], max_new_tokens=9))
    for step in range(1, 4):
        engine.step()
        assert in_flight(engine) > 0
        assert engine.cache_usage().slot_lengths[0] == 2 + step
        assert in_flight(engine) == 0
        assert len(handle.tokens) == 1 + step


class Lost(Exception):
    """An error that the test injects."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """A result that cannot be read."""

    def fetch(self) -> Any:
        raise Lost


@pytest.mark.full(but=["begin-dense", "read-dense"])
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize("breaks", ["begin", "read"])
def test_an_error_fails_the_requests_that_it_lost(kind: str, breaks: str) -> None:
    engine = make(kind, slots=2, prefill_rows=2)
    last, long, next_one, _, waiting = (
        engine.submit(Request(prompt=[at], max_new_tokens=new))
        for at, new in enumerate((3, 9, 2, 2, 2))
    )
    engine.step()
    engine.step()
    arrays: Any = engine._arrays
    decode = arrays.decode

    def failing(*args: Any) -> Any:
        arrays.decode = decode
        decode(*args)
        if breaks == "begin":
            raise Lost
        return Broken()

    # The last token of the first request is in flight. It is read before anything is given up. The
    # third request has taken its slot, and when an error is read, the fourth one has the next slot.
    arrays.decode = failing
    with pytest.raises(Lost):
        finish(engine)
    finish(engine)
    assert last.result().tokens == tuple(text_of([0], 3, shift=1))
    assert long.result().finish is Finish.FAILED
    assert "were lost" in str(long.result().error)
    assert long.tokens == tuple(text_of([1], 9, shift=1)[: len(long.tokens)])
    assert next_one.result().finish is Finish.FAILED
    assert waiting.result().tokens == tuple(text_of([4], 2, shift=1))
    assert set(engine.cache_usage().slot_lengths) == {0}


def breaks_at_twelve(params: Any, tokens: jax.Array, held: Any, valid: jax.Array) -> Any:
    """A model whose program fails on the devices."""

    def check(tokens: Any, valid: Any) -> Any:
        if np.any((tokens == 12) & valid):
            raise ValueError("twelve")
        return tokens

    shape = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
    return stub(params, jax.pure_callback(check, shape, tokens, valid), held, valid)


def test_a_failure_on_the_devices_is_raised_and_ends() -> None:
    engine, fails = make(model=breaks_at_twelve), Request(prompt=[12], max_new_tokens=2)
    lost = engine.submit(fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="twelve"):
        finish(engine)
    assert lost.result().finish is Finish.FAILED
    # Calls that began with the lost arrays are in flight, and fail too.
    for _ in range(3):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            finish(engine)
    done = engine.run([Request(prompt=[1], max_new_tokens=2)])[0]
    assert done.tokens == tuple(text_of([1], 2, shift=1))


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_new_weights_apply_from_the_next_step(kind: str) -> None:
    engine = make(kind)
    handle = engine.submit(Request(prompt=[2, 5], max_new_tokens=7))
    engine.step()
    engine.step()
    known = len(handle.tokens)
    engine.update_params(np.int32(2))
    done = handle.result()
    old = text_of([2, 5], known + 1, shift=1)
    assert list(done.tokens) == old + text_of([2, 5, *old], 7 - len(old), shift=2)
    assert done.versions == (0, 1)


def test_versions_leave_out_a_dropped_token() -> None:
    engine, text = make(), text_of([2, 5], 4, shift=1)
    handle = engine.submit(Request(prompt=[2, 5], max_new_tokens=9, stop=[text[3]]))
    while len(handle.tokens) < 3:
        engine.step()
    engine.update_params(np.int32(2))
    # The stop is in flight, and the step that begins now gives a token after it.
    assert list(handle.result().tokens) == text[:3]
    assert handle.result().versions == (0,)


def test_a_cancel_drops_the_tokens_in_flight() -> None:
    engine = make(slots=1)
    handle = engine.submit(Request(prompt=[1, 2], max_new_tokens=9))
    engine.step()
    engine.step()
    known = handle.tokens
    handle.cancel()
    assert set(engine.cache_usage().slot_lengths) == {0}
    assert (handle.result().finish, handle.tokens) == (Finish.CANCELED, known)
    assert known == tuple(text_of([1, 2], len(known), shift=1))
    assert engine.idle


def test_ahead_is_true_or_false() -> None:
    with raises(ServingError, 1, path="ahead", fix=("True", "False")):
        make(ahead=1)
