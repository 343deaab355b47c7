"""Twenty-five surprising behaviors of eformer, numbered as on the page of behaviors, and ours."""

from __future__ import annotations

import copy
import json
import pickle
import threading
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import eformer as ef
from shardwright.interop.eformer import (
    BATCH,
    DP,
    EMBED,
    EMPTY,
    FSDP,
    HEAD,
    KV_HEAD,
    KV_LENGTH,
    LENGTH,
    MODE_DECODE,
    MODE_INSERT,
    MODE_PREFILL,
    MODE_TRAIN,
    QUERY_LENGTH,
    SP,
    TP,
    ColumnWise,
    PartitionAxis,
    PartitionManager,
    Replicated,
    RowWise,
)
from tests.raising import facts, raises

MODES = (MODE_TRAIN, MODE_PREFILL, MODE_DECODE, MODE_INSERT)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def spec_of(x: Any) -> P:
    return x.sharding.spec


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return ef.create_mesh((2, 4), ("dp", "tp"))


def test_01_none_in_decode_replicates() -> None:
    axes = PartitionAxis(decode_kv_head_axis=None)
    assert [axes.resolve_axis([KV_HEAD], mode) for mode in MODES] == [
        ["tp"],
        ["tp"],
        [None],
        [None],
    ]
    assert PartitionAxis().resolve_axis([KV_HEAD], MODE_DECODE) == ["tp"]
    assert PartitionAxis().resolve_axis([QUERY_LENGTH], MODE_DECODE) == [None]
    assert PartitionAxis(decode_query_sequence_axis=sw.NOT_GIVEN).resolve_axis(
        [QUERY_LENGTH], MODE_DECODE
    ) == ["sp"]


@pytest.mark.parametrize(
    ("alias", "axis"),
    [("query_sequence_axis", QUERY_LENGTH), (QUERY_LENGTH, QUERY_LENGTH), (BATCH, BATCH)],
)
def test_02_alias_in_every_mode(alias: str, axis: str) -> None:
    PartitionAxis.register("X", alias)
    paxis = PartitionAxis(decode_batch_axis="dp")
    assert [paxis.resolve_axis(["X"], mode) for mode in MODES] == [
        paxis.resolve_axis([axis], mode) for mode in MODES
    ]


def test_03_every_axis_in_every_mode() -> None:
    text = (
        "version = 1\n"
        "[rules]\n"
        'embed = "tp"\n'
        'length = "sp"\n'
        "[modes.decode]\n"
        'embed = "-"\n'
        "[modes.prefill]\n"
        'length = "-"\n'
    )
    rules = sw.Strategy.loads(text).compile()
    actual = {
        mode: sw.resolve((LENGTH, EMBED), rules, {"tp": 2, "sp": 2}, mode=mode).spec
        for mode in MODES
    }
    assert actual == {
        MODE_TRAIN: P("sp", "tp"),
        MODE_PREFILL: P(None, "tp"),
        MODE_DECODE: P("sp"),
        MODE_INSERT: P("sp"),
    }


def test_04_unknown_mode() -> None:
    paxis = PartitionAxis(decode_head_axis=None)
    assert paxis.resolve_axis([HEAD], "decode") == paxis.resolve_axis([HEAD], MODE_DECODE) == [None]
    for call in (paxis.resolve_axis, paxis.resolve_spec, PartitionManager(paxis).resolve):
        with raises(sw.StrategyError, "mode", "autoregressive", fix="__autoregressive__"):
            call([HEAD], "autoregressive")


def test_05_invalid_member_of_a_composite() -> None:
    with raises(sw.UnknownAxisError, "axis", "__KV_HAED__", fix="KV_HEAD"):
        PartitionAxis().resolve_axis([["__KV_HAED__", TP]], MODE_TRAIN)
    for empty in (EMPTY, None):
        with raises(sw.StrategyError, "EMPTY", fix="EMPTY"):
            PartitionAxis().resolve_axis([[empty, TP]], MODE_TRAIN)
    # An axis that is replicated adds nothing: nothing and tp are tp.
    assert PartitionAxis(head_axis=None).resolve_axis([[HEAD, TP]], MODE_TRAIN) == [["tp"]]


