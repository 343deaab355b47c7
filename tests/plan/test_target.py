"""A plan for a slice plans the kernels of its chips, on every machine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import shardwright as sw
from shardwright import attention, caches
from shardwright.plan import PlanReport, Program
from shardwright.plan.planner import trace_program
from shardwright.plan.verify.export import export_program
from shardwright.plan.verify.run import verify_plan
from tests.plan.test_walk import rows
from tests.tpu_compile import MARKS

SLICE = "v5e:2x4"
QUERY = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KEY = (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
BATCH, LENGTH, HEADS, DIM = 16, 1024, 8, 128
X = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, DIM), jnp.bfloat16)
TRAIN = sw.PartitionManager(
    sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("fsdp:4,tp:2"), mode="train"
)


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return attention.dot_product_attention(q, k, v, causal=True, **options)


def gradient(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *qkv: attend(*qkv).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)


def planned(function: Any, topology: str | None, pm: Any = TRAIN) -> PlanReport:
    report: PlanReport = pm.plan(function, X, X, X, specs=(QUERY, KEY, KEY), topology=topology)
    return report


def taken(report: PlanReport) -> list[tuple[str, tuple[str, ...]]]:
    return [(calls.implementation, calls.kernels) for calls in report.attention]


def test_a_slice_decides_the_kernel() -> None:
    """And not what was planned before: the target is part of JAX's cache keys."""
    kernels = ("splash_forward", "splash_queries", "splash_keys")
    for topology, expected in (
        (None, [("blockwise", ())]),
        (SLICE, [("splash", kernels)]),
        (None, [("blockwise", ())]),
    ):
        report = planned(gradient, topology)
        assert taken(report) == expected
        assert report.walked.complete
    text = planned(gradient, SLICE).text()
    assert "attention: splash at test_target.py:" in text


def test_work_of_a_kernel_is_counted() -> None:
    """At most both matmuls of all pairs; at least nothing, since a block may be skipped."""
    report = planned(attend, SLICE)
    local = BATCH // 4 * HEADS // 2
    assert report.walked.work.flops == 2 * 2 * local * LENGTH * LENGTH * DIM
    # q, k and v by head are copies, which the kernel reads from memory.
    array = local * LENGTH * DIM * 2
    # The memory of the result is taken from the start, beside that of what the kernel returns.
    assert report.memory.high == pytest.approx(3 * array + 3 * array + 2 * array, rel=0.01)


@pytest.mark.full
def test_ring_runs_the_kernels_of_the_slice() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("sequence"), mesh=sw.abstract_mesh("fsdp:2,sp:4"), mode="train"
    )
    ring = functools.partial(attend, implementation="ring")
    here, there = (planned(ring, topology, pm) for topology in (None, SLICE))
    assert taken(there) == [("ring", ("splash_forward",))]
    assert here.walked.complete
    assert there.walked.complete
    assert rows(here) == rows(there)


def test_decode_of_a_slice_reads_caches_in_their_order() -> None:
    """`layout_constraint` is an equation of decode on TPUs alone."""

    def decode(q: Any, k: Any, cache: Any) -> Any:
        result = attention.append_and_attend(q, k, k, cache)
        return result.o, result.cache

    cache = jax.eval_shape(
        lambda: caches.init("dense", batch=BATCH, capacity=LENGTH, kv_heads=HEADS, head_dim=DIM)
    )
    token = jax.ShapeDtypeStruct((BATCH, 1, HEADS, DIM), jnp.bfloat16)
    shapes, specs = (token, token, cache), (QUERY, KEY, cache.axes())
    program = Program(decode, shapes, specs, (QUERY, cache.axes()), None, (2,))
    pm = TRAIN.for_mode("decode")
    text = str(trace_program(pm, program, platform="tpu").jaxpr)
    assert "layout_constraint" in text
    assert "layout_constraint" not in str(trace_program(pm, program).jaxpr)
    report = pm.plan(decode, *shapes, specs=specs, donated=(2,), topology=SLICE)
    assert report.walked.complete
    assert taken(report) == [("blockwise", ())]


@pytest.mark.full
def test_search_plans_the_kernels_of_its_slice() -> None:
    program = Program(gradient, (X, X, X), (QUERY, KEY, KEY))
    found = sw.search(program, {"fsdp": sw.Strategy.preset("fsdp")}, topology=SLICE, axes=("fsdp",))
    (candidate,) = found.front
    assert {name for each in candidate.reports.values() for name, _ in taken(each)} == {"splash"}


@pytest.mark.full
def test_export_has_the_kernels_of_the_target() -> None:
    """For every chip, without devices and without libtpu."""
    program = Program(gradient, (X, X, X), (QUERY, KEY, KEY))
    traced = trace_program(TRAIN, program, platform="tpu")
    texts = [
        export_program(TRAIN, program, traced, platform="tpu", chip=chip).text
        for chip in ("v5e", "v5p")
    ]
    assert all(text.count("@tpu_custom_call") == 3 for text in texts)
    on_cpus = export_program(TRAIN, program, trace_program(TRAIN, program), platform="cpu")
    assert "tpu_custom_call" not in on_cpus.text


def test_kernel_that_copies_by_itself_is_incomplete() -> None:
    """It may send to other devices."""
    from jax.experimental.pallas import tpu as pltpu

    def body(x: Any, out: Any, done: Any) -> None:
        copy = pltpu.make_async_copy(x, out, done)
        copy.start()
        copy.wait()

    def local(x: Any) -> Any:
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        )(x)

    def mapped(x: Any) -> Any:
        spec = jax.P("fsdp")
        return jax.shard_map(
            local, mesh=TRAIN.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x)

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    assert dict(TRAIN.plan(mapped, x).walked.unknown) == {"pallas_call": 1}


class TestOnTpu:
    """Compiled for TPUs that are not there."""

    pytestmark = MARKS

    @pytest.mark.parametrize("window", [None, (255, 0)])
    def test_compiled_program_is_the_planned_one(self, window: Any) -> None:
        """Also with a window, for which a CPU would compile other memory."""

        def step(q: Any, k: Any, v: Any) -> Any:
            def loss(*qkv: Any) -> Any:
                return attend(*qkv, window=window).astype(jnp.float32).sum()

            return jax.grad(loss, (0, 1, 2))(q, k, v)

        found = verify_plan(TRAIN, Program(step, (X, X, X), (QUERY, KEY, KEY)), topology=SLICE)
        assert found.compiled.peak == pytest.approx(found.report.memory.high, rel=0.02)
        assert all(row.difference == 0 for row in found.traffic)
