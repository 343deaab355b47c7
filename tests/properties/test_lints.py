"""What a lint calls useless can be dropped without changing an answer."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import event, given

import shardwright as sw
from shardwright.lints.catalogue import Code, Finding, lint
from shardwright.trees.tensors import Tensor
from shardwright.vocabulary.axes import Role, file_name
from tests.properties import cases
from tests.properties.cases import Case

USELESS = (Code.UNREACHABLE_CANDIDATE, Code.SHADOWED_RULE, Code.MODE_CHANGES_NOTHING)


def data_of(case: Case) -> dict[str, Any]:
    """The case as a strategy's data."""
    policy = {
        name: str(getattr(case.policy, name)) for name in ("indivisible", "conflict", "missing")
    }
    data_of_case: dict[str, Any] = {
        "mesh": {"model": 1, **case.mesh},
        "policy": {**policy, "gather": "+".join(case.policy.gather) or "-"},
    }
    for name, table in case.tables.items():
        if table:
            at = data_of_case
            for key in name.split("."):
                at = at.setdefault(key, {})
            at.update({file_name(axis): text for axis, text in table.items()})
    return data_of_case


def without(data: dict[str, Any], finding: Finding) -> dict[str, Any]:
    """The data without what a finding calls useless."""
    left = copy.deepcopy(data)
    *parents, last = finding.key.split(".")
    table = left
    for key in parents:
        table = table[key]
    candidate = re.search(r"the candidate (\S+) is never used", finding.message)
    if candidate:
        parts = table[last].split(" | ")
        at = (
            len(parts) - 1 - parts[::-1].index(candidate[1])
        )  # the later one, where it occurs twice
        table[last] = " | ".join(parts[:at] + parts[at + 1 :])
    elif isinstance(table[last], dict) and "params" in table[last]:
        table[last] = {"params": table[last]["params"]}
    else:
        del table[last]
    return left


def answers(data: dict[str, Any], case: Case, code: Code) -> Iterator[Any]:
    """What every mode and role answers: the spec, or the problem without the words of the rule.

    A rule is shadowed for the roles that the tree has.
    """
    rules = sw.Strategy(**data).compile()
    roles = [Role(case.role)] if code is Code.SHADOWED_RULE else [*sw.Role]
    for mode in cases.MODES:
        for role in roles:
            resolution = sw.explain(
                case.axes, rules, data["mesh"], mode=mode, role=role, shape=case.shape
            )
            yield (
                resolution.spec,
                [(problem.error, problem.dim, problem.what) for problem in resolution.problems],
            )


@given(cases.cases())
def test_useless_rules_can_be_dropped(case: Case) -> None:
    data = data_of(case)
    try:
        strategy = sw.Strategy(**data)
    except sw.ShardingError:  # a mesh that the rules do not fit
        event("refused")
        return
    tree = [Tensor(path="x", axes=case.axes, shape=case.shape, role=Role(case.role))]
    for finding in lint(strategy, tree):
        if finding.code in USELESS:
            event(finding.code)
            actual = list(answers(without(data, finding), case, finding.code))
            assert actual == list(answers(data, case, finding.code)), finding


@given(cases.cases(composites=True, shaped=False))
def test_lints_answer_every_strategy_that_loads(case: Case) -> None:
    try:
        strategy = sw.Strategy(**data_of(case))
    except sw.ShardingError:
        return
    tree = [Tensor(path="x", axes=case.axes, shape=case.shape, role=Role(case.role))]
    findings = lint(strategy, tree)
    assert findings == lint(strategy, tree)
    for finding in findings:
        assert finding.message
        assert finding.fix
        assert "\n" not in finding.message