def test_06_quickstart_shards_its_batch(mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh):
        x = PartitionManager(PartitionAxis()).shard(
            ones(4, 2, 8), [BATCH, LENGTH, EMBED], MODE_TRAIN
        )
        permissive = PartitionManager(PartitionAxis(), policy="eformer")
        dropped = permissive.shard(ones(4, 2, 8), [BATCH, LENGTH, EMBED], MODE_TRAIN)
        resolution = permissive.explain([BATCH, LENGTH, EMBED], MODE_TRAIN, shape=(4, 2, 8))
    assert spec_of(x) == P("dp", None, "tp")
    assert spec_of(dropped) == resolution.spec == P(None, None, "tp")
    assert 'fsdp is not in the mesh; policy missing = "replicate"' in str(resolution)


def test_07_indivisible_composite() -> None:
    mesh = ef.create_mesh((2, 2, 2), ("fsdp", "dp", "tp"))
    with jax.set_mesh(mesh):
        with raises(sw.IndivisibleError, "fsdp=2", "dp=2", 4, size=2, fix="batch_axis"):
            PartitionManager(PartitionAxis()).shard(ones(2, 4), [BATCH, None], MODE_TRAIN)
        prefix = PartitionManager(PartitionAxis(), policy=sw.Policy(indivisible="prefix"))
        assert spec_of(prefix.shard(ones(2, 4), [BATCH, None], MODE_TRAIN)) == P("fsdp")
        dropped = PartitionManager(PartitionAxis(), policy="eformer")
        assert spec_of(dropped.shard(ones(2, 4), [BATCH, None], MODE_TRAIN)) == P()


def test_08_empty_spec_replicates(mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh):
        pm = PartitionManager(PartitionAxis())
        x = pm.shard(ones(4, 8), [BATCH, HEAD], MODE_TRAIN)
        assert spec_of(x) == P("dp", "tp")
        for y in (
            pm.shard(x, Replicated),
            ef.with_sharding_constraint(x, P()),
            jax.jit(lambda x: ef.with_sharding_constraint(x, P()))(x),
        ):
            assert y.sharding.is_fully_replicated
            np.testing.assert_array_equal(y, x)


def test_09_unconstrained(mesh: jax.sharding.Mesh) -> None:
    open_dim = P(P.UNCONSTRAINED, "tp")
    with jax.set_mesh(mesh):
        x = ef.with_sharding_constraint(ones(4, 8), P("dp"))
        assert spec_of(jax.jit(lambda x: ef.with_sharding_constraint(x, open_dim))(x)) == P(
            "dp", "tp"
        )
        assert (
            '[{?}, {"tp"}]'
            in jax.jit(lambda x: ef.with_sharding_constraint(x, open_dim)).lower(x).as_text()
        )


def test_10_numpy_arrays_are_placed(mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh):
        assert spec_of(ef.with_sharding_constraint(ones(4, 8), P("dp", "tp"))) == P("dp", "tp")
        shard_fns, gather_fns = ef.make_shard_and_gather_fns({"w": P("dp", "tp")})
    placed = shard_fns["w"](np.arange(32.0, dtype=np.float32).reshape(4, 8))
    assert spec_of(placed) == P("dp", "tp")
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    back = gather_fns["w"](placed)
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, np.arange(32.0).reshape(4, 8))


