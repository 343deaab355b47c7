"""Casts to fp8: equal to NumPy, block by block, and honest about what is not finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import fp8
from shardwright.layers.fp8.recipe import largest
from tests.raising import Facts, facts, raises

X = np.random.default_rng(0).normal(size=(64, 3, 96)).astype(np.float32)
X *= np.exp2(np.random.default_rng(1).integers(-40, 40, size=(64, 1, 96))).astype(np.float32)

# One program each instead of one for each operation.
quantize_tensor = jax.jit(fp8.quantize_tensor, static_argnums=2)
quantize_blocks = jax.jit(fp8.quantize_blocks, static_argnums=(1, 2))
dequantize = jax.jit(fp8.dequantize, static_argnums=1)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_tensor_equals_numpy(form: str) -> None:
    limit = float(ml_dtypes.finfo(form).max)
    assert largest(form) == limit
    scale = np.float32(limit / 2.0)  # values above 2 saturate
    quantized = quantize_tensor(jnp.asarray(X), jnp.float32(scale), form)
    wanted = np.clip(X * scale, -limit, limit).astype(form)
    np.testing.assert_array_equal(np.asarray(quantized.value), wanted)
    np.testing.assert_array_equal(quantized.scale, np.float32(1) / scale)
    assert np.asarray(quantized.value, np.float32).max() == limit


def block_by_block(x: np.ndarray, dim: int, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and powers of two of blocks, by one loop over the blocks."""
    limit = float(ml_dtypes.finfo(form).max)
    x = np.moveaxis(x.astype(np.float64), dim, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    powers = np.empty(blocks.shape[:-1])
    for at in np.ndindex(*powers.shape):
        amax = np.abs(blocks[at]).max()
        powers[at] = np.exp2(max(np.ceil(np.log2(amax / limit)), -127)) if amax else 2.0**-127
    values = np.clip(blocks / powers[..., None], -limit, limit).astype(np.float32).astype(form)
    return np.moveaxis(values.reshape(x.shape), -1, dim), np.moveaxis(powers, -1, dim)


@pytest.mark.full(but=["float8_e5m2-0", "float8_e4m3fn-2"])
@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_blocks_equal_numpy(dim: int, form: str) -> None:
    x = X.copy()
    x[:, 1] = 0.0  # blocks of zeros
    quantized = quantize_blocks(x, dim, form)
    values, powers = block_by_block(x, dim, form)
    np.testing.assert_array_equal(np.asarray(quantized.value), values)
    np.testing.assert_array_equal(np.exp2(np.asarray(quantized.scale, np.float64) - 127), powers)
    back = dequantize(quantized, jnp.float32)
    wanted = values.astype(np.float64) * np.repeat(powers, 32, axis=dim)
    np.testing.assert_array_equal(back, wanted.astype(np.float32))
    assert np.all(np.asarray(back)[:, 1] == 0)


def test_amax_of_a_power_of_two_is_not_rounded_up() -> None:
    for amax, power in ((448.0, 127), (449.0, 128), (447.0, 127), (224.0, 126)):
        quantized = quantize_blocks(jnp.full(32, amax), 0, "float8_e4m3fn")
        assert int(quantized.scale[0]) == power, amax


def test_blocks_of_the_smallest_scale() -> None:
    """2^-127, the scale, is subnormal. These values are normal, and float8_e4m3fn holds them."""
    x = jnp.asarray(np.float32(2.0**-119) * np.array([1.0, -0.5, 0.75, 1.5] * 8, np.float32))

    @jax.jit
    def round_trip(x: Any) -> Any:
        quantized = fp8.quantize_blocks(x, 0, "float8_e4m3fn")
        return quantized.scale, fp8.dequantize(quantized, jnp.float32)

    scale, back = round_trip(x)
    assert int(scale[0]) == 0
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite(bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3] = bad
    blocks = dequantize(quantize_blocks(jnp.asarray(x), 1, "float8_e4m3fn"), jnp.float32)
    wrong = np.isnan(np.asarray(blocks))
    assert wrong[0, :32].all()
    assert not wrong[0, 32:].any()
    assert not wrong[1].any()
    tensor = quantize_tensor(jnp.asarray(x), jnp.float32(1), "float8_e4m3fn")
    value = np.asarray(tensor.value, np.float32)
    assert np.isnan(value[0, 3]) if np.isnan(bad) else value[0, 3] == 448
    assert np.all(value[1] == 1)


def test_scale_stays_where_amax_says_nothing() -> None:
    amax = jnp.array([0.0, np.inf, np.nan, 7.0])
    old = jnp.full(4, 3.0)
    scale = fp8.scale_of(amax, "float8_e4m3fn", margin=1, old=old)
    np.testing.assert_array_equal(scale, [3, 3, 3, 32])
    np.testing.assert_array_equal(fp8.scale_of(amax, "float8_e4m3fn"), [1, 1, 1, 64])
    # 448 / 1e-37 is not a float32.
    most = np.finfo(np.float32).max
    for tiny in (1e-37, 1.2e-38):
        assert fp8.scale_of(jnp.float32(tiny), "float8_e4m3fn") == most


def test_recipes_by_name() -> None:
    assert fp8.read_recipe("delayed") == fp8.DelayedScaling()
    assert fp8.read_recipe("MXFP8") == fp8.BlockScaling()
    assert fp8.read_recipe(None) is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fp8.read_recipe("NVFP4"), facts("NVFP4", path="recipe", fix="mxfp8")),
        (lambda: fp8.read_recipe("delayd"), facts("delayd", path="recipe", fix="delayed")),
        (lambda: fp8.read_recipe(8), facts("int", path="recipe", fix="mxfp8")),
        (
            lambda: fp8.DelayedScaling(algorithm="mean"),
            facts("mean", path="algorithm", fix="most_recent"),
        ),
        (lambda: fp8.DelayedScaling(history=0), facts(0, path="history", fix="history")),
        (
            lambda: fp8.CurrentScaling(forward="int8"),
            facts("int8", path="forward", fix="float8_e4m3fn"),
        ),
    ],
)
def test_invalid_recipes(make: Any, match: Facts) -> None:
    with raises(sw.LayerError, match):
        make()
