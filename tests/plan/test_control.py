"""Loops, branches and calls: what a plan counts of them, and what it marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.plan.planner import PlanReport
from tests.plan.against_xla import compiled_bytes, planned_bytes

MESH = "dp:2,tp:4"
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
WHOLE = (sw.EMPTY,) * 3
X = jax.ShapeDtypeStruct((16, 32, 64), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
RUNS = "while (number of runs)"


def manager(mesh: Any) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)


def plan(function: Callable[..., Any], *shapes: Any, specs: Any = (HIDDEN,)) -> PlanReport:
    report: PlanReport = manager(sw.abstract_mesh(MESH)).plan(function, *shapes, specs=specs)
    return report


def check_equal(function: Callable[[Any], Any]) -> None:
    """Check that a plan of a function of hidden states is sure, and equal to XLA's program."""
    report = plan(function, X)
    assert report.walked.complete
    assert not report.walked.choices
    pm = manager(sw.create_mesh(MESH))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=pm.sharding(HIDDEN, shape=X.shape))
    assert planned_bytes(report) == compiled_bytes(pm, function, (x,))


def test_condition_that_sums_over_devices_is_marked() -> None:
    def until_small(x: Any) -> Any:
        return lax.while_loop(
            lambda s: jnp.max(jnp.abs(s)) > 1e-3, lambda s: s * 0.5, sw.shard(x, HIDDEN)
        )

    assert plan(until_small, X).walked.unknown == {RUNS: 1}


def test_condition_inside_shard_map_is_marked() -> None:
    spec = PartitionSpec("dp")

    def until_small(x: Any) -> Any:
        def local(x: Any) -> Any:
            return lax.while_loop(
                lambda s: lax.pmax(jnp.max(s), ("dp", "tp")) > 1e-3, lambda s: s * 0.5, x
            )

        return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(x)

    assert plan(until_small, X).walked.unknown == {RUNS: 1}


def test_carry_of_zeros_takes_the_sharding_of_the_body() -> None:
    def summed(x: Any) -> Any:
        x = sw.shard(x, HIDDEN)
        _, total = lax.while_loop(
            lambda state: state[0] < x.shape[0],
            lambda state: (state[0] + 1, state[1] + x),
            (0, jnp.zeros(x.shape)),
        )
        return sw.shard(total, WHOLE)

    check_equal(summed)
    assert [event.kind for event in plan(summed, X).events] == ["all_gather"]


@pytest.mark.parametrize("key", ["in_shardings", "out_shardings"])
def test_shardings_of_an_inner_jit_are_followed(key: str) -> None:
    mesh = sw.create_mesh(MESH)

    def run(x: Any) -> Any:
        sharding = {"in_shardings": PartitionSpec(None, "dp"), "out_shardings": PartitionSpec()}
        step = jax.jit(lambda x: x * 2, **{key: NamedSharding(mesh, sharding[key])})
        return step(sw.shard(x, HIDDEN))

    check_equal(run)
    assert plan(run, X).events


def test_jitted_step_keeps_its_shardings() -> None:
    step = jax.jit(
        lambda x: x * 2, out_shardings=NamedSharding(sw.create_mesh(MESH), PartitionSpec())
    )
    assert [event.kind for event in plan(step, X).events] == ["all_gather"]


def test_shardings_on_another_mesh_are_marked() -> None:
    other = NamedSharding(sw.create_mesh("tp:8"), PartitionSpec("tp"))
    report = plan(jax.jit(lambda x: x * 2, out_shardings=other), X)
    assert report.walked.unknown == {"jit (a sharding that is not of the mesh)": 1}


def test_reduction_by_a_function_is_not_a_call() -> None:
    def reduced(x: Any) -> Any:
        return lax.reduce(sw.shard(x, HIDDEN), jnp.float32(0), lambda a, b: a + b * 1.0, (0,))

    assert plan(reduced, X).walked.unknown == {"reduce": 1}


def test_kernel_is_not_a_call() -> None:
    def double(x: Any) -> Any:
        def kernel(source: Any, target: Any) -> None:
            target[...] = source[...] * 2

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    assert plan(double, X).walked.unknown == {"pallas_call": 1}


def test_vmapped_custom_rule_is_a_call() -> None:
    @jax.custom_batching.custom_vmap
    def whole(x: Any) -> Any:
        return sw.shard(x, WHOLE)

    @whole.def_vmap
    def rule(size: int, batched: Any, x: Any) -> Any:
        raise NotImplementedError

    assert [event.kind for event in plan(whole, X).events] == ["all_gather"]


def test_branches_count_the_most_work_and_the_least() -> None:
    def switched(x: Any, w: Any, index: Any) -> Any:
        branches = [lambda x: x @ w, lambda x: x @ w @ w, lambda x: x @ w]
        return lax.switch(index, branches, x)

    shapes = (SQUARE, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
    work = plan(switched, *shapes, specs=(None, None, None)).walked.work
    once = 2 * 64**3
    assert (work.least_flops, work.flops) == (once, 2 * once)
    assert work.product_bytes == 2 * 3 * 64**2 * 4


def test_branches_inside_shard_map_count_the_most_work() -> None:
    def switched(x: Any, w: Any, index: Any) -> Any:
        def local(x: Any, w: Any, index: Any) -> Any:
            return lax.cond(index > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

        specs = PartitionSpec()
        return jax.shard_map(local, in_specs=specs, out_specs=specs, check_vma=False)(x, w, index)

    shapes = (SQUARE, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
    work = plan(switched, *shapes, specs=(None, None, None)).walked.work
    assert (work.least_flops, work.flops) == (2 * 64**3, 4 * 64**3)


@pytest.mark.parametrize("mapped", [False, True])
def test_branch_by_platform_is_that_of_tpus(mapped: bool) -> None:
    def square(x: Any) -> Any:
        return lax.platform_dependent(
            x, cpu=lambda x: x @ x @ x, tpu=lambda x: x @ x, default=lambda x: x
        )

    def run(x: Any) -> Any:
        specs = PartitionSpec()
        return jax.shard_map(square, in_specs=specs, out_specs=specs, check_vma=False)(x)

    work = plan(run if mapped else square, SQUARE, specs=(None,)).walked.work
    assert (work.least_flops, work.flops) == (2 * 64**3, 2 * 64**3)


def test_bytes_of_a_branch_are_an_upper_bound() -> None:
    def switched(x: Any, flag: Any) -> Any:
        x = sw.shard(x, HIDDEN)
        return lax.cond(flag, lambda x: sw.shard(x, WHOLE).sum(), lambda x: 0.0, x)

    report = plan(switched, X, jax.ShapeDtypeStruct((), jnp.bool_), specs=(HIDDEN, None))
    assert "≤1" in report.text()
    assert "sent per device: at most" in report.text()
