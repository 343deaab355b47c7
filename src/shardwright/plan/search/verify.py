"""Compile the best candidates of a search, and rank them by the compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwright.errors import ProgramError
from shardwright.plan.fit import Verdict
from shardwright.plan.links import inside_seconds
from shardwright.plan.planner import Program
from shardwright.plan.search.result import Candidate, SearchReport, seconds_of
from shardwright.plan.verify.compiler import TIMEOUT, Effort, Platform
from shardwright.plan.verify.run import Verification, verify_plan
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.shown import data_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCandidate:
    """A candidate and its compiled programs.

    Attributes:
      candidate: The candidate.
      verifications: Mode -> plan and compiled program; modes that could not be compiled are absent.
      failures: Why modes could not be compiled.
    """

    candidate: Candidate
    verifications: Mapping[str, Verification]
    failures: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the compiler accepts every mode."""
        verdicts = [each.verdict for each in self.verifications.values()]
        return not self.failures and Verdict.DOES_NOT_FIT not in verdicts

    @property
    def seconds(self) -> float:
        """Upper end of the time, computed from the bytes that the compiled programs send."""
        return sum(map(compiled_seconds, self.verifications.values()))

    @property
    def most_bytes(self) -> int:
        """Bytes that one device needs, in the mode that needs most."""
        return max((each.most_bytes for each in self.verifications.values()), default=0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends in one run of each compiled program."""
        return sum(
            size
            for each in self.verifications.values()
            for sent in each.traffic
            for size in sent.compiled.values()
        )

    def to_json(self) -> dict[str, Any]:
        """Return the candidate and its compiled numbers as plain data."""
        return data_of(self)


def compiled_seconds(verification: Verification) -> float:
    """Return the upper end of the time, computed from the bytes that the compiled program sends.

    Operations and memory traffic are taken from the plan.
    """
    report = verification.report
    assert report.time is not None
    assert report.layout is not None
    # A program that the compiler refused, because it is too large, has no collectives to count.
    if verification.compiled.refused:
        return seconds_of(report)
    planned = sum(span.high for span in report.time.links.values())
    between = report.layout.seconds_between_slices
    sending = sum(
        # XLA compiles a collective that crosses slices into one inside each slice and one between
        # slices. A loop of unknown length counts as one run.
        (each.count or 1)
        * (
            between(each.kind, each.mesh_axes, each.logical_bytes)
            if each.between_slices
            else inside_seconds(report.layout, each.kind, each.mesh_axes, each.wire_bytes).high
        )
        for each in verification.compiled.collectives
    )
    return seconds_of(report) - planned + sending


def verify_front(
    found: SearchReport,
    variants: Mapping[str, Mapping[str, Program]],
    *,
    most: int,
    platform: Platform | None = None,
    effort: Effort = "low",
    timeout: float = TIMEOUT,
    cache: Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> tuple[VerifiedCandidate, ...]:
    """Compile the fastest candidates of the front, and order them by their compiled programs.

    Args:
      found: The result of a search.
      variants: Label -> programs by mode, as they were searched.
      most: How many candidates to compile at most.
      platform: `tpu`, `gpu` or `cpu`. Defaults to the platform of the slice.
      effort: `full` or `low`, see `Target`.
      timeout: Seconds for each compile.
      cache: Folder of compiled results. Defaults to none.
      progress: Called with a text before each compile.

    Raises:
      StrategyError: There is no compiler for the slice, or it is not installed.
    """
    verified = []
    chosen = found.front[:most]
    for number, candidate in enumerate(chosen, 1):
        manager = candidate.manager
        verifications: dict[str, Verification] = {}
        failures: list[str] = []
        for mode in candidate.reports:
            if progress is not None:
                progress(f"compiling {number} of {len(chosen)} candidates for {mode_name(mode)}")
            try:
                verifications[mode] = verify_plan(
                    manager.for_mode(mode),
                    variants[candidate.variant][mode],
                    topology=found.topology,
                    platform=platform,
                    effort=effort,
                    timeout=timeout,
                    cache=cache,
                )
            except ProgramError as error:
                failures.append(str(error))
        verified.append(
            VerifiedCandidate(
                candidate=candidate, verifications=verifications, failures=tuple(failures)
            )
        )
    # Candidates that do not fit, or were not compiled, come last.
    return tuple(
        sorted(verified, key=lambda each: (not each.fits, each.seconds, each.candidate.order))
    )
