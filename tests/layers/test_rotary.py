"""Rotary embeddings of given tables, and repeated kv heads, against loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop.easydel import (
    apply_rotary_pos_emb,
    repeat_kv_bnsh,
    repeat_kv_bsnh,
    rotate_half,
)
from shardwright.layers import rope
from shardwright.testing import assert_no_collectives, cpu_mesh
from tests.raising import Facts, facts, raises


def tables(length: int, dim: int) -> tuple[jax.Array, jax.Array]:
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(dim // 2) / (dim // 2))
    both = jnp.concatenate([angles, angles], axis=-1)[None, None]
    return jnp.sin(both), jnp.cos(both)


def test_half_is_rotated() -> None:
    np.testing.assert_array_equal(
        rotate_half(jnp.array([1.0, 2.0, 3.0, 4.0])), [-3.0, -4.0, 1.0, 2.0]
    )


def test_rotation_equals_complex_product() -> None:
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 5, 8)))
    sin, cos = tables(9, 8)
    actual = apply_rotary_pos_emb(jnp.asarray(x), sin, cos)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
        1j * np.arange(5)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    )
    np.testing.assert_allclose(
        actual, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5
    )


def turned(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Return `x` `[batch, length, heads, head_dim]` rotated as complex numbers, in float64."""
    half = x.shape[-1] // 2
    angles = np.maximum(positions, 0)[:, :, None, None] * theta ** (-np.arange(half) / half)
    points = (x[..., :half] + 1j * x[..., half:].astype(np.float64)) * np.exp(1j * angles)
    return np.concatenate([points.real, points.imag], axis=-1)


@pytest.mark.parametrize("theta", [10_000.0, 500_000])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.full(but=["False-10000.0"])
def test_tokens_are_rotated_by_their_positions(theta: float, alike: bool) -> None:
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 5, 3, 8)))
    positions = np.array([[0, 1, 700, 3, -1], [4, -1, 2, 1, 0]], np.int32)[: 1 if alike else 2]
    np.testing.assert_allclose(
        rope(jnp.asarray(x), positions, theta=theta), turned(x, positions, theta), atol=2e-4
    )


@pytest.mark.full
def test_padding_is_rotated_as_position_0() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 4))
    np.testing.assert_array_equal(rope(x, jnp.array([[-1, 0]])), x)


def test_rope_equals_tables() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    tabled = jnp.swapaxes(apply_rotary_pos_emb(jnp.swapaxes(x, 1, 2), *tables(5, 8)), 1, 2)
    np.testing.assert_allclose(rope(x, jnp.arange(5)[None]), tabled, atol=1e-5)


def test_bfloat16_is_rotated_in_float32() -> None:
    x, positions = (
        jax.random.normal(jax.random.key(0), (1, 4, 2, 8), jnp.bfloat16),
        jnp.array([[0, 3, 900, 70_001]]),
    )
    actual = rope(x, positions)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        actual, rope(x.astype(jnp.float32), positions).astype(jnp.bfloat16)
    )


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full
def test_rope_of_sharded_array_sends_nothing(axis_types: str) -> None:
    rules = sw.Strategy.loads(
        '[rules]\nbatch = "dp"\nquery_length = "sp"\nhead = "tp"\nhead_dim = "-"\n'
    )
    pm = sw.PartitionManager(
        rules, mesh=cpu_mesh("dp:2,sp:2,tp:2", axis_types=axis_types)
    ).for_mode("train")
    x, positions = (
        jax.random.normal(jax.random.key(0), (2, 4, 2, 8)),
        jnp.array([[3, 1, 2, 0], [5, 4, -1, 0]]),
    )
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
    with pm:
        placed, at = pm.shard(x, *axes), pm.shard(positions, sw.BATCH, sw.QUERY_LENGTH)
        actual = jax.jit(rope)(placed, at)
        assert_no_collectives(jax.jit(rope), placed, at)
        np.testing.assert_allclose(rope(placed, positions), rope(x, positions), atol=1e-6)
    assert actual.sharding.is_equivalent_to(placed.sharding, 4)
    assert placed.sharding.spec == P("dp", "sp", "tp")
    np.testing.assert_allclose(actual, rope(x, positions), atol=1e-6)


