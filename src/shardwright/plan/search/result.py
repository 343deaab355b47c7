"""The result of a search: the candidates, the best of them, and why others were dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import PlanReport
from shardwright.plan.search.space import mesh_text
from shardwright.vocabulary.shown import data_of

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

STOPPED: Final = "not planned: the search was stopped"
# Candidates that fit come first.
_VERDICTS: Final = (Verdict.FITS, Verdict.CLOSE, Verdict.DOES_NOT_FIT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy on a mesh, and the plans of the programs under it.

    Attributes:
      name: Name of the strategy that it comes from.
      sizes: Size of each mesh axis, in mesh order.
      settings: Settings that the candidate changes: `head` -> `-`, `params.embed` -> `fsdp`.
      strategy: The strategy with this mesh and these changes, ready to be written to a file.
      reports: Mode -> its plan.
      variant: Label of the program, if several were searched; else "".
      position: Position of the strategy among those that were searched.
      tokens: Mode -> tokens of one run, for the modes whose arguments have BATCH and a length.
    """

    name: str
    sizes: Mapping[str, int]
    strategy: Strategy
    reports: Mapping[str, PlanReport]
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variant: str = ""
    position: int = 0
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def manager(self) -> PartitionManager:
        """A manager of its strategy on its mesh."""
        mesh = abstract_mesh(dict(self.sizes), axis_types=self.strategy.axis_types)
        return PartitionManager(self.strategy, mesh=mesh)

    @property
    def report(self) -> PlanReport:
        """Its plan in the first mode."""
        return next(iter(self.reports.values()))

    @property
    def mesh(self) -> str:
        """The mesh axes of size > 1 as text."""
        return mesh_text(self.sizes)

    @property
    def seconds(self) -> float:
        """Upper end of the estimated time to run each mode once, one after another."""
        return sum(seconds_of(report) for report in self.reports.values())

    @property
    def min_seconds(self) -> float:
        """Lower end of the estimated time to run each mode once, one after another."""
        times = [report.time for report in self.reports.values()]
        return sum(time.low for time in times if time is not None)

    @property
    def most_bytes(self) -> int:
        """Upper end of the memory of one device, in the mode that needs most."""
        return max(report.memory.high for report in self.reports.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in one run of each mode."""
        return sum(report.sent_bytes for report in self.reports.values())

    @property
    def slice_bytes(self) -> int:
        """Bytes that one device sends to other slices in one run of each mode."""
        return sum(report.slice_bytes for report in self.reports.values())

    @property
    def host_bytes(self) -> int:
        """Bytes that move between a device and its host in one run of each mode."""
        return sum(report.host_bytes for report in self.reports.values())

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all modes."""
        verdicts = {report.verdict for report in self.reports.values()}
        return next((each for each in reversed(_VERDICTS) if each in verdicts), Verdict.FITS)

    @property
    def complete(self) -> bool:
        """Whether the walk knew every primitive of every mode."""
        return all(report.walked.complete for report in self.reports.values())

    @property
    def costs(self) -> tuple[float, ...]:
        """The verdict, times, memory, and bytes between slices, to be compared."""
        times = map(seconds_of, self.reports.values())
        # Compare verdicts first: a candidate that may not fit never beats one that fits.
        return (_VERDICTS.index(self.verdict), *times, self.most_bytes, self.slice_bytes)

    @property
    def order(self) -> tuple[Any, ...]:
        """The key by which candidates are sorted: by the verdict, then by the time.

        No two keys are equal.
        """
        settings = tuple(self.settings.items())
        names = (self.variant, self.name, self.mesh, tuple(self.sizes.items()), settings)
        # If costs are equal, the candidate with fewer mesh axes comes first. If these are equal
        # too, the candidate whose strategy was given first comes first.
        axes = sum(size > 1 for size in self.sizes.values())
        verdict = _VERDICTS.index(self.verdict)
        return (verdict, self.seconds, self.most_bytes, axes, self.position, *names)

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as plain data."""
        return data_of(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """The result of a search.

    Attributes:
      topology: The slice.
      candidates: The candidates that were walked, sorted by `Candidate.order`: by verdict, then by
        time. Candidates that do not fit are only there if the search was asked to keep them.
      dropped: Reason -> number of candidates.
      walked: Number of walks. Candidates that differ only in the order of axes share a walk.
      skipped: Number of candidates that were not walked, because they ranked too low, or because
        the search was stopped.
      examples: Reason -> a candidate that was dropped for it, and its error. For the reason
        `does not fit`, it is the candidate that needs the least memory.
      fixed_axes: Mesh axes of the strategies that have size 1 in every candidate, because `axes`
        leaves them out.
      refused: Candidates on Explicit meshes that JAX refuses, and why. They are not in
        `candidates`.
    """

    topology: Topology
    candidates: tuple[Candidate, ...]
    dropped: Mapping[str, int]
    walked: int = 0
    skipped: int = 0
    examples: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed_axes: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def judged(self) -> int:
        """Number of all candidates that a search has looked at."""
        seen = sum(count for reason, count in self.dropped.items() if reason != STOPPED)
        return len(self.candidates) + len(self.refused) + seen

    @property
    def exhaustive(self) -> bool:
        """Whether every candidate that resolves and whose state fits was walked.

        If several candidates are the same program, only one of them is walked.
        """
        return not self.skipped

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The candidates that no other candidate beats. Those that fit come first, by time.

        A candidate is beaten if another candidate takes no more time in any mode, needs no more
        memory, and sends no more bytes between slices. A candidate that fits is beaten only by a
        candidate that fits too.
        """
        front: list[tuple[Candidate, tuple[float, ...]]] = []
        for candidate in self.candidates:
            costs = candidate.costs
            # Candidates are sorted by whether they fit and by time, so only earlier ones can beat
            # this one.
            if not any(
                all(cost <= own for cost, own in zip(other, costs, strict=True))
                for _, other in front
            ):
                front.append((candidate, costs))
        return tuple(candidate for candidate, _ in front)

    @property
    def undecided(self) -> int:
        """Number of candidates of the front that may be the fastest.

        The lower end of their time is below the upper end of the time of the first candidate.
        """
        return sum(each.min_seconds < self.front[0].seconds for each in self.front)

    @property
    def best(self) -> Candidate | None:
        """The candidate to use: the fastest that fits, or else the fastest that may fit."""
        return self.candidates[0] if self.candidates else None

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return data_of(self)


def seconds_of(report: PlanReport) -> float:
    """Return the upper end of the estimated time of a plan on a slice."""
    assert report.time is not None
    return report.time.high


def utilization(report: PlanReport) -> tuple[float, float]:
    """Return the model FLOPs utilization (MFU) of a plan on a slice, as a range.

    Operations that rematerialization or idle devices repeat do not count, as in the PaLM paper
    (Chowdhery et al. 2022, appendix B).
    """
    assert report.time is not None
    assert report.layout is not None
    work = report.walked.work
    # Seconds at the peak rate. Divided by the estimated seconds, they give the MFU.
    seconds = report.walked.useful_flops / report.layout.topology.chip.flops
    low = seconds / report.time.high
    # The shortest time leaves out blocks of attention that a mask may hide, so leave out their
    # operations too.
    return low, max(low, seconds * work.min_flops / max(work.flops, 1) / report.time.low)
