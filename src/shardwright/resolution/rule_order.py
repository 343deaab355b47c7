"""Decide the dims of a request in the order of the rules: `policy.order = "rules"`.

The candidates of one dim are not tried one right after another. Instead, the candidates of all dims
are sorted by rank, and each is tried once. The ranks are:

1. Candidates of `[[tensors]]` entries, by entry and line.
2. Candidates of the tables, in the order in which tables are looked up, then by place in the table.
3. Default rules, by dim.

A composite has the rank of the member that comes first. As in `decide`, a candidate fits if its
mesh axes are free and the size divides. When the last candidate of a dim has failed, the rule's
fallback or the policy decides the dim, before the next rule is tried.

A mesh axis of size 1 conflicts like any other mesh axis, although the spec does not contain it.
With `policy.conflict = "next"`, rules have the same meaning as flax's `logical_axis_rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardwright import _jax
from shardwright.resolution.attempts import Attempts, Chain, PendingDecision
from shardwright.resolution.composites import Composite, TriedCandidate
from shardwright.resolution.decide import Decider, fall_back
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, Skip
from shardwright.resolution.rules import AxisRules, Conflict
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import Dim
from shardwright.vocabulary.modes import MODES

# The level of the rule, then two numbers that order it on that level: entry and line for TENSORS,
# position in the order and 0 for TABLES.
RuleRank = tuple[int, int, int]
TENSORS, TABLES, DEFAULT = range(3)


def ranks_of(
    rules: AxisRules, axis: str, *, mode: str, role: Role, path: str | None
) -> list[RuleRank]:
    """Return the rank of each candidate of an axis's rule, in order. A rule "-" has one rank."""
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


@dataclasses.dataclass(slots=True, kw_only=True)
class _Open:
    """A dim that is not decided yet.

    Attributes:
      pending: The decision so far.
      rule: The rule of the dim.
      candidates: The candidates of the rule, in order.
      size: The size that must divide, or None if it is unknown.
      attempts: The result of the candidates that were tried.
    """

    pending: PendingDecision
    rule: Chain
    candidates: tuple[TriedCandidate, ...]
    size: int | None
    attempts: Attempts = dataclasses.field(default_factory=Attempts)


def decide_in_rule_order(decider: Decider, dims: Sequence[Dim]) -> list[DimDecision]:
    """Decide all dims of a request, in the order of their rules."""
    # A mesh axis of size 1 stays in the candidates, so that it is taken like any other. Otherwise
    # the other mesh axes of a dim could change when the size of this one changes from 1 to 2.
    # `_sharded` removes mesh axes of size 1 at the end.
    decider.min_size = 1
    decisions: dict[int, DimDecision] = {}
    waiting: dict[int, _Open] = {}
    queue: list[tuple[RuleRank, int, int]] = []
    for position, dim in enumerate(dims):
        entry = _opened(decider, position, dim)
        if isinstance(entry, DimDecision):
            decisions[position] = entry
            continue
        waiting[position] = entry
        ranks = _ranks(decider, position, dim, entry)
        queue += [(rank, position, at) for at, rank in enumerate(ranks)]
    # All candidates of a composite have one rank, and so have all default rules. The dim and then
    # the number of the candidate break these ties.
    for _, position, at in sorted(queue):
        if position in decisions:
            continue
        entry = waiting[position]
        decision = _settled(decider, entry, at)
        if decision is not None:
            decisions[position] = decision
            for axis in decision.mesh_axes:
                decider.taken[axis] = (position, entry.pending.named)
    # The first problem decides the class of the error, so sort the problems by dim. Otherwise the
    # class would depend on the order of the rules.
    decider.problems.sort(key=lambda problem: problem.dim or 0)
    return [_sharded(decisions[position], decider.sizes) for position in range(len(dims))]


def _opened(decider: Decider, position: int, dim: Dim) -> DimDecision | _Open:
    """Return a dim as `_Open` if candidates have to be tried for it, else its decision."""
    names = [axis for axis, _ in dim.merged] if dim.merged else dim.axes
    if dim.literal is not None or not names or not decider.rules.known_axes.issuperset(names):
        # A literal entry, a dim without names, and an unknown axis have no rank. A literal entry
        # takes its mesh axes before all rules.
        return decider.decide(position, dim)
    size = None if decider.shape is None else decider.shape[position]
    pending = PendingDecision(dim=position, label=dim.label, size=dim.size if dim.merged else size)
    rule, size = decider.rule_and_size(pending, dim)
    if rule is None:
        return decider.without_rule(pending)
    pending.rule = rule.ref
    entry = _Open(pending=pending, rule=rule, candidates=tuple(decider.candidates(rule)), size=size)
    if size is None and _needs_shape(decider, entry):
        return decider.without_shape(pending, rule)
    if not entry.candidates:
        return fall_back(decider, pending, rule, entry.attempts, size)
    return entry


