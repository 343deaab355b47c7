"""The candidates of a dim.

A dim over one axis has the candidates of the axis's rule. A composite is one dim over several axes.
Its candidates are the product of its members' candidates, and those of the last member vary
fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from shardwright.errors import Problem, StrategyError
from shardwright.resolution.decisions import Reason, RuleRef, Skip
from shardwright.resolution.rules import Fallback, Missing, Rule
from shardwright.vocabulary.axes import REPLICATED, axis_label

# Three members of four candidates each reach this bound. The product is lazy, but a dim that fits
# nowhere tries all candidates.
MOST_CANDIDATES: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedCandidate:
    """One candidate as it is tried.

    Attributes:
      written: The mesh axes as the rule has them, or empty for `-`.
      live: The mesh axes of `written` that the mesh has. Mesh axes of size 1 are left out, except
        under `order = "rules"`.
      skipped: Records of what is skipped until `live` is tried: mesh axes of this candidate, and
        earlier candidates without any mesh axis left.
      misses_axis: Whether `policy.missing` replicates the dim, because the candidate names a mesh
        axis that the mesh does not have.
      parts: For a composite, the mesh axes that each member adds to `live`.
    """

    written: tuple[str, ...]
    live: tuple[str, ...]
    skipped: tuple[Skip, ...] = ()
    misses_axis: bool = False
    parts: tuple[tuple[str, ...], ...] = ()


def reduced(
    written: tuple[str, ...], sizes: Mapping[str, int], missing: Missing, min_size: int = 2
) -> TriedCandidate:
    """Return a candidate without the mesh axes that are absent or smaller than `min_size`.

    Each mesh axis that is left out is recorded in `skipped`.
    """
    # The usual case: a candidate is a single mesh axis, and the mesh has enough devices along it.
    if len(written) == 1 and sizes.get(written[0], 0) >= min_size:
        return _single(written)
    live: list[str] = []
    skipped: list[Skip] = []
    misses_axis = False
    for axis in written:
        size = sizes.get(axis)
        if size is not None and size >= min_size:
            live.append(axis)
            continue
        reason = Reason.MISSING if size is None else Reason.SIZE_ONE
        skipped.append(Skip(reason=reason, candidate=written, mesh_axis=axis))
        misses_axis = misses_axis or (size is None and missing is Missing.REPLICATE)
    if not live and not misses_axis:
        skipped.append(Skip(reason=Reason.EMPTY, candidate=written))
    return TriedCandidate(
        written=written, live=tuple(live), skipped=tuple(skipped), misses_axis=misses_axis
    )


# `written` is a single mesh axis, and the caller has checked that the mesh has enough devices along
# it. So the result does not depend on the mesh, and all rules and meshes share one cache.
@functools.lru_cache(maxsize=1024)
def _single(written: tuple[str, ...]) -> TriedCandidate:
    return TriedCandidate(written=written, live=written)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """The rules of a composite. A dim over one axis has a `Rule` instead.

    Attributes:
      members: The rules of the members that have a rule, in order.
      chains: The candidates of each member, in order. The last candidate is empty if the member
        does not have to add a mesh axis.
      ref: The members' rules, for messages.
      unruled: A record for each member without a rule. Such a member adds no mesh axes.
    """

    members: tuple[Rule, ...]
    chains: tuple[tuple[TriedCandidate, ...], ...]
    ref: RuleRef
    unruled: tuple[Skip, ...] = ()

    @property
    def fallback(self) -> Fallback:
        """The fallback that applies if no candidate fits.

        This is `-` if no member has to add a mesh axis, and at least one rule ends in `-`.
        Otherwise there is no fallback.
        """
        may_be_empty = all(not chain[-1].written for chain in self.chains)
        # A chain also ends in an empty candidate if the mesh has none of its axes. Only an empty
        # candidate that a person wrote is a fallback.
        is_stated = any(rule.fallback is Fallback.REPLICATED for rule in self.members)
        return Fallback.REPLICATED if may_be_empty and is_stated else Fallback.NONE

    @property
    def count(self) -> int:
        """Number of candidates, `-` included."""
        return math.prod(len(chain) for chain in self.chains)

    def candidates(self) -> Iterator[TriedCandidate]:
        """Yield the candidates of the product, one at a time.

        A skip of a member is recorded only once: in the first candidate of the product that comes
        after this skip.
        """
        # Compare by identity: two members may have equal candidates, and each must report its
        # skips.
        reported: set[int] = set()
        # For "dp | -" and "sp | -", the product is dp+sp, dp, sp, -.
        for at, picks in enumerate(itertools.product(*self.chains)):
            skipped = [] if at else [*self.unruled]
            for pick in picks:
                if id(pick) not in reported:
                    reported.add(id(pick))
                    skipped += pick.skipped
            yield TriedCandidate(
                written=tuple(axis for pick in picks for axis in pick.written),
                live=tuple(axis for pick in picks for axis in pick.live),
                skipped=tuple(skipped),
                misses_axis=any(pick.misses_axis for pick in picks),
                parts=tuple(pick.live for pick in picks),
            )

    def with_fallback(
        self, parts: Sequence[tuple[str, ...]], fits: Callable[[tuple[str, ...]], bool]
    ) -> str:
        """Return rules of members as text, with a fallback added so that the dim would fit.

        A member with a fallback does not have to add a mesh axis. Try to change a single rule,
        starting with the last member. If no single change is enough, return all rules that can be
        changed.
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
    axes: Sequence[str],
    rules: Sequence[Rule | None],
    sizes: Mapping[str, int],
    missing: Missing,
    min_size: int = 2,
) -> Composite | Problem | None:
    """Return the candidates of a composite. Return None if no member has a rule, and a problem if
    the rules do not combine.
    """
    stated = [(axis, rule) for axis, rule in zip(axes, rules, strict=True) if rule is not None]
    if not stated:
        return None
    for axis, rule in stated:
        if rule.fallback is Fallback.UNCONSTRAINED:
            name, ref = axis_label(axis), str(rule.ref)
            what = f'the rule of {name} has "?", so it cannot be a member of a composite'
            fix = f'give {name} a rule without "?", or annotate it on a dim of its own'
            return Problem(error=StrategyError, what=what, rule=ref, fix=fix)
    members = tuple(rule for _, rule in stated)
    chains = tuple(_chain(rule, sizes, missing, min_size) for rule in members)
    unruled = [axis_label(axis) for axis, rule in zip(axes, rules, strict=True) if rule is None]
    composite = Composite(
        members=members,
        chains=chains,
        ref=_joined([rule.ref for rule in members]),
        unruled=tuple(Skip(reason=Reason.NO_RULE, candidate=(), detail=label) for label in unruled),
    )
    if composite.count > MOST_CANDIDATES:
        counts = " * ".join(str(len(chain)) for chain in chains)
        what = f"the composite has {counts} = {composite.count} candidates, at most "
        what += f"{MOST_CANDIDATES} are tried"
        fix = "give the members' rules fewer candidates, or flatten fewer axes into one dim"
        return Problem(error=StrategyError, what=what, rule=str(composite.ref), fix=fix)
    return composite


