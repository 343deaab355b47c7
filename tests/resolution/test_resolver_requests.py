"""Requests (mode, role, layouts, literal specs) and their answers: errors and identity."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import ModeFrom, Outcome
from shardwright.resolution.resolver import explain, resolve
from shardwright.resolution.rules import POLICY_PRESETS, Indivisible, Missing, Policy, Rank
from tests.raising import facts, raises
from tests.resolving import make_rules, spec

B, L, E, H, K, M = sw.BATCH, sw.LENGTH, sw.EMBED, sw.HEAD, sw.KV_HEAD, sw.MLP_INTERMEDIATE


class TestModeOfACall:
    RULES = make_rules(rules={B: "dp"}, decode={B: "tp"}, prefill={B: "-"})
    MESH: ClassVar = {"dp": 2, "tp": 2}

    @pytest.mark.parametrize(
        ("axes", "options", "mode", "mode_from"),
        [
            ((B,), {"mode": "decode"}, sw.MODE_DECODE, ModeFrom.CALL),
            ((B,), {}, sw.MODE_TRAIN, ModeFrom.DEFAULT),
            (sw.DynamicShardingAxes([B], "prefill"), {}, sw.MODE_PREFILL, ModeFrom.LAYOUT),
            (
                sw.DynamicShardingAxes([B], "prefill"),
                {"mode": "train"},
                sw.MODE_TRAIN,
                ModeFrom.CALL,
            ),
            (sw.DynamicShardingAxes([B], 0), {}, sw.MODE_TRAIN, ModeFrom.LAYOUT_DIM),
            (sw.DynamicShardingAxes([B], 0), {"mode": "decode"}, sw.MODE_DECODE, ModeFrom.CALL),
        ],
    )
    def test_call_then_layout_then_train(
        self, axes: Any, options: Any, mode: str, mode_from: ModeFrom
    ) -> None:
        resolution = resolve(axes, self.RULES, self.MESH, shape=(4,), **options)
        assert (resolution.mode, resolution.mode_from) == (mode, mode_from)

    def test_an_integer_mode_reads_the_size(self) -> None:
        rules = make_rules(rules={B: "dp", E: "-"}, decode={B: "tp"})
        assert spec(sw.HiddenStateSharding, rules, self.MESH, shape=(4, 1, 8)) == P("tp")
        assert spec(sw.HiddenStateSharding, rules, self.MESH, shape=(4, 2, 8)) == P("dp")

    @pytest.mark.parametrize("mode", ["trian", "", 3])
    def test_an_unknown_mode(self, mode: Any) -> None:
        with raises(sw.StrategyError, "mode", fix="train"):
            resolve((B,), self.RULES, self.MESH, mode=mode)

    def test_an_unknown_role(self) -> None:
        with raises(sw.StrategyError, "role", "parm", fix="param") as caught:
            resolve((B,), self.RULES, self.MESH, role="parm")
        assert "did you mean 'param'?" in caught.value.fix

    def test_default_role_of_weight_layouts(self) -> None:
        rules = make_rules(rules={E: "-", M: "tp"}, params={E: "dp"})
        assert resolve(sw.ColumnWise, rules, self.MESH, shape=(4, 4)).role is sw.Role.PARAM
        assert resolve((E, M), rules, self.MESH, shape=(4, 4)).role is sw.Role.ACTIVATION
        assert (
            resolve(sw.ColumnWise, rules, self.MESH, shape=(4, 4), role="use").role is sw.Role.USE
        )


class TestLayouts:
    MESH: ClassVar = {"fsdp": 2, "sp": 2, "tp": 2}

    def test_weight_layout_follows_its_semantic_axes(self) -> None:
        rules = make_rules(rules={M: "sp"}, params={E: "tp"})
        assert spec(sw.ColumnWise, rules, self.MESH, shape=(4, 4)) == P("tp", "sp")
        assert spec(sw.RowWise, rules, self.MESH, shape=(4, 4)) == P("sp", "tp")

    def test_a_table_that_names_the_parallelism_axis_wins(self) -> None:
        rules = make_rules(
            rules={M: "tp", E: "-"}, params={E: "fsdp", sw.FSDP: "fsdp", sw.SP: "sp", sw.TP: "-"}
        )
        assert spec(sw.ColumnWise, rules, self.MESH, shape=(4, 4)) == P(("fsdp", "sp"))

    def test_layout_as_activation_uses_own_axes(self) -> None:
        rules = make_rules(rules={M: "-", E: "-"})
        assert spec(sw.ColumnWise, rules, self.MESH, shape=(4, 4), role="activation") == P(
            ("fsdp", "sp"), "tp"
        )

    def test_layout_without_rule_uses_own_axes(self) -> None:
        assert spec(sw.ColumnWise, make_rules(), self.MESH, shape=(4, 4)) == P(("fsdp", "sp"), "tp")

    def test_exceptions_by_path_apply_to_layouts(self) -> None:
        rules = make_rules(
            rules={M: "tp"},
            params={E: "fsdp"},
            tensors=[("lm_head", {E: "-"}), ("odd", {sw.TP: "-"})],
        )
        assert spec(sw.ColumnWise, rules, self.MESH, shape=(4, 4), path="lm_head") == P(None, "tp")
        assert spec(sw.ColumnWise, rules, self.MESH, shape=(4, 4), path="odd") == P("fsdp")
        assert spec(sw.ColumnWise, rules, self.MESH, shape=(4, 4), path="mlp") == P("fsdp", "tp")

    def test_an_exception_by_path_comes_before_tables(self) -> None:
        """An entry by path for the axis that a layout means beats a table that names the layout's
        parallelism axis.
        """
        rules = make_rules(
            rules={M: "tp"},
            params={E: "fsdp", sw.FSDP: "sp", sw.SP: "-"},
            tensors=[("lm_head", {E: "fsdp"})],
        )
        for role in ("param", "use"):
            options = {"shape": (4, 4), "role": role}
            assert spec(sw.ColumnWise, rules, self.MESH, path="lm_head", **options) == P(
                "fsdp", "tp"
            )
            assert spec(sw.ColumnWise, rules, self.MESH, path="mlp", **options) == P("sp", "tp")

    @pytest.mark.parametrize("rank", range(4))
    def test_replicated_fits_any_rank(self, rank: int) -> None:
        assert spec(sw.Replicated, make_rules(), self.MESH, shape=(3,) * rank) == P()


class TestLiteralSpecs:
    MESH: ClassVar = {"dp": 2, "tp": 2}

    def test_a_literal_spec_is_checked_like_a_rule(self) -> None:
        assert spec(P("dp", None), make_rules(), self.MESH, shape=(4, 3)) == P("dp")
        assert spec(P(None, ("tp", "dp")), make_rules(), self.MESH, shape=(3, 4)) == P(
            None, ("tp", "dp")
        )
        assert spec(P(P.UNCONSTRAINED, "tp"), make_rules(), self.MESH, shape=(3, 4)) == P(
            P.UNCONSTRAINED, "tp"
        )
        with raises(sw.IndivisibleError, "dp=2", size=3):
            resolve(P("dp"), make_rules(), self.MESH, shape=(3,))
        with raises(sw.IndivisibleError, "dp=2", size=3, fix="None"):
            resolve(P("dp"), make_rules(), self.MESH, shape=(3,))
        says = facts("tp", 0, dim=1, fix="None")
        with raises(sw.AxisConflictError, says):
            resolve(P("tp", ("dp", "tp")), make_rules(), self.MESH, shape=(4, 4))
        with raises(sw.MissingMeshAxisError, "mesh", "axis", "ttp", fix="tp") as caught:
            resolve(P("ttp"), make_rules(), self.MESH, shape=(4,))
        assert "did you mean 'tp'?" in caught.value.fix
        with raises(sw.AxisConflictError, "tp", 0):
            resolve(P("tp", "tp"), make_rules(), self.MESH, shape=(4, 4))


class TestArraySpecs:
    def test_an_array_spec_brings_its_shape(self) -> None:
        array_spec = sw.ArraySpec((3,), jnp.float32, (K,))
        assert spec(array_spec, make_rules(rules={K: "tp | -"}), {"tp": 2}) == P()
        assert spec(array_spec, make_rules(rules={K: "tp | -"}), {"tp": 2}, shape=(3,)) == P()

    def test_another_shape_is_refused(self) -> None:
        with raises(sw.RankMismatchError, "(4,)", "ArraySpec", "(3,)"):
            resolve(sw.ArraySpec((3,), jnp.float32, (K,)), make_rules(), {"tp": 2}, shape=(4,))


class TestUnconstrainedParameters:
    def test_unconstrained_parameter_is_refused(self) -> None:
        for role in ("param", "use"):
            with raises(sw.StrategyError, "?", fix="-") as caught:
                resolve((L,), make_rules(rules={L: "tp | ?"}), {"tp": 2}, role=role, shape=(3,))
            assert '[params] length = "-"' in caught.value.fix

    def test_fitting_candidate_is_allowed(self) -> None:
        assert spec(
            (L,), make_rules(rules={L: "tp | ?"}), {"tp": 2}, role="param", shape=(4,)
        ) == P("tp")


class TestErrors:
    RULES = make_rules(rules={B: "dp", H: "tp", E: "dp"})
    MESH: ClassVar = {"dp": 2, "tp": 4}

    def test_parts_of_a_message(self) -> None:
        with raises(
            sw.IndivisibleError, "tp=4", path="attn/q", dim=1, axis="HEAD", size=6, fix="tp | -"
        ) as caught:
            resolve((B, H), self.RULES, self.MESH, shape=(4, 6), path="attn/q")
        error = caught.value
        assert str(error).splitlines() == [
            "attn/q dim 1 HEAD: size 6 does not divide over tp=4",
            '  rule  head = "tp"   (t.toml, [rules], mode train)',
            '  fix   add a fallback, head = "tp | -", or choose a size and a mesh that divide',
        ]
        assert (error.path, error.dim, error.axis, error.size, error.mesh_axes, error.shards) == (
            "attn/q",
            1,
            "HEAD",
            6,
            ("tp",),
            4,
        )
        with pytest.raises(AttributeError, match="no attribute 'colour'"):
            _ = error.colour

    def test_all_problems_are_collected(self) -> None:
        with raises(sw.IndivisibleError, "dp=2", size=3, fix="dp | -", count=3) as caught:
            resolve((B, "mine", H), self.RULES, self.MESH, shape=(3, 4, 6))
        assert [problem.error for problem in caught.value.problems] == [
            sw.IndivisibleError,
            sw.UnknownAxisError,
            sw.IndivisibleError,
        ]
        assert [problem.dim for problem in caught.value.problems] == [0, 1, 2]

    def test_error_has_the_resolution(self) -> None:
        options = {"shape": (3, 4), "path": "x"}
        resolution = explain((B, H), self.RULES, self.MESH, **options)
        with raises(sw.IndivisibleError, "dp=2", path="x", size=3, fix="dp | -") as caught:
            resolve((B, H), self.RULES, self.MESH, **options)
        assert caught.value.resolution is resolution
        assert caught.value.problems == resolution.problems
        assert not resolution.ok
        assert resolution.decisions[0].outcome is Outcome.FAILED
        assert resolution.decisions[1].mesh_axes == ("tp",)

    @pytest.mark.parametrize(
        ("axes", "options", "error"),
        [
            ((B,), {"shape": (3,)}, sw.IndivisibleError),
            ((B, E), {"shape": (4, 4)}, sw.AxisConflictError),
            ((B, B), {}, sw.AxisConflictError),
            (("mine",), {}, sw.UnknownAxisError),
            ((B,), {"shape": (4, 4)}, sw.RankMismatchError),
            ((B,), {"mode": "x"}, sw.StrategyError),
            ((B,), {"role": "x"}, sw.StrategyError),
            ((None,), {}, sw.StrategyError),
            (sw.HiddenStateSharding, {}, sw.ShapeRequiredError),
            (P("x"), {}, sw.MissingMeshAxisError),
        ],
        ids=str,
    )
    def test_every_error_is_a_sharding_error_that_pickles(
        self, axes: Any, options: Any, error: type[sw.ShardingError]
    ) -> None:
        resolution = explain(axes, self.RULES, self.MESH, **options)
        assert not resolution.ok
        with pytest.raises(sw.ShardingError, match=r".") as caught:
            resolve(axes, self.RULES, self.MESH, **options)
        assert type(caught.value) is error
        assert isinstance(caught.value, ValueError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is error
        assert str(again) == str(caught.value)
        assert again.problems == caught.value.problems
        assert again.resolution == caught.value.resolution
        assert again.fix == caught.value.fix

    def test_a_failed_resolution_has_no_spec(self) -> None:
        resolution = explain((B,), self.RULES, self.MESH, shape=(3,))
        assert resolution.spec is None
        assert "failed" in str(resolution)


class TestIdentity:
    RULES = make_rules(rules={B: "dp", H: "tp | -"})
    MESH: ClassVar = {"dp": 2, "tp": 2}

    def test_the_same_question_has_the_identical_answer(self) -> None:
        resolution = explain((B, H), self.RULES, self.MESH, shape=(4, 4))
        assert explain([B, H], self.RULES, dict(self.MESH), shape=[4, 4]) is resolution
        assert explain((B, H), self.RULES, tuple(self.MESH.items()), shape=(4, 4)) is resolution
        assert (
            explain((B, H), self.RULES, AbstractMesh((2, 2), ("dp", "tp")), shape=(4, 4))
            is resolution
        )
        assert explain((B, H), self.RULES, self.MESH, shape=(4, 3)) is not resolution

    def test_failed_resolutions_are_cached(self) -> None:
        resolution = explain((B,), self.RULES, self.MESH, shape=(3,))
        assert explain((B,), self.RULES, self.MESH, shape=(3,)) is resolution

    def test_caches_belong_to_their_rules(self) -> None:
        other = make_rules(rules={B: "dp", H: "tp | -"})
        assert other == self.RULES
        options = {"shape": (4, 4)}
        assert explain((B, H), other, self.MESH, **options) is not explain(
            (B, H), self.RULES, self.MESH, **options
        )
        assert explain((B, H), other, self.MESH, **options) == explain(
            (B, H), self.RULES, self.MESH, **options
        )

    def test_the_order_of_a_mesh_changes_no_spec(self) -> None:
        assert spec((B, H), self.RULES, {"tp": 2, "dp": 2}, shape=(4, 4)) == spec(
            (B, H), self.RULES, self.MESH, shape=(4, 4)
        )

    def test_layout_and_equal_tuple_differ(self) -> None:
        layout = sw.DynamicShardingAxes([B, H], "train")
        options = {"shape": (4, 4), "mode": "train"}
        assert (
            explain(layout, self.RULES, self.MESH, **options).annotation
            == "DynamicShardingAxes(BATCH, HEAD)"
        )
        assert explain((B, H), self.RULES, self.MESH, **options).annotation == "(BATCH, HEAD)"


class TestPartitionAxis:
    """What users of the attribute form count on."""

    MESH: ClassVar = {"dp": 2, "tp": 2}

    def test_decode_attributes_of_partition_axis(self) -> None:
        rules = sw.PartitionAxis(decode_kv_head_axis=sw.REPLICATED).compile()
        wanted = {"train": P("tp"), "prefill": P("tp"), "decode": P(), "insert": P()}
        assert {
            mode: spec((K,), rules, self.MESH, mode=mode, shape=(4,)) for mode in wanted
        } == wanted

    def test_parallelism_axis_as_a_value(self) -> None:
        alias = sw.PartitionAxis(head_axis=sw.TP, tensor_parallel_axis="model").compile()
        named = sw.PartitionAxis(head_axis="model", tensor_parallel_axis="model").compile()
        assert alias == named
        for mode in ("train", "prefill", "decode", "insert"):
            assert spec((H,), alias, {"model": 2}, mode=mode, shape=(4,)) == P("model")

    def test_absent_mesh_axis_of_the_batch(self) -> None:
        resolution = resolve((B,), sw.PartitionAxis().compile(), self.MESH, shape=(4,))
        assert resolution.spec == P("dp")
        assert "fsdp is not in the mesh" in resolution.decisions[0].why

    def test_eformer_policy_drops_the_dim(self) -> None:
        policy = Policy(indivisible=Indivisible.DROP, missing=Missing.REPLICATE, rank=Rank.FIT)
        resolution = resolve((B,), sw.PartitionAxis().compile(policy=policy), self.MESH, shape=(4,))
        assert resolution.spec == P()
        assert "fsdp is not in the mesh" in resolution.decisions[0].why

    def test_scores_with_both_lengths(self) -> None:
        rules = sw.PartitionAxis().compile()
        axes = (B, H, sw.QUERY_LENGTH, sw.KV_LENGTH)
        assert spec(axes, rules, {"dp": 2, "sp": 1}, shape=(2, 2, 4, 4)) == P("dp")
        with raises(
            sw.AxisConflictError, "sp", 2, "QUERY_LENGTH", dim=3, axis="KV_LENGTH", fix="EMPTY"
        ):
            resolve(axes, rules, {"dp": 2, "sp": 2}, shape=(2, 2, 4, 4))
        assert spec(axes, rules, {"dp": 2, "sp": 2}, shape=(2, 2, 1, 4), mode="decode") == P(
            "dp", None, None, "sp"
        )


class TestEformersPolicy:
    MESH: ClassVar = {"dp": 2, "fsdp": 2, "tp": 2}
    PERMISSIVE = sw.PartitionAxis().compile(policy=POLICY_PRESETS["eformer"])

    def test_fit_keeps_a_stack_of_layers(self) -> None:
        resolution = resolve(
            sw.ColumnWise, self.PERMISSIVE, {**self.MESH, "sp": 1}, shape=(6, 4, 4)
        )
        assert (resolution.spec, resolution.notes) == (P(None, "fsdp", "tp"), ())
        assert resolve(sw.Replicated, self.PERMISSIVE, self.MESH, shape=(4, 4)).notes == ()

    def test_fit_cuts_a_weight_layout_for_a_bias(self) -> None:
        resolution = resolve(sw.ColumnWise, self.PERMISSIVE, {**self.MESH, "sp": 1}, shape=(4,))
        assert resolution.spec == P("fsdp")
        assert resolution.notes == ('policy rank = "fit": 2 dims fitted to the array\'s 1',)

    def test_fit_cuts_a_literal_spec(self) -> None:
        resolution = resolve(
            P(("tp", "model"), "tp", "dp", "fsdp"), self.PERMISSIVE, self.MESH, shape=(4, 4, 3)
        )
        assert resolution.spec == P(None, "tp")
        assert [str(decision.outcome) for decision in resolution.decisions] == [
            "policy_missing",
            "chosen",
            "policy_drop",
        ]
        assert "model is not in the mesh" in resolution.decisions[0].why
        assert resolution.notes == ('policy rank = "fit": 4 dims fitted to the array\'s 3',)
        with raises(sw.MissingMeshAxisError, "mesh", "axis", "model", fix="dp"):
            resolve(P("model"), sw.PartitionAxis().compile(), self.MESH, shape=(4,))

    def test_eformer_policy_on_any_mesh(self) -> None:
        axis = sw.PartitionAxis(batch_axis="data")
        mesh = sw.abstract_mesh("x:2,tp:2")
        pm = sw.PartitionManager(axis.compile(policy=POLICY_PRESETS["eformer"]), mesh=mesh)
        assert pm.resolve(sw.BATCH, sw.HEAD, shape=(4, 4)) == P(None, "tp")
        with raises(sw.MeshMismatchError, "data", "x", 2, "tp", fix="tp"):
            sw.PartitionManager(axis, mesh=mesh)

    def test_the_preset_in_a_file(self) -> None:
        text = (
            'version = 1\n[rules]\nbatch = "fsdp+dp"\nhead = "tp"\n[policy]\npreset = "eformer"\n'
        )
        rules = sw.Strategy.loads(text, source="s.toml").compile()
        resolution = resolve((B, H), rules, {"dp": 2, "tp": 4}, shape=(4, 6))
        assert resolution.spec == P()
        assert [decision.why for decision in resolution.decisions] == [
            'fsdp is not in the mesh; policy missing = "replicate"',
            'tp: 6 % 4 != 0; policy indivisible = "drop"',
        ]
