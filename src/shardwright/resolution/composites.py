"""Candidates as they are tried: one chain for an axis, the product of its members' chains for a composite. Pure.

A composite is one dim over several axes. Each member brings its chain; the first member varies slowest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from shardwright.errors import Problem, StrategyError
from shardwright.resolution.decisions import Reason, RuleRef, Skip
from shardwright.resolution.rules import Fallback, Missing, Rule
from shardwright.vocabulary.axes import REPLICATED, axis_label

MOST_CANDIDATES: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One candidate as it is tried.

    Attributes:
      written: its mesh axes as the rules write them; none for `-`.
      live: those of more than one device.
      passed: what was passed over on the way to it: mesh axes, and candidates without any left.
      lost: it names a mesh axis that the mesh lacks, and the policy says that its dim is then replicated.
      parts: of a composite, what each member adds to `live`.
    """

    written: tuple[str, ...]
    live: tuple[str, ...]
    passed: tuple[Skip, ...] = ()
    lost: bool = False
    parts: tuple[tuple[str, ...], ...] = ()


def reduced(written: tuple[str, ...], sizes: Mapping[str, int], missing: Missing) -> Candidate:
    """Return a candidate without mesh axes that are absent or of size 1, each recorded."""
    live: list[str] = []
    passed: list[Skip] = []
    lost = False
    for axis in written:
        size = sizes.get(axis)
        if size is not None and size > 1:
            live.append(axis)
            continue
        reason = Reason.MISSING if size is None else Reason.SIZE_ONE
        passed.append(Skip(reason=reason, candidate=written, mesh_axis=axis))
        lost = lost or (size is None and missing is Missing.REPLICATE)
    if not live and not lost:
        passed.append(Skip(reason=Reason.EMPTY, candidate=written))
    return Candidate(written=written, live=tuple(live), passed=tuple(passed), lost=lost)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """The chain of a dim over several axes: what `Rule` is for a dim over one.

    Attributes:
      members: the rules of the members that have one, in order.
      chains: what each member may add, in order; an empty candidate last where it may add nothing.
      ref: the members' rules, for messages.
      unruled: what is recorded of members without a rule, which add nothing.
    """

    members: tuple[Rule, ...]
    chains: tuple[tuple[Candidate, ...], ...]
    ref: RuleRef
    unruled: tuple[Skip, ...] = ()

    @property
    def fallback(self) -> Fallback:
        """`-` where every member may add nothing and some rule says so."""
        may_be_empty = all(not chain[-1].written for chain in self.chains)
        said = any(rule.fallback is Fallback.REPLICATED for rule in self.members)
        return Fallback.REPLICATED if may_be_empty and said else Fallback.NONE

    @property
    def count(self) -> int:
        """Number of candidates, `-` included."""
        return math.prod(len(chain) for chain in self.chains)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the product lazily; what a member passed over is told once, with the candidate that it led to."""
        told: set[int] = set()
        for at, picks in enumerate(itertools.product(*self.chains)):
            passed = [] if at else [*self.unruled]
            for pick in picks:
                if id(pick) not in told:
                    told.add(id(pick))
                    passed += pick.passed
            yield Candidate(
                written=tuple(axis for pick in picks for axis in pick.written),
                live=tuple(axis for pick in picks for axis in pick.live),
                passed=tuple(passed),
                lost=any(pick.lost for pick in picks),
                parts=tuple(pick.live for pick in picks),
            )

    def with_fallback(
        self, parts: Sequence[tuple[str, ...]], fits: Callable[[tuple[str, ...]], bool]
    ) -> str:
        """Return the change of members' rules that lets a failed candidate fit without their part of it.

        One member is enough where the rest then fits, the later one first.
        """
        able = [
            at
            for at, rule in enumerate(self.members)
            if rule.fallback is Fallback.NONE and parts[at]
        ]
        for at in reversed(able):
            if fits(
                tuple(axis for other, part in enumerate(parts) if other != at for axis in part)
            ):
                return _with_dash(self.members[at])
        return " and ".join(_with_dash(self.members[at]) for at in able)


def _with_dash(rule: Rule) -> str:
    return f'{rule.ref.key} = "{rule.ref.text} | {REPLICATED}"'


def make_composite(
    axes: Sequence[str], rules: Sequence[Rule | None], sizes: Mapping[str, int], missing: Missing
) -> Composite | Problem | None:
    """Return the chain of a composite; None where no member has a rule, a problem where the rules make none."""
    stated = [(axis, rule) for axis, rule in zip(axes, rules, strict=True) if rule is not None]
    if not stated:
        return None
    for axis, rule in stated:
        if rule.fallback is Fallback.UNCONSTRAINED:
            return Problem(
                error=StrategyError,
                what=f'the rule of {axis_label(axis)} has "?", so it cannot be a member of a composite',
                rule=str(rule.ref),
                fix=f'give {axis_label(axis)} a rule without "?", or annotate it on a dim of its own',
            )
    members = tuple(rule for _, rule in stated)
    chains = tuple(_chain(rule, sizes, missing) for rule in members)
    unruled = [axis_label(axis) for axis, rule in zip(axes, rules, strict=True) if rule is None]
    composite = Composite(
        members=members,
        chains=chains,
        ref=_joined([rule.ref for rule in members]),
        unruled=tuple(Skip(reason=Reason.NO_RULE, candidate=(), detail=label) for label in unruled),
    )
    if composite.count > MOST_CANDIDATES:
        counts = " * ".join(str(len(chain)) for chain in chains)
        return Problem(
            error=StrategyError,
            what=f"{counts} = {composite.count} candidates, more than the {MOST_CANDIDATES} that are tried",
            rule=str(composite.ref),
            fix="give the members' rules fewer candidates, or flatten fewer axes into one dim",
        )
    return composite


def _chain(rule: Rule, sizes: Mapping[str, int], missing: Missing) -> tuple[Candidate, ...]:
    """Return what a member may add to a composite, in order: no emptied candidate, none twice."""
    found: list[Candidate] = []
    passed: tuple[Skip, ...] = ()
    for written in rule.candidates:
        one = reduced(written, sizes, missing)
        passed += one.passed
        if one.lost or (one.live and one.live not in [other.live for other in found]):
            found.append(dataclasses.replace(one, passed=passed))
            passed = ()
        if one.lost:
            return tuple(found)  # the dim is replicated when it is reached: nothing comes after it
    if rule.fallback is Fallback.REPLICATED or not found:
        found.append(Candidate(written=(), live=(), passed=passed))
    return tuple(found)


def _joined(refs: Sequence[RuleRef]) -> RuleRef:
    return RuleRef(
        key=" + ".join(ref.key for ref in refs),
        text=" + ".join(f"({ref.text})" if "|" in ref.text else ref.text for ref in refs),
        table=", ".join(dict.fromkeys(ref.table for ref in refs if ref.table)),
        source=", ".join(dict.fromkeys(ref.source for ref in refs if ref.source)),
        members=tuple(refs),
    )