def _chain(
    rule: Rule, sizes: Mapping[str, int], missing: Missing, min_size: int
) -> tuple[TriedCandidate, ...]:
    """Return the candidates of a member in order, each only once.

    Empty candidates are left out, except the last one: if the member does not have to add a mesh
    axis, the last candidate is empty.
    """
    chain: list[TriedCandidate] = []
    skipped: tuple[Skip, ...] = ()
    for written in rule.candidates:
        candidate = reduced(written, sizes, missing, min_size)
        skipped += candidate.skipped
        # Different candidates may have equal mesh axes left: "dp+fsdp | dp" on a mesh with fsdp=1.
        # Without this test, the product would try both.
        if candidate.misses_axis or (
            candidate.live and candidate.live not in [other.live for other in chain]
        ):
            chain.append(dataclasses.replace(candidate, skipped=skipped))
            skipped = ()
        if candidate.misses_axis:
            # The policy replicates the dim at this candidate, so no later one is tried.
            return tuple(chain)
    # `itertools.product` of an empty chain yields nothing, so a member without a mesh axis left has
    # one empty candidate.
    if rule.fallback is Fallback.REPLICATED or not chain:
        chain.append(TriedCandidate(written=(), live=(), skipped=skipped))
    return tuple(chain)


def _joined(refs: Sequence[RuleRef]) -> RuleRef:
    return RuleRef(
        key=" + ".join(ref.key for ref in refs),
        text=" + ".join(f"({ref.text})" if "|" in ref.text else ref.text for ref in refs),
        table=", ".join(dict.fromkeys(ref.table for ref in refs if ref.table)),
        source=", ".join(dict.fromkeys(ref.source for ref in refs if ref.source)),
        members=tuple(refs),
    )
