"""`Request`: one question to the rules, as a frozen value. And the problems of its resolution."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardwright.errors import Problem, ShapeRequiredError, ShardingError
from shardwright.resolution import resolver
from shardwright.resolution.decisions import DimDecision, Resolution, rule_text
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import Dim


class Request(NamedTuple):
    """One question: how is an array with this annotation sharded?

    A request is a named tuple, because a frozen dataclass takes four times as long to create, and
    each call of `explain` creates a request.

    Attributes:
      annotation: Any annotation, such as a layout, an `ArraySpec` or a tuple of axes.
      shape: Global sizes, but local to the mesh axes in `manual`. None if they are not known.
      mode: Runtime mode. None means the manager's mode, then the layout's, then train.
      role: Role of the array. None means param for weight layouts and `ArraySpec`s, else
        activation.
      path: Path of the array in its tree, for `[[tensors]]` entries and for messages. None if it is
        not known.
      manual: Mesh axes that an enclosing `shard_map` has already applied.
    """

    annotation: Any
    shape: Sequence[int] | None = None
    mode: str | None = None
    role: Role | str | None = None
    path: str | None = None
    manual: frozenset[str] = frozenset()

    def of(self, role: Role, shape: tuple[int, ...]) -> Request:
        """Return the same question for another role and shape."""
        return Request(self.annotation, shape, self.mode, role, self.path, self.manual)

    def dims(self, rules: AxisRules) -> tuple[Dim, ...]:
        """Return the lowered dims of the annotation for the request's shape."""
        shape = None if self.shape is None else tuple(self.shape)
        return resolver.lower_fitted(self.annotation, shape, rules)[0].dims


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


def suggest_for_missing_size(resolution: Resolution, fix: str) -> list[Problem]:
    """Return the problems of a resolution. For a missing size, they have the caller's fix."""
    return [
        dataclasses.replace(problem, fix=fix) if problem.error is ShapeRequiredError else problem
        for problem in resolution.problems
    ]
