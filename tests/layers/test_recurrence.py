"""`linear_scan`: the states and gradients of a plain loop, on every mesh, and what is sent."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.plan.collectives.read import read_collectives
from shardwright.testing import cpu_mesh
from tests.raising import raises

AXES = (sw.BATCH, sw.LENGTH, sw.EMBED)
# By name of the axes: the positions of length and batch.
SHAPE = (4, 16, 6)
STRATEGY = sw.Strategy.loads("""
[mesh]
dp = 1
[rules]
batch = "dp"
length = "fsdp+sp"
embed = "tp"
""")


def inputs(dtype: Any = jnp.float32, shape: tuple[int, ...] = SHAPE) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    a, x, weight = random.normal(size=(3, *shape)).astype(np.float32)
    return jnp.asarray(1 / (1 + np.exp(-a)), dtype), jnp.asarray(x, dtype), jnp.asarray(weight)


def loop(a: Any, x: Any, dim: int, *, reverse: bool = False) -> Any:
    """The recurrence as NumPy computes it, in float64."""
    a, x = (np.moveaxis(np.asarray(each).astype(np.complex128), dim, 0) for each in (a, x))
    states, state = [], np.zeros_like(x[0])
    steps = list(zip(a, x, strict=True))
    for coefficient, value in steps[::-1] if reverse else steps:
        state = coefficient * state + value
        states.append(state)
    return np.moveaxis(np.stack(states[::-1] if reverse else states), 0, dim)


def plain(a: Any, x: Any, *, reverse: bool = False) -> Any:
    """The recurrence along dim 1 as a `lax.scan`, for gradients."""

    def step(state: Any, now: Any) -> Any:
        state = now[0] * state + now[1]
        return state, state

    pairs = jnp.moveaxis(a, 1, 0), jnp.moveaxis(x, 1, 0)
    return jnp.moveaxis(jax.lax.scan(step, 0 * x[:, 0], pairs, reverse=reverse)[1], 0, 1)


MESHES = [
    ("dp:2", "auto"),
    ("sp:8", "auto"),
    ("sp:8", "explicit"),
    ("dp:2,sp:2,tp:2", "auto"),
    ("dp:2,sp:2,tp:2", "explicit"),
    ("fsdp:2,sp:4", "auto"),
    ("fsdp:2,sp:4", "explicit"),
]


@pytest.mark.parametrize(("mesh", "axis_types"), MESHES)
@pytest.mark.full(but=["dp:2,sp:2,tp:2-explicit"])
@pytest.mark.ci
def test_states_and_gradients_are_those_of_a_loop(mesh: str, axis_types: str) -> None:
    a, x, weight = inputs()
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh(mesh, axis_types=axis_types)) as pm:
        for reverse in (False, True):

            def loss(a: Any, x: Any, reverse: bool = reverse) -> Any:
                h = sw.linear_scan(a, x, *AXES, reverse=reverse)
                return (h * sw.shard(weight, *AXES)).sum(), h

            def expected(a: Any, x: Any, reverse: bool = reverse) -> Any:
                return (plain(a, x, reverse=reverse) * weight).sum()

            sharded = pm.shard((a, x), AXES)
            gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
            (_, h), found = gradient(*sharded)
            np.testing.assert_allclose(h, loop(a, x, 1, reverse=reverse).real, rtol=1e-5, atol=1e-5)
            wanted = jax.jit(jax.grad(expected, (0, 1)))(a, x)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
                assert one.sharding.is_equivalent_to(pm.sharding(AXES, shape=SHAPE), one.ndim)


def test_one_exchange_in_each_direction() -> None:
    a, x, _ = inputs()
    mesh = cpu_mesh("dp:2,sp:4")
    with sw.PartitionManager(STRATEGY, mesh=mesh) as pm:
        sharded = pm.shard((a, x), AXES)

        def scan(a: Any, x: Any) -> Any:
            return sw.linear_scan(a, x, *AXES)

        def loss(a: Any, x: Any) -> Any:
            return (scan(a, x) ** 2).sum()

        for function, count in ((scan, 1), (jax.grad(loss, (0, 1)), 2)):
            compiled = jax.jit(function).lower(*sharded).compile()
            sent = collections.Counter(
                (str(each.kind), each.mesh_axes) for each in read_collectives(compiled, mesh)
            )
            assert sent == {("all_gather", ("sp",)): count}
        report = pm.plan(scan, a, x, specs=(AXES, AXES))
        # The last state and the product of the coefficients, in float32, of two batches each.
        (event,) = report.events
        assert (str(event.kind), event.mesh_axes) == ("all_gather", ("sp",))
        assert event.logical_bytes == 4 * 2 * 2 * 6 * 4


def test_one_device_and_no_manager_send_nothing() -> None:
    a, x, _ = inputs()
    expected = loop(a, x, 1).real
    alone = jax.jit(lambda a, x: sw.linear_scan(a, x, *AXES))(a, x)
    np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-5)
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh("dp:2")):
        compiled = jax.jit(lambda a, x: sw.linear_scan(a, x, *AXES)).lower(a, x).compile()
    assert not list(read_collectives(compiled, cpu_mesh("dp:2")))


def test_low_precision_is_computed_in_float32() -> None:
    """Beside float32 states of the same rounded inputs, only the result is rounded."""
    a, x, _ = inputs(jnp.bfloat16, (2, 64, 4))
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh("sp:8")):
        h = jax.jit(lambda a, x: sw.linear_scan(a, x, *AXES))(a, x)
        total = jax.grad(lambda a: (sw.linear_scan(a, x, *AXES).astype(jnp.float32)).sum())
        found = jax.jit(total)(a)
    assert (h.dtype, found.dtype) == (jnp.bfloat16, jnp.bfloat16)
    expected = loop(a.astype(jnp.float32), x.astype(jnp.float32), 1).real
    np.testing.assert_allclose(h.astype(jnp.float32), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.full
def test_complex_states_along_the_first_dim() -> None:
    a, x, weight = inputs(shape=(16, 4, 6))
    turned = a * jnp.exp(1j * weight)
    axes = (sw.LENGTH, sw.BATCH, sw.EMBED)
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh("dp:2,sp:4")):
        h = jax.jit(lambda a, x: sw.linear_scan(a, x, *axes))(turned, x.astype(jnp.complex64))
    np.testing.assert_allclose(h, loop(turned, x, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
@pytest.mark.full
def test_in_a_scan_over_layers_with_remat(axis_types: str) -> None:
    a, x, weight = inputs()
    layers = jnp.stack([a, a**2])

    def through(scan: Any) -> Any:
        def loss(layers: Any, x: Any) -> Any:
            layer = jax.checkpoint(lambda x, a: (jnp.tanh(scan(a, x)), None))
            return (jax.lax.scan(layer, x, layers)[0] * weight).sum()

        return jax.grad(loss, (0, 1))

    wanted = through(plain)(layers, x)
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh("dp:2,sp:4", axis_types=axis_types)) as pm:
        gradient = jax.jit(through(lambda a, x: sw.linear_scan(a, x, *AXES)))
        found = gradient(pm.shard(layers, sw.LAYERS, *AXES), pm.shard(x, *AXES))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_inside_shard_map() -> None:
    """The enclosing `shard_map` has split the length: the arrays are local."""
    a, x, _ = inputs()
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh("dp:2,sp:4")) as pm:
        scan = pm.shard_map(
            lambda a, x: sw.linear_scan(a, x, *AXES), in_axes=(AXES, AXES), out_axes=AXES
        )
        h = jax.jit(scan)(a, x)
        found = jax.jit(jax.grad(lambda x: (scan(a, x) ** 2).sum()))(x)
    np.testing.assert_allclose(h, loop(a, x, 1).real, rtol=1e-5, atol=1e-5)
    wanted = jax.jit(jax.grad(lambda x: (plain(a, x) ** 2).sum()))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_it_refuses() -> None:
    a, x, _ = inputs()
    with raises(sw.RankMismatchError, "(4, 16, 1)", "(4, 16, 6)", path="a", fix="jnp.broadcast_to"):
        sw.linear_scan(a[..., :1], x, *AXES)
    for axes in (
        (sw.BATCH, sw.EMPTY, sw.EMBED),
        (sw.QUERY_LENGTH, sw.KV_LENGTH, sw.EMBED),
        (sw.EMPTY, (sw.BATCH, sw.LENGTH), sw.EMBED),
    ):
        with raises(sw.LayerError, path="axes", fix="LENGTH"):
            sw.linear_scan(a, x, *axes)
    with (
        sw.PartitionManager(STRATEGY, mesh=cpu_mesh("sp:8")),
        raises(sw.IndivisibleError, "sp=8", 12),
    ):
        sw.linear_scan(a[:, :12], x[:, :12], *AXES)


def test_the_first_coefficient_is_not_read() -> None:
    a, x, _ = inputs()
    expected = loop(a, x, 1).real
    a = a.at[:, 0].set(jnp.inf)
    with sw.PartitionManager(STRATEGY, mesh=cpu_mesh("sp:8")):
        h = jax.jit(lambda x: sw.linear_scan(a, x, *AXES))(x)
        of_x = jax.jit(jax.grad(lambda x: (sw.linear_scan(a, x, *AXES) ** 2).sum()))(x)
    np.testing.assert_allclose(h, expected, rtol=1e-5, atol=1e-5)
    assert bool(jnp.isfinite(of_x).all())


def test_an_empty_length_has_no_states() -> None:
    a, x, _ = inputs(shape=(4, 0, 6))
    for mesh in ("dp:2", "sp:8"):
        with sw.PartitionManager(STRATEGY, mesh=cpu_mesh(mesh)):
            h, pull = jax.vjp(lambda a, x: sw.linear_scan(a, x, *AXES), a, x)
        assert [each.shape for each in (h, *pull(h))] == [(4, 0, 6)] * 3


def test_dtypes_that_cannot_hold_the_states() -> None:
    a, x, _ = inputs()
    with raises(sw.LayerError, "int32", path="x", fix="x.astype(jnp.float32)"):
        sw.linear_scan(a, x.astype(jnp.int32), *AXES)
    with raises(sw.LayerError, "bool", path="a", fix="a.astype(jnp.float32)"):
        sw.linear_scan(a > 0, x, *AXES)
    with raises(sw.LayerError, "complex64", "float32", path="x", fix="x.astype(a.dtype)"):
        sw.linear_scan(a.astype(jnp.complex64), x, *AXES)
