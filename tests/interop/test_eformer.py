"""The names of eformer, beyond the cases of test_behaviors.py and test_oracle.py."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.interop import eformer as ef
from shardwright.interop.eformer.escale import partition
from shardwright.interop.eformer.escale.partition import constraints, manager
from tests.raising import facts, raises

# Every name that code written for eformer may import, by where from.
COMMON_TYPES = """
BATCH LENGTH KV_LENGTH QUERY_LENGTH EMBED HEAD KV_HEAD MLP_INTERMEDIATE VOCAB EXPERT EXPERT_GATE
HEAD_DIM KV_HEAD_DIM BIAS_HEAD_SEQ BIAS_KV_SEQ EMPTY DATA_PARALLEL DP FULLY_SHARDED_DATA_PARALLEL
FSDP TENSOR_PARALLEL TP EXPERT_PARALLEL EP SEQUENCE_PARALLEL SP MODE_DECODE MODE_PREFILL
MODE_TRAIN MODE_INSERT GENERATION_MODES RUNTIME_MODE_TYPES NOT_GIVEN EMPTY_VAL DEFAULT_MASK_VALUE
AxisType Array PRNGKey DType Shape Mesh AxisNames AxisIdxes DynamicShardingAxes
HiddenStateSharding AttnQSharding AttnKVSharding RowWise SRowWise ColumnWise SColumnWise
Replicated ExpertColumnWise ExpertRowWise ExpertColumnWiseAlt ExpertRowWiseAlt
UnifiedExpertColumnWise UnifiedExpertRowWise ExpertActivations ExpertActivationsAlt
ExpertTensorParallel
"""
ESCALE = """
PartitionAxis PartitionManager apply_logical_sharding get_current_partition_manager
get_partition_manager get_corrected_named_sharding with_sharding_constraint lax_reshard
match_partition_rules make_shard_and_gather_fns create_mesh parse_mesh_from_string create_cpu_mesh
cpu_context force_cpu get_incontext_mesh get_axes_size_in_mesh get_mesh_axis_names
get_mesh_axis_size get_submesh_device_index names_in_current_mesh extract_shardings
extract_sharding_structure get_shardings_with_structure get_partition_spec
get_names_from_partition_spec NamedSharding PartitionSpec
"""


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return ef.create_mesh((2, 4), ("dp", "tp"))


@pytest.fixture
def pm() -> ef.PartitionManager:
    return ef.PartitionManager(ef.PartitionAxis())


def test_every_name_is_importable() -> None:
    for module, names in ((ef.common_types, COMMON_TYPES), (ef.escale, ESCALE)):
        assert [
            name for name in names.split() if getattr(module, name) is not getattr(ef, name)
        ] == []
    assert isinstance(ef.NOT_GIVEN, ef.common_types._Empty), "EasyDeL imports the private name"
    assert ef.lax_reshard is ef.with_sharding_constraint
    for module, names in (
        (constraints, constraints.__all__),
        (manager, manager.__all__),
        (partition, vars(partition)),
    ):
        mine = [name for name in names if name in ESCALE.split()]
        assert len(mine) >= 5
        assert [name for name in mine if getattr(module, name) is not getattr(ef, name)] == []
    assert constraints.MIN_SHARDING_SIZE == 16384
    with pytest.raises(AttributeError, match="no attribute 'MAX_SHARDING_SIZE'"):
        _ = constraints.MAX_SHARDING_SIZE


def test_star_import_gives_every_name() -> None:
    names: dict[str, Any] = {}
    exec("from shardwright.interop.eformer import *", names)
    errors = {"NoMeshError", "NotRegisteredError", "WrongTypeError"}
    assert {*COMMON_TYPES.split(), *ESCALE.split(), *errors} <= set(names)
    assert ef.MIN_SHARDING_SIZE == 16384
    assert not hasattr(ef, "os")


def test_misspelled_attribute_in_a_dict() -> None:
    with raises(sw.StrategyError, "batc_axis", fix="batch_axis"):
        ef.PartitionAxis.from_dict({"batc_axis": "dp"})


SUBMODULES = {
    "escale.mesh": (
        "create_mesh create_cpu_mesh parse_mesh_from_string force_cpu cpu_context",
        "MeshPartitionHelper",
    ),
    "escale.mesh.creation": (
        "create_mesh create_cpu_mesh parse_mesh_from_string force_cpu cpu_context",
        "calculate_host_mesh_shape",
    ),
    "escale.mesh.mesh_helpers": ("", "MeshPartitionHelper"),
    "escale.helpers": (
        "",
        """
        AutoShardingRule CompositeShardingRule MemoryConstrainedShardingRule
        ShapeBasedShardingRule ShardingAnalyzer ShardingRule barrier_sync
        """,
    ),
    "escale.helpers.base": ("", "ShardingRule create_monitored_function barrier_sync"),
    "escale.partition": (
        "",
        "analyze_sharding_strategy auto_namedsharding convert_sharding_strategy",
    ),
    "escale.partition.auto_spec": (
        "",
        """
        auto_partition_spec vrn_auto_partition_spec auto_shard_array auto_namedsharding
        optimize_sharding_for_memory validate_sharding_config convert_sharding_strategy
        """,
    ),
    "escale.partition.constraints": (
        "",
        "analyze_sharding_strategy create_pattern_based_partition_spec",
    ),
    "escale.partition.manager": ("", "get_safe_hash_int hash_fn"),
}


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodules_and_missing_names(name: str) -> None:
    module = importlib.import_module(f"shardwright.interop.eformer.{name}")
    given, absent = SUBMODULES[name]
    for part in given.split():
        assert getattr(module, part) is getattr(ef, part)
    for part in absent.split():
        stand_in = getattr(module, part)
        with raises(NotImplementedError, part, "eformer", "provided"):
            stand_in(1)
        with raises(sw.StrategyError, part, "eformer", "provided"):
            type("Own", (stand_in,), {})
    with pytest.raises(AttributeError, match="has no attribute 'nobody'"):
        _ = module.nobody


class TestManager:
    def test_native_functions_use_it(
        self, pm: ef.PartitionManager, mesh: jax.sharding.Mesh
    ) -> None:
        with pm, jax.set_mesh(mesh):
            x = sw.shard(ones(4, 8), sw.BATCH, sw.EMBED)
            assert x.sharding.spec == P("dp", "tp")
            assert sw.hint(ones(3, 8), sw.BATCH, sw.EMBED).sharding.spec[1] == "tp"
            gathered = jax.jit(lambda w: sw.gather(w, sw.EMBED, sw.MLP_INTERMEDIATE))(ones(4, 8))
            assert gathered.sharding.spec == P(None, "tp")
            assert sw.current_manager() is pm
            assert pm.native() is pm.native()
        with raises(AssertionError, "mesh", fix="jax.set_mesh"):
            pm.native()

    def test_mesh_argument(self, mesh: jax.sharding.Mesh) -> None:
        pm = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh)
        assert pm.shard(ones(4, 8), [ef.BATCH, ef.HEAD]).sharding == NamedSharding(
            mesh, P("dp", "tp")
        )
        with pm:
            assert ef.get_incontext_mesh() is mesh
            assert ef.with_sharding_constraint(ones(4), P("dp")).sharding.spec == P("dp")
        planned = ef.PartitionManager(ef.PartitionAxis(), mesh=sw.abstract_mesh("fsdp:64,tp:8"))
        assert planned.explain(ef.AttnQSharding, shape=(128, 1, 32, 128)).spec == P(
            "fsdp", None, "tp"
        )

    def test_none_values_and_index_modes(
        self, pm: ef.PartitionManager, mesh: jax.sharding.Mesh
    ) -> None:
        axes = [ef.BATCH, ef.QUERY_LENGTH, ef.HEAD]
        assert pm.resolve(axes, 1, shape=(8, 1, 8)) == P(("fsdp", "dp"), None, "tp")
        assert pm.resolve(axes, 1, shape=(8, 2, 8)) == P(("fsdp", "dp"), "sp", "tp")
        assert pm.resolve(ef.AttnQSharding, 0, shape=(1, 8, 8, 8)) == P(
            ("fsdp", "dp"), None, "tp", None
        )
        assert pm.resolve(axes) == pm.resolve(axes, ef.MODE_TRAIN)
        with raises(sw.RankMismatchError, 3, "(8, 1, 8)"):
            pm.resolve(axes, 3, shape=(8, 1, 8))
        with jax.set_mesh(mesh):
            x = ef.apply_logical_sharding(ones(8, 1, 8), pm, axes, 1)
            y = ef.apply_logical_sharding(
                ones(8, 1, 8),
                pm,
                None,
                None,
                ef.DynamicShardingAxes([ef.BATCH, None, [ef.TP]], "train"),
            )
            assert x.sharding.spec == y.sharding.spec == P("dp", None, "tp")

    def test_mesh_axes_by_name(self) -> None:
        paxis = ef.PartitionAxis(data_parallel_axis="data", tensor_parallel_axis="model")
        pm = ef.PartitionManager(paxis, mesh=ef.create_mesh((2, 4), ("data", "model")))
        assert pm.shard(ones(4, 8), ["data", ["model"]]).sharding.spec == P("data", "model")
        assert pm.shard(
            ones(4, 8), ef.DynamicShardingAxes(["data", "model"], ef.MODE_TRAIN)
        ).sharding.spec == P("data", "model")
        assert paxis.resolve_axis([["data", ef.TP]], ef.MODE_TRAIN) == [["data", "model"]]

    def test_several_candidates_need_a_shape(self, mesh: jax.sharding.Mesh) -> None:
        pm = ef.PartitionManager(ef.PartitionAxis(kv_head_axis="tp | -"), mesh=mesh)
        assert [pm.resolve([ef.KV_HEAD], ef.MODE_TRAIN, shape=(heads,)) for heads in (4, 6)] == [
            P("tp"),
            P(),
        ]
        with raises(sw.ShapeRequiredError, "candidate", "applies", dim=0, axis="KV_HEAD"):
            pm.resolve([ef.KV_HEAD], ef.MODE_TRAIN)

    def test_native_annotations(self, mesh: jax.sharding.Mesh) -> None:
        pm = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh)
        assert pm.resolve(sw.stacked(ef.ColumnWise), shape=(2, 4, 8)) == P(None, None, "tp")
        assert pm.shard(ones(4, 8), P("dp")).sharding.spec == P("dp")

    def test_auto_correct_false_is_strict(self, mesh: jax.sharding.Mesh) -> None:
        pm = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh, policy="eformer")
        assert pm.shard(ones(4, 6), [ef.DP, ef.HEAD], ef.MODE_TRAIN).sharding.spec == P("dp")
        with raises(sw.IndivisibleError, "tp=4", dim=1, axis="HEAD", size=6, fix="head_axis"):
            pm.shard(ones(4, 6), [ef.DP, ef.HEAD], ef.MODE_TRAIN, auto_correct=False)
        ours = sw.PartitionManager(pm.rules, mesh=mesh)
        with raises(sw.StrategyError, "auto_correct", "False"):
            ef.apply_logical_sharding(ones(4, 6), ours, [ef.DP, ef.HEAD], auto_correct=False)
        strict = sw.PartitionManager(ef.PartitionAxis().compile(), mesh=mesh)
        assert ef.apply_logical_sharding(
            ones(4, 8), strict, [ef.DP, ef.HEAD], auto_correct=False
        ).sharding.spec == P("dp", "tp")

    def test_invalid_arguments(self, pm: ef.PartitionManager) -> None:
        for kind in (TypeError, sw.StrategyError):
            with raises(
                kind, "PartitionAxis", "dict", fix="shardwright.interop.eformer.PartitionAxis"
            ):
                ef.PartitionManager({})  # type: ignore[arg-type]
        with raises(sw.StrategyError, "policy", "eforme", "preset", fix="eformer"):
            ef.PartitionManager(ef.PartitionAxis(), policy="eforme")
        with raises(sw.StrategyError, "PartitionManager", fix="PartitionManager"):
            ef.apply_logical_sharding(ones(4), object(), [ef.BATCH])
        with pytest.raises(AttributeError, match="cannot assign to field"):
            pm.paxis = None  # type: ignore[assignment]

    def test_equal_managers_do_not_retrace(self, mesh: jax.sharding.Mesh) -> None:
        traces: list[None] = []

        @jax.jit
        def f(pm: Any, x: Any) -> Any:
            traces.append(None)
            return pm.shard(x, [ef.BATCH, ef.HEAD])

        with jax.set_mesh(mesh):
            managers = [ef.PartitionManager(ef.PartitionAxis()) for _ in range(2)]
            assert [f(item, ones(4, 8)).sharding.spec for item in managers] == [P("dp", "tp")] * 2
        assert len(traces) == 1
        assert (
            {*managers}
            == {managers[0]}
            != {ef.PartitionManager(ef.PartitionAxis(), policy="eformer")}
        )


class TestRegistry:
    def test_manager_keeps_its_snapshot(self, mesh: jax.sharding.Mesh) -> None:
        before = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh)
        ef.PartitionAxis.register("ROTARY", ("tp",), generation_axis_rule=None)
        with raises(sw.UnknownAxisError, "axis", axis="ROTARY", fix="PartitionAxis.register"):
            before.shard(ones(4), ["ROTARY"])
        after = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh)
        ef.PartitionAxis.clear_registered_axes()
        assert after.shard(ones(4), ["ROTARY"]).sharding.spec == P("tp")
        assert after.shard(ones(4), ["ROTARY"], ef.MODE_INSERT).sharding.spec == P()
        assert "ROTARY" in str(after.explain(["ROTARY"], shape=(4,)))
        assert "PartitionAxis.register" in str(after.explain(["ROTARY"], shape=(4,)))

    def test_unregister_and_replace(self) -> None:
        register, unregister = ef.PartitionAxis.register, ef.PartitionAxis.unregister
        register(" X ", "head_axis")
        register("Y", "tp")
        assert ef.PartitionAxis.get_registered_axes() == {
            "X": {"axis_rule": "head_axis", "generation_axis_rule": "decode_head_axis"},
            "Y": {"axis_rule": "tp", "generation_axis_rule": ef.NOT_GIVEN},
        }
        with raises(ValueError, "__X__", fix="override"):
            register("__X__", "tp")
        register("X", ["fsdp", "tp"], override=True)
        assert ef.PartitionAxis().resolve_axis(["X", ["X"]], ef.MODE_TRAIN) == [
            ("fsdp", "tp"),
            ["fsdp", "tp"],
        ]
        unregister("X")
        unregister("X")
        for kind in (KeyError, sw.UnknownAxisError):
            with raises(kind, "axis", "X", fix="missing_ok"):
                unregister("X", missing_ok=False)
        with raises(sw.StrategyError, "semantic_axis"):
            register("  ", "tp")

    def test_replace_an_axis_of_the_vocabulary(self) -> None:
        ef.PartitionAxis.register(ef.HEAD, "fsdp", override=True)
        ef.PartitionAxis.register(ef.TP, "tp", override=True)
        paxis = ef.PartitionAxis(decode_head_axis="tp")
        assert [
            paxis.resolve_axis([ef.HEAD, ef.TP], mode) for mode in (ef.MODE_TRAIN, ef.MODE_DECODE)
        ] == [["fsdp", "tp"]] * 2

    def test_aliases_in_a_circle(self) -> None:
        ef.PartitionAxis.register("A", "B")
        ef.PartitionAxis.register("B", ("tp", "A"))
        with raises(ValueError, "axis", "A"):
            ef.PartitionAxis().resolve_axis(["A"], ef.MODE_TRAIN)


class TestConstraints:
    def test_constraint_by_named_sharding(self, mesh: jax.sharding.Mesh) -> None:
        sharding = NamedSharding(mesh, P("dp", "tp"))
        assert ef.with_sharding_constraint(ones(4, 8), sharding).sharding == sharding
        assert (
            jax.jit(lambda x: ef.with_sharding_constraint(x, sharding))(ones(4, 8)).sharding
            == sharding
        )
        with raises(sw.StrategyError, "pinned_host", fix="jax.device_put"):
            ef.with_sharding_constraint(
                ones(4, 8), NamedSharding(mesh, P("dp"), memory_kind="pinned_host")
            )
        with raises(TypeError, "dp", "PartitionSpec", "NamedSharding", fix="PartitionSpec"):
            ef.with_sharding_constraint(ones(4, 8), "dp")  # type: ignore[arg-type]

    def test_custom_mesh_axis_names(self) -> None:
        with jax.set_mesh(ef.create_mesh((2, 4), ("data", "model"))):
            assert ef.with_sharding_constraint(ones(4, 8), P("data", "model")).sharding.spec == P(
                "data", "model"
            )
            with raises(sw.MissingMeshAxisError, "mesh", "axis", "modle", dim=1, fix="model"):
                ef.with_sharding_constraint(ones(4, 8), P("data", "modle"))
            with raises(sw.RankMismatchError, "data", 3, 2, "(4, 8)"):
                ef.with_sharding_constraint(ones(4, 8), P("data", None, None))

    def test_policy_argument_or_manager(
        self, mesh: jax.sharding.Mesh, pm: ef.PartitionManager
    ) -> None:
        permissive = ef.PartitionManager(ef.PartitionAxis(), policy="eformer")
        native = sw.PartitionManager(permissive.rules, mesh=mesh)
        calls = (
            lambda **text: (
                ef.with_sharding_constraint(ones(6, 8), P("tp", "dp"), **text).sharding.spec
            ),
            lambda **text: ef.get_corrected_named_sharding((6, 8), P("tp", "dp"), **text).spec,
        )
        with jax.set_mesh(mesh):
            for call in calls:
                for manager in (permissive, native):
                    with manager:
                        assert call() == P(None, "dp")
                with (
                    pm,
                    raises(sw.IndivisibleError, "tp=4", dim=0, size=6),
                ):
                    call()
                assert call(policy="eformer") == P(None, "dp")

    def test_corrected_sharding_keeps_the_spec(self) -> None:
        with jax.set_mesh(ef.create_mesh((2, 4, 1), ("dp", "tp", "sp"))):

            def corrected(*entries):
                return ef.get_corrected_named_sharding((8, 8, 8), P(*entries)).spec

            assert corrected(("dp", "sp"), "tp") == P(("dp", "sp"), "tp", None)
            assert corrected(None, "sp") == P(None, "sp", None)
            assert corrected("sp", "dp", "sp") == P("sp", "dp", None)
            assert corrected(P.UNCONSTRAINED, "dp") == P(P.UNCONSTRAINED, "dp", None)
            assert corrected() == corrected(None, None) == P()
            prefix = ef.get_corrected_named_sharding(
                (2, 8), P(("dp", "tp"), "sp"), policy=sw.Policy(indivisible="prefix")
            )
            assert prefix.spec == P("dp", "sp")

    def test_warnings_of_changes(
        self, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pm = ef.PartitionManager(ef.PartitionAxis(), mesh=mesh, policy="eformer")

        def calls() -> None:
            pm.shard({"a": ones(4, 6), "b": ones(4, 8)}, [ef.DP, ef.HEAD])
            ef.with_sharding_constraint(ones(6), NamedSharding(mesh, P("tp")), policy="eformer")
            with pm:
                ef.get_corrected_named_sharding((8, 8), P("dp", "nowhere"))

        assert ef.LOG_SHARDING_MOVE is False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            calls()
        monkeypatch.setenv("LOG_SHARDING_MOVE", "true")
        assert ef.LOG_SHARDING_MOVE is True
        with pytest.warns(UserWarning, match="the policy changed a sharding") as warned:
            calls()
        assert len(warned) == 3
        assert "6 % 4 != 0" in str(warned[0].message)
        assert "nowhere is not in the mesh" in str(warned[2].message)


class TestMeshes:
    def test_defaults_types_and_options(self) -> None:
        assert dict(ef.create_mesh().shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
        assert (
            ef.create_mesh((2, -1), ["dp", "tp"], axis_types=["Explicit"]).axis_types
            == (AxisType.Explicit,) * 2
        )
        assert (
            ef.create_mesh(
                (2, 4), ("dp", "tp"), axis_types=AxisType.Explicit, backend="cpu"
            ).axis_types
            == (AxisType.Explicit,) * 2
        )
        assert ef.create_mesh(
            (2, 4), ("dp", "tp"), axis_types=("auto", AxisType.Explicit)
        ).axis_types == (AxisType.Auto, AxisType.Explicit)
        assert ef.create_mesh((3, 2), ("dp", "tp")).size == 6, "a part of the devices will do"
        with raises(sw.MeshSpecError, 2, "axis_types", 3, fix="name"):
            ef.create_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=("auto", "auto"))
        manual = ef.create_mesh((2, -1), ("dp", "tp"), axis_types=("auto", " Manual "))
        assert manual.axis_types == (AxisType.Auto, AxisType.Manual)
        auto = ef.create_mesh((2, -1), ("dp", "tp"))
        np.testing.assert_array_equal(manual.devices, auto.devices)
        assert ef.create_mesh(axis_types=AxisType.Manual).axis_types == (AxisType.Manual,) * 5
        with raises(sw.MeshSpecError, "axis_types", "dp", "manuel", fix="auto"):
            ef.create_mesh((8,), ("dp",), axis_types="manuel")
        with raises(sw.MeshSpecError, 3, "axis_types", 2, fix="name"):
            ef.create_mesh((2, 4), ("dp", "tp"), axis_types=["auto"] * 3)
        with raises(sw.MeshSpecError, 1, "dcn_mesh_dims", 2, fix="name"):
            ef.create_mesh((2, 4), ("dp", "tp"), dcn_mesh_dims=(2,))
        with raises(sw.MeshSpecError, "dp=2", "(2)", 1):
            ef.create_mesh((2, 4), ("dp", "tp"), dcn_mesh_dims=(2, 1))
        for option in ("should_sort_granules_by_key", "allow_split_physical_axes"):
            with raises(sw.MeshSpecError, option, "False", fix="!"):
                ef.create_mesh((8,), ("dp",), **{option: False})

    def test_text(self) -> None:
        assert dict(ef.parse_mesh_from_string("2,-1", ["dp", "tp"]).shape) == {"dp": 2, "tp": 4}
        with raises(sw.MeshSpecError, "tpp", "dp", "tp", fix="tp"):
            ef.parse_mesh_from_string("dp:2,tpp:4", ["dp", "tp"])
        with raises(sw.MeshSpecError, "dp", "tp"):
            ef.parse_mesh_from_string("dp:2", ["dp", "tp"])

    def test_on_the_cpu(self, pm: ef.PartitionManager) -> None:
        with ef.cpu_context() as mesh:
            assert ef.get_incontext_mesh() == mesh == ef.create_cpu_mesh()
            assert pm.shard(jnp.ones((8, 4)), [ef.BATCH, None]).sharding.spec == P("fsdp")
            assert jax.jit(lambda x: ef.with_sharding_constraint(x, P("fsdp")))(
                ones(8)
            ).sharding.spec == P("fsdp")
        with ef.force_cpu() as device:
            assert jnp.ones(1).devices() == {device}
        assert ef.get_incontext_mesh(raise_error=False).empty

    def test_sizes(self, mesh: jax.sharding.Mesh) -> None:
        assert ef.get_axes_size_in_mesh("tp", mesh) == 4
        assert ef.get_mesh_axis_names(mesh) == ["dp", "tp"]
        with raises(sw.MissingMeshAxisError, "tpp", "dp", 2, "tp", 4, fix="tp"):
            ef.get_axes_size_in_mesh(("dp", "tpp"), mesh)
        assert not ef.names_in_current_mesh("dp")
        with jax.set_mesh(mesh):
            assert ef.names_in_current_mesh("dp", "tp")
            assert not ef.names_in_current_mesh("dp", "sp")


class TestTrees:
    def test_min_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tree, rules = (
            {
                "w": jax.ShapeDtypeStruct((64, 64), np.float32),
                "s": jax.ShapeDtypeStruct((8,), np.float32),
            },
            [("", P("tp"))],
        )
        assert ef.match_partition_rules(rules, tree) == {"w": P("tp"), "s": P("tp")}
        assert ef.match_partition_rules(rules, tree, min_size=9) == {"w": P("tp"), "s": P()}
        assert (ef.MIN_SHARDING_SIZE, ef.match_partition_rules(rules, tree, min_size=None)) == (
            16384,
            {"w": P(), "s": P()},
        )
        monkeypatch.setenv("MIN_SHARDING_SIZE", "4000")
        assert (ef.MIN_SHARDING_SIZE, ef.match_partition_rules(rules, tree, min_size=None)) == (
            4000,
            {"w": P("tp"), "s": P()},
        )
        monkeypatch.setenv("MIN_SHARDING_SIZE", "many")
        with raises(sw.StrategyError, "MIN_SHARDING_SIZE", "many"):
            ef.match_partition_rules(rules, tree, min_size=None)

    def test_unmatched_paths(self) -> None:
        with raises(
            sw.StrategyError,
            facts("rule", path="a/0", fix="rule"),
            facts("rule", path="b", fix="rule"),
        ):
            ef.match_partition_rules([("c", P())], {"a": [ones(2)], "b": ones(2), "c": ones(2)})

    def test_functions_check_their_input(self, mesh: jax.sharding.Mesh) -> None:
        with raises(AssertionError, "mesh", fix="jax.set_mesh"):
            ef.make_shard_and_gather_fns({"w": P("dp")})
        shard_fns, _ = ef.make_shard_and_gather_fns({"w": P("dp")}, mesh)
        with raises(sw.IndivisibleError, "dp=2", size=3):
            shard_fns["w"](ones(3))
        shard_fns, gather_fns = ef.make_shard_and_gather_fns({"w": P("dp")}, mesh, policy="eformer")
        assert shard_fns["w"](ones(3)).sharding == NamedSharding(mesh, P())
        np.testing.assert_array_equal(gather_fns["w"](shard_fns["w"](ones(3))), ones(3))

    def test_shapes_get_the_sharding(self, mesh: jax.sharding.Mesh) -> None:
        """EasyDeL shards the shapes of a state before it creates the state."""
        shard_fns, _ = ef.make_shard_and_gather_fns({"w": P("dp"), "b": P()}, mesh)
        shape = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
        placed = shard_fns["w"]({"shape": shape, "array": ones(4)})
        assert placed["shape"].sharding == NamedSharding(mesh, P("dp"))
        assert (placed["shape"].shape, placed["shape"].dtype) == ((4, 8), jnp.bfloat16)
        assert placed["array"].sharding == NamedSharding(mesh, P("dp"))
        assert shard_fns["b"](shape).sharding == NamedSharding(mesh, P())
        with raises(sw.IndivisibleError, "dp=2", size=3):
            shard_fns["w"](jax.ShapeDtypeStruct((3,), jnp.float32))

    def test_shardings_of_arrays(self, mesh: jax.sharding.Mesh) -> None:
        x = jax.device_put(ones(4, 8), NamedSharding(mesh, P("dp")))
        tree = {"x": x, "on one device": jnp.ones(2), "number": 1.5}
        assert (
            ef.extract_shardings(tree)
            == ef.get_shardings_with_structure(tree)
            == {"x": x.sharding, "on one device": None, "number": None}
        )
        assert ef.get_partition_spec({"x": x, "number": 1.5}) == {"x": P("dp"), "number": P()}
        with raises(
            sw.StrategyError,
            facts("mesh", "spec", path="a", fix="jax.device_put"),
            facts("ArrayImpl", "mesh", "spec", path="b", fix="jax.device_put"),
        ):
            ef.get_partition_spec({"a": ones(2), "b": jnp.ones(2)})
