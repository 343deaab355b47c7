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
from tests.raising import Facts, facts, raises
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
    with raises(ServingError, "slots", 1, path="compile", fix="before"):
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
    with raises(ServingError, "belongs", "another", path="handle", fix="handle.cancel"):
        other.cancel(theirs)
    with raises(ServingError, "int", path="handle", fix="handle.cancel"):
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

    with raises(
        ServingError, 0, 3, "KeyError", "no such listener", path="request", fix="result"
    ) as caught:
        read()
    assert seen == TEXT[:3] == list(handle.result().tokens)
    assert caught.value.__cause__ is handle.result().error


@pytest.mark.full
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_deleted_weights_fail_every_request(steps: int) -> None:
    weights = jax.numpy.int32(1)
    engine = serving.Engine(stub, weights, shape=SHAPE, slots=2, capacity=16, prefill_chunk=2)
    handles = [engine.submit(ask(prompt=[*PROMPT, at])) for at in range(4)]
    for _ in range(steps):
        engine.step()
    weights.delete()
    with raises(ServingError, "deleted", "donated", path="params", fix="donate"):
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
    with raises(ServingError, "deleted", path="params"):
        engine.run([ask()])


def test_engine_refuses_deleted_weights() -> None:
    weights = jax.numpy.int32(1)
    weights.delete()
    with raises(ServingError, "deleted", path="params"):
        serving.Engine(stub, weights, shape=SHAPE, slots=2, capacity=16)


@pytest.mark.parametrize("top_p", [1e-40, 1e-46])
def test_tiny_top_p_keeps_most_likely_token(top_p: float) -> None:
    given = first_draws(1, {0: Sampling(temperature=1.0, top_p=top_p)})
    logits = jnp.asarray([[1.0, 2.0, 9.0, 3.0]])
    assert np.asarray(jax.jit(sample)(logits, given)).tolist() == [2]


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
    with raises(ServingError, path="temperature", fix=("0", "float")):
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
        ({"model": None}, facts("model=None", path="model", fix="serving.Model")),
        (
            {"model": Unhashable()},
            facts("tests.serving.test_edges.Unhashable", path="model", fix="key"),
        ),
        ({"model": Listed(layers=[1])}, facts("model=Listed", "[1]", path="model", fix="hashable")),
        ({"shape": None}, facts(path="shape", fix="serving.CacheShape")),
        ({"cache_options": None}, facts(path="cache_options", fix="page_size")),
        (
            {"cache_options": {"window": 4}},
            facts("window", path="cache_options", fix="slots"),
        ),
        (
            {"cache_options": {"batch": 4, "mode": "decode"}},
            facts("batch", "mode", path="cache_options"),
        ),
        ({"clock": None}, facts(path="clock", fix="time.perf_counter")),
        ({"manager": "fsdp"}, facts("fsdp", path="manager", fix="PartitionManager")),
    ],
)
def test_invalid_engine_arguments(options: dict[str, Any], message: Facts) -> None:
    with raises(ServingError, message):
        make(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([PROMPT], facts("list", path="request", fix="serving.Request")),
        ("hello", facts("str", path="requests", fix="serving.Request")),
        (ask(), facts(path="requests", fix="serving.Request")),
    ],
)
def test_run_refuses_invalid_requests_first(given: Any, message: Facts) -> None:
    engine = make()
    with raises(ServingError, message):
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
            facts("(1, 1, 13)", "(1, 4)", path="model", fix="q_length"),
        ),
        (unlisted, facts("returned", "caches", path="model", fix="q_length")),
        (rounded, facts("int32", path="model", fix="return")),
    ],
)
def test_model_results_are_checked_in_every_step(model: Any, message: Facts) -> None:
    shape = serving.CacheShape(layers=1, kv_heads=1, head_dim=1, dtype="float32")
    with raises(ServingError, message):
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
            facts("padding", "written", path="model", fix=("append_and_attend", "valid")),
        ),
        (
            stale,
            facts("cache", "layer", 1, path="model", fix="done.cache"),
        ),
    ],
)
def test_engine_refuses_model_without_valid(model: Any, message: Facts) -> None:
    with raises(ServingError, message):
        make(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"slots": 4},
            facts(
                "prefill_rows", 1, "dp=2", path="length", axis="BATCH", fix=("prefill_rows", "2")
            ),
        ),
        (
            {"slots": 3, "prefill_rows": 2},
            facts("slots", 3, "dp=2", path="length", fix=("slots", "4")),
        ),
    ],
)
def test_indivisible_batch_names_engine_argument(options: dict[str, Any], message: Facts) -> None:
    pm = sw.PartitionManager(
        sw.Strategy.loads('[rules]\nbatch = "dp"\nkv_length = "-"\nkv_head = "-"\n'),
        mesh=cpu_mesh("dp:2"),
    )
    with raises(sw.IndivisibleError, message):
        make(manager=pm, **options)


def test_window_comes_from_cache_shape() -> None:
    with raises(CacheError, "cache", path="window", fix="CacheShape"):
        make(cache="sliding")
    with raises(
        CacheError,
        facts("float32", "bfloat16", path="k", fix=("k.astype", "bfloat16")),
        facts("float32", "bfloat16", path="v", fix=("bfloat16", "CacheShape")),
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
            raises(ServingError, "but", path="manager"),
        ):
            call()
    assert list(handle) == TEXT
