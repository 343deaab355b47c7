"""The decision of one dim: its outcome, what it records, and every field of its problem."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import Outcome, RuleRef, rule_text
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import Conflict, Indivisible, Missing, Policy
from tests.raising import raises
from tests.resolving import make_rules, spec

B, L, E, H, D, M = sw.BATCH, sw.LENGTH, sw.EMBED, sw.HEAD, sw.HEAD_DIM, sw.MLP_INTERMEDIATE


def outcomes(resolution: sw.Resolution) -> list[Outcome]:
    return [decision.outcome for decision in resolution.decisions]


def message(resolution: sw.Resolution) -> str:
    """The whole text of the one problem."""
    assert len(resolution.problems) == 1
    with pytest.raises(sw.ShardingError, match=r"\S") as caught:
        resolution.require()
    return str(caught.value)


def test_entries_of_a_literal_spec() -> None:
    resolution = explain(
        P(("dp", "tp"), None, P.UNCONSTRAINED), make_rules(), {"dp": 2, "tp": 2}, shape=(4, 4, 4)
    )
    assert outcomes(resolution) == [Outcome.CHOSEN, Outcome.REPLICATED, Outcome.UNCONSTRAINED]
    assert [decision.skipped for decision in resolution.decisions] == [()] * 3
    rules = [decision.rule for decision in resolution.decisions if decision.rule is not None]
    assert [(rule.key, rule.text, rule.source) for rule in rules] == [
        ("dim 0", "dp+tp", "literal spec"),
        ("dim 1", "-", "literal spec"),
        ("dim 2", "?", "literal spec"),
    ]


@pytest.mark.parametrize("path", [None, "mlp/up"])
def test_unknown_axes_of_a_composite(path: str | None) -> None:
    """Each unknown member is a problem of the whole dim; the dims beside it are decided."""
    rules = make_rules(rules={B: "dp", E: "fsdp"})
    resolution = explain(
        (B, (E, "mine", "yours")), rules, {"dp": 2, "fsdp": 2}, shape=(4, 4), path=path
    )
    assert outcomes(resolution) == [Outcome.CHOSEN, Outcome.FAILED]
    assert [problem.what for problem in resolution.problems] == [
        "unknown axis 'MINE'",
        "unknown axis 'YOURS'",
    ]
    assert {(problem.path, problem.dim, problem.axis) for problem in resolution.problems} == {
        (path or "", 1, "EMBED+MINE+YOURS")
    }


@pytest.mark.parametrize("path", [None, "mlp/up"])
def test_members_whose_rules_conflict(path: str | None) -> None:
    """A refused composite has failed; a dim without a rule beside it has not."""
    resolution = explain(
        (L, (B, E), M), make_rules(rules={B: "dp", E: "?"}), {"dp": 2}, shape=(4, 4, 4), path=path
    )
    assert outcomes(resolution) == [Outcome.NO_RULE, Outcome.FAILED, Outcome.NO_RULE]
    (problem,) = resolution.problems
    assert (problem.error, problem.path, problem.dim, problem.axis) == (
        sw.StrategyError,
        path or "",
        1,
        "BATCH+EMBED",
    )


def test_two_dims_that_fail() -> None:
    resolution = explain(
        ("mine", (B, E), L), make_rules(rules={B: "dp", E: "?"}), {"dp": 2}, shape=(4, 4, 4)
    )
    assert outcomes(resolution) == [Outcome.FAILED, Outcome.FAILED, Outcome.NO_RULE]


def test_a_merged_dim_is_judged_by_its_first_member() -> None:
    rules, mesh = make_rules(rules={H: "tp"}), {"tp": 4}
    text = message(explain((sw.merged((H, 6), (D, 128)),), rules, mesh, shape=(768,), path="q"))
    assert text.startswith("q dim 0 HEAD*HEAD_DIM: HEAD of size 6 does not divide over tp=4\n")
    other = message(explain((H,), rules, mesh, shape=(6,), path="q"))
    assert other.startswith("q dim 0 HEAD: size 6 does not divide over tp=4\n")


def test_used_layout_follows_its_semantic_axis() -> None:
    """FSDP's own rule would keep fsdp; EMBED's rule for activations does not name it."""
    rules = make_rules(Policy(gather=("fsdp",)), rules={E: "-", M: "tp"}, params={E: "fsdp"})
    mesh = {"fsdp": 2, "tp": 2}
    assert spec(sw.ColumnWise, rules, mesh, shape=(4, 4)) == P("fsdp", "tp")
    assert spec(sw.ColumnWise, rules, mesh, shape=(4, 4), role="use") == P(None, "tp")


def test_without_a_shape_a_lost_candidate_counts() -> None:
    """`dp` would do for some sizes; for the others the dim is dropped, so the size decides."""
    rules = make_rules(Policy(missing=Missing.REPLICATE), rules={B: "dp | model"})
    text = message(explain((B,), rules, {"dp": 2}, path="x"))
    assert text == (
        "x dim 0 BATCH: which candidate applies depends on the size\n"
        '  rule  batch = "dp | model"   (t.toml, [rules], mode train)\n'
        "  fix   pass shape="
    )
    assert spec((B,), rules, {"dp": 2}, shape=(4,)) == P("dp")
    assert (
        explain((B,), rules, {"dp": 2}, shape=(3,)).decisions[0].outcome is Outcome.POLICY_MISSING
    )
    assert explain(
        (B,), make_rules(Policy(missing=Missing.REPLICATE), rules={B: "model | dp"}), {"dp": 2}
    ).ok


def test_unconstrained_is_refused_for_a_parameter() -> None:
    text = message(
        explain((E,), make_rules(rules={E: "?"}), {"dp": 2}, shape=(4,), role="param", path="w")
    )
    assert text == (
        'w dim 0 EMBED: "?" is for activations only: a parameter needs a sharding\n'
        '  rule  embed = "?"   (t.toml, [rules], mode train)\n'
        '  fix   give parameters a rule of their own, [params] embed = "-"'
    )


@pytest.mark.parametrize(
    ("rule", "shape", "unchecked"),
    [("dp+tp", None, True), ("dp+tp", (4, 4), False), ("dp", None, False)],
)
def test_first_dim_without_a_size_is_unchecked(
    rule: str, shape: tuple[int, ...] | None, unchecked: bool
) -> None:
    rules = make_rules(Policy(conflict=Conflict.FIRST_DIM), rules={B: "dp", E: rule})
    decision = explain((B, E), rules, {"dp": 2, "tp": 2}, shape=shape).decisions[1]
    assert decision.outcome is Outcome.POLICY_FIRST_DIM
    assert decision.mesh_axes == (("tp",) if rule == "dp+tp" else ())
    assert decision.unchecked is unchecked


def test_conflict_names_the_holding_dim() -> None:
    mesh = {"dp": 2, "tp": 2}
    resolution = explain(
        (B, E), make_rules(rules={B: "dp+tp", E: "tp+dp"}), mesh, shape=(4, 4), path="x"
    )
    assert message(resolution) == (
        "x dim 1 EMBED: tp is taken by dim 0 BATCH; dp is taken by dim 0 BATCH\n"
        '  rule  embed = "tp+dp"   (t.toml, [rules], mode train)\n'
        "  fix   an array uses each mesh axis once: write EMPTY or another axis here, or end "
        'the rule in a fallback, "tp+dp | -"'
    )
    assert resolution.problems[0].mesh_axes == ("tp", "dp")
    assert message(explain(P("dp", "dp"), make_rules(), mesh, shape=(4, 4), path="x")) == (
        "x dim 1: dp is taken by dim 0\n"
        '  rule  dim 1 = "dp"   (literal spec, mode train)\n'
        "  fix   an array uses each mesh axis once: write None or another mesh axis here"
    )


def test_a_size_that_does_not_divide_over_several() -> None:
    mesh = {"dp": 2, "fsdp": 4}
    resolution = explain((B,), make_rules(rules={B: "dp+fsdp"}), mesh, shape=(12,), path="x")
    assert message(resolution) == (
        "x dim 0 BATCH: size 12 does not divide over dp=2, fsdp=4 (8 shards)\n"
        '  rule  batch = "dp+fsdp"   (t.toml, [rules], mode train)\n'
        '  fix   add a fallback, batch = "dp+fsdp | fsdp | -", or choose a size and a mesh '
        "that divide"
    )
    (problem,) = resolution.problems
    assert (problem.size, problem.mesh_axes, problem.shards) == (12, ("dp", "fsdp"), 8)
    assert 'batch = "dp+fsdp | dp | -"' in message(
        explain((B,), make_rules(rules={B: "dp+fsdp"}), mesh, shape=(6,))
    )
    three = message(
        explain((B,), make_rules(rules={B: "dp+fsdp+tp"}), {**mesh, "tp": 3}, shape=(12,))
    )
    assert 'batch = "dp+fsdp+tp | fsdp+tp | -"' in three, (
        "of the parts that fit the one with the most shards"
    )
    assert 'batch = "dp+fsdp | -"' in message(
        explain((B,), make_rules(rules={B: "dp+fsdp"}), mesh, shape=(3,))
    )
    assert message(explain(P("fsdp"), make_rules(), mesh, shape=(6,), path="x")) == (
        "x dim 0: size 6 does not divide over fsdp=4\n"
        '  rule  dim 0 = "fsdp"   (literal spec, mode train)\n'
        "  fix   write None there, or choose a size and a mesh that divide"
    )


@pytest.mark.parametrize(
    ("size", "prefix"), [(16, ("dp", "fsdp", "tp")), (8, ("dp", "fsdp")), (4, ("dp",)), (3, ())]
)
def test_a_prefix_is_the_longest_that_divides(size: int, prefix: tuple[str, ...]) -> None:
    rules = make_rules(Policy(indivisible=Indivisible.PREFIX), rules={B: "dp+fsdp+tp"})
    assert (
        explain((B,), rules, {"dp": 2, "fsdp": 4, "tp": 2}, shape=(size,)).decisions[0].mesh_axes
        == prefix
    )


@pytest.mark.parametrize("axes", [(sw.EXPERT, E), (E, sw.EXPERT)])
def test_a_conflict_with_experts_suggests_the_gate(axes: tuple[str, ...]) -> None:
    text = message(
        explain(axes, make_rules(rules={sw.EXPERT: "ep", E: "ep"}), {"ep": 2}, shape=(4, 4))
    )
    assert text.endswith(
        "fix   router weights and logits end in EXPERT_GATE: write it in place of EXPERT, or "
        "EMPTY here"
    )


@pytest.mark.parametrize(
    ("axis", "label", "fix"),
    [
        ("mine", "MINE", '[axes] mine = "what it is"'),
        ("__batch__", "batch", "write BATCH, whose value is '__BATCH__'"),
        ("batch length", "BATCH LENGTH", 'each dim is a string of its own: "BATCH", "LENGTH"'),
        ("dp+tp", "DP+TP", 'a dim over several axes is a tuple of them: ("DP", "TP")'),
        ("columnwise", "COLUMNWISE", "did you mean the layout ColumnWise?"),
    ],
)
def test_an_unknown_axis_of_the_wrong_rank(axis: str, label: str, fix: str) -> None:
    """The unknown name explains more than the rank does: the error is about the name."""
    with raises(sw.UnknownAxisError, "axis") as caught:
        explain((axis,), make_rules(), {"dp": 2}, shape=(4, 4)).require()
    assert caught.value.axis == label
    assert fix in caught.value.fix


def test_rule_of_a_composite_lists_members() -> None:
    text = message(
        explain(
            ((B, E),),
            make_rules(rules={B: "dp", E: "fsdp"}),
            {"dp": 2, "fsdp": 2},
            shape=(6,),
            path="x",
        )
    )
    assert (
        '\n  rule  batch = "dp"   (t.toml, [rules], mode train)\n        embed = "fsdp"   '
        "(t.toml, [rules], mode train)\n" in text
    )


def test_text_of_a_rule_without_a_file() -> None:
    assert (
        rule_text(RuleRef(key="batch", text="dp"), sw.MODE_TRAIN) == 'batch = "dp"   (mode train)'
    )
    assert (
        rule_text(RuleRef(key="batch", text="dp", source="default"), sw.MODE_DECODE)
        == 'batch = "dp"   (default, mode decode)'
    )


NEXT = Policy(conflict=Conflict.NEXT)


def test_next_candidate_after_a_conflict() -> None:
    rules = make_rules(NEXT, rules={B: "dp", E: "dp | tp", M: "dp | tp"})
    resolution = explain((B, E, M), rules, {"dp": 2, "tp": 2}, shape=(4, 4, 4))
    assert resolution.spec == P("dp", "tp")
    assert outcomes(resolution) == [Outcome.CHOSEN, Outcome.CHOSEN, Outcome.POLICY_NEXT]
    assert resolution.decisions[2].why == (
        "dp: dp is taken by dim 0 BATCH; tp: tp is taken by dim 1 EMBED; "
        'policy conflict = "next": replicated'
    )


@pytest.mark.parametrize("rule", ["tp | dp", "tp | -", "tp | ?"])
def test_next_never_follows_a_size(rule: str) -> None:
    rules = make_rules(NEXT, rules={E: rule})
    text = message(explain((E,), rules, {"dp": 2, "tp": 4}, shape=(6,), path="x"))
    assert text == (
        "x dim 0 EMBED: size 6 does not divide over tp=4\n"
        f'  rule  embed = "{rule}"   (t.toml, [rules], mode train)\n'
        '  fix   under conflict = "next", fallbacks ignore sizes: set [policy] indivisible, '
        "or choose a size and a mesh that divide"
    )


def test_next_with_indivisible() -> None:
    """The candidate after the conflict is judged, not the one before it."""
    for indivisible, expected in (
        (Indivisible.PREFIX, P("ep", "tp")),
        (Indivisible.REPLICATE, P("ep")),
        (Indivisible.DROP, P("ep")),
    ):
        policy = Policy(conflict=Conflict.NEXT, indivisible=indivisible)
        rules = make_rules(policy, rules={B: "ep", E: "ep | tp+dp | -"})
        mesh = {"dp": 4, "tp": 2, "ep": 2}
        assert spec((B, E), rules, mesh, shape=(4, 2)) == expected, indivisible


def test_next_needs_no_shape() -> None:
    rules = make_rules(NEXT, rules={B: "dp", E: "dp | tp | -", M: "dp | -"})
    resolution = explain((B, E, M), rules, {"dp": 2, "tp": 2})
    assert resolution.spec == P("dp", "tp")
    assert [decision.unchecked for decision in resolution.decisions] == [True, True, False]
    assert outcomes(resolution)[2] is Outcome.REPLICATED
    lenient = Policy(conflict=Conflict.NEXT, indivisible=Indivisible.PREFIX)
    rules = make_rules(lenient, rules={E: "dp | tp"})
    with raises(sw.ShapeRequiredError, "depends", dim=0, axis="EMBED"):
        spec((E,), rules, {"dp": 2, "tp": 2})
