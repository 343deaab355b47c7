"""The arguments of a plan: positions of donated arguments, shapes, and slices."""

from __future__ import annotations

import math
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


UP = (sw.EMBED, sw.MLP_INTERMEDIATE)
HIDDEN = (sw.BATCH, sw.EMBED)


def gathered(w: Any, x: Any) -> Any:
    return sw.shard(sw.shard(x, HIDDEN) @ sw.gather(w, *UP), sw.BATCH, sw.MLP_INTERMEDIATE)


def scanned(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(gathered(w, x)), None), x, w)[0]


STACKED = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "alone": (gathered, STACKED.shape[1:], UP),
    "gradient": (jax.grad(lambda w, x: (gathered(w, x) ** 2).sum()), STACKED.shape[1:], UP),
    "jit, remat and a cast": (
        jax.jit(jax.checkpoint(lambda w, x: gathered(w.astype(jnp.bfloat16), x))),
        STACKED.shape[1:],
        UP,
    ),
    "rows of a scan": (scanned, STACKED.shape, (sw.LAYERS, *UP)),
}


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_weight_annotated_like_an_input_is_refused(name: str, axis_types: Any) -> None:
    """By the rules of activations, embed is whole, so nothing would be gathered."""
    function, shape, axes = PROGRAMS[name]
    mesh = sw.abstract_mesh("fsdp:4", axis_types=axis_types)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp"), mesh=mesh)
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    given: dict[str, Any] = {"specs": (axes, HIDDEN)}
    says = "argument 0", "input", "weight", "test_program.py"
    with raises(sw.StrategyError, *says, fix='holds=("parameters", "inputs")', count=1):
        pm.plan(function, w, x, **given)
    # Either of the two fixes gives the plan with the gather.
    plans = [
        pm.plan(function, w, x, holds=("parameters", "inputs"), **given),
        pm.plan(function, w, x, specs=(sw.ArraySpec(shape, jnp.float32, axes), HIDDEN)),
    ]
    for report in plans:
        assert "all_gather" in {str(event.kind) for event in report.events}
        assert report.state.of("parameters").per_device == 4 * math.prod(shape) // 4
    # Whoever says that it is an input, or stores it alike, is believed.
    pm.plan(function, w, x, holds=("inputs", "inputs"), **given)
    ddp = sw.PartitionManager(sw.Strategy.preset("ddp"), mesh=sw.abstract_mesh("dp:4"))
    ddp.plan(function, w, x, **given)
