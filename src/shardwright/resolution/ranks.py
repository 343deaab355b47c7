"""The order in which candidates are tried under `policy.order = "rules"`."""

from __future__ import annotations

from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import MODES

# The level of the rule, then two numbers that order it on that level: entry and line for TENSORS,
# position in the order and 0 for TABLES.
RuleRank = tuple[int, int, int]
TENSORS, TABLES, DEFAULT = range(3)


def ranks_of(
    rules: AxisRules, axis: str, *, mode: str, role: Role, path: str | None
) -> list[RuleRank]:
    """Return the rank of each candidate of the rule of an axis, in order; one for a rule "-"."""
    is_weight = role is not Role.ACTIVATION
    for number, entry in enumerate(rules.tensors if is_weight and path is not None else ()):
        rule = entry.find(axis, path or "")
        if rule is not None:
            line = [name for name, _ in entry.rules].index(axis)
            return [(TENSORS, number, line)] * max(1, len(rule.candidates))
    if rules.stated(axis, mode=mode, role=role, path=None) is None:
        return [(DEFAULT, 0, 0)]
    order = rules.order[MODES.index(mode) + (len(MODES) if is_weight else 0)]
    return [(TABLES, place, 0) for place, name in enumerate(order) if name == axis]
