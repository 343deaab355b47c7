"""A scatter into zeros takes the sharding of the values that it is combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from tests.plan.against_xla import compiled_bytes, planned_bytes

LOGITS = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)
TOKENS = (sw.BATCH, sw.QUERY_LENGTH)
L = jax.ShapeDtypeStruct((64, 32, 512), jnp.float32)
T = jax.ShapeDtypeStruct((64, 32), jnp.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    chances = jax.nn.log_softmax(sw.shard(logits, LOGITS))
    return -jnp.take_along_axis(chances, labels[..., None], -1).mean()


def added_later(logits: Any, labels: Any) -> Any:
    logits = sw.shard(logits, LOGITS)
    rows = jnp.arange(64)[:, None], jnp.arange(32)[None]
    marks = jnp.zeros(L.shape).at[(*rows, labels)].add(1.0)
    return (jnp.tanh(marks) * 2 + logits).sum()


@pytest.mark.parametrize("mesh", ["dp:2,tp:4", "dp:8,tp:1"])
def test_gradient_of_cross_entropy_equals_xla(mesh: str) -> None:
    gradient = jax.grad(cross_entropy)
    strategy = sw.Strategy.preset("tensor")
    planning = sw.PartitionManager(strategy, mesh=sw.abstract_mesh(mesh))
    report = planning.plan(gradient, L, T, specs=(LOGITS, TOKENS))
    assert report.walked.complete
    assert not report.walked.choices
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh(mesh))
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))
        for x, axes in ((L, LOGITS), (T, TOKENS))
    ]
    assert planned_bytes(report) == compiled_bytes(pm, gradient, arguments)
    # The logits, the softmax that waits for its gradient, and the scattered gradient.
    local = L.size * 4 // 8
    assert 3 * local <= report.memory.high < 3.1 * local


@pytest.mark.parametrize("function", [jax.grad(cross_entropy), added_later])
def test_scatter_is_never_held_whole(function: Callable[..., Any]) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("dp:2,tp:4"))
    report = pm.plan(function, L, T, specs=(LOGITS, TOKENS))
    assert report.memory.high < L.size * 4 // 2


def test_scatter_without_peers_takes_the_sharding_of_its_updates() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("dp:2,tp:4"))
    rows = jax.ShapeDtypeStruct((64, 128), jnp.float32)

    def summed(rows: Any, labels: Any) -> Any:
        return jnp.zeros((512, 128)).at[labels].add(sw.shard(rows, sw.BATCH, sw.EMBED))

    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    report = pm.plan(summed, rows, ids, specs=((sw.BATCH, sw.EMBED), (sw.BATCH,)))
    assert [(event.kind, event.mesh_axes) for event in report.events] == [("all_reduce", ("dp",))]
