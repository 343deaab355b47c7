"""Known mistakes of sharding libraries do not occur here.

The mistakes are about stale rules, mesh contexts, axis types, threads and no-op constraints.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.collectives.read import read_collectives
from shardwright.testing import cpu_mesh
from tests.raising import facts, raises

TEXT = (
    'version = 1\n[axes]\nopen = "left to the compiler"\n'
    '[rules]\nbatch = "dp"\nhead = "tp"\nopen = "?"\n'
)
AXIS_TYPES: dict[str, Any] = {
    "auto": "auto",
    "explicit": "explicit",
    "dp explicit": {"dp": "explicit"},
    "tp explicit": {"tp": "explicit"},
}


def manager(text: str = TEXT, *, kind: str = "auto") -> sw.PartitionManager:
    return sw.PartitionManager(
        sw.Strategy.loads(text), mesh=cpu_mesh("dp:2,tp:4", axis_types=AXIS_TYPES[kind])
    )


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_one_program_per_manager() -> None:
    traces: list[None] = []

    @jax.jit
    def f(x: Any) -> Any:
        traces.append(None)
        return sw.shard(2 * x, sw.BATCH, sw.HEAD)

    first, other = manager(), manager(TEXT.replace('head = "tp"', 'head = "-"'))
    actual = []
    for pm in (first, other, first, manager(), other):
        with pm:
            actual.append(f(numbers(4, 8)).sharding.spec)
    assert actual == [P("dp", "tp"), P("dp"), P("dp", "tp"), P("dp", "tp"), P("dp")]
    assert len(traces) == 2


def test_same_question_keeps_the_jit_cache() -> None:
    pm = manager()
    assert (
        pm.sharding(sw.BATCH, sw.HEAD)
        is pm.sharding(sw.BATCH, sw.HEAD)
        is pm.sharding([sw.BATCH, sw.HEAD, sw.EMPTY])
    )
    step = jax.jit(lambda x: x + 1)
    for _ in range(3):
        step(pm.shard(numbers(4, 8), sw.BATCH, sw.HEAD))
        step(jax.device_put(numbers(4, 8), pm.sharding(sw.BATCH, sw.HEAD)))
    assert step._cache_size() == 1


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("entered", [True, False], ids=["entered", "mesh by itself"])
@pytest.mark.full(but=["entered-auto", "entered-dp explicit", "mesh by itself-explicit"])
def test_same_body_on_every_mesh(kind: str, entered: bool) -> None:
    pm = manager(kind=kind)

    def body(x: Any) -> Any:
        return pm.shard(2 * x, sw.BATCH, sw.HEAD)

    x = jax.device_put(numbers(4, 8), NamedSharding(pm.mesh, P()))
    if entered:
        with pm:
            traced, eager = jax.jit(body)(x), body(x)
    else:
        traced, eager = jax.jit(body)(x), body(x)
    for y in (traced, eager):
        np.testing.assert_array_equal(y, 2 * x)
        assert y.sharding.is_equivalent_to(NamedSharding(pm.mesh, P("dp", "tp")), 2)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_same_body_inside_shard_map(kind: str) -> None:
    pm = manager(kind=kind)

    def body(x: Any) -> Any:
        return sw.shard(2 * x, sw.BATCH, sw.HEAD)

    x = pm.shard(numbers(4, 8), sw.BATCH, sw.HEAD)
    full = {"in_specs": P("dp", "tp"), "out_specs": P("dp", "tp")}
    part = {"in_specs": P("dp"), "out_specs": P("dp"), "axis_names": {"dp"}}
    with pm:
        for options in (full, part):
            y = jax.jit(jax.shard_map(body, **options))(x)
            np.testing.assert_array_equal(y, 2 * numbers(4, 8))
            assert y.sharding.is_equivalent_to(NamedSharding(pm.mesh, P("dp", "tp")), 2)


def test_invariant_manual_axis() -> None:
    pm = manager()
    with pm:
        strict = jax.shard_map(
            lambda x: sw.shard(x, sw.BATCH, sw.HEAD), in_specs=P("dp"), out_specs=P("dp")
        )
        with raises(sw.ManualAxisError, "tp", dim=1, axis="HEAD", fix="tp"):
            jax.jit(strict)(numbers(4, 8))
        hinted = jax.shard_map(
            lambda x: sw.hint(2 * x, sw.BATCH, sw.HEAD), in_specs=P("dp"), out_specs=P("dp")
        )
        np.testing.assert_array_equal(jax.jit(hinted)(numbers(4, 8)), 2 * numbers(4, 8))


def test_replicated_and_unconstrained() -> None:
    pm = manager()
    x = pm.shard(numbers(4, 8), sw.BATCH, sw.HEAD)
    for y in (
        pm.shard(x, sw.Replicated),
        jax.jit(lambda x: pm.shard(x, sw.Replicated))(x),
        pm.shard(x, P()),
    ):
        assert y.sharding.is_fully_replicated
        np.testing.assert_array_equal(y, x)
    with pm:
        assert (
            '[{?}, {"tp"}]'
            in jax.jit(lambda x: sw.shard(2 * x, "open", sw.HEAD)).lower(x).as_text()
        )
        assert jax.jit(lambda x: sw.shard(2 * x, "open", sw.HEAD))(x).sharding.spec == P("dp", "tp")


def test_numpy_leaves_and_all_errors() -> None:
    pm = manager()
    placed = pm.shard({"a": numbers(4, 8), "b": [jnp.ones((2, 4))]}, (sw.BATCH, sw.HEAD))
    assert {x.sharding.spec for x in jax.tree.leaves(placed)} == {P("dp", "tp")}
    with raises(
        sw.IndivisibleError,
        facts("dp=2", path="a", dim=0, axis="BATCH", size=3, fix="dp | -"),
        facts("tp=4", path="b/0", dim=1, axis="HEAD", size=6, fix="tp | -"),
    ):
        pm.shard({"a": numbers(3, 8), "b": [numbers(2, 6)]}, (sw.BATCH, sw.HEAD))


def test_collectives_have_mesh_axes_and_bytes() -> None:
    pm = manager(
        'version = 1\n[rules]\nbatch = "dp"\nembed = "-"\nmlp_intermediate = "tp"\n[params]\n'
        'embed = "dp"\n[policy]\ngather = "dp"\n'
    )

    def f(x: Any, up: Any, down: Any) -> Any:
        x = sw.shard(x, sw.BATCH, sw.EMBED)
        h = sw.shard(
            x @ sw.gather(up, sw.EMBED, sw.MLP_INTERMEDIATE), sw.BATCH, sw.MLP_INTERMEDIATE
        )
        return sw.shard(h @ sw.gather(down, sw.MLP_INTERMEDIATE, sw.EMBED), sw.BATCH, sw.EMBED)

    weights = pm.shard([numbers(16, 8), numbers(8, 16)], [sw.ColumnWise, sw.RowWise])
    with pm:
        compiled = jax.jit(f).lower(numbers(4, 16), *weights).compile()
    collectives = [
        (collective.kind, collective.mesh_axes, collective.count, collective.logical_bytes)
        for collective in read_collectives(compiled, pm.mesh)
    ]
    gathered, summed = 16 * 8 // 4 * 4, 4 // 2 * 16 * 4
    assert sorted(collectives) == [(Kind.ALL_GATHER, ("dp",), 1, gathered)] * 2 + [
        (Kind.ALL_REDUCE, ("tp",), 1, summed)
    ]


def test_thread_has_its_own_manager() -> None:
    pm, texts = manager(), []

    def bare() -> None:
        with raises(sw.NoManagerError, "PartitionManager", fix="pm.shard"):
            sw.shard(numbers(4, 8), sw.BATCH, sw.HEAD)
        with pm:
            texts.append(sw.shard(numbers(4, 8), sw.BATCH, sw.HEAD).sharding.spec)

    with manager(TEXT.replace('head = "tp"', 'head = "-"')):
        thread = threading.Thread(target=bare)
        thread.start()
        thread.join()
    assert texts == [P("dp", "tp")]


def test_manager_is_a_leaf() -> None:
    pm = manager()
    assert jax.tree.leaves(pm) == []
    traces: list[None] = []

    @jax.jit
    def f(pm: sw.PartitionManager, x: Any) -> Any:
        traces.append(None)
        return pm.shard(x, sw.BATCH, sw.HEAD)

    assert (
        f(pm, numbers(4, 8)).sharding.spec
        == f(manager(), numbers(4, 8)).sharding.spec
        == P("dp", "tp")
    )
    assert len(traces) == 1
    assert isinstance(pm.mesh, Mesh)
