"""Caches with short heads may be copied to a padded layout, which the upper end counts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright import attention, caches
from shardwright.plan import PlanReport, Program
from shardwright.plan.fit import Verdict
from shardwright.plan.verify.run import verify_plan
from tests.tpu_compile import MARKS

BATCH, LENGTH, LAYERS = 256, 1024, 4
PM = sw.PartitionManager(
    sw.Strategy.preset("serve_tp"), mesh=sw.abstract_mesh("dp:2,tp:4"), mode="decode"
)
QUERY = (sw.BATCH, sw.EMPTY, sw.HEAD, sw.HEAD_DIM)
KEY = (sw.BATCH, sw.EMPTY, sw.KV_HEAD, sw.KV_HEAD_DIM)


@functools.cache
def decode(heads: int, kv_heads: int, head_dim: int, *, batch: int = BATCH) -> Program:
    """Return one step of attention per layer, each with its own cache."""

    def step(held: Any, q: Any, k: Any) -> Any:
        written = []
        for cache in held:
            result = attention.append_and_attend(q, k, k, cache)
            q = result.o
            written.append(result.cache)
        return q, written

    def empty() -> Any:
        return caches.init(
            "dense", batch=batch, capacity=LENGTH, kv_heads=kv_heads, head_dim=head_dim
        )

    held = jax.eval_shape(lambda: [empty() for _ in range(LAYERS)])
    axes = [cache.axes() for cache in held]
    shapes = [
        jax.ShapeDtypeStruct((batch, 1, count, head_dim), jnp.bfloat16)
        for count in (heads, kv_heads)
    ]
    return Program(
        step,
        (held, *shapes),
        (axes, QUERY, KEY),
        (QUERY, axes),
        ("cache", "inputs", "inputs"),
        (0,),
    )


def planned(program: Program) -> PlanReport:
    return PM.plan(
        program.function,
        *program.shapes,
        specs=program.specs,
        outputs=program.outputs,
        holds=program.holds,
        donated=program.donated,
        topology="v5e:2x4",
    )


def copies(heads: int, kv_heads: int, head_dim: int) -> float:
    """Return by how many padded keys of a layer the upper end is above the cache."""
    report = planned(decode(heads, kv_heads, head_dim))
    local = BATCH // 2 * LENGTH * kv_heads // 4
    extra = report.memory.high - report.state.of().per_device
    return extra / (local * 128 * 2)


@pytest.mark.full(but=["8-4-64-4", "4-4-64-16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "count"),
    [
        (8, 4, 128, 0),  # needs no padding
        (8, 4, 64, 4),  # one KV head on a device: twice the keys and the values of one layer
        (8, 4, 32, 4),
        (4, 4, 64, 4 * LAYERS),  # one query head per KV head: all layers
        (8, 8, 96, 2 * LAYERS + 1.5),  # and a copy of one layer with the heads first
    ],
)
def test_upper_end_counts_padded_copies(
    heads: int, kv_heads: int, head_dim: int, count: float
) -> None:
    assert copies(heads, kv_heads, head_dim) == pytest.approx(count, abs=0.2)


def test_lower_end_counts_no_padded_copies() -> None:
    report = planned(decode(8, 4, 64))
    assert report.memory.low < 1.1 * report.state.of().per_device


def test_large_step_with_short_heads_is_close() -> None:
    """Half of the memory is cache, and the padded copies may take the other half."""
    report = planned(decode(8, 4, 64, batch=64 * BATCH))
    assert report.verdict is Verdict.CLOSE


class TestOnTpu:
    """Compiled for TPUs that are not there."""

    pytestmark = MARKS

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "head_dim"), [(8, 4, 64), (4, 4, 64), (8, 8, 96), (16, 8, 64)]
    )
    def test_peak_is_in_the_range(self, heads: int, kv_heads: int, head_dim: int) -> None:
        found = verify_plan(PM, decode(heads, kv_heads, head_dim), topology="v5e:2x4")
        assert found.compiled.peak is not None
        assert found.compiled.peak <= 1.05 * found.report.memory.high
        assert found.compiled.peak >= found.report.memory.low
