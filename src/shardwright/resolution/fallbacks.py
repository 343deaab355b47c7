"""Decide a dim that no candidate fits: by the fallback of its rule, else by the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import AxisConflictError, IndivisibleError, StrategyError
from shardwright.resolution.composites import Composite
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, Skip
from shardwright.resolution.drafts import Chain, Draft, Failure, Trial
from shardwright.resolution.rules import Conflict, Fallback, Indivisible
from shardwright.vocabulary.axes import EXPERT, Role, axis_label

if TYPE_CHECKING:
    from shardwright.resolution.decide import Decider

_ROUTER = "router weights and logits end in EXPERT_GATE: write it in place of EXPERT, or EMPTY here"


def fall_back(
    decider: Decider, draft: Draft, rule: Chain, trial: Trial, size: int | None
) -> DimDecision:
    """Decide a dim that no candidate fits."""
    failure = trial.failure
    is_next = decider.rules.policy.conflict is Conflict.NEXT
    if is_next and failure is not None and failure.reason is Reason.INDIVISIBLE:
        # Under `conflict = "next"`, neither `-` nor `?` applies to sizes.
        return _indivisible(decider, draft, rule, failure, failure.live, size)
    if rule.fallback is Fallback.REPLICATED:
        return draft.decided(Outcome.REPLICATED)
    if rule.fallback is Fallback.UNCONSTRAINED:
        return _unconstrained(decider, draft, rule)
    if failure is None:
        return draft.decided(Outcome.NO_MESH_AXIS)
    if failure.reason is Reason.TAKEN:
        return _conflict(decider, draft, rule, failure, size)
    return _indivisible(decider, draft, rule, failure, failure.live, size)


def _unconstrained(decider: Decider, draft: Draft, rule: Chain) -> DimDecision:
    if decider.role is Role.ACTIVATION:
        return draft.decided(Outcome.UNCONSTRAINED)
    decider.add_problem(
        StrategyError,
        '"?" is for activations only: a parameter needs a sharding',
        draft.dim,
        draft.label,
        rule=rule.ref,
        fix=f'give it a rule of its own, [params] {rule.ref.key} = "-"',
    )
    return draft.decided(Outcome.FAILED)


def _conflict(
    decider: Decider, draft: Draft, rule: Chain, failure: Failure, size: int | None
) -> DimDecision:
    if decider.rules.policy.conflict is Conflict.NEXT:
        return draft.decided(Outcome.POLICY_NEXT)
    if decider.rules.policy.conflict is Conflict.FIRST_DIM:
        return _leave_to_first(decider, draft, rule, failure, size)
    decider.add_problem(
        AxisConflictError,
        "; ".join(decider.holder(axis) for axis in dict.fromkeys(failure.blocked_by)),
        draft.dim,
        draft.named,
        rule=rule.ref,
        mesh_axes=failure.live,
        fix=_conflict_fix(decider, draft, rule, failure, size),
    )
    return draft.decided(Outcome.FAILED)


def _leave_to_first(
    decider: Decider, draft: Draft, rule: Chain, failure: Failure, size: int | None
) -> DimDecision:
    """Apply `conflict = "first_dim"`: the dim takes only mesh axes that no earlier dim holds."""
    free = tuple(axis for axis in dict.fromkeys(failure.live) if axis not in decider.taken)
    if not free or size is None or decider.fits(size, free):
        unchecked = bool(free) and size is None
        return draft.decided(Outcome.POLICY_FIRST_DIM, mesh_axes=free, unchecked=unchecked)
    remainder = decider.remainder(size, free)
    skip = Skip(reason=Reason.INDIVISIBLE, candidate=free, detail=remainder)
    draft.skipped = (*draft.skipped, skip)
    return _indivisible(decider, draft, rule, failure, free, size)


def _conflict_fix(
    decider: Decider, draft: Draft, rule: Chain, failure: Failure, size: int | None
) -> str:
    holders = [decider.taken.get(axis, (0, ""))[1] for axis in failure.blocked_by]
    if axis_label(EXPERT) in (draft.named, *holders):
        return _ROUTER
    once = "an array uses each mesh axis once: write "
    if draft.literal:
        return once + "None or another mesh axis here"
    end = f', or end the rule in a fallback, "{rule.ref.text} | -"'
    if isinstance(rule, Composite):
        change = _composite_fallback(decider, rule, failure, size)
        end = f", or end a member's rule in a fallback, {change}"
    return f"{once}EMPTY or another axis here{end}"


def _indivisible(
    decider: Decider,
    draft: Draft,
    rule: Chain,
    failure: Failure,
    live: tuple[str, ...],
    size: int | None,
) -> DimDecision:
    assert size is not None
    policy = decider.rules.policy.indivisible
    if policy is Indivisible.REPLICATE:
        return draft.decided(Outcome.POLICY_REPLICATE)
    if policy is Indivisible.DROP:
        return draft.decided(Outcome.POLICY_DROP)
    if policy is Indivisible.PREFIX:
        ends = range(len(live) - 1, -1, -1)
        best = next(live[:end] for end in ends if decider.fits(size, live[:end]))
        return draft.decided(Outcome.POLICY_PREFIX, mesh_axes=best)
    _add_indivisible(decider, draft, rule, failure, live, size)
    return draft.decided(Outcome.FAILED)


def _add_indivisible(
    decider: Decider,
    draft: Draft,
    rule: Chain,
    failure: Failure,
    live: tuple[str, ...],
    size: int,
) -> None:
    shards = decider.shards(live)
    over = ", ".join(f"{axis}={decider.sizes[axis]}" for axis in live)
    count = f" ({shards} shards)" if len(live) > 1 else ""
    judged = f"{draft.judged_as} of " if draft.judged_as else ""
    fallback = "write None there"
    if not draft.literal and decider.rules.policy.conflict is Conflict.NEXT:
        fallback = 'under conflict = "next" a fallback is not for sizes: set [policy] indivisible'
    elif not draft.literal:
        fallback = f"add a fallback, {_fallback_for(decider, rule, failure, live, size)}"
    decider.add_problem(
        IndivisibleError,
        f"{judged}size {size} does not divide over {over}{count}",
        draft.dim,
        draft.named,
        rule=rule.ref,
        size=size,
        mesh_axes=live,
        shards=shards,
        fix=f"{fallback}, or choose a size and a mesh that divide",
    )


def _fallback_for(
    decider: Decider, rule: Chain, failure: Failure, live: tuple[str, ...], size: int
) -> str:
    """Return the rule with an added fallback that fits this size."""
    if isinstance(rule, Composite):
        return _composite_fallback(decider, rule, failure, size)
    parts = [
        part
        for end in range(1, len(live))
        for part in (live[:-end], live[end:])
        if decider.fits(size, part)
    ]
    best = max(parts, key=decider.shards, default=())
    then = f"{'+'.join(best)} | -" if best else "-"
    return f'{rule.ref.key} = "{rule.ref.text} | {then}"'


def _composite_fallback(
    decider: Decider, rule: Composite, failure: Failure, size: int | None
) -> str:
    def fits(live: tuple[str, ...]) -> bool:
        return not decider.blocked(live) and (size is None or decider.fits(size, live))

    return rule.with_fallback(failure.candidate.parts, fits)
