"""Edge cases of an engine: deleted weights, extreme sampling, invalid models."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import serving
from shardwright.errors import CacheError, ServingError
from shardwright.serving import Finish, Request, Sampling
from shardwright.serving.sampling import keep, sample
from shardwright.testing import cpu_mesh
from tests.serving.stub import SHAPE, VOCAB, stub, text_of
from tests.serving.test_sampling import first_draws

PROMPT = [1, 2, 3]
TEXT = text_of(PROMPT, 5, shift=1)


def make(model: Any = stub, **options: Any) -> serving.Engine:
    given: dict[str, Any] = {
        "slots": 3,
        "capacity": 16,
        "prefill_chunk": 4,
        "shape": SHAPE,
    } | options
    return serving.Engine(model, np.int32(1), **given)


def ask(**options: Any) -> Request:
    return Request(**{"prompt": PROMPT, "max_new_tokens": 5, **options})


@pytest.mark.full
def test_compile_gives_no_token_to_running_requests() -> None:
    engine = make()
    queued = engine.submit(ask())
    engine.compile()
    engine.step()
    with pytest.raises(
        ServingError,
        match=(
            r"compile\(\) was called while the engine is in use \(requests in slots: 1\)"
            r"\n  fix   compile before the first"
        ),
    ):
        engine.compile()
    assert list(queued) == TEXT
    engine.compile()
    assert [list(done.tokens) for done in engine.run([ask()])] == [TEXT]


@pytest.mark.full
def test_cancel_with_handle_of_another_engine() -> None:
    first, other = make(), make()
    theirs, ours = first.submit(ask()), other.submit(ask())
    first.step()
    other.step()
    with pytest.raises(ServingError, match="handle: it belongs to another engine"):
        other.cancel(theirs)
    with pytest.raises(ServingError, match="handle: it is int, not a handle"):
        other.cancel(0)  # type: ignore[arg-type]
    assert list(theirs) == list(ours) == TEXT
    assert [engine.report().finished["length"] for engine in (first, other)] == [1, 1]


@pytest.mark.full
def test_two_engines_take_turns() -> None:
    first, other = make(), make(cache="paged", cache_options={"page_size": 8, "pages": 1}, slots=1)
    handles = [engine.submit(ask(max_new_tokens=4)) for engine in (first, other) for _ in range(3)]
    for texts in zip(*handles, strict=True):
        assert len(set(texts)) == 1
    assert [list(handle.tokens) for handle in handles] == [TEXT[:4]] * 6
    assert other.cache_usage().pages == 0


def test_iteration_raises_if_request_failed() -> None:
    def stop_at_third(token: int) -> None:
        if token == TEXT[2]:
            raise KeyError("no such listener")

    handle, seen = make().submit(ask(on_token=stop_at_third)), []

    def read() -> None:
        for token in handle:
            seen.append(token)  # noqa: PERF402  # what was read before the error counts

    with pytest.raises(
        ServingError,
        match=r"(?s)request 0 failed after 3 tokens: KeyError: 'no such listener'.*result\(\)",
    ) as caught:
        read()
    assert seen == TEXT[:3] == list(handle.result().tokens)
    assert caught.value.__cause__ is handle.result().error


@pytest.mark.full(but=["0"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_deleted_weights_fail_every_request(steps: int) -> None:
    weights = jax.numpy.int32(1)
    engine = serving.Engine(stub, weights, shape=SHAPE, slots=2, capacity=16, prefill_chunk=2)
    handles = [engine.submit(ask(prompt=[*PROMPT, at])) for at in range(4)]
    for _ in range(steps):
        engine.step()
    weights.delete()
    with pytest.raises(
        ServingError,
        match=r"(?s)params: arrays of the weights were deleted.*fix   .*create another engine",
    ):
        handles[0].result()
    for handle in handles:
        assert handle.completion is not None
        assert (handle.completion.finish, type(handle.completion.error)) == (
            Finish.FAILED,
            ServingError,
        )
    held = engine.cache_usage()
    assert (engine.idle, set(held.slot_lengths), set(held.row_lengths)) == (True, {0}, {0})
    assert engine.report().finished["failed"] == 4
    with pytest.raises(ServingError, match="params: arrays of the weights were deleted"):
        engine.run([ask()])


def test_engine_refuses_deleted_weights() -> None:
    weights = jax.numpy.int32(1)
    weights.delete()
    with pytest.raises(ServingError, match="params: arrays of the weights were deleted"):
        serving.Engine(stub, weights, shape=SHAPE, slots=2, capacity=16)


@pytest.mark.parametrize("top_p", [1e-40, 1e-46])
def test_tiny_top_p_keeps_most_likely_token(top_p: float) -> None:
    given = first_draws(1, {0: Sampling(temperature=1.0, top_p=top_p)})
    assert np.asarray(sample(jnp.asarray([[1.0, 2.0, 9.0, 3.0]]), given)).tolist() == [2]


def test_small_temperature_does_not_overflow() -> None:
    given = first_draws(1, {0: Sampling(temperature=2e-38)})
    assert np.asarray(sample(jnp.asarray([[1.0, 20.0, 30.0, -jnp.inf]]), given)).tolist() == [2]


def test_top_p_of_one_keeps_all_tokens() -> None:
    # A likely token and many unlikely ones: in float32 their running sum reaches 1 before the last.
    chances = jax.nn.softmax(jnp.concatenate([jnp.zeros(1), jnp.full(50_000, -20.0)]))
    assert not np.all(np.asarray(jnp.cumsum(chances) - chances < 1))
    assert np.all(np.asarray(keep(chances, top_k=jnp.int32(2**31 - 1), top_p=jnp.float32(1))))


@pytest.mark.parametrize("temperature", [1e-39, 1e39, float("nan"), float("inf"), -1.0, True])
def test_invalid_temperature(temperature: Any) -> None:
    with pytest.raises(
        ServingError,
        match=(
            r"temperature=.*\n  fix   pass 0 for the most likely token, or a float in "
            r"the range of float32, from 1.18e-38 to 3.4e\+38"
        ),
    ):
        Sampling(temperature=temperature)


@dataclasses.dataclass(frozen=True)
class Listed:
    """A model whose `__hash__` fails, because it holds a list."""

    layers: list[int]

    def __call__(self, *args: Any) -> Any:
        return stub(*args)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *args: Any) -> Any:
        return stub(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model: model=None\n  fix   pass a function of"),
        (
            {"model": Unhashable()},
            "model: model=.*\n  fix   pass a hashable model .*: a function, or a frozen dataclass",
        ),
        ({"model": Listed(layers=[1])}, "model: model=.*\n  fix   pass a hashable model"),
        ({"shape": None}, "shape: shape=None\n  fix   pass serving.CacheShape"),
        ({"cache_options": None}, "cache_options: cache_options=None\n  fix   pass a mapping"),
        (
            {"cache_options": {"window": 4}},
            (
                r"cache_options=\['window'\]"
                r"\n  fix   leave them out: slots, capacity and shape set them"
            ),
        ),
        ({"cache_options": {"batch": 4, "mode": "decode"}}, r"cache_options=\['batch', 'mode'\]"),
        ({"clock": None}, "clock: clock=None\n  fix   pass a function that returns seconds"),
        ({"manager": "fsdp"}, "manager: manager='fsdp'\n  fix   pass a PartitionManager"),
    ],
)
def test_invalid_engine_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([PROMPT], "request: it is list, not a request\n  fix   pass serving.Request"),
        ("hello", "requests: requests is str\n  fix   pass a list"),
        (ask(), "requests: requests is Request\n  fix   pass a list"),
    ],
)
def test_run_refuses_invalid_requests_first(given: Any, message: str) -> None:
    engine = make()
    with pytest.raises(ServingError, match=message):
        engine.run(given)
    assert engine.report().requests == 0
    assert engine.vocabulary == VOCAB


def shortened(params: Any, tokens: Any, held: Any, valid: Any) -> Any:
    logits, new = stub(params, tokens, held, valid)
    return logits[:, :1], new


def unlisted(params: Any, tokens: Any, held: Any, valid: Any) -> Any:
    logits, new = stub(params, tokens, held, valid)
    return logits, new[0]


def rounded(params: Any, tokens: Any, held: Any, valid: Any) -> Any:
    logits, new = stub(params, tokens, held, valid)
    return logits.astype(jnp.int32), new


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            shortened,
            r"the model returned logits of shape \(1, 1, 13\) for tokens of shape \(1, 4\)",
        ),
        (unlisted, "the model returned other caches than it was given"),
        (rounded, "the model returned logits of int32\n  fix   return floating-point logits"),
    ],
)
def test_model_results_are_checked_in_every_step(model: Any, message: str) -> None:
    shape = serving.CacheShape(layers=1, kv_heads=1, head_dim=1, dtype="float32")
    with pytest.raises(ServingError, match=message):
        make(model, shape=shape).run([ask()])


def blind(params: Any, tokens: Any, held: Any, valid: Any) -> Any:
    return stub(params, tokens, held, jnp.ones(tokens.shape, bool))


def stale(params: Any, tokens: Any, held: Any, valid: Any) -> Any:
    logits, new = stub(params, tokens, held, valid)
    return logits, [new[0], held[1]]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            blind,
            (
                r"model: the model does not use valid, .*"
                r"\n  fix   pass valid on: append_and_attend\(\.\.\., valid=valid\)"
            ),
        ),
        (
            stale,
            (
                "model: the model returned the cache of layer 1 unchanged, without "
                "the tokens\n  fix   return done.cache"
            ),
        ),
    ],
)
def test_engine_refuses_model_without_valid(model: Any, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        make(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"slots": 4},
            (
                r"BATCH: prefill_rows=1 does not divide over dp=2\n  rule .*"
                r"\n  fix   pass prefill_rows=2, or add"
            ),
        ),
        (
            {"slots": 3, "prefill_rows": 2},
            "slots=3 does not divide over dp=2\n  rule .*\n  fix   pass slots=4, or",
        ),
    ],
)
def test_indivisible_batch_names_engine_argument(options: dict[str, Any], message: str) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.loads('[rules]\nbatch = "dp"\nkv_length = "-"\nkv_head = "-"\n'),
        mesh=cpu_mesh("dp:2"),
    )
    with pytest.raises(sw.IndivisibleError, match=message):
        make(manager=pm, **options)


def test_window_comes_from_cache_shape() -> None:
    with pytest.raises(
        CacheError, match=r"a sliding cache needs a window\n  fix   .*CacheShape\(window=...\)"
    ):
        make(cache="sliding")
    with pytest.raises(
        CacheError,
        match=r'dtype float32, not bfloat16\n .*CacheShape\(...\)\) with dtype="float32"',
    ):
        make(shape=dataclasses.replace(SHAPE, dtype="bfloat16"))


def test_engine_without_manager_called_under_one() -> None:
    engine = make()
    handle = engine.submit(ask())
    engine.step()
    pm = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("dp:2,tp:1"))
    for call in (engine.step, make().compile):
        with (
            pm.for_mode("decode"),
            pytest.raises(
                ServingError,
                match="manager: the engine was created without a manager, but is called under one",
            ),
        ):
            call()
    assert list(handle) == TEXT