def test_11_tree_on_explicit_meshes() -> None:
    mesh = ef.create_mesh((2, 4), ("dp", "tp"), axis_types="explicit")
    with jax.set_mesh(mesh):
        placed = ef.with_sharding_constraint({"a": ones(4), "b": [jnp.ones((2, 8))]}, P("dp"))
        traced = jax.jit(lambda tree: ef.with_sharding_constraint(tree, P("dp")))(
            {"a": ones(4), "b": [ones(2, 8)]}
        )
        assert [spec_of(x)[0] for x in jax.tree.leaves((placed, traced))] == ["dp"] * 4
        with raises(
            sw.IndivisibleError,
            facts("dp=2", path="a", dim=0, size=3, fix="None"),
            facts("dp=2", path="b/0", dim=0, size=5, fix="None"),
        ):
            ef.with_sharding_constraint({"a": ones(3), "b": [ones(5, 8)]}, P("dp"))


@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning")
def test_12_set_mesh_without_warnings(mesh: jax.sharding.Mesh) -> None:
    pm = PartitionManager(PartitionAxis())

    def f(x: Any) -> Any:
        return ef.with_sharding_constraint(
            pm.shard(2 * x, [BATCH, HEAD], MODE_TRAIN), P("dp", "tp")
        )

    for ambient in (jax.set_mesh(mesh), mesh):
        with ambient, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ef.get_incontext_mesh() is mesh
            assert spec_of(jax.jit(f)(ones(4, 8))) == spec_of(f(ones(4, 8))) == P("dp", "tp")
    for call in (f, lambda x: ef.with_sharding_constraint(x, P("dp"))):
        with raises(AssertionError, "mesh", "manager", fix="jax.set_mesh"):
            call(ones(4, 8))


def test_13_auto_explicit_and_manual_axes() -> None:
    pm = PartitionManager(PartitionAxis())
    for use_jax in (False, True):
        assert set(ef.create_mesh((2, 4), ("dp", "tp"), use_jax=use_jax).axis_types) == {
            AxisType.Auto
        }
    explicit = ef.create_mesh((2, 4), ("dp", "tp"), axis_types=("auto", "explicit"))
    with jax.set_mesh(explicit):
        assert spec_of(
            jax.jit(lambda x: pm.shard(2 * x, [BATCH, HEAD], MODE_TRAIN))(ones(4, 8))
        ) == P("dp", "tp")
    with jax.set_mesh(ef.create_mesh((2, 4), ("dp", "tp"))):
        inside = jax.shard_map(
            lambda x: pm.shard(2 * x, [BATCH, HEAD], MODE_TRAIN),
            in_specs=P("dp", "tp"),
            out_specs=P("dp", "tp"),
        )
        np.testing.assert_array_equal(jax.jit(inside)(ones(4, 8)), 2 * ones(4, 8))
        outside = jax.shard_map(
            lambda x: pm.shard(2 * x, [BATCH, HEAD], MODE_TRAIN),
            in_specs=P("dp"),
            out_specs=P("dp"),
        )
        with raises(sw.ManualAxisError, "tp", dim=1, axis="HEAD", fix="tp"):
            jax.jit(outside)(ones(4, 8))


def test_14_managers_do_not_share_programs(mesh: jax.sharding.Mesh) -> None:
    traces = []

    @jax.jit
    def f(x: Any) -> Any:
        traces.append(None)
        return ef.apply_logical_sharding(x, axes=[BATCH, "X"], mode=MODE_TRAIN)

    PartitionAxis.register("X", "tp")
    manager = PartitionManager(PartitionAxis())
    PartitionAxis.register("X", None, override=True)  # changes no manager that exists
    other = PartitionManager(PartitionAxis())
    PartitionAxis.register("X", "tp", override=True)
    same = PartitionManager(PartitionAxis())
    assert manager == same != other
    with jax.set_mesh(mesh):
        actual = []
        for pm in (manager, other, manager, same):
            with pm:
                actual.append(spec_of(f(ones(4, 8))))
    assert actual == [P("dp", "tp"), P("dp"), P("dp", "tp"), P("dp", "tp")]
    assert len(traces) == 2