def _needs_shape(decider: Decider, entry: _Open) -> bool:
    attempts = decider.attempt(entry.candidates, None)
    return not attempts.dropped_missing and decider.needs_shape(attempts, entry.rule)


def _ranks(decider: Decider, position: int, dim: Dim, entry: _Open) -> Sequence[RuleRank]:
    """Return the rank of each candidate of a dim."""
    axes = (dim.semantic_axis,) if position in decider.by_semantic_axis else dim.axes
    ranks = [
        ranks_of(decider.rules, axis, mode=decider.mode, role=decider.role, path=decider.path)
        for axis in axes
    ]
    # The ranks are those of the stated rule. Use them only if `entry.rule` has the same number of
    # candidates. The rule for a dim of size 1 (`Rule.of_one`) may have another number.
    if not isinstance(entry.rule, Composite) and len(ranks[0]) == len(entry.candidates):
        return ranks[0]
    lowest = min((rank for member in ranks for rank in member), default=(DEFAULT, 0, 0))
    return [lowest] * len(entry.candidates)


def _settled(decider: Decider, entry: _Open, at: int) -> DimDecision | None:
    """Try one candidate of a dim. Return the decision, or None if the dim stays open."""
    # `_tried` adds to `skipped` before a size may turn out to be symbolic. The copy lets the
    # candidate be tried again from the same state.
    tried = dataclasses.replace(entry.attempts, skipped=[*entry.attempts.skipped])
    try:
        return _tried(decider, entry, at)
    except _jax.Inconclusive:
        # Whether a symbolic size divides is unknown: decide as if no size were given.
        entry.size, entry.attempts = None, tried
        if _needs_shape(decider, entry):
            return decider.without_shape(entry.pending, entry.rule)
        return _tried(decider, entry, at)


def _tried(decider: Decider, entry: _Open, at: int) -> DimDecision | None:
    pending, attempts = entry.pending, entry.attempts
    attempt = decider.attempt((entry.candidates[at],), entry.size)
    attempts.skipped += attempt.skipped
    pending.skipped = tuple(attempts.skipped)
    failure = attempt.failure
    if attempt.dropped_missing:
        return pending.decided(Outcome.POLICY_MISSING)
    if attempt.chosen is not None:
        refs = () if isinstance(entry.rule, Composite) else entry.rule.refs
        pending.rule = refs[at] if refs else entry.rule.ref
        unchecked = entry.size is None
        return pending.decided(Outcome.CHOSEN, mesh_axes=attempt.chosen, unchecked=unchecked)
    # Under `conflict = "next"`, if a size does not divide, no later candidate is tried.
    is_next = decider.rules.policy.conflict is Conflict.NEXT
    is_last = is_next and failure is not None and failure.reason is Reason.INDIVISIBLE
    attempts.failure = failure if is_last else attempts.failure or failure
    if not is_last and at + 1 < len(entry.candidates):
        return None
    if attempts.failure is not None:
        # Other dims may have taken the mesh axes of this candidate since it failed. Try it again,
        # so that the reason of the failure is current.
        candidates = (attempts.failure.candidate,)
        attempts.failure = decider.attempt(candidates, entry.size).failure
    return fall_back(decider, pending, entry.rule, attempts, entry.size)


def _sharded(decision: DimDecision, sizes: Mapping[str, int]) -> DimDecision:
    """Remove mesh axes of size 1 from a decision, and record them as skipped."""
    small = [axis for axis in decision.mesh_axes if sizes[axis] == 1]
    if not small:
        return decision
    remaining = tuple(axis for axis in decision.mesh_axes if axis not in small)
    skips = [
        Skip(reason=Reason.SIZE_ONE, candidate=decision.mesh_axes, mesh_axis=axis) for axis in small
    ]
    is_empty = decision.outcome is Outcome.CHOSEN and not remaining
    return dataclasses.replace(
        decision,
        mesh_axes=remaining,
        skipped=(*decision.skipped, *skips),
        outcome=Outcome.NO_MESH_AXIS if is_empty else decision.outcome,
        unchecked=decision.unchecked and bool(remaining),
    )
