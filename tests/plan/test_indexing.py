"""Slices, reshapes, stacks, scatters and carries: equal to XLA, or marked before the compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.plan.planner import PlanReport
from tests.plan.against_xla import compiled_bytes, planned_bytes

MESH = "dp:2,tp:4"
INTS = jnp.int32
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
LOGITS = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)
TOKENS = (sw.BATCH, sw.QUERY_LENGTH)
ROWS = (sw.BATCH,)
SQUARE = (sw.BATCH, sw.LENGTH, sw.EMBED)
SHAPES: Mapping[Any, tuple[int, ...]] = {
    HIDDEN: (16, 32, 64),
    LOGITS: (16, 32, 512),
    TOKENS: (16, 32),
    ROWS: (16,),
    SQUARE: (32, 32, 64),
}


def plan(pm: Any, function: Callable[..., Any], *arguments: Any) -> PlanReport:
    shapes = [jax.ShapeDtypeStruct(SHAPES[axes], dtype) for axes, dtype in arguments]
    report: PlanReport = pm.plan(function, *shapes, specs=[axes for axes, _ in arguments])
    return report


def check(
    function: Callable[..., Any], *arguments: tuple[Any, Any], marked: bool = False, sends: int = 1
) -> None:
    """Check that a plan is marked, or that it is not and equals XLA's program.

    Args:
      function: The program.
      *arguments: Axes and dtype of each argument.
      marked: Whether a mesh axis must be marked as chosen.
      sends: Number of events that an unmarked plan must have at least.
    """
    strategy = sw.Strategy.preset("tensor")
    report = plan(sw.PartitionManager(strategy, mesh=sw.abstract_mesh(MESH)), function, *arguments)
    assert report.walked.complete
    assert bool(report.walked.choices) is marked
    if marked:
        return
    assert len(report.events) >= sends
    pm = sw.PartitionManager(strategy, mesh=sw.create_mesh(MESH))
    given = [
        jax.ShapeDtypeStruct(SHAPES[axes], dtype, sharding=pm.sharding(axes, shape=SHAPES[axes]))
        for axes, dtype in arguments
    ]
    assert planned_bytes(report) == compiled_bytes(pm, function, given)


LOGIT = (LOGITS, jnp.float32)


@pytest.mark.full(but=["at4", "at6", "8"])
@pytest.mark.parametrize(
    "at", [0, 7, 8, -1, (..., 3), (..., 200), (slice(-1, None), slice(None), slice(-1, None))]
)
def test_one_position_of_a_sharded_dim_is_a_sum(at: Any) -> None:
    check(lambda x: sw.shard(x, LOGITS)[at], LOGIT)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:8],
        lambda x: x[1:],
        lambda x: jnp.pad(x, ((2, 2), (0, 0), (0, 0))),
        lambda x: jnp.roll(x, 1, axis=0),
        lambda x: jnp.flip(x, axis=0),
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.split(x, 2, axis=-1),
        lambda x: jnp.sort(x, axis=-1),
        lambda x: jax.lax.top_k(x, 8),
        lambda x: jnp.tile(x, (2, 1, 1)),
        lambda x: x.reshape(16, 32, 2, 256),
    ],
    ids=[
        "start",
        "end",
        "pad",
        "roll",
        "flip",
        "join",
        "split",
        "sort",
        "top_k",
        "tile",
        "reshape",
    ],
)
def test_cut_of_a_sharded_dim_is_marked(cut: Callable[[Any], Any]) -> None:
    check(lambda x: cut(sw.shard(x, LOGITS)), LOGIT, marked=True)


def test_cut_after_a_gather_is_sure() -> None:
    check(lambda x: jnp.roll(sw.shard(x, sw.EMPTY, *LOGITS[1:]), 1, axis=0), LOGIT)


@pytest.mark.parametrize("axis", [0, -1])
def test_position_of_the_largest_gathers_the_best_of_each_shard(axis: int) -> None:
    check(lambda x: jnp.argmax(sw.shard(x, LOGITS), axis), LOGIT)


def test_reshape_gathers_only_the_dims_that_do_not_fit() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh(MESH))
    report = plan(pm, lambda x: sw.shard(x, LOGITS).reshape(-1), LOGIT)
    [event] = report.events
    assert (event.mesh_axes, event.logical_bytes) == (("tp",), 16 * 32 * 512 * 4 // 2)
    assert [choice.mesh_axis for choice in report.walked.choices] == ["tp"]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stack_keeps_the_sharding(axis: int) -> None:
    def stacked(x: Any) -> Any:
        x = sw.shard(x, LOGITS)
        return jnp.stack([x, x * 2], axis=axis)

    check(stacked, LOGIT, sends=0)


def test_repeated_whole_dim_sends_nothing() -> None:
    check(lambda x: jnp.tile(sw.shard(x, LOGITS), (1, 2, 1)), LOGIT, sends=0)


def test_counts_of_sharded_indices_are_summed() -> None:
    check(lambda t: jnp.zeros(512, INTS).at[sw.shard(t, TOKENS)].add(1), (TOKENS, INTS))
    check(lambda t: jnp.bincount(t.reshape(-1), length=512), (TOKENS, INTS))


@pytest.mark.parametrize("name", ["max", "min", "mul"])
def test_rows_are_combined_before_they_are_sent(name: str) -> None:
    def combined(table: Any, rows: Any) -> Any:
        return getattr(jnp.ones((512,)).at[table], name)(rows)

    check(combined, (ROWS, INTS), (ROWS, jnp.float32))


def test_rows_that_are_set_gather_their_indices() -> None:
    check(lambda rows: jnp.zeros((16, 32)).at[rows].set(1.0), (ROWS, INTS))


def test_write_to_a_sharded_dim_is_marked() -> None:
    def append(cache: Any, at: Any) -> Any:
        return cache.at[jnp.arange(16), at].set(1.0)

    check(append, (HIDDEN, jnp.float32), (ROWS, INTS), marked=True)


def test_carry_that_the_body_moves_is_marked() -> None:
    turned = (sw.LENGTH, sw.BATCH, sw.EMBED)

    def loop(x: Any) -> Any:
        start = sw.shard(x, SQUARE)
        return jax.lax.scan(lambda h, _: (sw.shard(h * 2, turned), None), start, None, length=5)[0]

    check(loop, (SQUARE, jnp.float32), marked=True)


@pytest.mark.parametrize("annotated", [False, True])
def test_parts_of_a_sharded_batch(annotated: bool) -> None:
    """A scan over a sharded dim is marked, unless it is annotated as the mark asks for."""

    def parts(x: Any) -> Any:
        x = sw.shard(x, HIDDEN).reshape(4, 4, 32, 64)
        if annotated:
            x = sw.shard(x, sw.EMPTY, *HIDDEN)
        return jax.lax.scan(lambda total, part: (total + part.sum(), None), 0.0, x)[0]

    check(parts, (HIDDEN, jnp.float32), marked=not annotated)


def test_four_bits_take_half_a_byte() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("tp:8"))
    x = jax.ShapeDtypeStruct((16, 16), jnp.int4)
    report = pm.plan(lambda x: x.astype(jnp.int8), x)
    assert report.memory.kinds["inputs"] == report.state.of().per_device == 128
