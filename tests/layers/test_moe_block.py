"""An MoE layer in a layer and in a stack: scan equals a loop, and sharded equals unsharded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import LayerError
from shardwright.layers import attention_block, mlp_block, moe, moe_block, transformer_block
from shardwright.layers.placement import RESIDUAL
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import facts, raises

MOE = moe_block.MoEBlockConfig(
    moe=moe.MoEConfig(
        embed=16, hidden=8, experts=8, per_token=2, shared=1, balance_loss=0.1, z_loss=0.01
    )
)
STACK = transformer_block.TransformerConfig(
    layers=4,
    attention=attention_block.AttentionConfig(embed=16, heads=8, kv_heads=4, head_dim=4),
    mlp=(mlp_block.MlpConfig(embed=16, hidden=32), MOE),
)
X = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)
PARAMS = blocks.random_params(transformer_block.specs(STACK))
BIASES = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
STATE = transformer_block.StackState(moe=[None, moe.MoEState(bias=BIASES)])


def stack(params: Any, x: Any, config: Any = STACK, state: Any = STATE) -> Any:
    y, after = transformer_block.apply(config, params, x, state=state)
    return y, after.aux


@functools.cache
def unsharded() -> Any:
    return blocks.values_and_gradients(stack, PARAMS, X)


def by_blocks(params: Any, x: Any) -> Any:
    """Return the stack as a loop over its blocks, which have their own oracles."""
    aux = jnp.float32(0)
    for number in range(4):
        layer = jax.tree.map(lambda w, at=number // 2: w[at], params[number % 2])
        x = x + attention_block.apply(STACK.attention, layer["attention"], x)[0]
        if number % 2 == 0:
            x = x + mlp_block.apply(STACK.mlps[0], layer["mlp"], x)[0]  # type: ignore[arg-type]
            continue
        state = moe.MoEState(bias=BIASES[number // 2])
        added, state = moe_block.apply(MOE, layer["mlp"], x, state=state)
        assert state.stats is not None
        x, aux = x + added, aux + state.stats.aux
    return x, aux


@pytest.mark.full
def test_scan_equals_a_loop_over_blocks() -> None:
    blocks.assert_close(unsharded(), blocks.values_and_gradients(by_blocks, PARAMS, X), rtol=1e-4)


@pytest.mark.parametrize(
    ("preset", "mesh", "remat"),
    [
        ("moe_ep", "fsdp:2,ep:4", "blocks"),
        pytest.param("fsdp_tp_sp", "fsdp:2,tp:4", "full", marks=pytest.mark.full),
        pytest.param("fsdp_tp", "fsdp:4,tp:2", "dots", marks=pytest.mark.full),
        pytest.param("moe_ep", "fsdp:2,ep:2,tp:2", "none", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_sharded_equals_unsharded(preset: str, mesh: str, remat: str) -> None:
    config = dataclasses.replace(STACK, remat=remat)
    pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(mesh), mode="train")
    with pm:
        stored = pm.shard(PARAMS, transformer_block.specs(config), role="param")
        got = blocks.values_and_gradients(
            functools.partial(stack, config=config), stored, pm.shard(X, RESIDUAL)
        )
        assert got[0][1][0].sharding.is_equivalent_to(pm.sharding(RESIDUAL, shape=X.shape), 3)
    blocks.assert_close(got, unsharded(), rtol=1e-4)


# A router without losses: nothing is summed for statistics.
PLAIN = dataclasses.replace(
    MOE, moe=dataclasses.replace(MOE.moe, shared=0, balance_loss=0.0, z_loss=0.0)
)


def plain(params: Any, x: Any) -> Any:
    return moe_block.apply(PLAIN, params, x)[0]


@functools.cache
def unsharded_plain() -> Any:
    return blocks.values_and_gradients(plain, blocks.random_params(moe_block.specs(PLAIN)), X)


@pytest.mark.full
@pytest.mark.parametrize(("preset", "kind"), blocks.CASES)
@pytest.mark.alternate
def test_collectives(preset: str, kind: str) -> None:
    specs = moe_block.specs(PLAIN)
    inputs = (blocks.random_params(specs), specs, X, RESIDUAL)
    blocks.check_sharded("moe_block", plain, inputs, unsharded_plain(), preset, kind)


@pytest.mark.full
def test_decode_equals_one_call() -> None:
    config, layers = transformer_block.unstack(STACK, PARAMS)
    moe_states = transformer_block.unstack_state(STACK, STATE).moe
    pm = sw.PartitionManager(
        sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("ep:4,tp:2"), mode="decode"
    )

    @functools.partial(jax.jit, donate_argnums=2)
    def step(params: Any, x: Any, state: Any) -> Any:
        return transformer_block.apply(config, params, x, state=state)

    with pm:
        state = transformer_block.StackState(
            caches=transformer_block.init_caches(config, batch=8, capacity=8), moe=moe_states
        )
        stored = pm.shard(layers, transformer_block.specs(config), role="param")
        rows = []
        for at in range(8):
            y, state = step(stored, X[:, at : at + 1], state)
            rows.append(np.asarray(y))
    blocks.assert_close(np.concatenate(rows, 1), unsharded()[0][1][0], rtol=1e-4)


@pytest.mark.full
def test_statistics_and_biases_of_a_stack() -> None:
    _, after = jax.jit(functools.partial(transformer_block.apply, STACK))(PARAMS, X, state=STATE)
    dense, moe_state = after.moe
    assert dense is None
    assert moe_state.stats.load.shape == (2, 8)
    assert moe_state.stats.load.sum(-1).tolist() == [8 * 8 * 2] * 2
    assert moe_state.stats.dropped.tolist() == [0, 0]
    bias = moe.update_bias(moe_state.bias, moe_state.stats.load, rate=0.5)
    for layer in range(2):
        wanted = moe.update_bias(BIASES[layer], moe_state.stats.load[layer], rate=0.5)
        np.testing.assert_array_equal(bias[layer], wanted)
    assert transformer_block.StackState().aux == 0


def test_bad_input() -> None:
    small = dataclasses.replace(MOE, moe=dataclasses.replace(MOE.moe, embed=8))
    cases: list[tuple[Any, str]] = [
        (
            lambda: dataclasses.replace(STACK, mlp=small),
            facts("mlp.embed", 8, "attention.embed", 16),
        ),
        (
            lambda: moe_block.apply(MOE, {}, X[0]),
            facts("(8, 16)", path="x"),
        ),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)


def test_state_of_a_stack_as_that_of_its_layers() -> None:
    state = transformer_block.unstack_state(STACK, STATE)
    assert state.moe is not None
    assert state.moe[1].stats.load.shape == (8,)
    assert [moe_state and moe_state.bias.tolist() for moe_state in state.moe] == [
        None,
        BIASES[0].tolist(),
        None,
        BIASES[1].tolist(),
    ]
    config, layers = transformer_block.unstack(STACK, PARAMS)
    again = transformer_block.unstack_state(config, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    wrong = transformer_block.StackState(moe=STATE.moe * 2)  # type: ignore[operator]
    with raises(
        LayerError, "moe[1].bias", "(2, 8)", path="state", fix="transformer_block.unstack_state"
    ):
        transformer_block.apply(config, layers, X, state=wrong)
    one = transformer_block.StackState(moe=[None, moe.MoEState(bias=BIASES[0])])
    with raises(LayerError, "moe[1].bias", "(8,)", path="state"):
        transformer_block.apply(STACK, PARAMS, X, state=one)


@pytest.mark.full
@pytest.mark.parametrize("given", [STATE, transformer_block.StackState()], ids=["bias", "no bias"])
def test_state_is_the_carry_of_a_loop(given: Any) -> None:
    config, layers = transformer_block.unstack(STACK, PARAMS)
    caches = transformer_block.init_caches(config, batch=8, capacity=8)
    state = transformer_block.unstack_state(STACK, given)

    def step(state: Any, row: Any) -> Any:
        y, state = transformer_block.apply(config, layers, row[:, None], state=state)
        return state, y[:, 0]

    rows = jnp.swapaxes(jnp.asarray(X), 0, 1)
    _, ys = jax.lax.scan(step, dataclasses.replace(state, caches=caches), rows)
    wanted, _ = transformer_block.apply(STACK, PARAMS, X, state=given)
    blocks.assert_close(jnp.swapaxes(ys, 0, 1), wanted, rtol=1e-4)
