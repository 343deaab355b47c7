"""Constraints inside loops, branches, mapped axes and derivatives, and on random keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import assert_like, make_manager, numbers, sharded_over

X = (sw.BATCH, sw.EMBED)


def branches(x: Any, place: Callable[..., Any]) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda x: place(x, *X) * 2, lambda x: place(x + 1, *X), x)


def loop(x: Any, place: Callable[..., Any]) -> Any:
    return jax.lax.fori_loop(0, 3, lambda at, x: place(x + at, *X), place(x, *X))


def rows(x: Any, place: Callable[..., Any]) -> Any:
    return jax.lax.map(lambda row: place(row * 2, sw.EMBED), x)


def tangent(x: Any, place: Callable[..., Any]) -> Any:
    return jax.jvp(lambda x: place(x, *X) ** 2, (x,), (x,))[1]


def linearized(x: Any, place: Callable[..., Any]) -> Any:
    return jax.linearize(lambda x: place(x, *X) ** 2, x)[1](x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cond": (branches, ("dp", "tp")),
    "fori_loop": (loop, ("dp", "tp")),
    "map": (rows, (None, "tp")),
    "jvp": (tangent, ("dp", "tp")),
    "linearize": (linearized, ("dp", "tp")),
}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.full(but=["cond-auto", "map-explicit"])
def test_constraint_inside_control_flow(name: str, kind: str) -> None:
    program, spec = PROGRAMS[name]
    pm = make_manager(kind)
    with pm:
        actual = jax.jit(lambda x: program(x, sw.shard))(pm.shard(numbers(8, 8), sw.Replicated))
    assert_like(actual, program(jnp.asarray(numbers(8, 8)), lambda x, *_: x))
    assert sharded_over(actual, pm.mesh, *spec)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mapped_over_a_mesh_axis(kind: str) -> None:
    """`spmd_axis_name` shards the mapped dim, and the constraint inside the other dims."""
    pm = make_manager(kind)
    with pm:
        inside = jax.vmap(lambda row: sw.shard(row * 2, sw.EMBED) * 1, spmd_axis_name="dp")
        actual = jax.jit(inside)(pm.shard(numbers(8, 8), sw.BATCH, sw.EMPTY))
    assert sharded_over(actual, pm.mesh, "dp", "tp")
    assert_like(actual, jnp.asarray(numbers(8, 8) * 2))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_random_keys(kind: str) -> None:
    pm = make_manager(kind)
    keys = jax.random.split(jax.random.key(0), 8)
    placed = pm.shard(keys, sw.BATCH)
    assert sharded_over(placed, pm.mesh, "dp")
    assert pm.shard(jax.random.key(0), ()).sharding.is_fully_replicated
    with pm:
        again = jax.jit(lambda keys: sw.shard(keys, sw.BATCH))(placed)
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys))


def test_low_precision_gradients_keep_dtype() -> None:
    pm = make_manager()
    kernel = (sw.EMBED, sw.MLP_INTERMEDIATE)
    w = pm.shard(jnp.asarray(numbers(8, 8), jnp.bfloat16), *kernel, role="param")
    grad = jax.jit(jax.grad(lambda w: (pm.gather(w, *kernel).astype(jnp.float32) ** 2).sum()))(w)
    assert grad.dtype == jnp.bfloat16
    assert sharded_over(grad, pm.mesh, "dp", "tp")
    np.testing.assert_allclose(
        np.asarray(grad, np.float32), 2 * np.asarray(w, np.float32), rtol=1e-2
    )


def test_integer_weights_are_gathered_too() -> None:
    pm = make_manager()
    table = pm.shard(
        np.arange(64, dtype=np.int8).reshape(8, 8), sw.EMBED, sw.MLP_INTERMEDIATE, role="param"
    )
    actual = jax.jit(lambda table: pm.gather(table, sw.EMBED, sw.MLP_INTERMEDIATE))(table)
    assert sharded_over(actual, pm.mesh, None, "tp")
    np.testing.assert_array_equal(actual, table)
