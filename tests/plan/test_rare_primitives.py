"""Plans of Refs, asynchronous collectives and cumulative operations, equal to XLA's programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import shardwright as sw
from shardwright.testing import cpu_mesh
from tests.plan.against_xla import compiled_bytes, planned_bytes

Axes = tuple[Any, ...]


def equals_xla(function: Callable[..., Any], *arrays: tuple[tuple[int, ...], Axes]) -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for shape, axes in arrays
    ]
    report = pm.plan(function, *given)
    assert report.walked.complete
    assert planned_bytes(report)
    assert planned_bytes(report) == compiled_bytes(pm, function, given)


def written_rows(x: Any, w: Any) -> Any:
    """Write a row of a Ref in each round of a loop."""
    rows = jax.new_ref(jnp.zeros((4, *x.shape)))

    def step(x: Any, at: Any) -> tuple[Any, None]:
        y = sw.shard(jnp.tanh(x @ w), sw.BATCH, sw.EMBED)
        rows[at] = y
        return y, None

    last = lax.scan(step, x, jnp.arange(4))[0]
    return last, jax.freeze(rows)


def summed_gradients(x: Any, w: Any) -> Any:
    """Add gradients to a Ref in each round of a loop."""
    total = jax.new_ref(jnp.zeros_like(w))

    def step(_: Any, carry: None) -> None:
        total[...] += jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
        return carry

    lax.fori_loop(0, 3, step, None)
    return total[...]


def test_loop_that_writes_ref() -> None:
    equals_xla(written_rows, ((8, 64), ("dp", None)), ((64, 64), ("tp", None)))


def test_loop_that_adds_to_ref() -> None:
    equals_xla(summed_gradients, ((8, 64), ("dp", None)), ((64, 64), (None, "tp")))


@pytest.mark.skipif(not hasattr(lax, "psum_scatter_start"), reason="JAX 0.12 has it")
def test_asynchronous_collective() -> None:
    def scattered(x: Any) -> Any:
        return lax.psum_scatter_start(x, "tp", tiled=True).done()

    run = jax.shard_map(
        scattered,
        mesh=cpu_mesh("dp:2,tp:4"),
        in_specs=PartitionSpec("dp"),
        out_specs=PartitionSpec(("dp", "tp")),
        check_vma=False,
    )
    equals_xla(run, ((32, 16), ("dp", None)))


def test_result_of_cumulative_operation_stays_sharded() -> None:
    def run(x: Any) -> Any:
        gradient = jax.grad(lambda x: (jnp.cumsum(jnp.sin(x), 0) ** 2).sum())(x)
        return gradient, jax.nn.softmax(jnp.cumsum(x, 1))

    equals_xla(run, ((16, 32), ("dp", "tp")))


@pytest.mark.full
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
@pytest.mark.parametrize("axes", [("tp", None), ("dp", "tp"), (("dp", "tp"), None)])
def test_cumulative_operations_along_sharded_dims(name: str, axes: Axes) -> None:
    def twice(x: Any) -> Any:
        operation = getattr(lax, name)
        return operation(jnp.sin(operation(x, axis=0)), axis=1, reverse=True)

    equals_xla(twice, ((16, 32), axes))


def unpacked(x: Any, w: Any) -> Any:
    """JAX 0.12 makes one primitive of `q, k = x`."""
    q, k = lax.unstack(x)
    return jnp.tanh(q * k) @ w


def test_unpacked_array() -> None:
    equals_xla(unpacked, ((2, 8, 64), (None, "dp", "tp")), ((64, 32), ("tp", None)))


def test_unpacked_dim_that_is_sharded_is_a_doubt() -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=sw.abstract_mesh("dp:2"))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 64), (64, 32)))
    report = pm.plan(unpacked, x, w, specs=((sw.BATCH, sw.EMPTY, sw.EMPTY), (sw.EMPTY, sw.EMPTY)))
    assert {choice.mesh_axis for choice in report.walked.choices} == {"dp"}