def test_15_no_implicit_manager(mesh: jax.sharding.Mesh) -> None:
    PartitionManager(PartitionAxis())
    events = []

    def call() -> None:
        assert ef.get_partition_manager() is None
        assert ef.get_current_partition_manager() is None
        with raises(sw.NoManagerError, "PartitionManager", fix="partition_manager"):
            ef.apply_logical_sharding(ones(4), axes=[BATCH], mode=MODE_TRAIN)
        events.append(True)

    with jax.set_mesh(mesh):
        call()
        with PartitionManager(PartitionAxis()) as pm:
            assert ef.get_partition_manager() is ef.get_current_partition_manager() is pm
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
    assert events == [True, True]


def test_16_enter_and_leave_twice() -> None:
    outer, inner = (
        PartitionManager(PartitionAxis()),
        PartitionManager(PartitionAxis(head_axis=None)),
    )
    with outer:
        with inner, inner:
            assert ef.get_current_partition_manager() is inner
        assert ef.get_current_partition_manager() is outer
    assert ef.get_current_partition_manager() is None


def test_17_conflicting_dims() -> None:
    axes = [BATCH, HEAD, QUERY_LENGTH, KV_LENGTH]
    pm = PartitionManager(PartitionAxis())
    with jax.set_mesh(ef.create_mesh((2, 4, 1), ("fsdp", "tp", "sp"))):
        assert spec_of(pm.shard(ones(2, 4, 3, 3), axes, MODE_TRAIN)) == P("fsdp", "tp")
        assert pm.resolve(axes, MODE_TRAIN) == P(("fsdp", "dp"), "tp", "sp", None)
    with jax.set_mesh(ef.create_mesh((2, 2, 2), ("fsdp", "tp", "sp"))):
        for call in (
            lambda: pm.shard(ones(2, 4, 4, 4), axes, MODE_TRAIN),
            lambda: pm.resolve(axes, MODE_TRAIN),
        ):
            with raises(
                sw.AxisConflictError, "sp", 2, "QUERY_LENGTH", dim=3, axis="KV_LENGTH", fix="EMPTY"
            ):
                call()
        permissive = PartitionManager(PartitionAxis(), policy="eformer")
        resolution = permissive.explain(
            axes, MODE_TRAIN, shape=(2, 4, 4, 3)
        )  # a dim that is dropped for its size wants no mesh axis
        assert (resolution.spec, resolution.ok) == (
            P(None, "tp", "sp"),
            True,
        )  # dp is not in the mesh
        assert "sp: 3 % 2 != 0; policy indivisible" in resolution.decisions[3].why
        with raises(sw.AxisConflictError, "sp", 2, "QUERY_LENGTH", fix="EMPTY"):
            permissive.shard(ones(2, 4, 4, 4), axes, MODE_TRAIN)
    written = pm.resolve(
        axes, MODE_TRAIN
    )  # without a mesh the rules apply as written, and are checked where the spec is used
    assert (
        written
        == PartitionAxis().resolve_spec(axes, MODE_TRAIN)
        == P(("fsdp", "dp"), "tp", "sp", "sp")
    )
    with (
        jax.set_mesh(ef.create_mesh((1, 2, 2, 2), ("fsdp", "dp", "tp", "sp"))),
        raises(sw.AxisConflictError, "sp", 2),
    ):
        ef.with_sharding_constraint(ones(4, 4, 4, 4), written)
    with jax.set_mesh(ef.create_mesh((2, 2, 2, 1), ("fsdp", "dp", "tp", "sp"))):
        assert spec_of(ef.with_sharding_constraint(ones(4, 4, 4, 4), written)) == P(
            ("fsdp", "dp"), "tp"
        )


