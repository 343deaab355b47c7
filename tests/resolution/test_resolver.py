"""Rules, candidates and fallbacks: one test for each sentence of the page on resolution."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution import unknown_axes
from shardwright.resolution.decisions import Outcome, Reason
from shardwright.resolution.resolver import explain, resolve
from shardwright.resolution.rules import Conflict, Indivisible, Missing, Policy, Rank
from shardwright.vocabulary.axes import KNOWN_AXES, axis_label
from tests.raising import Facts, facts, raises
from tests.resolving import FIRST_DIM, PREFIX, REPLICATE, B, E, H, K, L, M, V, make_rules, spec


class TestWhichRule:
    RULES = make_rules(
        rules={B: "dp", E: "-", H: "tp", K: "tp"},
        params={E: "fsdp"},
        decode={B: "fsdp", K: "-"},
        decode_params={E: "sp"},
        insert={K: "ep"},
        prefill={B: "sp"},
        prefill_params={H: "-"},
    )
    MESH: ClassVar = {"dp": 2, "fsdp": 2, "sp": 2, "ep": 2, "tp": 2}

    @pytest.mark.parametrize(
        ("mode", "wanted"),
        [
            ("train", P("dp", None, "tp")),
            ("prefill", P("sp", None, "tp")),
            ("decode", P("fsdp")),
            ("insert", P("fsdp", None, "ep")),
        ],
    )
    def test_table_order_of_activations(self, mode: str, wanted: P) -> None:
        assert spec((B, E, K), self.RULES, self.MESH, mode=mode, shape=(4, 4, 4)) == wanted

    @pytest.mark.parametrize("role", ["param", "use"])
    @pytest.mark.parametrize(
        ("mode", "wanted"),
        [
            ("train", P("fsdp", "tp")),
            ("prefill", P("fsdp")),
            ("decode", P("sp", "tp")),
            ("insert", P("sp", "tp")),
        ],
    )
    def test_table_order_of_parameters(self, mode: str, role: str, wanted: P) -> None:
        assert spec((E, H), self.RULES, self.MESH, mode=mode, role=role, shape=(4, 4)) == wanted

    def test_mode_table_ignores_parameters(self) -> None:
        for mode in ("train", "prefill", "decode", "insert"):
            assert spec((B, K), self.RULES, self.MESH, mode=mode, role="param", shape=(4, 4)) == P(
                "dp", "tp"
            )

    def test_the_decision_names_the_table(self) -> None:
        resolution = resolve((K, B), self.RULES, self.MESH, mode="insert", shape=(4, 4))
        assert [decision.rule.table for decision in resolution.decisions if decision.rule] == [
            "modes.insert",
            "modes.decode",
        ]
        assert str(resolution.decisions[1].rule) == 'batch = "fsdp"   (t.toml, [modes.decode])'

    def test_tensor_entries_come_first(self) -> None:
        rules = make_rules(
            rules={E: "-", V: "tp"},
            params={E: "fsdp"},
            decode_params={E: "sp"},
            tensors=[("lm_head/.*", {E: "ep"}), ("head", {E: "dp", V: "-"})],
        )
        for mode in ("train", "decode"):
            for role in ("param", "use"):
                options = {"mode": mode, "role": role, "shape": (4, 4)}
                assert spec((E, V), rules, self.MESH, path="lm_head/kernel", **options) == P("ep")
                assert spec((E, V), rules, self.MESH, path="head", **options) == P("dp")
        assert spec((E, V), rules, self.MESH, path="lm_head/kernel", shape=(4, 4)) == P(None, "tp")
        assert spec((E, V), rules, self.MESH, path="mlp", role="param", shape=(4, 4)) == P(
            "fsdp", "tp"
        )
        assert spec((E, V), rules, self.MESH, role="param", shape=(4, 4)) == P("fsdp", "tp")

    def test_axis_without_a_rule_is_replicated(self) -> None:
        resolution = resolve(
            (L, "mine"), make_rules(user_axes=("__MINE__",)), {"dp": 2}, shape=(4, 4)
        )
        assert resolution.spec == P()
        assert [decision.outcome for decision in resolution.decisions] == [Outcome.NO_RULE] * 2

    @pytest.mark.parametrize("axes", [("mine",), ((B, "mine"),), (sw.merged((B, 2), ("mine", 2)),)])
    def test_any_other_name_is_unknown_with_a_hint(self, axes: Any) -> None:
        with raises(sw.UnknownAxisError, "axis", fix="what it is") as caught:
            resolve(axes, make_rules(), {"dp": 2}, shape=(4,))
        assert "[axes] mine =" in caught.value.fix

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            (
                "BATCH QUERY_LENGTH EMBED",
                facts(
                    "axis",
                    "BATCH QUERY_LENGTH EMBED",
                    axis="BATCH QUERY_LENGTH EMBED",
                    fix=("BATCH", "QUERY_LENGTH"),
                ),
            ),
            (
                "batch, embed",
                facts("axis", "BATCH, EMBED", axis="BATCH, EMBED", fix=("BATCH", "EMBED")),
            ),
            ("DP+FSDP", facts("axis", "DP+FSDP", axis="DP+FSDP", fix=("tuple", "DP"))),
        ],
    )
    def test_several_axes_in_one_string(self, text: str, says: Facts) -> None:
        with raises(sw.UnknownAxisError, says):
            resolve((text,), make_rules(), {"dp": 2}, shape=(4,))

    def test_a_typo_inside_a_composite_has_a_suggestion(self) -> None:
        with raises(sw.UnknownAxisError, "axis", "EMBD", fix="EMBED") as caught:
            resolve(((B, "EMBD"),), make_rules(rules={B: "dp"}), {"dp": 2}, shape=(4,))
        assert "did you mean 'EMBED'?" in caught.value.fix

    def test_names_of_other_libraries_are_translated(self) -> None:
        expected = {
            "mlp": "MLP_INTERMEDIATE",
            "heads": "HEAD",
            "kv_heads": "KV_HEAD",
            "kv": "KV_HEAD",
            "hidden": "EMBED",
            "d_model": "EMBED",
            "sequence": "LENGTH",
            "vocab_size": "VOCAB",
            "layer": "LAYERS",
            "experts": "EXPERT",
            "activation_mlp": "MLP_INTERMEDIATE",
            "activation_batch": "BATCH",
        }
        wrong = {}
        for name, axis in expected.items():
            with pytest.raises(sw.UnknownAxisError) as caught:
                resolve((name,), make_rules(), {"dp": 2}, shape=(4,))
            if not caught.value.fix.startswith(f"did you mean '{axis}'"):
                wrong[name] = caught.value.fix
        assert not wrong

    def test_every_translation_names_a_known_axis(self) -> None:
        known = {axis_label(axis) for axis in KNOWN_AXES}
        for axes, names in unknown_axes.OTHER_NAMES.items():
            assert set(axes.split()) <= known, axes
            assert not {name.upper() for name in names.split()} & known, names

    def test_default_rule_of_parallelism_axes(self) -> None:
        mesh = {"tp": 2, "model": 2}
        assert spec((sw.TP,), make_rules(), mesh, shape=(4,)) == P("tp")
        renamed = make_rules(rules={sw.TP: "model"}, params={sw.TP: "-"})
        assert spec((sw.TP,), renamed, mesh, shape=(4,)) == P("model")
        assert spec((sw.TP,), renamed, mesh, shape=(4,), role="param") == P()


class TestUse:
    RULES = make_rules(
        Policy(gather=("fsdp", "sp", "ep")),
        rules={E: "-", sw.EXPERT: "ep", M: "tp", V: "tp", H: "fsdp+tp", L: "sp"},
        params={E: "fsdp+sp", V: "fsdp+tp", L: "-"},
        decode={E: "sp"},
        tensors=[("lm_head", {E: "-", V: "fsdp+tp"})],
    )
    MESH: ClassVar = {"fsdp": 2, "sp": 2, "ep": 2, "tp": 2}

    @pytest.mark.parametrize(
        ("axes", "stored", "used", "gathered"),
        [
            ((E, M), P(("fsdp", "sp"), "tp"), P(None, "tp"), [("fsdp", "sp"), ()]),
            (
                (sw.EXPERT, E, M),
                P("ep", ("fsdp", "sp"), "tp"),
                P("ep", None, "tp"),
                [(), ("fsdp", "sp"), ()],
            ),
            ((V, E), P(("fsdp", "tp")), P("tp"), None),
            ((H,), P(("fsdp", "tp")), P(("fsdp", "tp")), [()]),
        ],
    )
    def test_use_drops_gathered_mesh_axes(
        self, axes: Any, stored: P, used: P, gathered: Any
    ) -> None:
        shape = (8,) * len(axes)
        if gathered is None:
            axes, shape = axes[:1], shape[:1]
            gathered = [("fsdp",)]
        assert spec(axes, self.RULES, self.MESH, role="param", shape=shape) == stored
        resolution = resolve(axes, self.RULES, self.MESH, role="use", shape=shape)
        assert resolution.spec == used
        assert [decision.gathered for decision in resolution.decisions] == gathered

    def test_the_activation_rule_is_that_of_the_mode(self) -> None:
        assert spec((E,), self.RULES, self.MESH, role="use", shape=(8,), mode="decode") == P("sp")

    def test_an_exception_by_path_is_gathered_too(self) -> None:
        options = {"shape": (8, 8), "path": "lm_head"}
        assert spec((E, V), self.RULES, self.MESH, role="param", **options) == P(
            None, ("fsdp", "tp")
        )
        assert spec((E, V), self.RULES, self.MESH, role="use", **options) == P(None, "tp")

    def test_use_equals_stored_without_gather(self) -> None:
        rules = make_rules(rules={E: "-", M: "tp"}, params={E: "fsdp"})
        assert spec((E, M), rules, self.MESH, role="use", shape=(8, 8)) == P("fsdp", "tp")

    def test_gathering_keeps_order_within_a_dim(self) -> None:
        rules = make_rules(Policy(gather=("sp",)), rules={E: "-"}, params={E: "fsdp+sp+tp"})
        assert spec((E,), rules, self.MESH, role="use", shape=(8,)) == P(("fsdp", "tp"))


class TestWhichCandidate:
    def test_the_first_that_divides_wins(self) -> None:
        rules = make_rules(rules={B: "dp+fsdp | dp | fsdp | -"})
        mesh = {"dp": 2, "fsdp": 3}
        for size, wanted in {
            6: P(("dp", "fsdp")),
            4: P("dp"),
            9: P("fsdp"),
            5: P(),
            0: P(("dp", "fsdp")),
        }.items():
            assert spec((B,), rules, mesh, shape=(size,)) == wanted

    def test_the_order_of_mesh_axes_is_kept(self) -> None:
        rules = make_rules(rules={B: "fsdp+dp"})
        assert spec((B,), rules, {"dp": 2, "fsdp": 2}, shape=(4,)) == P(("fsdp", "dp"))

    def test_absent_mesh_axes_are_skipped(self) -> None:
        resolution = resolve(
            (B,), make_rules(rules={B: "pp+dp+fsdp"}), {"dp": 2, "fsdp": 1}, shape=(4,)
        )
        assert resolution.spec == P("dp")
        assert [(skip.reason, skip.mesh_axis) for skip in resolution.decisions[0].skipped] == [
            (Reason.MISSING, "pp"),
            (Reason.SIZE_ONE, "fsdp"),
        ]
        assert resolution.decisions[0].why == "pp is not in the mesh; fsdp has size 1"

    def test_empty_candidate_is_skipped(self) -> None:
        resolution = resolve((B,), make_rules(rules={B: "pp | dp"}), {"dp": 2}, shape=(4,))
        assert resolution.spec == P("dp")
        assert [skip.reason for skip in resolution.decisions[0].skipped] == [
            Reason.MISSING,
            Reason.EMPTY,
        ]

    def test_dim_without_candidates_is_replicated(self) -> None:
        resolution = resolve((B,), make_rules(rules={B: "pp | dp"}), {"dp": 1, "tp": 2}, shape=(3,))
        assert resolution.spec == P()
        assert resolution.decisions[0].outcome is Outcome.NO_MESH_AXIS

    @pytest.mark.parametrize(
        ("rule", "outcome"), [("pp | -", Outcome.REPLICATED), ("pp | ?", Outcome.UNCONSTRAINED)]
    )
    def test_a_fallback_never_becomes_empty(self, rule: str, outcome: Outcome) -> None:
        assert (
            resolve((B,), make_rules(rules={B: rule}), {"dp": 2}, shape=(3,)).decisions[0].outcome
            is outcome
        )

    def test_unconstrained_stays_open_in_the_spec(self) -> None:
        assert spec(
            (B, L, H),
            make_rules(rules={B: "dp", L: "?", H: "tp | ?"}),
            {"dp": 2, "tp": 2},
            shape=(4, 4, 3),
        ) == P("dp", P.UNCONSTRAINED, P.UNCONSTRAINED)

    def test_dims_are_decided_left_to_right(self) -> None:
        rules = make_rules(rules={B: "tp | dp", H: "tp | -"})
        assert spec((B, H), rules, {"dp": 2, "tp": 2}, shape=(4, 4)) == P("tp")
        assert spec((H, B), rules, {"dp": 2, "tp": 2}, shape=(4, 4)) == P("tp", "dp")

    def test_a_taken_axis_is_checked_before_divisibility(self) -> None:
        rules = make_rules(rules={B: "tp", H: "tp"})
        with raises(sw.AxisConflictError, "tp", 0, "BATCH", dim=1, axis="HEAD", fix="EMPTY"):
            resolve((B, H), rules, {"tp": 2}, shape=(4, 3))
        resolution = explain(
            (B, H), make_rules(rules={B: "tp", H: "tp | -"}), {"tp": 2}, shape=(4, 3)
        )
        assert resolution.decisions[1].skipped[0].reason is Reason.TAKEN
        assert resolution.decisions[1].skipped[0].detail == "tp is taken by dim 0 BATCH"

    @pytest.mark.parametrize(
        "axes",
        [
            (H, H),
            ("head", H),
            (H, (E, H)),
            ((H, H),),
            (sw.TP, "tp"),
            (H, sw.merged((H, 2), (E, 2))),
        ],
    )
    def test_an_axis_twice_is_refused_where_it_is_sharded(self, axes: Any) -> None:
        """The window of a conv may have one axis twice, whose rule shards nothing."""
        shape = (4,) * len(axes)
        with raises(sw.AxisConflictError, "tp", dim=len(axes) - 1, fix="EMPTY"):
            resolve(axes, make_rules(rules={H: "tp"}), {"tp": 2}, shape=shape)
        whole = make_rules(rules={H: "-", sw.TP: "-"})
        assert spec(axes, whole, {"tp": 2}, shape=shape) == P()

    def test_an_axis_twice_may_have_a_fallback(self) -> None:
        """The second dim takes the next candidate, and a merged dim its first member alone."""
        assert spec((E, E), make_rules(rules={E: "tp | -"}), {"tp": 2}, shape=(4, 4)) == P("tp")
        both = make_rules(rules={E: "fsdp | tp"})
        assert spec((E, E), both, {"fsdp": 2, "tp": 2}, shape=(4, 4)) == P("fsdp", "tp")
        inside = (H, sw.merged((E, 2), (H, 2)))
        assert spec(inside, make_rules(rules={H: "tp"}), {"tp": 2}, shape=(4, 4)) == P("tp")

    def test_lengths_twice_are_those_of_scores(self) -> None:
        rules = make_rules(rules={L: "sp"})
        with raises(sw.AxisConflictError, "sp", 1, "LENGTH", dim=2, fix="BIAS_KV_SEQ"):
            resolve((B, L, L), rules, {"sp": 2}, shape=(4, 4, 4))

    def test_indivisible_is_recorded_with_its_numbers(self) -> None:
        resolution = resolve((K,), make_rules(rules={K: "tp | -"}), {"tp": 4}, shape=(6,))
        skip = resolution.decisions[0].skipped[0]
        assert (skip.reason, skip.candidate, skip.detail) == (
            Reason.INDIVISIBLE,
            ("tp",),
            "6 % 4 != 0",
        )
        assert resolution.decisions[0].outcome is Outcome.REPLICATED

    def test_a_size_zero_divides(self) -> None:
        assert spec(
            (B, L), make_rules(rules={B: "dp", L: "sp"}), {"dp": 2, "sp": 3}, shape=(0, 0)
        ) == P("dp", "sp")

    def test_empty_dims_and_scalars(self) -> None:
        assert spec((), make_rules(), {"dp": 2}, shape=()) == P()
        resolution = resolve(
            (sw.EMPTY, B, sw.EMPTY), make_rules(rules={B: "dp"}), {"dp": 2}, shape=(3, 4, 5)
        )
        assert resolution.spec == P(None, "dp")
        assert resolution.decisions[0].outcome is Outcome.EMPTY


class TestPolicies:
    MESH: ClassVar = {"dp": 2, "fsdp": 4, "tp": 2}

    def test_first_failure_selects_the_policy(self) -> None:
        # dp+tp is indivisible, dp is taken: the first one decides, so the error is about the size.
        rules = make_rules(rules={H: "dp", B: "pp | dp+tp | tp"})
        with raises(sw.AxisConflictError, "dp", 0, "HEAD", fix="EMPTY"):
            resolve((H, B), rules, self.MESH, shape=(2, 3))
        rules = make_rules(rules={H: "dp", B: "pp | tp | dp"})
        with raises(sw.IndivisibleError, "tp=2", size=3):
            resolve((H, B), rules, self.MESH, shape=(2, 3))

    @pytest.mark.parametrize(
        ("size", "wanted"),
        [
            (16, ("dp", "fsdp", "tp")),
            (8, ("dp", "fsdp")),
            (12, ("dp",)),
            (2, ("dp",)),
            (3, ()),
            (1, ()),
        ],
    )
    def test_prefix_is_the_longest_that_divides(self, size: int, wanted: tuple[str, ...]) -> None:
        resolution = resolve(
            (B,), make_rules(PREFIX, rules={B: "dp+fsdp+tp"}), self.MESH, shape=(size,)
        )
        assert resolution.decisions[0].mesh_axes == wanted
        assert resolution.decisions[0].outcome is (
            Outcome.CHOSEN if size == 16 else Outcome.POLICY_PREFIX
        )

    def test_prefix_never_shortens_what_a_fallback_answers(self) -> None:
        assert (
            spec((B,), make_rules(PREFIX, rules={B: "dp+fsdp | -"}), self.MESH, shape=(2,)) == P()
        )

    def test_prefix_acts_on_the_first_non_empty_candidate(self) -> None:
        assert spec(
            (B,), make_rules(PREFIX, rules={B: "pp | dp+fsdp | fsdp"}), self.MESH, shape=(2,)
        ) == P("dp")

    def test_a_mesh_axis_that_a_prefix_left_is_free(self) -> None:
        assert spec(
            (B, H), make_rules(PREFIX, rules={B: "dp+tp", H: "tp"}), self.MESH, shape=(2, 2)
        ) == P("dp", "tp")

    def test_replicate(self) -> None:
        resolution = resolve(
            (B, H), make_rules(REPLICATE, rules={B: "dp+fsdp", H: "tp"}), self.MESH, shape=(2, 4)
        )
        assert resolution.spec == P(None, "tp")
        assert resolution.decisions[0].outcome is Outcome.POLICY_REPLICATE

    def test_prefix_with_the_larger_axis_first(self) -> None:
        mesh = {"fsdp": 4, "dp": 2}
        assert spec((B,), make_rules(PREFIX, rules={B: "fsdp+dp"}), mesh, shape=(12,)) == P("fsdp")
        assert spec((B,), make_rules(PREFIX, rules={B: "fsdp+dp"}), mesh, shape=(2,)) == P()
        with raises(sw.IndivisibleError, "fsdp=4", "dp=2", 8, size=2) as caught:
            resolve((B,), make_rules(rules={B: "fsdp+dp"}), mesh, shape=(2,))
        assert (caught.value.shards, caught.value.mesh_axes, caught.value.size) == (
            8,
            ("fsdp", "dp"),
            2,
        )

    def test_first_dim_keeps_the_mesh_axis(self) -> None:
        resolution = resolve(
            (B, E), make_rules(FIRST_DIM, rules={B: "dp", E: "dp+fsdp"}), self.MESH, shape=(4, 8)
        )
        assert resolution.spec == P("dp", "fsdp")
        assert resolution.decisions[1].outcome is Outcome.POLICY_FIRST_DIM

    def test_first_dim_with_nothing_left_is_replicated(self) -> None:
        assert spec(
            (B, E), make_rules(FIRST_DIM, rules={B: "dp", E: "dp"}), self.MESH, shape=(4, 3)
        ) == P("dp")

    @pytest.mark.parametrize(
        ("indivisible", "wanted"),
        [(Indivisible.PREFIX, P("dp", "tp")), (Indivisible.REPLICATE, P("dp"))],
    )
    def test_under_first_dim_indivisible_judges_the_rest(
        self, indivisible: Indivisible, wanted: P
    ) -> None:
        policy = Policy(conflict=Conflict.FIRST_DIM, indivisible=indivisible)
        assert (
            spec(
                (B, E),
                make_rules(policy, rules={B: "dp", E: "tp+dp+fsdp"}),
                self.MESH,
                shape=(4, 2),
            )
            == wanted
        )

    @pytest.mark.parametrize("indivisible", [Indivisible.PREFIX, Indivisible.REPLICATE])
    def test_under_first_dim_both_reasons_are_recorded(self, indivisible: Indivisible) -> None:
        policy = Policy(conflict=Conflict.FIRST_DIM, indivisible=indivisible)
        resolution = resolve(
            (H, E),
            make_rules(policy, rules={H: "tp", E: "tp+dp"}),
            {"dp": 2, "tp": 4},
            shape=(8, 3),
        )
        assert [(skip.reason, skip.detail) for skip in resolution.decisions[1].skipped] == [
            (Reason.TAKEN, "tp is taken by dim 0 HEAD"),
            (Reason.INDIVISIBLE, "3 % 2 != 0"),
        ]

    def test_first_dim_with_an_indivisible_rest(self) -> None:
        with raises(sw.IndivisibleError, "fsdp=4", dim=1, axis="EMBED", size=2, fix="dp+fsdp | -"):
            resolve(
                (B, E),
                make_rules(FIRST_DIM, rules={B: "dp", E: "dp+fsdp"}),
                self.MESH,
                shape=(4, 2),
            )

    def test_dropped_dim_does_not_conflict(self) -> None:
        """Under `indivisible = "drop"` a dim gives up its mesh axes before conflicts are judged."""
        mesh, wants = {"fsdp": 4}, {B: "fsdp", E: "fsdp"}
        resolution = resolve(
            (B, E),
            make_rules(Policy(indivisible=Indivisible.DROP), rules=wants),
            mesh,
            shape=(4, 6),
        )
        assert (resolution.spec, resolution.decisions[1].outcome) == (
            P("fsdp"),
            Outcome.POLICY_DROP,
        )
        assert resolution.decisions[1].why == 'fsdp: 6 % 4 != 0; policy indivisible = "drop"'
        for policy, size in (
            (REPLICATE, 6),
            (Policy(indivisible=Indivisible.REPLICATE, missing=Missing.REPLICATE), 6),
        ):
            with raises(sw.AxisConflictError, "fsdp", 0, "BATCH", fix="EMPTY"):
                resolve((B, E), make_rules(policy, rules=wants), mesh, shape=(4, size))
        with raises(sw.AxisConflictError, "fsdp", 0, "BATCH", fix="EMPTY"):
            resolve(
                (B, E),
                make_rules(Policy(indivisible=Indivisible.DROP), rules=wants),
                mesh,
                shape=(4, 8),
            )

    def test_eformer_policy_is_recorded(self) -> None:
        policy = Policy(indivisible=Indivisible.DROP, missing=Missing.REPLICATE, rank=Rank.FIT)
        rules = make_rules(policy, rules={B: "fsdp+dp", H: "tp", E: "pp"})
        mesh = {"dp": 2, "tp": 2}
        resolution = resolve((B, H), rules, mesh, shape=(4, 4))
        assert resolution.spec == P(None, "tp")
        assert resolution.decisions[0].outcome is Outcome.POLICY_MISSING
        assert "fsdp is not in the mesh" in resolution.decisions[0].why
        assert resolve((H,), rules, mesh, shape=(3,)).decisions[0].outcome is Outcome.POLICY_DROP
        for axes, shape, wanted in (
            ((H, sw.EMPTY, L), (4, 4), P("tp")),
            ((H,), (4, 4, 4), P("tp")),
        ):
            resolution = resolve(axes, rules, mesh, shape=shape)
            assert resolution.spec == wanted
            assert resolution.notes == (
                f'policy rank = "fit": {len(axes)} dims fitted to the array\'s {len(shape)}',
            )
            assert len(resolution.decisions) == len(shape)
