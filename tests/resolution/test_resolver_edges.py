"""Composites, merged dims, requests without a shape, and Manual axes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import Outcome
from shardwright.resolution.resolver import resolve
from shardwright.resolution.rules import Policy
from tests.raising import raises
from tests.resolving import FIRST_DIM, PREFIX, REPLICATE, B, D, E, H, K, L, make_rules, spec


class TestComposites:
    MESH: ClassVar = {"dp": 2, "fsdp": 2, "tp": 2}

    def test_a_composite_keeps_member_order(self) -> None:
        rules = make_rules(rules={B: "dp+fsdp", H: "tp"})
        assert spec(((H, B),), rules, self.MESH, shape=(8,)) == P(("tp", "dp", "fsdp"))
        assert spec(((B, H),), rules, self.MESH, shape=(8,)) == P(("dp", "fsdp", "tp"))

    def test_replicated_and_unruled_members_add_nothing(self) -> None:
        rules = make_rules(rules={B: "dp", E: "-"})
        resolution = resolve(((E, L, B),), rules, self.MESH, shape=(8,))
        assert (resolution.spec, resolution.decisions[0].why) == (P("dp"), "LENGTH has no rule")
        assert spec(((E, L),), rules, self.MESH, shape=(8,)) == P()

    def test_members_that_meet_are_a_conflict(self) -> None:
        with raises(sw.AxisConflictError, "dp", dim=0, axis="BATCH+HEAD", fix="EMPTY"):
            resolve(((B, H),), make_rules(rules={B: "dp", H: "dp"}), self.MESH, shape=(8,))

    def test_members_that_share_an_axis_of_size_one(self) -> None:
        assert spec(
            ((B, H),),
            make_rules(rules={B: "dp+pp", H: "pp+tp"}),
            {**self.MESH, "pp": 1},
            shape=(8,),
        ) == P(("dp", "tp"))

    def test_the_rule_of_a_composite_names_both(self) -> None:
        resolution = resolve(
            ((B, H),), make_rules(rules={B: "dp", H: "tp | -"}), self.MESH, shape=(8,)
        )
        rule = resolution.decisions[0].rule
        assert str(rule) == 'batch = "dp"   (t.toml, [rules])\nhead = "tp | -"   (t.toml, [rules])'
        assert rule is not None
        assert (rule.key, rule.text) == ("batch + head", "dp + (tp | -)")

    def test_an_indivisible_composite(self) -> None:
        with raises(
            sw.IndivisibleError, "dp=2", "tp=2", dim=0, axis="BATCH+HEAD", size=6, fix="tp | -"
        ):
            resolve(((B, H),), make_rules(rules={B: "dp", H: "tp"}), self.MESH, shape=(6,))


class TestMerged:
    MESH: ClassVar = {"tp": 4, "dp": 2}

    def test_merged_dim_uses_its_first_member(self) -> None:
        rules = make_rules(rules={K: "tp | -", D: "dp"})
        assert spec((sw.merged((K, 8), (D, 128)),), rules, self.MESH, shape=(1024,)) == P("tp")
        assert spec((sw.merged((K, 2), (D, 128)),), rules, self.MESH, shape=(256,)) == P()
        assert spec((sw.merged((D, 128), (K, 2)),), rules, self.MESH, shape=(256,)) == P("dp")

    def test_a_flat_projection_never_splits_a_head(self) -> None:
        with raises(sw.IndivisibleError, "tp=4", dim=0, axis="HEAD*HEAD_DIM", size=6, fix="tp | -"):
            resolve(
                (sw.merged((H, 6), (D, 128)),), make_rules(rules={H: "tp"}), self.MESH, shape=(768,)
            )

    def test_a_merged_dim_brings_its_own_size(self) -> None:
        resolution = resolve(
            (sw.merged((K, 2), (D, 128)),), make_rules(rules={K: "tp | -"}), self.MESH
        )
        assert resolution.spec == P()
        assert resolution.decisions[0].size == 256
        assert not resolution.decisions[0].unchecked


class TestNoShape:
    MESH: ClassVar = {"dp": 2, "fsdp": 2, "tp": 2}

    @pytest.mark.parametrize(
        ("rule", "wanted"),
        [
            ("dp+fsdp", P(("dp", "fsdp"))),
            ("pp+dp | dp", P("dp")),  # one distinct candidate once pp is gone
            ("pp | sp", P()),
            ("pp | -", P()),
            ("-", P()),
            ("?", P(P.UNCONSTRAINED)),
        ],
    )
    def test_allowed_where_there_is_one_distinct_candidate(self, rule: str, wanted: P) -> None:
        resolution = resolve((B,), make_rules(rules={B: rule}), self.MESH)
        assert resolution.spec == wanted
        assert resolution.decisions[0].unchecked is (
            resolution.decisions[0].outcome is Outcome.CHOSEN
        )

    @pytest.mark.parametrize("rule", ["dp | -", "dp+fsdp | dp", "dp | ?", "dp | fsdp"])
    def test_refused_where_the_size_picks(self, rule: str) -> None:
        with raises(sw.ShapeRequiredError, "candidate", "applies", dim=0, axis="BATCH") as caught:
            resolve((B,), make_rules(rules={B: rule}), self.MESH)
        assert caught.value.fix == "pass shape="

    @pytest.mark.parametrize("policy", [PREFIX, REPLICATE])
    def test_refused_where_the_policy_would_need_the_size(self, policy: Policy) -> None:
        with raises(sw.ShapeRequiredError, "candidate", "applies", dim=0, axis="BATCH"):
            resolve((B,), make_rules(policy, rules={B: "dp"}), self.MESH)
        assert spec((B,), make_rules(policy, rules={B: "pp"}), self.MESH) == P()
        assert spec((B,), make_rules(policy, rules={B: "-"}), self.MESH) == P()

    def test_a_conflict_is_found_without_a_shape(self) -> None:
        with raises(sw.AxisConflictError, "dp", 0, "BATCH", dim=1, axis="EMBED", fix="EMPTY"):
            resolve((B, E), make_rules(rules={B: "dp", E: "dp"}), self.MESH)
        assert spec((B, E), make_rules(FIRST_DIM, rules={B: "dp", E: "dp+tp"}), self.MESH) == P(
            "dp", "tp"
        )

    def test_an_integer_mode_needs_a_shape(self) -> None:
        with raises(sw.ShapeRequiredError, "dim", 1, "layout"):
            resolve(sw.HiddenStateSharding, make_rules(rules={B: "dp"}), self.MESH)
        assert spec(
            sw.HiddenStateSharding, make_rules(rules={B: "dp"}), self.MESH, mode="train"
        ) == P("dp")


class TestManual:
    MESH: ClassVar = {"dp": 2, "tp": 2}

    def test_manual_axes_as_a_string(self) -> None:
        manual: Any = "dp"
        with raises(sw.StrategyError, "manual", "dp", fix="dp"):
            resolve((B,), make_rules(rules={B: "dp"}), self.MESH, shape=(2,), manual=manual)

    def test_manual_axis_is_already_applied(self) -> None:
        resolution = resolve(
            (B, H),
            make_rules(rules={B: "dp+tp", H: "-"}),
            self.MESH,
            shape=(2, 4),
            manual=frozenset({"dp"}),
        )
        assert resolution.spec == P("tp")
        assert resolution.decisions[0].mesh_axes == ("dp", "tp")
        assert resolution.decisions[0].manual == ("dp",)
        assert "dp already applied by shard_map" in resolution.decisions[0].why

    def test_manual_axis_skips_no_candidate(self) -> None:
        resolution = resolve(
            (B,), make_rules(rules={B: "dp | tp"}), self.MESH, shape=(3,), manual=frozenset({"dp"})
        )
        assert resolution.spec == P()
        assert resolution.decisions[0].mesh_axes == ("dp",)

    def test_manual_axis_is_still_taken(self) -> None:
        with raises(sw.AxisConflictError, "dp", 0, "BATCH", fix="EMPTY"):
            resolve(
                (B, E),
                make_rules(rules={B: "dp", E: "dp"}),
                self.MESH,
                shape=(1, 1),
                manual=frozenset({"dp"}),
            )
