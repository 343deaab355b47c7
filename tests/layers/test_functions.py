"""Norms, activations, dense products and dropout, against NumPy and jax.nn."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from shardwright.layers import dense, norm
from shardwright.layers.activation import ACTIVATIONS, Clamp, activation, gated
from shardwright.layers.dropout import dropout
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.moe.config import NOT_ZERO_AT_ZERO
from shardwright.layers.norm import NormConfig, layer_norm, rms_norm
from tests.layers import blocks
from tests.raising import facts, raises

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6, 16)).astype(np.float32)
SCALE, BIAS = (RNG.normal(size=16).astype(np.float32) for _ in range(2))


def test_norms_equal_numpy() -> None:
    wide = X.astype(np.float64) * 3 + 5
    centered = wide - wide.mean(-1, keepdims=True)
    normed = centered / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    by_root = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    x = jnp.asarray(wide, jnp.float32)
    cases = [
        (layer_norm(x, SCALE, BIAS, epsilon=1e-3), normed * SCALE + BIAS),
        (layer_norm(x, SCALE, epsilon=1e-3), normed * SCALE),
        (layer_norm(x, SCALE, epsilon=1e-3, zero_centered=True), normed * (1 + SCALE)),
        (rms_norm(x, SCALE, epsilon=1e-3), by_root * SCALE),
        (rms_norm(x, SCALE, epsilon=1e-3, zero_centered=True), by_root * (1 + SCALE)),
    ]
    for got, wanted in cases:
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_norm_statistics_are_float32() -> None:
    """In bfloat16 the variance of large values would be wrong, and 1 + scale would be rounded."""
    x = jnp.asarray(X + 100, jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    tiny = np.full(16, 2.0**-9, np.float32)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    got = layer_norm(x, tiny.astype(jnp.bfloat16), zero_centered=True, dtype="float32")
    np.testing.assert_allclose(got, wanted * (1 + 2.0**-9), rtol=1e-5, atol=1e-5)
    assert layer_norm(x, tiny).dtype == jnp.bfloat16


def test_norm_specs() -> None:
    layer = norm.specs(NormConfig(kind="layer", zero_centered=True), 16, Dtypes(param="bfloat16"))
    assert {name: spec.axes for name, spec in layer.items()} == {
        "scale": (sw.NORM,),
        "bias": (sw.NORM,),
    }
    assert layer["scale"].dtype == jnp.bfloat16
    for config, scale in ((NormConfig(kind="layer", zero_centered=True), 0.0), (NormConfig(), 1.0)):
        spec = norm.specs(config, 16)["scale"]
        assert spec.init is not None
        assert spec.init(jax.random.key(0), (2,), spec.dtype).tolist() == [scale] * 2
        params = {"scale": SCALE, "bias": BIAS}
        got = norm.apply(config, {name: params[name] for name in norm.specs(config, 16)}, X)
        wanted = (
            layer_norm(X, SCALE, BIAS, zero_centered=True)
            if config.kind == "layer"
            else rms_norm(X, SCALE)
        )
        np.testing.assert_array_equal(got, wanted)


def test_activations_equal_their_formulas() -> None:
    x = np.linspace(-9, 9, 37)
    sigmoid = 1 / (1 + np.exp(-x))
    low = np.minimum(x, 7.0)
    wanted = {
        "gelu": 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "gelu_exact": 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
        "silu": x * sigmoid,
        "relu": np.maximum(x, 0),
        "quick_gelu": x / (1 + np.exp(-1.702 * x)),
        "squared_relu": np.maximum(x, 0) ** 2,
        "sigmoid": sigmoid,
        "tanh": np.tanh(x),
        "linear": x,
        "clamped_silu": low / (1 + np.exp(-1.702 * low)),
        "clamped_linear": np.clip(x, -7, 7) + 1,
    }
    assert set(wanted) == set(ACTIVATIONS)
    # MoE with ragged groups is refused for these, because padding must stay zero.
    assert {name for name, values in wanted.items() if values[18]} == {*NOT_ZERO_AT_ZERO}
    every = jax.jit(lambda x: {name: activation(name.upper(), x) for name in wanted})
    for name, got in every(x.astype(np.float32)).items():
        np.testing.assert_allclose(got, wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)
    halves = jax.eval_shape(every, jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    assert {value.dtype for value in halves.values()} == {jnp.dtype("bfloat16")}
    clamped = activation("clamped_linear", jnp.asarray([-3.0, 3.0]), clamp=Clamp(limit=2, offset=0))
    assert clamped.tolist() == [-2.0, 2.0]


def test_gated_is_the_product_of_slices() -> None:
    x = jnp.asarray(RNG.normal(size=(3, 2, 8)), jnp.float32)
    np.testing.assert_allclose(
        gated(("silu", "linear"), x), jax.nn.silu(x[:, 0]) * x[:, 1], rtol=1e-6
    )
    np.testing.assert_array_equal(gated(("relu",), x[:, :1]), jax.nn.relu(x[:, 0]))


def test_dense_contracts_and_adds_the_bias() -> None:
    kernel = RNG.normal(size=(6, 16, 3, 5)).astype(np.float32)
    bias = RNG.normal(size=(3, 5)).astype(np.float32)
    axes = (sw.BATCH, sw.HEAD, sw.HEAD_DIM)
    got = dense.dense(X, kernel, bias, out=axes, contract=2)
    wanted = np.einsum("bij,ijhd->bhd", X.astype(np.float64), kernel) + bias
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    half = dense.dense(X, kernel, bias, out=axes, contract=2, dtype="bfloat16")
    assert half.dtype == jnp.bfloat16


def test_dense_specs() -> None:
    made = dense.specs(
        [(sw.HEAD, 8), (sw.HEAD_DIM, 64)], [(sw.EMBED, 32)], bias=True, dtypes=Dtypes(param="f4")
    )
    kernel, bias = made["kernel"], made["bias"]
    assert (kernel.shape, kernel.axes) == ((8, 64, 32), (sw.HEAD, sw.HEAD_DIM, sw.EMBED))
    assert (bias.shape, bias.axes) == ((32,), (sw.EMBED,))
    assert kernel.init is not None
    values = kernel.init(jax.random.key(0), kernel.shape, kernel.dtype)
    # 512 inputs, not 8: the variance is 1 / 512.
    np.testing.assert_allclose(np.std(values), 512**-0.5, rtol=0.05)


def test_dropout_mask() -> None:
    x, key = jnp.ones((64, 8, 16)), jax.random.key(3)
    dropped = dropout(x, key, 0.25)
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    np.testing.assert_allclose(np.mean(dropped == 0), 0.25, atol=0.02)
    shared = dropout(x, key, 0.25, shared=(1, -1))
    assert (shared == shared[:, :1, :1]).all()
    assert dropout(x, None, 0.25) is x
    assert dropout(x, key, 0) is x
    for kind in ("auto", "explicit"):
        with blocks.make_manager("fsdp_tp_sp", kind) as pm:
            placed = pm.shard(x, sw.BATCH, sw.LENGTH, sw.EMBED)
            masked = jax.jit(lambda x: dropout(x, key, 0.25))(placed)
            assert masked.sharding.is_equivalent_to(placed.sharding, 3)
        np.testing.assert_array_equal(masked, dropped)


def test_bad_input() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: NormConfig(kind="rsm"), facts("rsm", path="kind", fix="rms")),
        (lambda: NormConfig(epsilon=0), facts(0, path="epsilon")),
        (lambda: rms_norm(X, SCALE[:3]), facts("(3,)", "(4, 6, 16)", path="scale")),
        (lambda: layer_norm(X, SCALE, BIAS[:3]), facts("(3,)", "(4, 6, 16)", path="bias")),
        (lambda: activation("siluu", X), facts("siluu", path="name", fix="silu")),
        (lambda: gated((), X), facts("tuple", path="names", fix="silu")),
        (lambda: gated(("silu", "linear"), X), facts("(4, 6, 16)", 6, -2, 2, path="x")),
        (lambda: dropout(X, None, 1), facts(1, "[0, 1)", path="rate")),
        (
            lambda: dropout(X, jax.random.key(0), 0.5, shared=(3,)),
            facts("(3,)", "(4, 6, 16)", path="shared"),
        ),
        (
            lambda: dense.dense(X, SCALE[:4, None], out=(sw.EMPTY,) * 3),
            facts("(4, 1)", 1, "(4, 6, 16)", path="kernel"),
        ),
        (
            lambda: dense.dense(X, np.ones((16, 2)), np.ones(3), out=(sw.EMPTY,) * 3),
            facts("(3,)", "(2,)", path="bias"),
        ),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
