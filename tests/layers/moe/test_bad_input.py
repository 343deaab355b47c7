"""Errors of the MoE layer: what is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardwright as sw
from shardwright.errors import (
    IndivisibleError,
    LayerError,
    ManualAxisError,
    RankMismatchError,
    StrategyError,
)
from shardwright.layers import moe
from shardwright.testing import cpu_mesh
from tests.layers.moe.reference import config, manager, parameters, tokens
from tests.raising import facts, raises


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: config(per_token=9),
            "per_token=9 is more than the 8 experts\n  fix   give at most 8",
        ),
        (lambda: config(groups=3), "8 experts do not divide into 3 groups"),
        (lambda: config(groups=4, top_groups=5), "top_groups=5 is more than the 4 groups"),
        (lambda: config(groups=4, per_token=3), "more than the 2 experts in the 1 best groups"),
        (lambda: config(experts=0), "experts"),
        (lambda: config(shared=-1), "shared"),
        (lambda: config(score="tanh"), "write one of softmax, sigmoid"),
        (lambda: config(activation="swish2"), "activation='swish2' is unknown"),
        (lambda: config(matmul="grouped"), "write one of auto, padded, ragged"),
        (lambda: config(matmul="ragged", activation="sigmoid"), 'write matmul="padded"'),
        (lambda: config(capacity=1.25), "write capacity=CapacityFactor(1.25)"),
        (lambda: config(exchange="rows"), "write one of auto, slots, ragged"),
        (
            lambda: config(exchange="ragged", capacity=moe.CapacityFactor(2.0)),
            'write capacity=Dropless(), or exchange="slots"',
        ),
        (lambda: config(exchange="ragged", matmul="padded"), 'or write exchange="slots"'),
        (lambda: config(recipe="delayed"), "experts are not computed in fp8"),
        (lambda: moe.CapacityFactor(0), "write CapacityFactor(1.25)"),
        (lambda: moe.CapacityFactor(float("nan")), "write CapacityFactor(1.25)"),
    ],
)
def test_invalid_config(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(LayerError) as error:
        build()
    assert text in str(error.value)


def test_invalid_arguments() -> None:
    moe_config = config()
    params, x = parameters(moe_config), tokens(8, 4, 16)
    with raises(RankMismatchError, "(8, 4, 8)", "MoE", 16, fix="BATCH"):
        moe.apply(moe_config, params, x[..., :8])
    with raises(RankMismatchError, "(16,)", "MoE", 16, fix="BATCH"):
        moe.apply(moe_config, params, x[0, 0])
    with raises(LayerError, "parameter", "missing", fix="moe.specs"):
        moe.apply(moe_config, {"router": params["router"]}, x)
    with raises(LayerError, "(8, 24, 16)", "(8, 16, 24)", fix="moe.specs"):
        moe.apply(moe_config, {**params, "up": params["down"]}, x)
    with raises(LayerError, "bias"):
        moe.apply(moe_config, {**params, "bias": x}, x)
    with raises(LayerError, "(4,)", "(8,)", fix="expert"):
        moe.apply(moe_config, params, x, state=moe.MoEState(bias=jnp.zeros(4)))


def test_what_does_not_divide() -> None:
    moe_config = config(experts=6)
    with manager("moe_ep", "fsdp:2,ep:4"), pytest.raises(IndivisibleError) as error:
        moe.apply(moe_config, parameters(moe_config), tokens(8, 4, 16))
    assert "EXPERT" in str(error.value)
    with manager("moe_ep", "fsdp:2,ep:4"), pytest.raises(IndivisibleError) as error:
        moe.apply(config(), parameters(config()), tokens(4, 4, 16))
    assert "BATCH" in str(error.value)


@pytest.mark.parametrize(
    ("overlay", "text"),
    [
        ('capacity = "-"', 'write capacity = "fsdp" under [rules]'),
        ('embed = "tp"\nmlp_intermediate = "-"', 'write embed = "-" under [rules]'),
        ('batch = "fsdp+ep"\nexpert = "ep+tp"\nmlp_intermediate = "-"', "over all mesh axes"),
        ('mlp_intermediate = "fsdp"', "give BATCH and MLP_INTERMEDIATE different mesh axes"),
    ],
)
def test_strategies_that_it_cannot_follow(overlay: str, text: str) -> None:
    rules = sw.Strategy.loads(f"version = 1\n[rules]\n{overlay}\n")
    pm = sw.PartitionManager(
        sw.Strategy.preset("moe_ep") | rules, mesh=cpu_mesh("fsdp:2,ep:2,tp:2")
    )
    with pm, pytest.raises(StrategyError) as error:
        moe.explain(config(), (8, 4, 16))
    assert text in str(error.value)


def test_shared_experts_are_sharded_as_the_others() -> None:
    """One size divides and the other takes the next candidate of the rule."""
    rules = sw.Strategy.loads('version = 1\n[rules]\nmlp_intermediate = "tp | -"\n')
    moe_config = config(hidden=6, shared=2)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp") | rules, mesh=cpu_mesh("fsdp:2,tp:4"))
    text = facts(6, "expert", 2, "tp", fix="MLP_INTERMEDIATE")
    with pm, raises(StrategyError, text) as error:
        moe.apply(moe_config, parameters(moe_config), tokens(8, 4, 16))
    assert "fix   choose a hidden size that divides" in str(error.value)
    both = config(hidden=6, shared=1)
    with pm:
        y, _ = jax.jit(lambda x: moe.apply(both, parameters(both), x))(tokens(8, 4, 16))
    plain, _ = jax.jit(lambda x: moe.apply(both, parameters(both), x))(tokens(8, 4, 16))
    assert jnp.abs(y - plain).max() < 1e-5


def test_tokens_inside_shard_map() -> None:
    """Shards of tokens are right; tokens that all shards share are refused."""
    moe_config, x = config(), tokens(64, 4, 16)

    def layer(x: Any) -> Any:
        return moe.apply(moe_config, parameters(moe_config), x)[0]

    with manager("ddp", "dp:8") as pm:
        spec = PartitionSpec("dp")
        local = jax.jit(jax.shard_map(layer, mesh=pm.mesh, in_specs=spec, out_specs=spec))
        y = local(x)
        shared = jax.shard_map(
            layer, mesh=pm.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
        )
        with raises(ManualAxisError, "dp", fix="shard_map"):
            shared(x)
    assert jnp.abs(y - jax.jit(layer)(x)).max() < 1e-5
