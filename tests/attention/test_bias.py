"""A bias of at most -2e38 hides its pair in every implementation; a larger one is a number."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.attention import dot_product_attention
from shardwright.attention.masks import bias_hides
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE
from tests.attention.conformance import CASES, QUICK, Cell, check

# Each where it is meant to run.
CELLS = [
    ("vanilla", "one", "hidden by a bias"),
    ("blockwise", "one", "hidden by a bias"),
    ("sdpa", "one", "hidden by a bias"),
    ("ring", "sp", "hidden by a bias"),
    ("ulysses", "sp", "hidden by a bias"),
    ("allgather_kv", "odd sp", "hidden by a bias"),
    ("flash_decode", "sp", "decode hidden by a bias"),
    ("flash_decode", "sp", "decode hidden by a bias for all queries, sinks"),
    ("ring", "all", "hidden by a bias, causal, sinks"),
    ("blockwise", "dp", "hidden by a bias, everything"),
    ("sdpa", "tp", "hidden by a bias in bfloat16, bhtd"),
    ("blockwise", "one", "large biases"),
    ("ring", "sp", "large biases and sinks, causal"),
    ("flash_decode", "sp", "decode large biases"),
]
SHAPE = (1, 6, 2, 8)
ONE = ("vanilla", "blockwise", "sdpa")


@pytest.mark.parametrize(("implementation", "mesh", "name"), CELLS)
@pytest.mark.full
@pytest.mark.ci
def test_biases_equal_the_oracle(implementation: str, mesh: str, name: str) -> None:
    case = next(listed for listed in CASES if listed.name == name)
    check(
        Cell(
            implementation=implementation,
            case=case,
            dtype="float32",
            mesh=mesh,
            axis_types="auto",
            mode=case.mode,
        )
    )


@pytest.mark.parametrize(
    ("value", "dtype", "hides"),
    [
        (-np.inf, "float32", True),
        (-np.inf, "float16", True),
        (DEFAULT_MASK_VALUE, "float32", True),
        (DEFAULT_MASK_VALUE, "bfloat16", True),
        (float(jnp.finfo("bfloat16").min), "bfloat16", True),
        (-2e38, "float32", True),
        (-1.99e38, "float32", False),
        (float(jnp.finfo("float16").min), "float16", False),
        (-1e9, "float32", False),
        (np.inf, "float32", False),
        (np.nan, "float32", False),
    ],
)
def test_bias_that_hides(value: float, dtype: str, hides: bool) -> None:
    assert bool(bias_hides(jnp.asarray(value, dtype))) is hides


QKV = np.random.default_rng(0).normal(size=(3, *SHAPE)).astype(np.float32)


@functools.cache
def program(implementation: str, **options: Any) -> Any:
    def loss(given: tuple[jax.Array, ...]) -> Any:
        *arrays, bias = given
        o = dot_product_attention(
            *arrays, bias=bias, mode="train", implementation=implementation, **options
        )
        return jnp.sum(jnp.sin(o)), o

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def value_and_grads(implementation: str, bias: Any, **options: Any) -> tuple[Any, Any]:
    (_, o), grads = program(implementation, **options)((*QKV, jnp.asarray(bias)))
    return o, grads


@pytest.mark.full(but=["vanilla-nan", "blockwise-inf", "sdpa-nan"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", ONE)
@pytest.mark.ci
def test_nan_and_infinity_stay_in_their_row(implementation: str, value: float) -> None:
    bias = np.zeros((1, 1, 6, 6), np.float32)
    bias[..., 2, 1] = value
    o, _ = value_and_grads(implementation, bias)
    assert np.isnan(o[:, 2]).all()
    assert np.isfinite(o[:, [0, 1, 3, 4, 5]]).all()


@pytest.mark.full(but=["vanilla-2.0", "blockwise-2.0"])
@pytest.mark.parametrize(
    ("implementation", "softcap"),
    [("vanilla", 2.0), ("vanilla", None), ("blockwise", 2.0), ("sdpa", None)],
)
@pytest.mark.ci
def test_masked_bias_is_ignored(implementation: str, softcap: float | None) -> None:
    later = np.arange(6)[None, :] > np.arange(6)[:, None]
    bias = np.where(later, np.array([np.nan, np.inf, -np.inf])[np.arange(6) % 3], 0.5)[
        None, None
    ].astype(np.float32)
    options = {"causal": True} if softcap is None else {"causal": True, "softcap": softcap}
    actual = value_and_grads(implementation, bias, **options)
    want = value_and_grads(implementation, np.where(later, 0.0, bias).astype(np.float32), **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), actual, want)


@pytest.mark.full(but=["blockwise"])
@pytest.mark.parametrize("implementation", ONE)
@pytest.mark.ci
def test_row_of_large_biases_is_an_average(implementation: str) -> None:
    bias = np.full((1, 1, 6, 6), -1e9, np.float32)
    o, (_, _, dv, _) = value_and_grads(implementation, bias)
    _, _, v = QKV
    np.testing.assert_allclose(
        o, np.broadcast_to(np.mean(v, axis=1, keepdims=True), o.shape), atol=1e-6
    )
    np.testing.assert_allclose(
        dv, np.broadcast_to(np.cos(o).mean(axis=1, keepdims=True), dv.shape), atol=1e-6
    )
