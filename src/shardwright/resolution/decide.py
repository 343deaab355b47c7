"""How one dim is decided. This is the one place that decides divisibility, conflicts and fallbacks. Dims go left to right:

1. the rule of the dim's axis (`_rule_for`), by mode, role and path; of a composite, the members' rules together;
2. the first candidate whose mesh axes are free and whose product divides the dim (`_choose`);
3. if none fits, the rule's own fallback, then the policy (`_fall_back`);
4. for a weight where it is used, the mesh axes that it is gathered over (`gathered`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardwright import _jax
from shardwright.errors import (
    AxisConflictError,
    IndivisibleError,
    MissingMeshAxisError,
    Problem,
    ShapeRequiredError,
    ShardingError,
    StrategyError,
    UnknownAxisError,
    did_you_mean,
)
from shardwright.resolution.composites import Candidate, Composite, make_composite, reduced
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, RuleRef, Skip
from shardwright.resolution.rules import (
    AxisRules,
    Conflict,
    Fallback,
    Indivisible,
    Missing,
    Rule,
    default_rule,
)
from shardwright.vocabulary.axes import EXPERT, PARALLELISM_AXES, Role, axis_label, canonical_axis
from shardwright.vocabulary.layouts import LAYOUTS
from shardwright.vocabulary.lowering import Dim
from shardwright.vocabulary.modes import mode_name

_Chain = Rule | Composite


@dataclasses.dataclass(slots=True, kw_only=True)
class _Failure:
    """The first non-empty candidate that did not fit: what the policy acts on."""

    candidate: Candidate
    reason: Reason
    blocked_by: tuple[str, ...] = ()

    @property
    def live(self) -> tuple[str, ...]:
        """The candidate's mesh axes of more than one device."""
        return self.candidate.live


