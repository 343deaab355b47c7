"""Padding: no slot, no statistics, no loss, and nothing of what they hold."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import attention_block, moe, moe_block, transformer_block
from tests.layers import blocks
from tests.layers.moe.reference import config, error, manager, parameters, tokens
from tests.raising import raises

MOE = config(balance_loss=0.5, z_loss=0.25, shared=1)
VALID = np.random.default_rng(2).random((8, 4)) < 0.6
VALID[3] = False  # a device whose rows are all padding
X = tokens(8, 4, 16)
TARGET = np.random.default_rng(3).standard_normal(X.shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=4)
def evaluate(params: Any, x: Any, target: Any, valid: Any, moe_config: Any = MOE) -> Any:
    def loss(params: Any, x: Any) -> Any:
        y, state = moe.apply(moe_config, params, x, valid=valid)
        return (y * target).sum() + state.stats.aux, (y, state.stats)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)


def padded_with(value: float) -> np.ndarray:
    return np.where(VALID[..., None], X, np.float32(value))


@functools.cache
def tokens_alone() -> Any:
    """What the tokens give without any padding: the oracle."""
    return jax.device_get(evaluate(parameters(MOE), X[VALID], TARGET[VALID], None))


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_padding_changes_nothing(value: float) -> None:
    (gradient, of_x), (y, stats) = jax.device_get(
        evaluate(parameters(MOE), padded_with(value), TARGET, jnp.asarray(VALID))
    )
    (wanted, wanted_of_x), (wanted_y, wanted_stats) = tokens_alone()
    assert error(y[VALID], wanted_y) <= 1e-6
    assert error(of_x[VALID], wanted_of_x) <= 1e-6
    assert error(stats.aux, wanted_stats.aux) <= 1e-6
    np.testing.assert_array_equal(stats.load, wanted_stats.load)
    assert stats.dropped == 0
    assert not y[~VALID].any()
    assert not of_x[~VALID].any()
    for name, own in gradient.items():
        assert error(own, wanted[name]) <= 1e-5, name


@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "mesh", "exchange"),
    [
        ("moe_ep", "fsdp:2,ep:4", "auto"),
        pytest.param("moe_ep", "fsdp:2,ep:4", "ragged", marks=pytest.mark.full),
        pytest.param("fsdp_tp", "fsdp:4,tp:2", "auto", marks=pytest.mark.full),
        pytest.param("serve_tp", "ep:4,tp:2", "auto", marks=pytest.mark.full),
    ],
)
def test_sharded_equals_tokens_alone(preset: str, mesh: str, exchange: str) -> None:
    moe_config = config(balance_loss=0.5, z_loss=0.25, shared=1, exchange=exchange)
    with manager(preset, mesh):
        (gradient, _), (y, stats) = evaluate(
            parameters(moe_config), padded_with(np.nan), TARGET, jnp.asarray(VALID), moe_config
        )
    (wanted, _), (wanted_y, wanted_stats) = tokens_alone()
    assert error(np.asarray(y)[VALID], wanted_y) <= 1e-6
    assert error(stats.aux, wanted_stats.aux) <= 1e-6
    np.testing.assert_array_equal(stats.load, wanted_stats.load)
    for name, own in gradient.items():
        assert error(own, wanted[name]) <= 1e-5, name


def test_padding_takes_no_slot() -> None:
    """Whatever the padding holds, the same tokens are dropped: those that NumPy counts."""
    moe_config = config(per_token=1, capacity=moe.CapacityFactor(0.75))
    params, valid = parameters(moe_config), jnp.asarray(VALID)
    run = jax.jit(functools.partial(moe.apply, moe_config))
    results = [run(params, padded_with(value), valid=valid) for value in (0, 1, np.nan)]
    slots = moe_config.capacity.slots(VALID.size, 1, 8)
    load = np.bincount((X[VALID] @ params["router"]).argmax(-1), minlength=8)
    for y, state in results:
        np.testing.assert_array_equal(y, results[0][0])
        np.testing.assert_array_equal(state.stats.load, load)
        assert state.stats.dropped == np.maximum(load - slots, 0).sum() > 0


def test_nothing_but_padding() -> None:
    run = jax.jit(functools.partial(moe.apply, MOE))
    y, state = run(parameters(MOE), X, valid=jnp.zeros((8, 4), bool))
    assert not y.any()
    assert not state.stats.load.any()
    assert state.stats.aux == 0


@pytest.mark.parametrize(
    "valid", [VALID[0], VALID.astype(np.int32), [[True]]], ids=["shape", "dtype", "list"]
)
def test_refused(valid: Any) -> None:
    with raises(sw.LayerError, path="valid", fix="(8, 4)"):
        moe.apply(MOE, parameters(MOE), X, valid=valid)


STACK = transformer_block.TransformerConfig(
    layers=2,
    attention=attention_block.AttentionConfig(embed=16, heads=4, kv_heads=2, head_dim=4),
    mlp=moe_block.MoEBlockConfig(moe=config(capacity=moe.CapacityFactor(0.75), balance_loss=0.1)),
)
PARAMS = blocks.random_params(transformer_block.specs(STACK))


@pytest.mark.full(but=["none"])
@pytest.mark.parametrize("segments", [None, np.zeros((8, 4), np.int32)], ids=["none", "zeros"])
def test_stack_without_caches(segments: Any) -> None:
    valid = jnp.asarray(VALID)
    run = jax.jit(
        functools.partial(transformer_block.apply, STACK, valid=valid, segment_ids=segments)
    )
    (y, state), (other, after) = (run(PARAMS, padded_with(v)) for v in (0.5, -3.0))
    np.testing.assert_array_equal(y[VALID], other[VALID])
    np.testing.assert_array_equal(state.moe[0].stats.load, after.moe[0].stats.load)
    assert state.moe[0].stats.load.sum(-1).tolist() == [VALID.sum() * 2] * 2
    assert state.aux == after.aux


@pytest.mark.full
def test_idle_slots_of_a_batch() -> None:
    """In decode, a slot without a request leaves the slots of the experts to the others."""
    serving, layers = transformer_block.unstack(STACK, PARAMS)
    active = jnp.asarray(np.arange(8) % 2 == 0)[:, None]

    def step(idle: float) -> Any:
        caches = transformer_block.init_caches(serving, batch=8, capacity=4)
        state = transformer_block.StackState(caches=caches)
        x = np.where(active[..., None], X[:, :1], np.float32(idle))
        return transformer_block.apply(serving, layers, x, state=state, valid=active)

    (y, state), (other, _) = step(0.5), step(-3.0)
    np.testing.assert_array_equal(y[::2], other[::2])
    assert [each.stats.load.sum() for each in state.moe] == [8, 8]