def test_18_layout_fields_and_call_arguments(
    mesh: jax.sharding.Mesh,
) -> None:
    scores = ef.DynamicShardingAxes([EMBED], MODE_DECODE)
    assert (scores.axes, scores.mode) == ([EMBED], MODE_DECODE)
    assert (ef.HiddenStateSharding.axes, ef.HiddenStateSharding.mode) == (
        [BATCH, QUERY_LENGTH, EMBED],
        1,
    )
    with raises(sw.StrategyError, "RowWise", "TP", "FSDP", "SP", fix="DynamicShardingAxes"):
        RowWise([EMBED], MODE_DECODE)
    pm = PartitionManager(PartitionAxis())
    queries = ef.AttnQSharding
    assert pm.resolve(queries, mode=MODE_DECODE) == P(("fsdp", "dp"), None, "tp", None)
    assert pm.resolve(queries, mode=MODE_TRAIN) == P(("fsdp", "dp"), "sp", "tp", None)
    assert (
        pm.resolve([HEAD], MODE_TRAIN, None)
        == pm.resolve(None, MODE_TRAIN, scores.__class__([HEAD], MODE_TRAIN))
        == P("tp")
    )
    with raises(sw.StrategyError, "axes", "dynamic_axes", fix="BATCH"):
        pm.resolve([HEAD], MODE_TRAIN, queries)
    with raises(sw.StrategyError, "axes", "dynamic_axes", fix="BATCH"):
        pm.resolve(mode=MODE_TRAIN)


def test_19_none_constants_and_text() -> None:
    PartitionAxis.register("NOWHERE", None)
    PartitionAxis.register("ELSEWHERE", "replace")
    paxis = PartitionAxis(batch_axis=DP, decode_batch_axis=[FSDP, DP], data_parallel_axis="data")
    assert paxis.resolve_axis(["NOWHERE", "ELSEWHERE"], MODE_TRAIN) == [None, "replace"]
    assert (paxis.batch_axis, paxis.decode_batch_axis) == ("data", ("fsdp", "data"))
    with raises(
        sw.StrategyError,
        facts(3, "rule", axis="head_axis", fix="tp | -"),
        facts(3, "rule", fix="tp | -"),
    ):
        PartitionAxis(head_axis=3)
    with (
        jax.set_mesh(ef.create_mesh((8,), ("tp",))),
        raises(sw.MeshMismatchError, "replace", "tp", 8, fix="tp"),
    ):
        PartitionManager(PartitionAxis()).shard(ones(4), ["ELSEWHERE"], MODE_TRAIN)


def test_20_weight_layouts_of_stacks_and_biases() -> None:
    pm = PartitionManager(PartitionAxis(), mesh=ef.create_mesh((4, 2), ("fsdp", "tp")))
    assert spec_of(pm.shard(ones(8, 4), ColumnWise)) == P("fsdp", "tp")
    assert spec_of(pm.shard(ones(3, 8, 4), ColumnWise)) == P(None, "fsdp", "tp")
    assert spec_of(pm.shard(ones(4), ColumnWise.bias)) == P("tp")
    assert spec_of(pm.shard(ones(4), RowWise.bias)) == P()
    with raises(sw.RankMismatchError, "ColumnWise", 2, 1, "(4,)", fix="ColumnWise.bias"):
        pm.shard(ones(4), ColumnWise)
    rules = [("bias", P("tp")), ("", P("fsdp", "tp"))]
    tree = {"kernel": ones(8, 4), "bias": ones(4), "scale": ones(8), "step": 3}
    with raises(sw.RankMismatchError, "fsdp", "tp", 2, "(8,)", path="scale", fix="eformer"):
        ef.match_partition_rules(rules, tree)
    cut = ef.match_partition_rules(rules, tree, policy="eformer")
    assert cut == {"kernel": P("fsdp", "tp"), "bias": P("tp"), "scale": P("fsdp"), "step": P()}


@pytest.mark.parametrize(
    "name",
    [
        "AutoShardingRule",
        "ShardingAnalyzer",
        "analyze_sharding_strategy",
        "auto_partition_spec",
        "MeshPartitionHelper",
    ],
)
def test_21_missing_utilities_name_a_replacement(name: str) -> None:
    for module in (ef, ef.escale):
        with raises(NotImplementedError, name, "eformer", "provided"):
            getattr(module, name)({}, strict=True)
    with pytest.raises(AttributeError, match="no attribute 'parition_axis'"):
        _ = ef.parition_axis


