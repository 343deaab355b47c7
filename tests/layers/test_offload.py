"""Remat policies obey `[memory]`: what a layer saves is on the host, and gradients stay equal."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardwright as sw
from shardwright.layers import accumulate, attention_block, mlp_block, transformer_block
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.manager.test_memory import host_operands
from tests.raising import raises

CONFIG = transformer_block.TransformerConfig(
    layers=4,
    attention=attention_block.AttentionConfig(embed=16, heads=8, kv_heads=4, head_dim=4),
    mlp=mlp_block.MlpConfig(embed=16, hidden=32),
    remat="full",
)
PARAMS = blocks.random_params(transformer_block.specs(CONFIG))
X = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)


def make_manager(axis_types: Any = "auto", **memory: Any) -> sw.PartitionManager:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(memory=memory)
    sizes = "fsdp:2,tp:4" if axis_types == "auto" else "fsdp:8"
    return sw.PartitionManager(strategy, mesh=cpu_mesh(sizes, axis_types=axis_types))


def gradients(config: Any, pm: sw.PartitionManager) -> tuple[Any, Any]:
    """Return values and gradients of a stack, and the traced program."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(transformer_block.apply(config, params, x)[0] ** 2)

    with pm:
        stored = pm.shard(PARAMS, transformer_block.specs(config), role="param")
        x = pm.shard(X, sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(stored, x)
        return traced.lower().compile()(stored, x), traced.jaxpr.jaxpr


def offloaded(jaxpr: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the stacks that a scan writes to host memory."""
    return [
        variable.aval.shape
        for equation in jaxpr.eqns
        if equation.primitive.name == "scan"
        for variable in equation.outvars
        if "<host>" in str(variable.aval)
    ]


RESIDUAL = (4, 8, 8, 16)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "residual": ("full", {"saved": {"residual": "host"}}, 1),
    "all of full": ("full", {"activations": "host"}, 1),
    # The backward pass of a layer does not read its last matmul.
    "blocks": ("blocks", {"activations": "host"}, 2),
    "some of blocks": ("blocks", {"activations": "host", "saved": {"residual": "device"}}, 1),
    "on the device": ("blocks", {"saved": {"attention_out": "device"}}, 0),
    "dots": ("dots", {"activations": "host", "saved": {"residual": "device"}}, 5),
}


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.full(but=["residual-explicit"])
@pytest.mark.ci
@pytest.mark.alternate
def test_saved_values_live_on_the_host(name: str, axis_types: str) -> None:
    remat, memory, count = CASES[name]
    config = dataclasses.replace(CONFIG, remat=remat)
    found, jaxpr = gradients(config, make_manager(axis_types, **memory))
    expected, _ = gradients(config, make_manager(axis_types))
    blocks.assert_close(found, expected)
    stacks = offloaded(jaxpr)
    assert len(stacks) == count
    assert all(shape[0] == 4 for shape in stacks)
    assert host_operands(jaxpr) == []


def test_without_remat_nothing_can_move() -> None:
    config = dataclasses.replace(CONFIG, remat="none")
    with raises(sw.LayerError, "none", rule='activations = "host"', fix=("full", "dots", "blocks")):
        gradients(config, make_manager(activations="host"))


def test_accumulation_refuses_parameters_on_the_host() -> None:
    pm = make_manager(params="host")
    specs = {
        "w": sw.ArraySpec((16, 16), jnp.float32, (sw.EMBED, sw.EMPTY), jax.nn.initializers.ones)
    }
    params = pm.init(specs, jax.random.key(0))
    step = accumulate(lambda p, x, _: (jnp.mean(x), None), 2, specs=specs, mean_over="examples")
    with raises(sw.LayerError, "host", path="w", fix="memory"), pm:
        jax.jit(step)(params, pm.shard(X, sw.BATCH, sw.EMPTY, sw.EMPTY))


def test_policy_for_a_model_of_ones_own() -> None:
    pm = make_manager(saved={"hidden": "host", "other": "device"})
    policy = pm.remat_policy("named")
    assert policy is pm.remat_policy("named")
    with raises(sw.StrategyError, "['named']", fix='pm.remat_policy("a", "b")'):
        pm.remat_policy(["named"])  # type: ignore[arg-type]

    def layer(x: Any) -> Any:
        for name in ("hidden", "named", "other", "unknown"):
            x = checkpoint_name(jnp.sin(x), name)
        return x.sum()

    with pm:
        _, pullback = jax.jit(lambda x: jax.vjp(jax.checkpoint(layer, policy=policy), x))(X)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == X.shape]
    # The argument, and the values of three names.
    kinds = sorted(leaf.sharding.memory_kind for leaf in saved)
    assert kinds == ["device", "device", "device", "pinned_host"]
