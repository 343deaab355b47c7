"""The order in which candidates are tried under `policy.order = "rules"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import MODE_NAMES, MODES

if TYPE_CHECKING:
    from shardwright.resolution.rules import AxisRules, Rule

# The level of the rule, then two numbers that order it on that level: entry and line for TENSORS,
# position in the order and 0 for TABLES.
Rank = tuple[int, int, int]
TENSORS, TABLES, DEFAULT = range(3)


def rank_orders(
    tables: Mapping[str, Mapping[str, Rule]], written: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], ...]:
    """Return the axes of all candidates that apply, in rank order.

    A rule "-" has no candidates and stands here once, because a composite is tried at the place of
    the first rule of its members.

    The result has one tuple for the activations of each of `MODES`, then one for the parameters of
    each. Candidates rank by table, in the order in which tables are looked up, then by position in
    the table.

    Args:
      tables: Tables of axis -> rule, by name.
      written: For each table by name, the axis of every candidate in the order written. Defaults to
        the order of the table.
    """

    def ranked(*names: str) -> tuple[str, ...]:
        order: list[str] = []
        known: set[str] = set()
        for name in names:
            table = tables.get(name, {})
            axes = [axis for axis, rule in table.items() for _ in rule.candidates or [None]]
            order += [axis for axis in written.get(name, axes) if axis not in known]
            known.update(table)
        return tuple(order)

    chains = {mode: ("insert", "decode") if mode == "insert" else (mode,) for mode in MODE_NAMES}
    own = {name: [f"modes.{mode}" for mode in chains[name]] for name in MODE_NAMES}
    activations = [ranked(*own[name], "rules") for name in MODE_NAMES]
    params = [
        ranked(*(f"{mode}.params" for mode in own[name]), "params", "rules") for name in MODE_NAMES
    ]
    return (*activations, *params)


def ranks_of(rules: AxisRules, axis: str, *, mode: str, role: Role, path: str | None) -> list[Rank]:
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
