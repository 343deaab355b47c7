"""Shardings that differ: other devices, unreduced sums, specs that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import shardwright as sw
from shardwright.errors import RankMismatchError, ShardingError, StrategyError
from shardwright.testing import assert_max_replicated, assert_sharding, assert_spec, cpu_mesh
from shardwright.testing.golden import spec_table
from tests.raising import Facts, facts, raises

P = jax.P
ONES = np.ones((8, 8), np.float32)


def failing(call: Callable[[], Any]) -> str:
    with pytest.raises(AssertionError, match=r"\S") as caught:
        call()
    return str(caught.value)


def meshes() -> tuple[Mesh, Mesh, Mesh]:
    """Return three meshes tp=4: of four devices, of the same backwards, of four others."""
    devices = cpu_mesh("tp:8").devices
    types = (jax.sharding.AxisType.Auto,)
    first, other, rest = (
        Mesh(some, ("tp",), axis_types=types)
        for some in (devices[:4], devices[:4][::-1], devices[4:])
    )
    return first, other, rest


def test_device_order_is_compared() -> None:
    mesh, backwards, others = meshes()
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=mesh)
    for where, ids in ((backwards, "3,2,1,0"), (others, "4,5,6,7")):
        x = jax.device_put(ONES, NamedSharding(where, P(None, "tp")))
        says = f"devices: {ids}, not 0,1,2,3 (64 B per device either way)"
        expected = NamedSharding(mesh, P(None, "tp"))
        assert says in failing(functools.partial(assert_sharding, x, expected))
        assert says in failing(functools.partial(assert_spec, x, sw.EMPTY, sw.HEAD, manager=pm))
        assert_sharding(x, P(None, "tp"))
        assert_sharding(x, NamedSharding(pm.mesh.abstract_mesh, P(None, "tp")))
    assert_sharding(
        jax.device_put(ONES, NamedSharding(mesh, P(None, "tp"))), NamedSharding(mesh, P(None, "tp"))
    )


def test_unreduced_axes_are_compared() -> None:
    mesh = cpu_mesh("dp:2,tp:4,sp:1", axis_types="explicit")
    x = jax.ShapeDtypeStruct(
        (8, 8), np.float32, sharding=NamedSharding(mesh, P("dp", unreduced={"tp", "sp"}))
    )
    message = failing(lambda: assert_sharding(x, P("dp")))
    assert "unreduced over: tp, not -" in message
    assert "P('dp', unreduced={'sp', 'tp'})" in message
    assert "unreduced over: tp, not -" in failing(lambda: assert_spec(x, P("dp", None)))
    assert_sharding(x, NamedSharding(mesh, P("dp", unreduced={"tp"})))
    assert_sharding(x, P("dp", None, unreduced={"tp"}))
    assert "P('dp', unreduced={'tp'})" in spec_table({"x": x})
    assert (
        spec_table(P("dp", unreduced={"tp"})).splitlines()[-1].endswith("P('dp', unreduced={'tp'})")
    )


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (P("tp", None, None, None), facts("tp", 4, 2, "(8, 8)", path="a")),
        (P("tp", None, "dp"), facts("tp", "dp", 3, 2, path="a")),
        (P("zz"), facts("mesh", "axis", "zz", path="a", dim=0, fix="dp")),
    ],
)
def test_misfit_names_the_path(spec: Any, says: Facts) -> None:
    mesh = cpu_mesh("dp:2,tp:4")
    tree = {"a": jax.device_put(ONES, NamedSharding(mesh, P("dp")))}
    with raises(ShardingError, says):
        assert_sharding(tree, spec)
    with raises(ShardingError, says):
        assert_spec(tree, spec)
    if "zz" not in str(spec):
        with raises(RankMismatchError, len(spec), "tp", 2, path="a", fix="expect"):
            assert_sharding(tree, {"a": NamedSharding(mesh, spec)})


@pytest.mark.parametrize(
    "call",
    [
        lambda pm: assert_sharding({}, {}),
        lambda pm: assert_sharding({"a": []}, P()),
        lambda pm: assert_spec({}, {}, manager=pm),
        lambda pm: assert_spec({}, P()),
        lambda pm: assert_max_replicated({}, bytes=0),
    ],
)
def test_tree_without_arrays_is_refused(call: Callable[[Any], None]) -> None:
    pm = sw.PartitionManager(sw.Strategy.preset("tensor"), mesh=cpu_mesh("tp:8"))
    with raises(StrategyError, "tree"):
        call(pm)
