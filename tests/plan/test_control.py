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
INNER = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
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
    assert (work.min_flops, work.flops) == (once, 2 * once)
    assert work.matmul_bytes == 2 * 3 * 64**2 * 4


@pytest.mark.parametrize("mapped", [False, True])
def test_work_before_branches_counts_once(mapped: bool) -> None:
    def run(x: Any, w: Any, index: Any) -> Any:
        return lax.cond(index > 0, lambda x: x @ w @ w, lambda x: x @ w, x @ w)

    def inside(*values: Any) -> Any:
        specs = PartitionSpec()
        return jax.shard_map(run, in_specs=specs, out_specs=specs, check_vma=False)(*values)

    shapes = (SQUARE, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
    work = plan(inside if mapped else run, *shapes, specs=(None, None, None)).walked.work
    once = 2 * 64**3
    assert (work.min_flops, work.flops) == (2 * once, 3 * once)
    assert work.matmul_bytes == 3 * 3 * 64**2 * 4


def test_branches_inside_shard_map_count_the_most_work() -> None:
    def switched(x: Any, w: Any, index: Any) -> Any:
        def local(x: Any, w: Any, index: Any) -> Any:
            return lax.cond(index > 0, lambda x: x @ w @ w, lambda x: x @ w, x)

        specs = PartitionSpec()
        return jax.shard_map(local, in_specs=specs, out_specs=specs, check_vma=False)(x, w, index)

    shapes = (SQUARE, SQUARE, jax.ShapeDtypeStruct((), jnp.int32))
    work = plan(switched, *shapes, specs=(None, None, None)).walked.work
    assert (work.min_flops, work.flops) == (2 * 64**3, 4 * 64**3)


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
    assert (work.min_flops, work.flops) == (2 * 64**3, 2 * 64**3)


def test_bytes_of_a_branch_are_an_upper_bound() -> None:
    def switched(x: Any, flag: Any) -> Any:
        x = sw.shard(x, HIDDEN)
        return lax.cond(flag, lambda x: sw.shard(x, WHOLE).sum(), lambda x: 0.0, x)

    report = plan(switched, X, jax.ShapeDtypeStruct((), jnp.bool_), specs=(HIDDEN, None))
    assert "≤1" in report.text()
    assert "sent per device: at most" in report.text()


def repeat(step: Callable[[Any], Any], x: Any) -> Any:
    return lax.scan(lambda x, _: (step(x), None), sw.shard(x, HIDDEN), None, length=10)[0]


def normalized(x: Any) -> Any:
    return repeat(lambda x: x / (1 + jnp.max(x, 0, keepdims=True)), x)


def attended(x: Any) -> Any:
    return repeat(lambda x: sw.shard(jax.nn.softmax(sw.shard(x, INNER), -1), HIDDEN), x)


def branched(x: Any) -> Any:
    def step(x: Any) -> Any:
        x = lax.cond(x[0, 0, 0] > 0, lambda x: x * 2, lambda x: x, x)
        return sw.shard(sw.shard(x, INNER).sum(-1, keepdims=True) + x, HIDDEN)

    return repeat(step, x)


@pytest.mark.parametrize("function", [normalized, attended])
def test_collectives_in_a_loop_run_every_time(function: Callable[[Any], Any]) -> None:
    check_equal(function)
    runs = {event.runs for event in plan(function, X).events}
    assert runs == {10}


def test_collectives_after_a_branch_in_a_loop_run_every_time() -> None:
    sums = [e for e in plan(branched, X).events if e.kind == "all_reduce" and "tp" in e.mesh_axes]
    assert [event.runs for event in sums] == [10]


def test_lookups_in_a_loop_run_every_time() -> None:
    table, ids = jax.ShapeDtypeStruct((512, 64), jnp.float32), jax.ShapeDtypeStruct((16,), "int32")

    def followed(table: Any, ids: Any) -> Any:
        def step(ids: Any, _: Any) -> Any:
            return table[ids].sum(-1).astype(jnp.int32) % 512, None

        return lax.scan(step, ids, None, length=10)[0]

    report = plan(followed, table, ids, specs=((sw.VOCAB, sw.EMBED), (sw.BATCH,)))
    assert {event.runs for event in report.events if event.kind == "all_reduce"} == {10}


def test_body_of_a_while_takes_memory() -> None:
    def looped(x: Any) -> Any:
        def step(state: Any) -> Any:
            at, total = state
            return at + 1, total + jnp.sort(x[:, None] * x[None], axis=0).sum()

        return lax.while_loop(lambda state: state[0] < 3, step, (0, 0.0))[1]

    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    assert plan(looped, square, specs=(None,)).memory.high > 256**3 * 4


def mapped(function: Callable[..., Any], *specs: Any, out: Any) -> Callable[..., Any]:
    def run(*arrays: Any) -> Any:
        return jax.shard_map(function, in_specs=specs, out_specs=out, check_vma=False)(*arrays)

    return run


def test_ragged_matmuls_inside_shard_map_are_counted() -> None:
    rows, experts = PartitionSpec("dp"), PartitionSpec()
    shapes = [
        jax.ShapeDtypeStruct(*shape)
        for shape in (((64, 48), "float32"), ((8, 48, 32), "float32"), ((8,), "int32"))
    ]

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes).sum()

    forward = mapped(lax.ragged_dot, rows, experts, experts, out=rows)
    backward = mapped(jax.grad(loss, 1), rows, experts, experts, out=experts)
    for function in (forward, backward):
        report = plan(function, *shapes, specs=(None,) * 3)
        assert report.walked.complete
        assert report.walked.flops == 2 * (64 // 2) * 48 * 32


def test_unknown_matmuls_inside_shard_map_are_marked() -> None:
    filters = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)

    def convolved(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1,), "SAME")

    spec = PartitionSpec("dp")
    function = mapped(convolved, spec, PartitionSpec(), out=spec)
    report = plan(function, X, filters, specs=(HIDDEN, None))
    assert report.walked.unknown == {"conv_general_dilated": 1}


def test_collectives_in_groups_are_marked() -> None:
    def gathered(x: Any) -> Any:
        return lax.all_gather(x, "tp", axis_index_groups=[[0, 1], [2, 3]])

    spec = PartitionSpec("dp")
    report = plan(mapped(gathered, spec, out=spec), X)
    assert report.walked.unknown == {"all_gather (in groups)": 1}


@pytest.mark.parametrize(
    "shown",
    [lambda x: x, jnp.sum, lambda x: x.sum(2), lambda x: x.shape[0]],
    ids=["whole", "sum", "partial", "number"],
)
def test_debug_print_gathers_what_it_prints(shown: Callable[[Any], Any]) -> None:
    def printed(x: Any) -> Any:
        jax.debug.print("{x}", x=shown(sw.shard(x, INNER)))
        return x * 2

    check_equal(printed)


def test_partitioned_callback_gathers_nothing() -> None:
    def called(x: Any) -> Any:
        jax.debug.callback(lambda x: None, sw.shard(x, HIDDEN), partitioned=True)
        return x * 2

    check_equal(called)
    assert not plan(called, X).events
