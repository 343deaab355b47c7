"""A function of plain JAX stands for a kernel, whose own program says nothing about its arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import shardwright as sw
from shardwright.inference.inferred import Inferred
from tests.raising import Facts, facts, raises

SHAPES = {
    "table": jax.ShapeDtypeStruct((96, 24), "float32"),
    "up": jax.ShapeDtypeStruct((24, 40), "float32"),
    "down": jax.ShapeDtypeStruct((40, 24), "float32"),
}
TOKENS = jax.ShapeDtypeStruct((2, 8), "int32")


def product_kernel(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] @ w[...]


def product(x: Any, w: Any, *, name: str | None = None) -> Any:
    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(product_kernel, out_shape=shape, name=name)(x, w)


def with_pallas(params: Any, tokens: Any) -> Any:
    x = params["table"][tokens].reshape(-1, 24)
    hidden = jax.nn.gelu(product(x, params["up"]))
    x = x + product(hidden, params["down"], name="down_projection")
    return x @ params["table"].T


def with_ffi(params: Any, tokens: Any) -> Any:
    x = params["table"][tokens].reshape(-1, 24)
    up = jax.ffi.ffi_call("up_product", jax.ShapeDtypeStruct((16, 40), x.dtype))(x, params["up"])
    return (x + jax.nn.gelu(up) @ params["down"]) @ params["table"].T


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def inferred(model: Any, **options: Any) -> Inferred:
    return sw.infer_axes(model, SHAPES, TOKENS, seeds=[(sw.BATCH, sw.LENGTH)], **options)


RIGHT = {
    "table": (sw.VOCAB, sw.EMBED),
    "up": (sw.EMBED, sw.MLP_INTERMEDIATE),
    "down": (sw.MLP_INTERMEDIATE, sw.EMBED),
}


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        (with_pallas, {"product_kernel": matmul, "down_projection": matmul}),
        (with_ffi, {"up_product": matmul}),
    ],
)
def test_functions_name_the_dims(model: Any, kernels: Any) -> None:
    result = inferred(model, kernels=kernels, strict=True)
    assert result.annotations == RIGHT
    assert result.unknown == ()


def test_kernels_without_a_function_are_named() -> None:
    result = inferred(with_pallas, kernels={"product_kernel": matmul})
    assert [text.partition(" (")[0] for text in result.unknown] == ["pallas_call down_projection"]
    assert result.annotations["up"][0] == sw.EMBED
    assert [dim.path for dim in result.open if dim.size != 40] == ["down"]


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        (
            {"product_kernal": matmul},
            facts("kernel", path="kernels/product_kernal", fix="product_kernel"),
        ),
        (
            {"product_kernel": lambda x, w: (x @ w).sum(0)},
            facts("float32[40]", "float32", "[16, 40]", path="kernels/product_kernel", fix="JAX"),
        ),
        (
            {"product_kernel": lambda x, w: (x @ w).astype("bfloat16")},
            facts("bfloat16", "[16, 40]", "float32", path="kernels/product_kernel", fix="JAX"),
        ),
        ({"product_kernel": None}, facts("mapping", "functions", path="kernels", fix="my_kernel")),
        (["product_kernel"], facts("mapping", "functions", path="kernels", fix="my_kernel")),
        (
            {"product_kernel": lambda x: x},
            facts("TypeError", 1, 2, path="kernels/product_kernel", fix="JAX"),
        ),
    ],
)
def test_functions_that_do_not_fit_are_refused(kernels: Any, says: Facts) -> None:
    with raises(sw.StrategyError, says):
        inferred(with_pallas, kernels=kernels)


def test_values_of_a_kernel_may_be_arrays_of_the_function() -> None:
    """Constants of the function have unknown dims, and change no name."""
    scale = jnp.ones(40)
    kernels = {"product_kernel": lambda x, w: (x @ w) * scale, "down_projection": matmul}
    assert inferred(with_pallas, kernels=kernels).annotations == RIGHT
