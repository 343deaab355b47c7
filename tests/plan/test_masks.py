"""Masks that a program computes twice are computed once, and have one sharding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan import PlanReport, Program
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.verify.run import verify_plan
from tests.tpu_compile import MARKS

ROWS, HEADS, DIM, LENGTH = 16, 16, 128, 256
SHAPES = (
    jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    jax.ShapeDtypeStruct((ROWS, HEADS, DIM, LENGTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((HEADS, LENGTH, LENGTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((ROWS, HEADS, DIM), jnp.bfloat16),
)
CACHE = (sw.BATCH, sw.KV_HEAD, sw.KV_HEAD_DIM, sw.KV_LENGTH)
SPECS = ((sw.BATCH,), CACHE, (sw.HEAD, sw.EMPTY, sw.EMPTY), (sw.BATCH, *CACHE[1:3]))
OUTPUTS = (CACHE, (sw.BATCH, sw.HEAD, sw.EMPTY))


def step(index: Any, cache: Any, bias: Any, key: Any, *, offset: Any = None) -> Any:
    """Write a row of a cache, and read one of a bias, with the one-hots of the same index."""
    written = jax.nn.one_hot(index, LENGTH, dtype=cache.dtype)
    cache = cache + key[..., None] * written[:, None, None]
    index = index if offset is None else index + offset
    mask = index[:, None] == jnp.arange(LENGTH).reshape((1, -1))
    read = jnp.where(mask, jnp.ones(mask.shape), jnp.zeros(mask.shape))
    return cache, jnp.einsum("bq,hqk->bhk", read, bias)


PM = sw.PartitionManager(
    sw.Strategy.preset("sequence"), mesh=sw.abstract_mesh("fsdp:4,sp:2"), mode="decode"
)


def planned(function: Any) -> PlanReport:
    return PM.plan(function, *SHAPES, specs=SPECS, outputs=OUTPUTS)


def test_one_hot_of_a_sharded_cache_is_gathered_for_another_use() -> None:
    report = planned(step)
    (event,), (choice,) = report.events, report.walked.choices
    assert choice.mesh_axis == "sp"
    assert "shard(...)" in choice.fix
    assert (event.kind, event.mesh_axes, event.axes) == (Kind.ALL_GATHER, ("sp",), ("KV_LENGTH",))
    assert event.logical_bytes == ROWS // 4 * LENGTH * 4
    assert event.source.startswith("test_masks.py:")


def test_other_one_hot_stays_whole() -> None:
    report = planned(lambda *args: step(*args, offset=1))
    assert not report.events
    assert not report.walked.choices


def test_equal_masks_of_two_calls_are_one() -> None:
    mask = jax.jit(lambda index: index[:, None] == jnp.arange(LENGTH))

    def twice(index: Any, cache: Any, bias: Any, key: Any) -> Any:
        cache = cache + key[..., None] * mask(index).astype(cache.dtype)[:, None, None]
        return cache, jnp.einsum("bq,hqk->bhk", mask(index).astype(jnp.float32), bias)

    def other(index: Any, cache: Any, bias: Any, key: Any) -> Any:
        cache = cache + key[..., None] * mask(index).astype(cache.dtype)[:, None, None]
        return cache, jnp.einsum("bq,hqk->bhk", mask(index * 2).astype(jnp.float32), bias)

    assert [event.kind for event in planned(twice).events] == [Kind.ALL_GATHER]
    assert not planned(other).events


def scanned(index: Any, cache: Any, bias: Any, key: Any, *, offset: Any = None) -> Any:
    """Take the step in three layers, each with its own cache and index."""

    def layer(rows: Any, own: Any) -> Any:
        index, cache = own
        cache, more = step(index, cache, bias, key, offset=offset)
        return rows + more, sw.shard(cache, CACHE)

    rows = jnp.zeros((ROWS, HEADS, LENGTH), jnp.float32)
    layers = jnp.stack([index, index + 1, index + 2]), jnp.stack([cache] * 3)
    rows, caches = jax.lax.scan(layer, rows, layers)
    return caches[0], rows


@pytest.mark.parametrize("offset", [None, 1])
def test_masks_inside_a_scan(offset: Any) -> None:
    events = planned(lambda *args: scanned(*args, offset=offset)).events
    assert [event.runs for event in events] == ([3] if offset is None else [])


class TestOnTpu:
    """Compiled for TPUs that are not there."""

    pytestmark = MARKS

    @pytest.mark.parametrize("offset", [None, 1])
    def test_plan_is_exact(self, offset: Any) -> None:
        def program(*args: Any) -> Any:
            return step(*args, offset=offset)

        found = verify_plan(PM, Program(program, SHAPES, SPECS, OUTPUTS), topology="v5e:2x4")
        assert all(row.difference == 0 for row in found.traffic), found.traffic
        assert bool(found.traffic) == (offset is None)
