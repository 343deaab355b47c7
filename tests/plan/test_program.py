"""The arguments of a plan: positions of donated arguments, shapes, and slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plan import Program
from tests.raising import raises

X = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
PM = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:8"))


def plan(donated: Any = (), topology: Any = None) -> Any:
    return PM.plan(lambda a, b: (a + 1, b), X, X, donated=donated, topology=topology)


@pytest.mark.parametrize("donated", [0, -2, (0,), (-2,), [0]])
def test_donated_is_read_as_jit_reads_it(donated: Any) -> None:
    assert plan().memory.high == 3 * X.size * 4
    assert plan(donated).memory.high == 2 * X.size * 4


@pytest.mark.parametrize("donated", [2, -3, "a", (1.5,), True, (0, 7)])
def test_invalid_donated_is_refused(donated: Any) -> None:
    with raises(sw.StrategyError, 0, 1):
        plan(donated)


def test_donated_without_arguments_is_refused() -> None:
    with raises(sw.StrategyError, "donated", 0):
        PM.plan(lambda: jnp.zeros(3), donated=0)


def test_shapes_that_are_not_a_tuple_are_refused() -> None:
    with raises(sw.StrategyError, "ShapeDtypeStruct", "tuple"):
        Program(lambda x: x, X)  # type: ignore[arg-type]


def test_topology_that_is_not_text_is_refused() -> None:
    with raises(sw.StrategyError, "topology", "int", fix="v5e:2x4"):
        plan(topology=3)


def test_numpy_arguments_count_in_the_dtype_of_the_program() -> None:
    report = PM.plan(lambda x: x, np.ones((1024, 1024)))  # 64 bits, of which JAX keeps 32
    [leaf] = report.state.leaves
    assert leaf.bytes.per_device == report.memory.high == 4 * 1024**2


def test_weight_that_is_not_gathered_is_suspected() -> None:
    """fsdp stores the weight's EMBED, and the batch wants fsdp too."""
    specs = {"up": sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    hidden = (sw.BATCH, sw.EMBED)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:2,tp:2"))

    def plan_with(gather: bool) -> Any:
        def forward(params: Any, x: Any) -> Any:
            w = sw.gather(params, specs) if gather else params
            return sw.shard(x, hidden) @ w["up"]

        return pm.plan(forward, params, x, specs=(specs, hidden))

    (choice,) = plan_with(gather=False).walked.choices
    assert choice.fix.startswith("gather the weight before use, sw.gather(params, specs)")
    assert plan_with(gather=True).walked.choices == ()
