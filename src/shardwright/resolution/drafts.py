"""What is known of a dim while it is decided. `decide` fills these in, `fallbacks` reads them."""

from __future__ import annotations

import dataclasses

from shardwright.resolution.composites import Candidate, Composite
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, RuleRef, Skip
from shardwright.resolution.rules import Rule

Chain = Rule | Composite


@dataclasses.dataclass(slots=True, kw_only=True)
class Failure:
    """The first non-empty candidate that did not fit: the policy decides what happens to it."""

    candidate: Candidate
    reason: Reason
    blocked_by: tuple[str, ...] = ()

    @property
    def live(self) -> tuple[str, ...]:
        """The candidate's mesh axes of more than one device."""
        return self.candidate.live


@dataclasses.dataclass(slots=True, kw_only=True)
class Trial:
    """The result of trying a dim's candidates in order.

    Attributes:
      chosen: Mesh axes of the first candidate that fits, or None.
      skipped: What was passed over.
      failure: The first candidate that did not fit, or None.
      lives: Mesh axes of every candidate that was tried.
      dropped_missing: A candidate names an absent mesh axis, and the policy replicates the dim for
        it.
    """

    chosen: tuple[str, ...] | None = None
    skipped: list[Skip] = dataclasses.field(default_factory=list)
    failure: Failure | None = None
    lives: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    dropped_missing: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class Draft:
    """A dim's decision before its outcome is known.

    Attributes:
      dim: Position.
      label: The dim's axes as people read them.
      size: Number of elements, or None if no shape is given.
      judged_as: For a merged dim, the member whose size must divide.
      literal: The dim is an entry of a literal spec.
      rule: The rule that applies, once it is found.
      skipped: What was passed over.
    """

    dim: int
    label: str
    size: int | None
    judged_as: str = ""
    literal: bool = False
    rule: RuleRef | None = None
    skipped: tuple[Skip, ...] = ()

    @property
    def named(self) -> str:
        """The dim's axes in a message; an entry of a literal spec has none."""
        return "" if self.literal else self.label

    def decided(
        self, outcome: Outcome, *, mesh_axes: tuple[str, ...] = (), unchecked: bool = False
    ) -> DimDecision:
        """Return the decision with this outcome."""
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
