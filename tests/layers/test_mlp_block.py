"""The MLP block: equal to NumPy, equal on every mesh, with exactly the documented collectives."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import mlp_block
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.norm import NormConfig
from shardwright.layers.placement import RESIDUAL
from tests.layers import blocks
from tests.raising import facts, raises

CONFIG = mlp_block.MlpConfig(embed=16, hidden=32)
X = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)


def block(params: Any, x: Any, config: mlp_block.MlpConfig = CONFIG) -> Any:
    return mlp_block.apply(config, params, x)[0]


def init(config: mlp_block.MlpConfig) -> Any:
    return blocks.random_params(mlp_block.specs(config))


@functools.cache
def unsharded() -> Any:
    return blocks.values_and_gradients(block, init(CONFIG), X)


def by_numpy(params: Any, x: Any, config: mlp_block.MlpConfig) -> np.ndarray:
    """Return a SwiGLU block with a layer norm and biases, in float64."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = np.asarray(x, np.float64)
    assert config.norm is not None
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm.epsilon)
    x = x * (1 + params["norm"]["scale"]) + params["norm"]["bias"]
    hidden = np.einsum("ble,enf->blnf", x, params["up"]["kernel"]) + params["up"]["bias"]
    gate, linear = hidden[..., 0, :], hidden[..., 1, :]
    out = (gate / (1 + np.exp(-gate)) * linear) @ params["down"]["kernel"]
    return np.asarray(out + params["down"]["bias"])


def test_values_and_gradients_of_numpy() -> None:
    config = mlp_block.MlpConfig(
        embed=16,
        hidden=32,
        norm=NormConfig(kind="layer", zero_centered=True),
        bias=True,
        activations=("SiLU", "linear"),
    )
    params = init(config)
    (_, y), gradients = blocks.values_and_gradients(
        lambda params, x: block(params, x, config), params, X
    )
    np.testing.assert_allclose(y, by_numpy(params, X, config), rtol=2e-5, atol=2e-5)
    # The derivative along one direction, by a central difference in float64.
    rng = np.random.default_rng(3)
    along = jax.tree.map(lambda w: rng.normal(size=w.shape), (params, X))

    def loss(step: float) -> float:
        moved = jax.tree.map(lambda w, d: w.astype(np.float64) + step * d, (params, X), along)
        return float(np.sin(by_numpy(*moved, config)).sum())

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    products = jax.tree.map(lambda g, d: np.vdot(np.asarray(g, np.float64), d), gradients, along)
    np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-4)


@blocks.cases()
def test_sharded_equals_unsharded(preset: str, kind: str) -> None:
    inputs = (init(CONFIG), mlp_block.specs(CONFIG), X, RESIDUAL)
    y = blocks.check_sharded("mlp_block", block, inputs, unsharded(), preset, kind)
    with blocks.make_manager(preset, kind) as pm:
        assert y.sharding.is_equivalent_to(pm.sharding(RESIDUAL, shape=X.shape), 3)


@pytest.mark.full
def test_bfloat16_and_dropout() -> None:
    dtypes = Dtypes(compute="bfloat16")
    config = mlp_block.MlpConfig(embed=16, hidden=32, dropout=0.5, dtypes=dtypes)
    params = init(config)
    key = jax.random.key(0)

    @jax.jit
    def both(params: Any, x: Any) -> Any:
        dropped, _ = mlp_block.apply(config, params, x, keys={"dropout": key})
        return mlp_block.apply(config, params, x)[0], dropped

    y, dropped = both(params, X)
    assert y.dtype == dropped.dtype == np.dtype("bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    blocks.assert_close(y.astype(np.float32), unsharded()[0][1], rtol=3e-2)
    assert not np.array_equal(y, dropped)
    with blocks.make_manager("fsdp_tp", "auto"):
        sharded = both(params, X)[1]
    blocks.assert_close(sharded.astype(np.float32), dropped.astype(np.float32), rtol=3e-2)


def test_state_passes_through_and_path_is_used() -> None:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy.loads(
        'version = 1\nname = "own"\n[[tensors]]\nmatch = "mlp/up/kernel"\nembed = "-"\n'
    )
    params = init(CONFIG)
    marker = object()
    with sw.PartitionManager(strategy, mesh=blocks.make_manager("fsdp_tp", "auto").mesh):
        assert mlp_block.apply(CONFIG, params, X, state=marker, path="mlp")[1] is marker
        with raises(
            sw.StrategyError,
            facts("mlp/up/kernel", path="down/kernel", fix="layers/mlp/up"),
            facts("mlp/up/kernel", path="up/kernel", fix="layers/mlp/up"),
        ):
            mlp_block.apply(CONFIG, params, X)


def test_bad_input() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: mlp_block.MlpConfig(embed=0, hidden=4), facts(0, path="embed", fix="embed")),
        (
            lambda: mlp_block.MlpConfig(embed=4, hidden=4, activations=("siloo",)),
            facts("siloo", path="activations", fix="silu"),
        ),
        (
            lambda: mlp_block.MlpConfig(embed=4, hidden=4, activations=cast("Any", "silu")),
            facts("silu", "tuple", path="activations", fix="silu"),
        ),
        (
            lambda: mlp_block.MlpConfig(embed=4, hidden=4, dropout=1.0),
            facts("1.0", "[0, 1)", path="dropout"),
        ),
        (lambda: mlp_block.apply(CONFIG, {}, X[0]), facts("(8, 16)", path="x")),
        (lambda: Dtypes(compute="int8"), facts("int8", path="compute", fix="bfloat16")),
        (lambda: Dtypes(param="float33"), facts("float33", path="param", fix="bfloat16")),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
    with (
        blocks.make_manager("fsdp_tp_sp", "auto"),
        raises(sw.IndivisibleError, "tp=4", axis="LENGTH", size=6, fix="sp+tp | -"),
    ):
        mlp_block.apply(CONFIG, init(CONFIG), X[:, :6])
