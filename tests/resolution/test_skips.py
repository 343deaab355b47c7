"""Decisions record every candidate that was passed over, each once."""

from __future__ import annotations

import shardwright as sw
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, RuleRef
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import Missing, Policy, build_rules, parse_rule
from tests.resolving import make_rules

B, E, H, L, M = sw.BATCH, sw.EMBED, sw.HEAD, sw.LENGTH, sw.MLP_INTERMEDIATE
REPLICATE = Policy(missing=Missing.REPLICATE)


def skips(decision: DimDecision) -> list[tuple[Reason, tuple[str, ...]]]:
    return [(skip.reason, skip.candidate) for skip in decision.skipped]


def test_lost_candidate_whose_last_axis_has_size_one() -> None:
    """One absent mesh axis is enough, wherever in the candidate it is."""
    rules = make_rules(REPLICATE, rules={B: "model+tp | dp"})
    (decision,) = explain((B,), rules, {"dp": 2, "tp": 1}, shape=(4,)).decisions
    assert decision.outcome is Outcome.POLICY_MISSING
    assert skips(decision) == [
        (Reason.MISSING, ("model", "tp")),
        (Reason.SIZE_ONE, ("model", "tp")),
    ]


def test_lost_candidate_is_not_recorded_as_empty() -> None:
    rules = make_rules(REPLICATE, rules={B: "model"})
    (decision,) = explain((B,), rules, {"dp": 2}, shape=(4,)).decisions
    assert skips(decision) == [(Reason.MISSING, ("model",))]


def test_member_without_a_rule_is_recorded_once() -> None:
    """The first candidate does not divide, so a second one is tried."""
    rules = make_rules(rules={B: "dp | fsdp"})
    (decision,) = explain(((B, H),), rules, {"dp": 4, "fsdp": 2}, shape=(2,)).decisions
    assert decision.mesh_axes == ("fsdp",)
    assert skips(decision) == [(Reason.NO_RULE, ()), (Reason.INDIVISIBLE, ("dp",))]


def test_skip_of_a_member_is_recorded_once() -> None:
    """Both candidates of BATCH meet the one candidate of EMBED, whose `sp` is absent."""
    rules = make_rules(rules={B: "dp | fsdp", E: "sp+tp"})
    mesh = {"dp": 4, "fsdp": 2, "tp": 2}
    (decision,) = explain(((B, E),), rules, mesh, shape=(4,)).decisions
    assert decision.mesh_axes == ("fsdp", "tp")
    assert skips(decision) == [
        (Reason.MISSING, ("sp", "tp")),
        (Reason.INDIVISIBLE, ("dp", "sp", "tp")),
    ]


def test_composite_without_any_rule() -> None:
    (decision,) = explain(((B, H),), make_rules(rules={E: "dp"}), {"dp": 2}, shape=(4,)).decisions
    assert decision.outcome is Outcome.NO_RULE
    assert decision.skipped == ()


def test_fix_leaves_members_that_may_add_nothing() -> None:
    """Both mesh axes are taken. BATCH has its fallback already, so the fix is for EMBED alone."""
    rules = make_rules(rules={L: "dp", H: "fsdp", B: "dp | -", E: "fsdp"})
    resolution = explain((L, H, (B, E)), rules, {"dp": 2, "fsdp": 2}, shape=(4, 4, 4))
    (problem,) = resolution.problems
    assert problem.error is sw.AxisConflictError
    assert problem.fix.endswith(' in a fallback, embed = "fsdp | -"')


def test_fix_leaves_members_that_add_nothing() -> None:
    """`sp` has one device, so a fallback of EMBED would change nothing."""
    rules = make_rules(rules={L: "dp", H: "tp", B: "dp", E: "sp", M: "tp"})
    resolution = explain((L, H, (B, E, M)), rules, {"dp": 2, "sp": 1, "tp": 2}, shape=(4, 4, 4))
    (problem,) = resolution.problems
    assert problem.fix.endswith(' batch = "dp | -" and mlp_intermediate = "tp | -"')


def test_candidates_after_a_lost_one_do_not_count() -> None:
    """The chain of BATCH ends where it is lost: its product with nine candidates stays below 64."""
    nine = "a | b | c | d | a+b | a+c | a+d | b+c | b+d"
    rules = make_rules(REPLICATE, rules={B: f"model | {nine}", E: nine})
    (decision,) = explain(((B, E),), rules, dict.fromkeys("abcd", 2), shape=(4,)).decisions
    assert decision.outcome is Outcome.POLICY_MISSING


def test_rule_of_a_composite_names_each_source_once() -> None:
    """A rule that is not in a file has no table and no source."""
    written = RuleRef(key="embed", text="fsdp", table="rules", source="t.toml")
    table = {
        B: parse_rule("dp"),
        E: parse_rule("fsdp", ref=written),
        M: parse_rule("-", ref=written),
    }
    rules = build_rules({"rules": table})
    (decision,) = explain(((B, E, M),), rules, {"dp": 2, "fsdp": 2}, shape=(4,)).decisions
    assert decision.rule is not None
    assert (decision.rule.table, decision.rule.source) == ("rules", "t.toml")
