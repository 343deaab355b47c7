"""The state of a dim while `decide` decides the dim."""

from __future__ import annotations

import dataclasses

from shardwright.resolution.composites import Composite, TriedCandidate
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, RuleRef, Skip
from shardwright.resolution.rules import Rule

Chain = Rule | Composite


@dataclasses.dataclass(slots=True, kw_only=True)
class Failure:
    """The first non-empty candidate that did not fit.

    If no candidate of the dim fits, the policy applies to this candidate.
    """

    candidate: TriedCandidate
    reason: Reason
    blocked_by: tuple[str, ...] = ()

    @property
    def live(self) -> tuple[str, ...]:
        """The mesh axes of the candidate, as in `TriedCandidate.live`."""
        return self.candidate.live


@dataclasses.dataclass(slots=True, kw_only=True)
class Attempts:
    """The result of trying a dim's candidates in order.

    Attributes:
      chosen: Mesh axes of the first candidate that fits, or None.
      skipped: Mesh axes and candidates that were skipped.
      failure: The first candidate that did not fit, or None.
      tried_axes: Mesh axes of every candidate that was tried.
      dropped_missing: Whether `policy.missing` replicates the dim, because a candidate names an
        absent mesh axis.
    """

    chosen: tuple[str, ...] | None = None
    skipped: list[Skip] = dataclasses.field(default_factory=list)
    failure: Failure | None = None
    tried_axes: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    dropped_missing: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class PendingDecision:
    """A dim's decision before its outcome is known.

    Attributes:
      dim: Position.
      label: The dim's axes as messages show them.
      size: Number of elements, or None if no shape is given.
      judged_as: For a merged dim, which flattens several axes, the axis whose size must divide.
      literal: Whether the dim is annotated by the entry of a `PartitionSpec`.
      rule: The rule that applies, or None if it is not known yet.
      skipped: Mesh axes and candidates that were skipped.
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
        """The dim's axes in a message, or empty for an entry of a `PartitionSpec`."""
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
