"""Logical names become mesh axes by flax's rules, by a manager or by a MeshResource."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests.raising import facts, raises

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
import shardwright.interop.transformer_engine as te
from shardwright.interop import flax as bridge
from shardwright.interop.transformer_engine import sharding
from shardwright.interop.transformer_engine.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    SEQLEN_TP_AXES,
    W_FSDP_AXES,
    W_TP_AXES,
)

ACTIVATION = (BATCH_AXES, SEQLEN_AXES, HIDDEN_TP_AXES)


@pytest.fixture
def mesh() -> Any:
    return jax.make_mesh(
        (2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )


def spec_of(names: Any, shape: tuple[int, ...] = (8, 4, 16)) -> Any:
    return trimmed(jax.jit(lambda x: sharding.constrain(x, names))(jnp.ones(shape)))


def trimmed(x: Any) -> Any:
    """Return the spec of an array without the dims at its end that are not sharded."""
    entries = list(getattr(x.sharding, "spec", P()))
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        (te.MeshResource("dp"), {BATCH_AXES: "dp", W_FSDP_AXES: None, HEAD_AXES: None}),
        # fsdp replaces dp for the batch: it is one of the two, not both.
        (te.MeshResource("dp", fsdp_resource="fsdp"), {BATCH_AXES: "fsdp", W_FSDP_AXES: "fsdp"}),
        # tp alone never shards the sequence.
        (te.MeshResource("dp", "tp"), {W_TP_AXES: "tp", SEQLEN_TP_AXES: None, HIDDEN_AXES: None}),
        (te.MeshResource(tpsp_resource="tp"), {W_TP_AXES: "tp", SEQLEN_TP_AXES: "tp"}),
    ],
)
def test_table_of_a_mesh_resource(mesh: Any, resource: Any, expected: Any) -> None:
    with jax.set_mesh(mesh), te.global_shard_guard(resource):
        table = sharding.mesh_axes_of_names()
    assert {name: table[name] for name in expected} == expected
    assert sharding.mesh_axes_of_names() == {}


def test_constraint_by_mesh_resource(mesh: Any) -> None:
    with jax.set_mesh(mesh), te.autocast(mesh_resource=te.MeshResource("dp", "tp")):
        assert spec_of(ACTIVATION) == P("dp", None, "tp")
        assert spec_of(None) == spec_of((None, SEQLEN_AXES, HIDDEN_AXES)) == P()
    assert spec_of(ACTIVATION) == P()


def test_legacy_mesh_context(mesh: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        legacy = contextlib.ExitStack()
        legacy.enter_context(mesh)
    with legacy, te.global_shard_guard(te.MeshResource("dp")):
        assert spec_of(ACTIVATION)[0] == "dp"


def test_constraint_by_flax_rules(mesh: Any) -> None:
    rules = ((BATCH_AXES, ("dp", "fsdp")), ("own", "tp"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        assert spec_of((BATCH_AXES, None, "own")) == P(("dp", "fsdp"), None, "tp")


def test_constraint_by_manager() -> None:
    pm = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh("fsdp:4,tp:2", axis_types="auto")
    )
    with pm:
        assert spec_of(ACTIVATION) == P("fsdp", None, "tp")
        with raises(sw.UnknownAxisError, "own", "TransformerEngine", fix="interop.flax.rules"):
            spec_of((BATCH_AXES, None, "own"))
    layer = te.flax.DenseGeneral(8, kernel_axes=(W_FSDP_AXES, W_TP_AXES), use_bias=False)
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 16)))
    values, axes = bridge.arrays(variables), bridge.annotate(variables, te.NAMES)
    assert pm.shardings(values, axes)["params"]["kernel"].spec == P("fsdp", "tp")


def test_jit_traces_again_under_another_resource(mesh: Any) -> None:
    function = jax.jit(lambda x: sharding.constrain(x, ACTIVATION))
    with jax.set_mesh(mesh):
        with te.autocast(mesh_resource=te.MeshResource("dp")):
            assert trimmed(function(jnp.ones((8, 4, 16)))) == P("dp")
        with te.autocast(mesh_resource=te.MeshResource("fsdp")):
            assert trimmed(function(jnp.ones((8, 4, 16)))) == P("fsdp")


def test_manual_axes_are_left_out(mesh: Any) -> None:
    def inside(x: Any) -> Any:
        return sharding.constrain(x, (BATCH_AXES, None, HIDDEN_TP_AXES))

    with jax.set_mesh(mesh), te.global_shard_guard(te.MeshResource("dp", "tp")):
        run = jax.shard_map(inside, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
        assert jax.jit(run)(jnp.ones((8, 4, 16))).sharding.spec == P("dp", None, "tp")


def test_extended_rules(mesh: Any) -> None:
    given = (("mine", "dp"), (BATCH_AXES, "dp"))
    assert te.extend_logical_axis_rules(given) == given
    with jax.set_mesh(mesh), te.global_shard_guard(te.MeshResource("dp", "tp")):
        extended = te.extend_logical_axis_rules(given)
        assert extended[:2] == given
        assert dict(extended)[W_TP_AXES] == "tp"
        assert len(extended) == 13
        with raises(
            sw.AxisConflictError, "nvte_w_tp", "dp", "MeshResource", "tp", fix="MeshResource"
        ):
            te.extend_logical_axis_rules([(W_TP_AXES, "dp")])
    with raises(sw.StrategyError, "batch", "dp", "fsdp", fix="batch"):
        te.extend_logical_axis_rules([("batch", ("dp", "fsdp"))])  # type: ignore[list-item]


def test_errors(mesh: Any) -> None:
    x = jnp.ones((8, 4, 16))
    wrong = {
        None: facts("MeshResource", fix="global_shard_guard"),
        te.MeshResource("data"): facts("MeshResource", "data", "dp", "fsdp"),
        te.MeshResource(None, "tp", "fsdp"): facts(
            "tp_resource", "tp", "tpsp_resource", "fsdp", fix="tpsp_resource"
        ),
    }
    for resource, says in wrong.items():
        with (
            jax.set_mesh(mesh),
            te.global_shard_guard(resource),
            raises(sw.ShardingError, says),
        ):
            sharding.constrain(x, ACTIVATION)
    with raises(sw.RankMismatchError, "(8, 4, 16)", "nvte_batch", path="x"):
        sharding.constrain(x, (BATCH_AXES,))
    with raises(sw.StrategyError, "mesh_resource", "str", fix="MeshResource"):
        te.global_shard_guard("dp").__enter__()  # type: ignore[arg-type]


def test_old_autocast_warns() -> None:
    with (
        pytest.warns(DeprecationWarning, match="write autocast"),
        te.fp8_autocast(mesh_resource=te.MeshResource("dp")),
    ):
        assert te.global_mesh_resource() == te.MeshResource("dp")


def test_update_collections() -> None:
    new, old = {"a": 1, "b": 2}, {"b": 3, "c": 4}
    assert te.update_collections(new, old) == {"a": 1, "b": 2, "c": 4}
    assert old == {"b": 3, "c": 4}
    frozen = nn.FrozenDict(old)
    assert te.update_collections(new, frozen) == nn.FrozenDict({"a": 1, "b": 2, "c": 4})
    with pytest.raises(TypeError, match="not a mapping"):
        te.update_collections([], old)  # type: ignore[arg-type]