@dataclasses.dataclass(slots=True, kw_only=True)
class _Trial:
    """What was learnt while a dim's candidates were tried in order."""

    chosen: tuple[str, ...] | None = None
    skipped: list[Skip] = dataclasses.field(default_factory=list)
    failure: _Failure | None = None
    lives: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    dropped_missing: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class _Draft:
    """A dim's decision while it is made: what is known of it before its outcome is."""

    dim: int
    label: str
    size: int | None
    judged_as: str = ""
    literal: bool = False
    rule: RuleRef | None = None
    skipped: tuple[Skip, ...] = ()

    @property
    def named(self) -> str:
        """The dim's axes in a message; a literal spec names none."""
        return "" if self.literal else self.label

    def decided(
        self, outcome: Outcome, *, mesh_axes: tuple[str, ...] = (), unchecked: bool = False
    ) -> DimDecision:
        """Return the decision."""
        return DimDecision(
            dim=self.dim,
            label=self.label,
            size=self.size,
            outcome=outcome,
            mesh_axes=mesh_axes,
            rule=self.rule,
            skipped=self.skipped,
            unchecked=unchecked,
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class Frame:
    """One request while its dims are decided.

    `taken` maps a mesh axis to the dim that holds it; `stood_in` are the dims whose rule is that of the axis they mean.
    """

    rules: AxisRules
    sizes: Mapping[str, int]
    mode: str
    role: Role
    shape: tuple[int, ...] | None
    path: str | None
    manual: frozenset[str]
    taken: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    stood_in: set[int] = dataclasses.field(default_factory=set)

    def fits(self, size: int, axes: tuple[str, ...]) -> bool:
        """Tell whether a size divides over mesh axes.

        Raises:
          _jax.Inconclusive: it is symbolic, and that depends on its value.
        """
        return not size % self._shards(axes) >= 1

    def decide(self, position: int, dim: Dim) -> DimDecision:
        """Decide one dim and take its mesh axes."""
        draft = _Draft(
            dim=position,
            label=dim.label,
            size=dim.size if dim.merged else None if self.shape is None else self.shape[position],
        )
        if dim.literal is not None:
            decision = self._literal(draft, dim.literal)
        elif not dim.axes:
            return draft.decided(Outcome.EMPTY)
        elif self._unknown(dim, position):
            return draft.decided(Outcome.FAILED)
        else:
            decision = self._by_rule(draft, dim)
        for axis in decision.mesh_axes:
            self.taken[axis] = (position, draft.named)
        return decision

    def _by_rule(self, draft: _Draft, dim: Dim) -> DimDecision:
        rule = self._rule_for(dim, draft.dim)
        if rule is None:
            failed = bool(self.problems) and self.problems[-1].dim == draft.dim
            return draft.decided(Outcome.FAILED if failed else Outcome.NO_RULE)
        if dim.merged:
            draft.judged_as = axis_label(dim.axes[0])
        return self._choose(draft, rule, dim.merged[0][1] if dim.merged else draft.size)

    def _literal(self, draft: _Draft, names: tuple[str, ...]) -> DimDecision:
        """Decide a dim of a literal spec: checked like a rule's candidate, but only a policy leaves anything out of it."""
        draft.literal = True
        ref = RuleRef(key=f"dim {draft.dim}", text="+".join(names) or "-", source="literal spec")
        lost = [name for name in names if name != Fallback.UNCONSTRAINED and name not in self.sizes]
        for name in lost if self.rules.policy.missing is Missing.SKIP else ():
            fix = lost_entry_fix(name, self.sizes)
            self._problem(
                MissingMeshAxisError,
                f"mesh axis {name!r} is not in the mesh",
                draft.dim,
                "",
                rule=ref,
                fix=fix,
            )
            draft.rule = ref
            return draft.decided(Outcome.FAILED)
        fallback = (
            Fallback.UNCONSTRAINED
            if names == (Fallback.UNCONSTRAINED,)
            else Fallback.NONE
            if names
            else Fallback.REPLICATED
        )
        rule = Rule(candidates=(names,) if not fallback else (), fallback=fallback, ref=ref)
        return self._choose(draft, rule, draft.size)

    # Which rule.

    def _unknown(self, dim: Dim, position: int) -> bool:
        names = [axis for axis, _ in dim.merged] if dim.merged else dim.axes
        if self.rules.known_axes.issuperset(names):
            return False
        for axis in names:
            if axis not in self.rules.known_axes:
                problem = unknown_axis(axis, self.rules)
                self.problems.append(
                    dataclasses.replace(problem, path=self.path or "", dim=position, axis=dim.label)
                )
        return True

    def _stated(self, axis: str) -> Rule | None:
        return self.rules.stated(axis, mode=self.mode, role=self.role, path=self.path)

    def _rule_for(self, dim: Dim, position: int) -> _Chain | None:
        """Return the rule of a dim, or None: no rule, or a composite that makes none (then a problem is noted)."""
        if dim.means and self.role is not Role.ACTIVATION:
            found = self._stand_in(dim)
            if found is not None:
                self.stood_in.add(position)
                return found
        if len(dim.axes) == 1:
            return self._stated(dim.axes[0]) or default_rule(dim.axes[0])
        return self._composite(
            dim, [self._stated(axis) or default_rule(axis) for axis in dim.axes], position
        )

    def _stand_in(self, dim: Dim) -> Rule | None:
        """Return the rule of the semantic axis that a weight layout's dim stands for.

        Exceptions by path come before tables; on either level a rule stated for the parallelism axis itself wins.
        """
        for find in (self._tensor, self._stated):
            if any(find(axis) is not None for axis in dim.axes):
                return None
            found = find(dim.means)
            if found is not None:
                return found
        return None

    def _tensor(self, axis: str) -> Rule | None:
        return self.rules.tensor_rule(axis, role=self.role, path=self.path)

    def _composite(self, dim: Dim, rules: list[Rule | None], position: int) -> Composite | None:
        found = make_composite(dim.axes, rules, self.sizes, self.rules.policy.missing)
        if isinstance(found, Problem):
            self.problems.append(
                dataclasses.replace(found, path=self.path or "", dim=position, axis=dim.label)
            )
            return None
        return found

    # Which candidate.

    def _choose(self, draft: _Draft, rule: _Chain, size: int | None) -> DimDecision:
        try:
            return self._chosen(draft, rule, size)
        except _jax.Inconclusive:
            return self._chosen(draft, rule, None)

    def _chosen(self, draft: _Draft, rule: _Chain, size: int | None) -> DimDecision:
        trial = self._try(rule, size)
        draft.rule, draft.skipped = rule.ref, tuple(trial.skipped)
        if trial.dropped_missing:
            return draft.decided(Outcome.POLICY_MISSING)
        if size is None and self._needs_shape(trial, rule):
            self._problem(
                ShapeRequiredError,
                "which candidate applies depends on the size",
                draft.dim,
                draft.label,
                rule=rule.ref,
                fix="pass shape="
                if draft.size is None
                else f"say more of {draft.size}, such as 8*b, or give the rule one candidate",
            )
            return draft.decided(Outcome.FAILED)
        if trial.chosen is not None:
            return self._taken_by(draft, trial.chosen, Outcome.CHOSEN, unchecked=size is None)
        return self._fall_back(draft, rule, trial, size)

    def _try(self, rule: _Chain, size: int | None) -> _Trial:
        """Try the candidates in order; keep trying names after a choice so that no-shape requests see all of them."""
        trial = _Trial()
        for candidate in self._candidates(rule):
            trial.skipped += candidate.passed
            if candidate.lost and size is None and trial.lives:
                # An earlier candidate would do for some sizes: without one, both are in play.
                trial.lives.append(candidate.written)
                return trial
            if candidate.lost:
                trial.dropped_missing = True
                return trial
            live = candidate.live
            if not live:
                continue
            trial.lives.append(live)
            blocked = self._blocked(live)
            if blocked and not self._dropped(size, live):
                self._fail(
                    trial, _Failure(candidate=candidate, reason=Reason.TAKEN, blocked_by=blocked)
                )
            elif size is not None and not self.fits(size, live):
                self._fail(
                    trial, _Failure(candidate=candidate, reason=Reason.INDIVISIBLE), size=size
                )
            elif size is None:
                trial.chosen = trial.chosen or live
            else:
                trial.chosen = live
                return trial
        return trial

    def _candidates(self, rule: _Chain) -> Iterator[Candidate]:
        if isinstance(rule, Composite):
            return rule.candidates()
        return (
            reduced(written, self.sizes, self.rules.policy.missing) for written in rule.candidates
        )

    def _dropped(self, size: int | None, live: tuple[str, ...]) -> bool:
        """Tell whether a dim is dropped for its size, and so wants no mesh axis that another dim could hold."""
        return (
            self.rules.policy.indivisible is Indivisible.DROP
            and size is not None
            and not self.fits(size, live)
        )

    def _blocked(self, live: tuple[str, ...]) -> tuple[str, ...]:
        """Return the mesh axes of a candidate that an earlier dim, or an earlier member, holds."""
        if len(live) == 1:
            return live if live[0] in self.taken else ()
        return tuple(
            axis for at, axis in enumerate(live) if axis in self.taken or axis in live[:at]
        )

    def _shards(self, live: tuple[str, ...]) -> int:
        """Shards along a candidate; sizes are already local along Manual mesh axes."""
        if len(live) == 1 and not self.manual:
            return self.sizes[live[0]]
        return math.prod([self.sizes[axis] for axis in live if axis not in self.manual])

    def _fail(self, trial: _Trial, failure: _Failure, *, size: int | None = None) -> None:
        if failure.reason is Reason.TAKEN:
            detail = ", ".join(self._holder(axis) for axis in dict.fromkeys(failure.blocked_by))
        else:
            assert size is not None
            detail = self._remainder(size, failure.live)
        trial.skipped.append(
            Skip(reason=failure.reason, candidate=failure.candidate.written, detail=detail)
        )
        trial.failure = trial.failure or failure

    def _remainder(self, size: int, live: tuple[str, ...]) -> str:
        return f"{size} % {self._shards(live)} != 0"

    def _holder(self, axis: str) -> str:
        if axis not in self.taken:
            return f"{axis} occurs twice"
        position, label = self.taken[axis]
        return f"{axis} is taken by dim {position} {label}".rstrip()

    def _needs_shape(self, trial: _Trial, rule: _Chain) -> bool:
        distinct = {*trial.lives, *([(rule.fallback.value,)] if rule.fallback else [])}
        return len(distinct) > 1 or (
            bool(trial.lives) and self.rules.policy.indivisible is not Indivisible.ERROR
        )

    def _taken_by(
        self, draft: _Draft, live: tuple[str, ...], outcome: Outcome, *, unchecked: bool = False
    ) -> DimDecision:
        return draft.decided(outcome, mesh_axes=live, unchecked=unchecked)

    # What if none fits.

    def _fall_back(
        self, draft: _Draft, rule: _Chain, trial: _Trial, size: int | None
    ) -> DimDecision:
        if rule.fallback is Fallback.REPLICATED:
            return draft.decided(Outcome.REPLICATED)
        if rule.fallback is Fallback.UNCONSTRAINED:
            return self._unconstrained(draft, rule)
        if trial.failure is None:
            return draft.decided(Outcome.NO_MESH_AXIS)
        if trial.failure.reason is Reason.TAKEN:
            return self._conflict(draft, rule, trial.failure, size)
        return self._indivisible(draft, rule, trial.failure, trial.failure.live, size)

    def _unconstrained(self, draft: _Draft, rule: _Chain) -> DimDecision:
        if self.role is Role.ACTIVATION:
            return draft.decided(Outcome.UNCONSTRAINED)
        self._problem(
            StrategyError,
            '"?" cannot be the answer for a parameter: it must lie somewhere',
            draft.dim,
            draft.label,
            rule=rule.ref,
            fix=f'give it a rule of its own, [params] {rule.ref.key} = "-"',
        )
        return draft.decided(Outcome.FAILED)

    def _conflict(
        self, draft: _Draft, rule: _Chain, failure: _Failure, size: int | None
    ) -> DimDecision:
        if self.rules.policy.conflict is Conflict.FIRST_DIM:
            rest = tuple(axis for axis in dict.fromkeys(failure.live) if axis not in self.taken)
            if not rest or size is None or self.fits(size, rest):
                return self._taken_by(
                    draft, rest, Outcome.POLICY_FIRST_DIM, unchecked=bool(rest) and size is None
                )
            left = Skip(
                reason=Reason.INDIVISIBLE, candidate=rest, detail=self._remainder(size, rest)
            )
            draft.skipped = (*draft.skipped, left)
            return self._indivisible(draft, rule, failure, rest, size)
        rather = "None or another mesh axis here" if draft.literal else "EMPTY or another axis here"
        end = "" if draft.literal else f', or end the rule in a fallback, "{rule.ref.text} | -"'
        holders = [self.taken.get(axis, (0, ""))[1] for axis in failure.blocked_by]
        is_router = axis_label(EXPERT) in (draft.named, *holders)
        if isinstance(rule, Composite):
            end = (
                f", or end a member's rule in a fallback, {self._fallback_of(rule, failure, size)}"
            )
        self._problem(
            AxisConflictError,
            "; ".join(self._holder(axis) for axis in dict.fromkeys(failure.blocked_by)),
            draft.dim,
            draft.named,
            rule=rule.ref,
            mesh_axes=failure.live,
            fix=_ROUTER if is_router else f"an array has each mesh axis once: write {rather}{end}",
        )
        return draft.decided(Outcome.FAILED)

    def _indivisible(
        self,
        draft: _Draft,
        rule: _Chain,
        failure: _Failure,
        live: tuple[str, ...],
        size: int | None,
    ) -> DimDecision:
        assert size is not None
        if self.rules.policy.indivisible in (Indivisible.REPLICATE, Indivisible.DROP):
            dropped = self.rules.policy.indivisible is Indivisible.DROP
            return draft.decided(Outcome.POLICY_DROP if dropped else Outcome.POLICY_REPLICATE)
        if self.rules.policy.indivisible is Indivisible.PREFIX:
            best = next(
                live[:end] for end in range(len(live) - 1, -1, -1) if self.fits(size, live[:end])
            )
            return self._taken_by(draft, best, Outcome.POLICY_PREFIX)
        over = ", ".join(f"{axis}={self.sizes[axis]}" for axis in live)
        shards = self._shards(live)
        count = f" ({shards} shards)" if len(live) > 1 else ""
        fallback = (
            "write None there"
            if draft.literal
            else f"add a fallback, {self._fallback_for(rule, failure, live, size)}"
        )
        self._problem(
            IndivisibleError,
            f"{f'{draft.judged_as} of ' if draft.judged_as else ''}size {size} does not divide over {over}{count}",
            draft.dim,
            draft.named,
            rule=rule.ref,
            size=size,
            mesh_axes=live,
            shards=shards,
            fix=f"{fallback}, or choose a size and a mesh that divide",
        )
        return draft.decided(Outcome.FAILED)

    def _fallback_for(
        self, rule: _Chain, failure: _Failure, live: tuple[str, ...], size: int
    ) -> str:
        """Return the rule with a fallback that this size would have taken."""
        if isinstance(rule, Composite):
            return self._fallback_of(rule, failure, size)
        parts = [
            part
            for end in range(1, len(live))
            for part in (live[:-end], live[end:])
            if self.fits(size, part)
        ]
        best = max(parts, key=self._shards, default=())
        then = f"{'+'.join(best)} | -" if best else "-"
        return f'{rule.ref.key} = "{rule.ref.text} | {then}"'

    def _fallback_of(self, rule: Composite, failure: _Failure, size: int | None) -> str:
        def fits(live: tuple[str, ...]) -> bool:
            return not self._blocked(live) and (size is None or self.fits(size, live))

        return rule.with_fallback(failure.candidate.parts, fits)

    def _problem(
        self,
        error: type[ShardingError],
        what: str,
        position: int,
        label: str,
        *,
        rule: RuleRef,
        **fields: Any,
    ) -> None:
        text = rule_text(rule, self.mode)
        self.problems.append(
            Problem(
                error=error,
                what=what,
                path=self.path or "",
                dim=position,
                axis=label,
                rule=text,
                **fields,
            )
        )


_ROUTER = "router weights and logits end in EXPERT_GATE: write it in place of EXPERT, or EMPTY here"


def lost_entry_fix(name: str, sizes: Iterable[str]) -> str:
    """Return how to fix an entry of a literal spec that is not a mesh axis: a slip, or the name of an axis."""
    names = list(sizes)
    hint = did_you_mean(PARALLELISM_AXES.get(name, name), names)
    logical = "write the axes themselves, such as (EMBED, MLP_INTERMEDIATE), or translate flax's with flax.linen.logical_to_mesh"
    return hint or f"name a mesh axis: the mesh has {', '.join(names)}. For logical names {logical}"


def unknown_axis(axis: str, rules: AxisRules) -> Problem:
    """Return the problem of an axis that nothing declares, with what was probably meant."""
    name = axis_label(axis)
    meant = canonical_axis(name)
    if meant in rules.known_axes:  # only the underscores or the case are wrong
        fix = f"write {axis_label(meant)}, whose value is {meant!r}"
        return Problem(error=UnknownAxisError, what=f"unknown axis {axis!r}", axis=name, fix=fix)
    several, flattened = re.split(r"[\s,]+", name.strip(" ,")), name.split("+")
    if len(several) > 1 or len(flattened) > 1:
        fix = (
            "each dim is a string of its own: "
            if len(several) > 1
            else "a dim over several axes is a tuple of them: "
        )
        words = ", ".join(f'"{word}"' for word in (several if len(several) > 1 else flattened))
        fix += words if len(several) > 1 else f"({words})"
        return Problem(error=UnknownAxisError, what=f"unknown axis {name!r}", axis=name, fix=fix)
    layout = next((layout for layout in LAYOUTS if layout.upper() == name), "")
    hint = (
        f"did you mean the layout {layout}?"
        if layout
        else did_you_mean(name, sorted(map(axis_label, rules.known_axes)))
    )
    declare = (
        f'an axis of your own is declared in the strategy: [axes] {name.lower()} = "what it is"'
    )
    return Problem(
        error=UnknownAxisError,
        what=f"unknown axis {name!r}",
        axis=name,
        fix=f"{hint} {declare}".strip(),
    )


def rule_text(rule: RuleRef, mode: str) -> str:
    """Return a rule, where it is written, and the mode it was asked in; of a composite one line per member."""
    if rule.members:
        return "\n".join(rule_text(member, mode) for member in rule.members)
    text = str(rule)
    mark = f"mode {mode_name(mode)}"
    return f"{text[:-1]}, {mark})" if text.endswith(")") else f"{text}   ({mark})"


def gathered(decision: DimDecision, dim: Dim, frame: Frame) -> DimDecision:
    """Drop from a stored dim the gather axes that its activation rule does not name."""
    if not decision.mesh_axes:
        return decision
    names: set[str] = set()
    for axis in (dim.means,) if decision.dim in frame.stood_in else dim.axes:
        rule = frame.rules.stated(
            axis, mode=frame.mode, role=Role.ACTIVATION, path=None
        ) or default_rule(axis)
        names.update(rule.mesh_axes if rule is not None else ())
    gone = tuple(
        axis
        for axis in decision.mesh_axes
        if axis in frame.rules.policy.gather and axis not in names
    )
    left = tuple(axis for axis in decision.mesh_axes if axis not in gone)
    return dataclasses.replace(decision, mesh_axes=left, gathered=gone)