@pytest.mark.parametrize("repeats", [1, 3])
def test_repeated_kv_heads_are_adjacent(repeats: int) -> None:
    x = jnp.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    for repeat, dim in ((repeat_kv_bnsh, 1), (repeat_kv_bsnh, 2)):
        actual = repeat(x, repeats)
        assert actual.shape[dim] == x.shape[dim] * repeats
        for head in range(actual.shape[dim]):
            np.testing.assert_array_equal(
                actual.take(head, axis=dim), x.take(head // repeats, axis=dim)
            )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: rotate_half(x[..., :3]), facts("dim", "(1, 2, 4, 3)", fix="head_dim")),
        (
            lambda x: apply_rotary_pos_emb(x, *tables(3, 8)),
            facts("(1, 1, 3, 8)", "tensor", "(1, 2, 4, 8)", path="sin_", fix="head_dim"),
        ),
        (
            lambda x: apply_rotary_pos_emb(x, tables(4, 8)[0], tables(4, 6)[1]),
            facts("(1, 1, 4, 6)", "tensor", "(1, 2, 4, 8)", path="cos_", fix="head_dim"),
        ),
        (
            lambda x: apply_rotary_pos_emb(
                x, *(jnp.tile(angles, (1, 3, 1, 1)) for angles in tables(4, 8))
            ),
            facts("(1, 3, 4, 8)", "tensor", "(1, 2, 4, 8)", path="sin_", fix="head_dim"),
        ),
        (
            lambda x: apply_rotary_pos_emb(
                x, *(jnp.tile(angles, (2, 1, 1, 1)) for angles in tables(4, 8))
            ),
            facts("(2, 1, 4, 8)", "tensor", "(1, 2, 4, 8)", path="sin_", fix="head_dim"),
        ),
        (
            lambda x: apply_rotary_pos_emb(x, tables(4, 8)[0], tables(9, 8)[1]),
            facts("(1, 1, 4, 8)", "(1, 1, 9, 8)", path="cos_"),
        ),
        (
            lambda x: apply_rotary_pos_emb(jnp.swapaxes(x, 1, 2), *tables(4, 8)),
            facts("(1, 1, 4, 8)", "tensor", "(1, 4, 2, 8)", path="sin_", fix="layers.rope"),
        ),
        (lambda x: rope(x[0], jnp.arange(2)[None]), facts("(2, 4, 8)", path="x", fix="head_dim")),
        (
            lambda x: rope(x[..., :3], jnp.arange(2)[None]),
            facts("(1, 2, 4, 3)", path="x", fix="head_dim"),
        ),
        (
            lambda x: rope(x, jnp.arange(4)[None]),
            facts("(1, 4)", "(1, 2, 4, 8)", path="positions", fix="attention.next_positions"),
        ),
        (
            lambda x: rope(x, jnp.arange(2)),
            facts("(2,)", "(1, 2, 4, 8)", path="positions", fix="attention.next_positions"),
        ),
        (lambda x: repeat_kv_bnsh(x[0], 2), facts("(2, 4, 8)", 4)),
        (lambda x: repeat_kv_bnsh(x, 0), facts("n_rep=0", fix="kv heads")),
        (lambda x: repeat_kv_bsnh(x, 0), facts("n_rep=0", fix="kv heads")),
    ],
)
def test_invalid_shapes(call: Any, says: Facts) -> None:
    with raises(sw.RankMismatchError, says):
        call(jnp.zeros((1, 2, 4, 8)))


@pytest.mark.parametrize(
    ("positions", "theta", "says"),
    [
        (jnp.ones((1, 2)), 1e4, facts("float32", path="positions", fix="integers")),
        ([[0, 1]], 1e4, facts("list", path="positions", fix="integers")),
        (jnp.array([[0, 1]]), 0, facts(0, path="theta")),
        (jnp.array([[0, 1]]), True, facts("True", path="theta")),
        (jnp.array([[0, 1]]), float("nan"), facts("nan", path="theta")),
    ],
)
def test_rope_with_invalid_positions(positions: Any, theta: Any, says: Facts) -> None:
    with raises(sw.LayerError, says):
        rope(jnp.zeros((1, 2, 4, 8)), positions, theta=theta)
