"""Dims that fail or fall back: their outcome, rule and fix, with and without a shape."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.decisions import Outcome
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import Indivisible, Missing, Policy
from tests.resolving import make_rules, spec

B, E, H, D, M = sw.BATCH, sw.EMBED, sw.HEAD, sw.HEAD_DIM, sw.MLP_INTERMEDIATE


def test_failed_literal_entry_keeps_its_rule() -> None:
    decision = explain(P("model"), make_rules(), {"dp": 2}, shape=(4,)).decisions[0]
    assert decision.outcome is Outcome.FAILED
    assert decision.rule is not None
    assert (decision.rule.key, decision.rule.text) == ("dim 0", "model")


def test_unknown_mesh_axis_lists_the_mesh() -> None:
    """Without a similar name the fix lists the mesh axes."""
    (problem,) = explain(P("zzzzzz"), make_rules(), {"dp": 2, "tp": 2}, shape=(4,)).problems
    assert problem.fix.startswith("name a mesh axis: the mesh has dp, tp. For logical names ")


def test_symbolic_size_asks_for_more() -> None:
    (size,) = jax.export.symbolic_shape("b")
    (problem,) = explain((B,), make_rules(rules={B: "dp | -"}), {"dp": 2}, shape=(size,)).problems
    assert problem.fix == "write b as a multiple, such as 8*b, or give the rule one candidate"


@pytest.mark.parametrize("rule", ["dp | fsdp", "dp | dp"])
def test_one_candidate_left_needs_no_shape(rule: str) -> None:
    """The second candidate has no mesh axis of its own, so the size cannot choose it."""
    decision = explain((B,), make_rules(rules={B: rule}), {"dp": 2, "fsdp": 1}).decisions[0]
    assert (decision.outcome, decision.mesh_axes) == (Outcome.CHOSEN, ("dp",))
    assert decision.unchecked


def test_lost_first_candidate_without_a_shape() -> None:
    rules = make_rules(Policy(missing=Missing.REPLICATE), rules={B: "model | dp"})
    assert explain((B,), rules, {"dp": 2}).decisions[0].outcome is Outcome.POLICY_MISSING


def test_taken_axis_under_drop_without_a_shape() -> None:
    """A merged dim brings its size along; the dim beside it has none, so the size decides."""
    rules = make_rules(Policy(indivisible=Indivisible.DROP), rules={H: "tp", E: "tp"})
    resolution = explain((sw.merged((H, 4), (D, 8)), E), rules, {"tp": 2})
    assert [decision.outcome for decision in resolution.decisions] == [
        Outcome.CHOSEN,
        Outcome.FAILED,
    ]
    assert [problem.error for problem in resolution.problems] == [sw.ShapeRequiredError]


def test_composite_conflict_with_one_part() -> None:
    """The other member adds nothing: without the blocked part the dim is replicated."""
    rules = make_rules(rules={E: "dp", B: "dp", M: "fsdp"})
    (problem,) = explain((E, (B, M)), rules, {"dp": 2, "fsdp": 1}, shape=(4, 4)).problems
    assert problem.error is sw.AxisConflictError
    assert problem.fix.endswith(' a member\'s rule in a fallback, batch = "dp | -"')


def test_composite_conflict_without_a_shape() -> None:
    rules = make_rules(rules={E: "dp", B: "dp", M: "fsdp"})
    (problem,) = explain((E, (B, M)), rules, {"dp": 2, "fsdp": 2}).problems
    assert problem.error is sw.AxisConflictError
    assert problem.fix.endswith(' a member\'s rule in a fallback, batch = "dp | -"')


def test_suggested_fallback_prefers_the_prefix() -> None:
    """Two parts of the candidate fit with as many shards: the suggestion keeps the first."""
    mesh = {"dp": 2, "fsdp": 2, "tp": 2}
    (problem,) = explain((B,), make_rules(rules={B: "dp+fsdp+tp"}), mesh, shape=(4,)).problems
    assert 'batch = "dp+fsdp+tp | dp+fsdp | -"' in problem.fix
    assert spec((B,), make_rules(rules={B: "dp+fsdp+tp | dp+fsdp | -"}), mesh, shape=(4,)) == P(
        ("dp", "fsdp")
    )


def test_prefix_is_checked_against_the_size() -> None:
    rules = make_rules(Policy(indivisible=Indivisible.PREFIX), rules={B: "dp+tp"})
    decision = explain((B,), rules, {"dp": 2, "tp": 2}, shape=(2,)).decisions[0]
    assert (decision.outcome, decision.mesh_axes) == (Outcome.POLICY_PREFIX, ("dp",))
    assert not decision.unchecked


def test_exception_by_path_precedes_tables() -> None:
    """MLP_INTERMEDIATE by path is more specific than TP in a table, and TP by path than both."""
    rules = make_rules(
        tensors=[("up", {M: "-"}), ("down", {M: "-", sw.TP: "tp"})],
        rules={sw.TP: "tp", E: "-"},
    )
    sharded, mesh = (4, 4), {"fsdp": 2, "tp": 2}
    assert spec(sw.ColumnWise, rules, mesh, shape=sharded, path="up") == P()
    assert spec(sw.ColumnWise, rules, mesh, shape=sharded, path="down") == P(None, "tp")
    assert spec(sw.ColumnWise, rules, mesh, shape=sharded, path="other") == P(None, "tp")
