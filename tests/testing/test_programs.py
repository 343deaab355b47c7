"""Assertions about programs refuse a program in which nothing is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

import shardwright as sw
from shardwright.errors import ProgramError
from shardwright.plan import read_collectives
from shardwright.testing import assert_collectives, assert_no_collectives, cpu_mesh
from tests.raising import facts, raises

P = jax.P
WHOLE = np.ones((8, 8), np.float32)
ONE_DEVICE = facts("tp", 8, fix="pm.shard")


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def summing(axes: Any, mesh: Mesh) -> tuple[Callable[[Any], Any], Any]:
    """Return a function that sums over mesh axes, and its argument."""
    spec = P(tuple(mesh.axis_names))
    mapped = jax.shard_map(
        lambda x: lax.psum(x, axes), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return mapped, jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    "w", [WHOLE, jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype)], ids=["numpy", "no_sharding"]
)
def test_program_on_one_device_is_refused(w: Any) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=cpu_mesh("tp:8"))
    with raises(ProgramError, ONE_DEVICE):
        assert_no_collectives(matmul, w, w, mesh=pm.mesh)
    # A manager's mesh is ambient, so an array without a sharding is on all of its devices.
    with raises(ProgramError, 8, "devices", fix="pm.shard"):
        assert_no_collectives(matmul, w, w, manager=pm)
    with raises(ProgramError, ONE_DEVICE):
        assert_collectives(matmul, w, w, all_reduce=0, only=True, mesh=pm.mesh)
    with pm, raises(ProgramError, 8, "devices", fix="pm.shard"):
        assert_collectives(matmul, w, w, all_reduce=0, only=True)
    with raises(ProgramError, ONE_DEVICE):
        read_collectives(jax.jit(matmul).lower(WHOLE, WHOLE).compile(), pm.mesh)


def test_program_that_shards_inside() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=cpu_mesh("tp:8"))
    assert_no_collectives(lambda x: sw.shard(jnp.sin(x), sw.EMPTY, sw.HEAD), WHOLE, manager=pm)


def test_mesh_of_one_device() -> None:
    assert_no_collectives(matmul, WHOLE, WHOLE, mesh=cpu_mesh("tp:1"))


def test_no_collectives_over_several_axes() -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    for axes in ("dp", "tp", ("dp", "tp")):
        f, x = summing(axes, mesh)
        with pytest.raises(
            AssertionError, match=r"over dp\+tp:\n  all_reduce: none is expected, 1"
        ):
            assert_no_collectives(f, x, axis=("dp", "tp"))
    f, x = summing("dp", mesh)
    assert_no_collectives(f, x, axis=("tp",))
    assert_collectives(f, x, all_reduce=0, axis=("dp", "tp"))
    assert_collectives(f, x, all_reduce=1, axis=("dp",))


def test_axes_of_size_one_are_ignored() -> None:
    f, x = summing(("dp", "tp"), cpu_mesh("dp:8,tp:1"))
    assert_collectives(f, x, all_reduce=1, axis=("dp", "tp"))
    assert_no_collectives(f, x, axis=("tp",))
    with pytest.raises(AssertionError, match="all_reduce: none is expected, 1"):
        assert_no_collectives(f, x, axis=("dp", "tp"))


@pytest.mark.parametrize("axis", [(), []])
def test_empty_axis_is_refused(axis: Any) -> None:
    f, x = summing("dp", cpu_mesh("dp:2,tp:4"))
    with pytest.raises(TypeError, match="names no axis, so nothing is checked"):
        assert_no_collectives(f, x, axis=axis)
    with pytest.raises(TypeError, match="names no axis, so nothing is checked"):
        assert_collectives(f, x, all_reduce=0, axis=axis)
