"""Moves into host memory: from other meshes, from the host, and back to devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.testing import cpu_mesh

AXES = {"up": (sw.EMBED, sw.MLP_INTERMEDIATE), "step": ()}


def manager(sizes: str, **memory: Any) -> sw.PartitionManager:
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(memory=memory)
    return sw.PartitionManager(strategy, mesh=cpu_mesh(sizes), mode="train")


def numbers() -> dict[str, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    return {"up": values, "step": np.int32(3)}


@pytest.mark.parametrize("piece", [512, "64MiB"])
def test_leaves_move_between_memories(piece: Any) -> None:
    wanted = numbers()
    places = [
        manager("fsdp:4,tp:2", params="host"),
        manager("fsdp:2,tp:4", params="host"),
        manager("fsdp:2,tp:4"),
        manager("fsdp:2,tp:4", params="host"),
    ]
    tree: Any = wanted
    for pm in places:
        before, tree = tree, pm.reshard(tree, AXES, piece=piece, donate=True)
        for name, sharding in pm.shardings(wanted, AXES).items():
            assert tree[name].sharding == sharding
            np.testing.assert_array_equal(tree[name], wanted[name])
    assert before["up"].is_deleted()
    assert tree["up"].sharding.memory_kind == "pinned_host"
    assert pm.reshard(tree, AXES)["up"] is tree["up"], "it is in its place"


def test_plan_counts_the_bytes_to_the_host() -> None:
    source, target = manager("fsdp:4,tp:2"), manager("fsdp:2,tp:4", params="host")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), numbers())
    plan = target.plan_reshard(shapes, AXES, source=source)
    assert plan.bytes_to_host == 16 * 32 * 4
    assert "to host memory: 2.0 KiB" in str(plan)
    back = source.plan_reshard(shapes, AXES, source=target)
    assert (back.bytes_to_host, back.leaves[1].source) == (0, "host")
    stays = target.plan_reshard(shapes, AXES, source=target)
    assert not any(leaf.moves for leaf in stays.leaves)