def test_22_names_in_order() -> None:
    specs = {"w": P(("sp", "fsdp"), "tp"), "b": [P("tp", P.UNCONSTRAINED), None, P("dp")]}
    assert ef.get_names_from_partition_spec(specs) == ["sp", "fsdp", "tp", "dp"]


class Device(types.SimpleNamespace):
    """Return a device of one of two slices."""

    def __hash__(self) -> int:
        return int(self.id)


def test_23_slices_keep_the_mesh_size(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device(id=i, platform="cpu", slice_index=i // 8, process_index=0) for i in range(16)]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(
        "shardwright.mesh.build.Mesh", lambda grid, names, axis_types: grid
    )  # a real one takes real devices only
    slices = [
        [device.slice_index for device in row]
        for row in ef.create_mesh((4, 4), ("dp", "tp"), dcn_mesh_dims=(1, 2))
    ]
    assert slices == [[0, 0, 1, 1]] * 4
    with raises(sw.MeshSpecError, "dp", "fsdp", 2, "pp", fix="dp"):
        ef.create_mesh((1, 1, 16), ("dp", "fsdp", "tp"))


def test_24_values_survive_text_pickle_and_copies(mesh: jax.sharding.Mesh) -> None:
    paxis = PartitionAxis(batch_axis=("dp", "fsdp"), decode_kv_head_axis=None)
    assert PartitionAxis.from_dict(json.loads(json.dumps(paxis.to_dict()))) == paxis
    assert pickle.loads(pickle.dumps(paxis)) == copy.deepcopy(paxis) == paxis
    assert pickle.loads(pickle.dumps(ef.NOT_GIVEN)) is copy.deepcopy(ef.NOT_GIVEN) is ef.NOT_GIVEN
    pm = PartitionManager(paxis)
    assert jax.tree.leaves({"pm": pm, "paxis": paxis}) == []
    assert jax.tree.map(lambda x: x, [pm]) == [pm]
    with raises(sw.MeshSpecError, "tp", "dp"):
        ef.parse_mesh_from_string("tp:4,dp:2", ["dp", "tp"])
    assert ef.parse_mesh_from_string("dp:2,tp:4", ["dp", "tp"]) == mesh
    assert ef.get_corrected_named_sharding((4,), P("tp"), raise_mesh_error=False).spec == P()
    with raises(AssertionError, "mesh", fix="jax.set_mesh"):
        ef.get_corrected_named_sharding((4,), P("tp"))


def test_25_errors_are_raised(mesh: jax.sharding.Mesh) -> None:
    pm = PartitionManager(PartitionAxis(), mesh=mesh)
    for call in (
        lambda: pm.resolve(["nobody"], MODE_TRAIN),
        lambda: pm.shard({"a": {"b": ones(4)}}, ["nobody"], MODE_TRAIN),
        lambda: ef.apply_logical_sharding(ones(4), pm, ["nobody"], MODE_TRAIN),
    ):
        with raises(sw.UnknownAxisError, "axis", axis="nobody", fix="PartitionAxis.register"):
            call()
    with raises(
        sw.IndivisibleError,
        facts("tp=4", path="a", dim=0, axis="HEAD", size=6, fix=("head_axis", "tp | -")),
        facts("tp=4", path="c/0", dim=0, axis="HEAD", size=2, fix=("head_axis", "tp | -")),
    ):
        pm.shard({"a": ones(6), "b": ones(4), "c": [ones(2)]}, [HEAD], MODE_TRAIN)
    assert set(PartitionAxis().resolve_axis([[FSDP, SP]], MODE_TRAIN)[0]) == {"fsdp", "sp"}
