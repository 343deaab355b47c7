"""Problems of a resolution, with the path, axis and rule of the dim that has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from shardwright.errors import Problem, ShapeRequiredError, ShardingError
from shardwright.resolution.decisions import DimDecision, Resolution, rule_text


def dim_problem(
    error: type[ShardingError],
    resolution: Resolution,
    decision: DimDecision,
    what: str,
    *,
    fix: str,
    size: int | None = None,
    mesh_axes: Sequence[str] = (),
) -> Problem:
    """Return a problem of one dim, with the path, axis and rule of its decision."""
    return Problem(
        error=error,
        what=what,
        path=resolution.path,
        dim=decision.dim,
        axis=decision.label,
        size=size,
        mesh_axes=tuple(mesh_axes),
        rule=decision_rule(resolution, decision),
        fix=fix,
    )


def decision_rule(resolution: Resolution, decision: DimDecision) -> str:
    """Return the rule of a decision as messages show it, or "" if no rule decided."""
    return "" if decision.rule is None else rule_text(decision.rule, resolution.mode)


def suggest_for_missing_size(problems: Iterable[Problem], fix: str) -> list[Problem]:
    """Return the problems, with `fix` as the fix of each problem that a missing size causes."""
    return [
        dataclasses.replace(problem, fix=fix) if problem.error is ShapeRequiredError else problem
        for problem in problems
    ]


def without_repeats(problems: Iterable[Problem]) -> list[Problem]:
    """Return each problem once: several modes may have the same problem."""
    first: dict[object, Problem] = {}
    for problem in problems:
        first.setdefault((problem.path, problem.dim, problem.what, problem.fix), problem)
    return list(first.values())
