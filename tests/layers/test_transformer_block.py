"""The stack of layers: scan equals a loop, remat changes no gradient, decode equals one call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import CacheError
from shardwright.layers import (
    RopeFrequencies,
    attention_block,
    fp8,
    mlp_block,
    moe,
    transformer_block,
)
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.layers.placement import RESIDUAL
from shardwright.layers.remat import REMAT
from tests.layers import blocks
from tests.raising import facts, raises

CONFIG = transformer_block.TransformerConfig(
    layers=4,
    attention=attention_block.AttentionConfig(embed=16, heads=8, kv_heads=4, head_dim=4),
    mlp=mlp_block.MlpConfig(embed=16, hidden=32),
    windows=((2, 0), None),
)
X = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)
PARAMS = blocks.random_params(transformer_block.specs(CONFIG))


def stack(params: Any, x: Any, config: Any = CONFIG) -> Any:
    return transformer_block.apply(config, params, x)[0]


@functools.cache
def unsharded() -> Any:
    return blocks.values_and_gradients(stack, PARAMS, X)


def by_blocks(params: Any, x: Any) -> Any:
    """Return the stack as a loop over its blocks, which have their own oracles."""
    for number in range(4):
        layer = jax.tree.map(lambda w, at=number // 2: w[at], params[number % 2])
        own = dataclasses.replace(CONFIG.attention, window=CONFIG.windows[number % 2])
        x = x + attention_block.apply(own, layer["attention"], x)[0]
        x = x + mlp_block.apply(CONFIG.mlp, layer["mlp"], x)[0]
    return x


def test_scan_equals_a_loop_over_blocks() -> None:
    """Values and gradients."""
    blocks.assert_close(unsharded(), blocks.values_and_gradients(by_blocks, PARAMS, X))


@pytest.mark.full
def test_unstack_gives_the_same_layers() -> None:
    config, layers = transformer_block.unstack(CONFIG, PARAMS)
    assert len(layers) == len(transformer_block.specs(config)) == 4
    assert transformer_block.unstack(config, layers)[1] == layers
    shapes = jax.tree.map(np.shape, layers)
    wanted = jax.tree.map(
        lambda spec: spec.shape,
        transformer_block.specs(config),
        is_leaf=lambda node: isinstance(node, sw.ArraySpec),
    )
    assert shapes == wanted
    y = jax.jit(functools.partial(stack, config=config))(layers, X)
    blocks.assert_close(y, unsharded()[0][1])


@pytest.mark.parametrize(
    ("preset", "kind", "remat"),
    [
        ("fsdp_tp_sp", "mixed", "full"),
        *[
            pytest.param(preset, kind, remat, marks=pytest.mark.full)
            for preset, kind, remat in [
                ("fsdp_tp_sp", "explicit", "none"),
                ("fsdp_tp_sp", "auto", "blocks"),
                ("fsdp_tp", "explicit", "dots"),
                ("fsdp_tp", "auto", "full"),
                ("tensor", "mixed", "none"),
                ("fsdp", "auto", "blocks"),
            ]
        ],
    ],
)
def test_sharded_equals_unsharded(preset: str, kind: str, remat: str) -> None:
    config = dataclasses.replace(CONFIG, remat=remat)
    with blocks.make_manager(preset, kind) as pm:
        stored = pm.shard(PARAMS, transformer_block.specs(config), role="param")
        got = blocks.values_and_gradients(
            functools.partial(stack, config=config), stored, pm.shard(X, RESIDUAL)
        )
        assert got[0][1].sharding.is_equivalent_to(pm.sharding(RESIDUAL, shape=X.shape), 3)
    blocks.assert_close(got, unsharded(), rtol=1e-4)


# Two layers that are alike, so the program has the collectives of one.
ALIKE = dataclasses.replace(CONFIG, layers=2, windows=())


def alike(params: Any, x: Any) -> Any:
    return stack(params, x, ALIKE)


@functools.cache
def unsharded_alike() -> Any:
    return blocks.values_and_gradients(alike, PARAMS[:1], X)


@pytest.mark.full
@pytest.mark.parametrize(("preset", "kind"), blocks.CASES)
@pytest.mark.alternate
def test_collectives(preset: str, kind: str) -> None:
    inputs = (PARAMS[:1], transformer_block.specs(ALIKE), X, RESIDUAL)
    blocks.check_sharded("transformer_block", alike, inputs, unsharded_alike(), preset, kind)


def test_remat_keeps_less() -> None:
    """Residuals of the backward pass, in elements: the more is computed again, the fewer."""
    kept = {}
    for remat in REMAT:
        config = dataclasses.replace(CONFIG, remat=remat)
        _, pullback = jax.eval_shape(
            lambda params, x, config=config: jax.vjp(lambda x: stack(params, x, config), x),
            PARAMS,
            X,
        )
        kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(pullback))
    assert kept["full"] < kept["blocks"] < kept["dots"] < kept["none"], kept


@pytest.mark.parametrize("kind", ["auto", pytest.param("explicit", marks=pytest.mark.full)])
def test_decode_equals_one_call(kind: str) -> None:
    config, layers = transformer_block.unstack(CONFIG, PARAMS)
    pm = blocks.make_manager("fsdp_tp_sp", kind, mode="decode")

    def step(params: Any, x: Any, caches: Any) -> Any:
        return transformer_block.apply(config, params, x, state=caches)

    with pm:
        caches = transformer_block.StackState(
            caches=transformer_block.init_caches(config, batch=8, capacity=8)
        )
        stored = pm.shard(layers, transformer_block.specs(config), role="param")
        run, rows = jax.jit(step, donate_argnums=2), []
        for at in range(8):
            y, caches = run(stored, X[:, at : at + 1], caches)
            rows.append(np.asarray(y))
    blocks.assert_close(np.concatenate(rows, 1), unsharded()[0][1], rtol=1e-4)


def past_the_caches() -> Any:
    """Run eight tokens through one layer of the stack, whose cache takes four of them."""
    config = dataclasses.replace(CONFIG, layers=1, windows=(), scan=False, remat="blocks")
    layers = [jax.tree.map(lambda w: w[0], PARAMS[0])]
    caches = transformer_block.init_caches(config, batch=8, capacity=4)
    state = transformer_block.StackState(caches=caches)
    return transformer_block.apply(config, layers, X, state=state)


@pytest.mark.full
def test_decode_past_the_caches() -> None:
    with raises(CacheError, 0, 1, 8) as caught:
        past_the_caches()
    assert "fix   create the cache with a larger capacity=" in str(caught.value)
    # A compiled program cannot raise: the caches do not grow.
    _, state = jax.jit(past_the_caches)()
    assert not np.asarray(state.caches[0].length).any()


@pytest.mark.full
def test_dropout_is_the_same_with_scan() -> None:
    config = dataclasses.replace(CONFIG, dropout=0.5, layers=2, windows=())
    params = [jax.tree.map(lambda w: w[:2], PARAMS[0])]
    unstacked, layers = transformer_block.unstack(config, params)
    keys = {"dropout": jax.random.key(0)}

    @jax.jit
    def both(x: Any) -> Any:
        scanned, _ = transformer_block.apply(config, params, x, keys=keys)
        return scanned, transformer_block.apply(unstacked, layers, x, keys=keys)[0]

    scanned, looped = both(X)
    blocks.assert_close(scanned, looped)
    assert not np.allclose(scanned, jnp.asarray(stack(params, X, config)), rtol=1e-2)


REST = dataclasses.replace(
    CONFIG,
    layers=8,
    windows=((2, 0), (2, 0), None),
    thetas=(100.0, 100.0, RopeFrequencies(values=(0.1, 0.01), scale=1.25)),
)
REST_PARAMS = blocks.random_params(transformer_block.specs(REST))


def loop_with_rest(params: Any, x: Any) -> Any:
    """Return 8 layers with a pattern of 3 as a loop over blocks: 2 in a scan, 2 after it."""
    for number in range(8):
        tree = params[number % 3 if number < 6 else 3 + number - 6]
        layer = jax.tree.map(lambda w, at=number // 3: w[at], tree) if number < 6 else tree
        window, theta = REST.windows[number % 3], REST.thetas[number % 3]
        own = dataclasses.replace(CONFIG.attention, window=window, rope_theta=theta)
        x = x + attention_block.apply(own, layer["attention"], x)[0]
        x = x + mlp_block.apply(CONFIG.mlp, layer["mlp"], x)[0]
    return x


@functools.cache
def looped_with_rest() -> Any:
    return blocks.values_and_gradients(loop_with_rest, REST_PARAMS, X)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.full)])
def test_layers_after_the_scan(remat: str) -> None:
    config = dataclasses.replace(REST, remat=remat)
    shapes = [tree["mlp"]["up"]["kernel"].shape for tree in transformer_block.specs(config)]
    assert shapes == [(2, 16, 2, 32)] * 3 + [(16, 2, 32)] * 2
    got = blocks.values_and_gradients(functools.partial(stack, config=config), REST_PARAMS, X)
    blocks.assert_close(got, looped_with_rest())
    text = str(jax.make_jaxpr(functools.partial(stack, config=config))(REST_PARAMS, X))
    assert text.count("scan[") == 1
    single, layers = transformer_block.unstack(config, REST_PARAMS)
    assert len(layers) == len(transformer_block.specs(single)) == 8
    y = jax.jit(functools.partial(stack, config=single))(layers, X)
    blocks.assert_close(y, looped_with_rest()[0][1])


@pytest.mark.full
@pytest.mark.parametrize(("preset", "kind"), blocks.CASES)
@pytest.mark.alternate
def test_layers_after_the_scan_sharded(preset: str, kind: str) -> None:
    specs = transformer_block.specs(REST)
    with blocks.make_manager(preset, kind) as pm:
        params, x = pm.shard(REST_PARAMS, specs, role="param"), pm.shard(X, RESIDUAL)
        got = blocks.values_and_gradients(functools.partial(stack, config=REST), params, x)
    blocks.assert_close(got, looped_with_rest())


def test_26_layers_of_gemma_3() -> None:
    config = dataclasses.replace(CONFIG, layers=26, windows=((511, 0),) * 5 + (None,))
    specs = transformer_block.specs(config)
    assert [tree["mlp"]["up"]["kernel"].shape[0] for tree in specs] == [4] * 6 + [16] * 2
    single, layers = transformer_block.unstack(config, blocks.random_params(specs))
    assert [number for number in range(26) if single.window(number) is None] == [5, 11, 17, 23]
    assert len(layers) == 26


@pytest.mark.full
def test_states_of_layers_after_the_scan() -> None:
    """MoE layers and delayed scaling have a state for each of them, in a scan and without."""
    recipe = fp8.DelayedScaling(history=2)
    moe_config = MoEBlockConfig(moe=moe.MoEConfig(embed=16, hidden=8, experts=4, per_token=2))
    config = dataclasses.replace(
        CONFIG,
        layers=5,
        attention=dataclasses.replace(CONFIG.attention, recipe=recipe),
        mlp=(dataclasses.replace(CONFIG.mlp, recipe=recipe), moe_config),
        windows=(),
        dropout=0.1,
    )
    params = blocks.random_params(transformer_block.specs(config))
    scaling = transformer_block.init_scaling(config)
    bias = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
    moe_states = [None, moe.MoEState(bias=jnp.asarray(bias), stats=None), None]
    state = transformer_block.StackState(moe=moe_states, scaling=fp8.uses(scaling))
    single, layers = transformer_block.unstack(config, params)
    alone = transformer_block.unstack_state(config, state)
    keys = {"dropout": jax.random.key(0)}

    @jax.jit
    def both(params: Any, layers: Any) -> Any:
        scanned = transformer_block.apply(config, params, X, keys=keys, state=state)
        return scanned, transformer_block.apply(single, layers, X, keys=keys, state=alone)

    (y, after), (again, seen) = both(params, layers)
    blocks.assert_close(y, again, rtol=1e-4)
    assert [moe_state is None for moe_state in alone.moe or ()] == [True, False, True, False, True]
    np.testing.assert_array_equal(alone.moe[3].bias, bias[1])  # type: ignore[index,union-attr]
    assert after.scaling is not None
    assert seen.scaling is not None
    first, last = after.scaling[0]["mlp"]["up"].x, after.scaling[2]["mlp"]["up"].x
    singly = [tree["mlp"]["up"].x for tree in seen.scaling[::2]]
    np.testing.assert_allclose([*first, last], singly, rtol=1e-4)


def test_bad_input() -> None:
    caches = [cast("Any", None)] * 4
    small = mlp_block.MlpConfig(embed=8, hidden=32)

    def change(**given: Any) -> Any:
        return dataclasses.replace(CONFIG, **given)

    cases: list[tuple[Any, str]] = [
        (lambda: change(layers=0), facts(0, path="layers", fix="layers")),
        (lambda: change(mlp=small), facts("mlp.embed", 8, "attention.embed", 16)),
        (lambda: change(remat="all"), facts("all", path="remat")),
        (lambda: change(windows=(None,) * 5), facts(5, 4, count=1)),
        (lambda: change(dropout=-1), facts(-1, "[0, 1)", path="dropout")),
        (lambda: stack(PARAMS[:1], X), facts(1, 2, path="params", fix="transformer_block.specs")),
        (lambda: stack(PARAMS, X[0]), facts("(8, 16)", path="x")),
        (
            lambda: transformer_block.apply(
                CONFIG, PARAMS, X, state=transformer_block.StackState(caches=caches)
            ),
            facts("scan", "True", path="state", fix="transformer_block.unstack"),
        ),
        (
            lambda: transformer_block.apply(CONFIG, PARAMS, X, state=cast("Any", caches)),
            facts("list", path="state", fix="transformer_block.StackState"),
        ),
        (
            lambda: transformer_block.apply(
                CONFIG, PARAMS, X, state=transformer_block.StackState(moe=[None])
            ),
            facts(1, "moe", 2, path="state", fix="MoEState"),
        ),
        (lambda: change(mlp=()), facts("mlp", "tuple", fix="MlpConfig")),
        (
            lambda: change(mlp=(CONFIG.mlp,) * 3),
            facts(6, 4, path="scan", fix="scan=False"),
        ),
        (lambda: change(thetas=(0.0,)), facts("0.0", path="thetas", fix="rope_frequencies")),
        (lambda: change(thetas=[1e4]), facts("10000.0", "list", path="thetas")),
        (
            lambda: transformer_block.apply(
                change(scan=False),
                [{}] * 4,
                X,
                state=transformer_block.StackState(caches=caches[:3]),
            ),
            facts(3, 4, path="state", fix="transformer_block.init_caches"),
        ),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
