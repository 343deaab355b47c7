"""State in host memory is saved, and restored straight into the memory that the rules name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright as sw
from shardwright import checkpoint
from shardwright.testing import cpu_mesh

SPECS = {
    "up": sw.ArraySpec(
        (16, 32), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE), jax.nn.initializers.normal(0.1)
    )
}
ADAM = optax.adam(1e-2)


def manager(sizes: str, preset: str = "fsdp_tp", **memory: Any) -> sw.PartitionManager:
    strategy = sw.Strategy.preset(preset) | sw.Strategy(memory=memory)
    return sw.PartitionManager(strategy, mesh=cpu_mesh(sizes), mode="train")


def abstract(pm: sw.PartitionManager) -> Any:
    return {"params": pm.abstract(SPECS), "moments": pm.abstract_state(ADAM, SPECS)}


def test_saved_state_is_restored_into_each_memory(tmp_path: Path) -> None:
    pm = manager("fsdp:2,tp:4", state="host", params="host")
    params = pm.init(SPECS, jax.random.key(0))
    state = {"params": params, "moments": pm.init_state(ADAM, params, SPECS)}
    checkpoint.save(tmp_path / "run", state, step=1)
    for other in (
        pm,
        manager("fsdp:4,tp:2", state="host"),
        manager("fsdp:8", "fsdp"),
        manager("fsdp:8", "fsdp", params="host"),
    ):
        restored = checkpoint.restore(tmp_path / "run", abstract(other))
        for found, target, wanted in zip(
            *map(jax.tree.leaves, (restored, abstract(other), state)), strict=True
        ):
            assert found.sharding == target.sharding
            np.testing.assert_array_equal(found, wanted)
