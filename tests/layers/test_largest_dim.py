"""Layers over weights that are stored along their largest dim."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import accumulate, fp8, transformer_block
from shardwright.layers.placement import RESIDUAL
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.layers.fp8 import test_blocks as fp8_blocks
from tests.layers.moe import test_results as moe_results
from tests.layers.moe.reference import config as moe_config
from tests.layers.test_accumulate import PARAMS, SPECS, TOKENS, decoder_loss, whole_batch

pytestmark = pytest.mark.full


def manager(preset: str, mesh: str, **policy: Any) -> sw.PartitionManager:
    """Return a manager whose rules shard no stored weight over fsdp."""
    base = sw.Strategy.preset(preset) | sw.Strategy(params={"embed": "-"})
    strategy = base | sw.Strategy(policy={"largest_dim": "fsdp | -", "gather": "fsdp", **policy})
    return sw.PartitionManager(strategy, mesh=cpu_mesh(mesh), mode="train")


def spread(tree: Any) -> list[bool]:
    """Tell for each leaf whether a mesh axis fsdp shards it."""
    return ["fsdp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("gather", ["each", "once"])
@pytest.mark.parametrize("min_size", [0, 100, 400])
def test_accumulated_gradients(gather: Any, min_size: int) -> None:
    """Layers are scanned: a minimum between one layer and the stack is that of one layer."""
    with manager("fsdp", "fsdp:8", largest_dim_min_size=min_size) as pm:
        params = pm.shard(PARAMS, SPECS, role="param")
        tokens = pm.shard(TOKENS, sw.BATCH, sw.QUERY_LENGTH)
        step = jax.jit(accumulate(decoder_loss, 2, specs=SPECS, gather=gather))
        result = step(params, tokens)
    assert any(spread(params))
    assert all(spread(params)) == (min_size == 0)
    blocks.assert_close((result.value, result.grads), whole_batch(), rtol=1e-4)
    assert spread(result.grads) == spread(params)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8(recipe: str) -> None:
    config, scaling = fp8_blocks.config_of(recipe), fp8_blocks.warm(recipe)
    channel = fp8.new_channel(scaling)
    with manager("fsdp_tp", "fsdp:4,tp:2") as pm:
        params = pm.shard(fp8_blocks.PARAMS, transformer_block.specs(config), role="param")
        step = jax.jit(fp8_blocks.differentiated(config, scaling))
        got = step(params, pm.shard(fp8_blocks.X, RESIDUAL), channel)
    assert any(spread(params))
    wanted = fp8_blocks.unsharded(recipe)
    assert np.max(fp8_blocks.distances(got, wanted)) < 0.02
    assert spread(got[1][0]) == spread(params)


def test_moe() -> None:
    for mesh in ("fsdp:8", "fsdp:2,ep:4"):
        pm = manager("moe_ep", mesh)
        specs = sw.layers.moe.specs(moe_config(shared=1))
        assert any("fsdp" in str(each.spec) for each in jax.tree.leaves(pm.shardings(specs)))
        assert not moe_results.check(pm, moe_config(shared=1))
