"""Per-call PRNG keys, host metrics."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.interop.fjformer import get_metrics, wrap_function_with_rng
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises


def data(key: Any) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


# Keys.


def test_each_call_gets_the_next_key() -> None:
    @wrap_function_with_rng(jax.random.key(3))
    def draw(key: Any, scale: float, *, shift: float = 0.0) -> tuple[Any, float]:
        """Return the drawn values."""
        return data(key), scale + shift

    rng = jax.random.key(3)
    for _ in range(3):
        rng, expected = jax.random.split(rng)
        assert draw(2.0, shift=1.0) == (data(expected), 3.0)
    assert draw.__doc__ == "Return the drawn values."


def test_old_style_keys_and_shared_chain() -> None:
    decorate = wrap_function_with_rng(jax.random.PRNGKey(0))
    first, second = (
        decorate(lambda key: tuple(key.tolist())),
        decorate(lambda key: tuple(key.tolist())),
    )
    drawn = [first(), second(), first()]
    assert len(set(drawn)) == 3
    again = wrap_function_with_rng(jax.random.PRNGKey(0))(lambda key: tuple(key.tolist()))
    assert [again(), again(), again()] == drawn


def test_threads_get_different_keys() -> None:
    draw = wrap_function_with_rng(jax.random.key(0))(data)
    actual: list[tuple[int, ...]] = []
    threads = [
        threading.Thread(target=lambda: actual.extend(draw() for _ in range(25))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = wrap_function_with_rng(jax.random.key(0))(data)
    assert sorted(actual) == sorted(alone() for _ in range(200))
    assert len(set(actual)) == 200


def test_outer_key_inside_a_trace() -> None:
    noise = wrap_function_with_rng(jax.random.key(0))(
        lambda key, x: x + jax.random.normal(key, x.shape)
    )
    with raises(sw.StrategyError, "key"):
        jax.jit(noise)(jnp.zeros(2))
    # And nothing of that trace is kept.
    assert np.isfinite(noise(jnp.zeros(2))).all()


def test_inner_key_inside_a_trace() -> None:
    @jax.jit
    def two(key: Any) -> Any:
        draw = wrap_function_with_rng(key)(lambda key: jax.random.normal(key, (4,)))
        return jnp.stack([draw(), draw()])

    first, second = two(jax.random.key(0))
    assert not np.array_equal(first, second)
    assert not np.array_equal(two(jax.random.key(1))[0], first)


# Metrics.


def test_metrics_are_floats() -> None:
    mesh = cpu_mesh("dp:8")
    loss = jax.device_put(jnp.float32(0.5), jax.NamedSharding(mesh, jax.P()))
    actual = get_metrics({"loss": loss, "tokens": jnp.int32(7), "lr": 0.25, "one": np.ones((1,))})
    assert actual == {"loss": 0.5, "tokens": 7.0, "lr": 0.25, "one": 1.0}
    assert {type(value) for value in actual.values()} == {float}


def test_stacked_metrics() -> None:
    steps = [{"loss": jnp.float32(at), "grad": {"norm": jnp.arange(2) + at}} for at in range(3)]
    actual = get_metrics(steps, stack=True)
    assert isinstance(actual["loss"], np.ndarray)
    np.testing.assert_array_equal(actual["loss"], [0.0, 1.0, 2.0])
    np.testing.assert_array_equal(actual["grad"]["norm"], [[0, 1], [1, 2], [2, 3]])


def test_unreplicate() -> None:
    mesh = cpu_mesh("dp:8")
    replicas = jax.device_put(jnp.arange(8.0) + 3, jax.NamedSharding(mesh, jax.P("dp")))
    assert get_metrics({"loss": replicas}, unreplicate=True) == {"loss": 3.0}
    np.testing.assert_array_equal(
        get_metrics([{"loss": replicas}] * 2, unreplicate=True, stack=True)["loss"], [3.0, 3.0]
    )


@pytest.mark.parametrize(
    ("metrics", "options", "says"),
    [
        ({"loss": np.ones(2)}, {}, "array of size 1"),
        ({"loss": np.complex64(1j)}, {}, "not 'complex'"),
        ({"grad": {"norm": 1.0}}, {}, "not 'dict'"),
        ({"loss": None}, {}, "not 'NoneType'"),
        ([{"a": np.ones(2)}, {"a": np.ones(3)}], {"stack": True}, "must have the same shape"),
    ],
)
def test_invalid_metrics(metrics: Any, options: dict[str, bool], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        get_metrics(metrics, **options)


@pytest.mark.parametrize(
    ("metrics", "stack", "says"),
    [
        ({"loss": "3"}, False, facts("loss", "3")),
        ({"loss": np.array(b"3")}, False, facts("loss", "b'3'")),
        ({"loss": 1.0, "acc": 2.0}, True, facts("dict", fix="list")),
        ([], True, facts("[]", fix="list")),
        ([{"a": 1}, {"a": {"c": 2, "d": 3}}], True, facts("step 1", "step 0", "'c'")),
        ([{"a": 1.0}, {"a": 1.0, "b": 2.0}], True, facts("step 1", "step 0", "'b'")),
    ],
)
def test_text_and_steps_that_differ(metrics: Any, stack: bool, says: Facts) -> None:
    with raises(sw.StrategyError, says):
        get_metrics(metrics, stack=stack)
