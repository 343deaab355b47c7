"""Show the range of a program's peak memory, and whether it fits."""

from __future__ import annotations

from shardwright.plan.fit import Verdict, judge
from shardwright.plan.hardware import Chip
from shardwright.plan.report.text import bytes_text
from shardwright.plan.walk.liveness import Peak

_MEANS = {
    Verdict.FITS: "fits",
    Verdict.DOES_NOT_FIT: "does not fit",
    Verdict.CLOSE: "close: compile the program to know",
}


def fit_lines(peak: Peak, chip: Chip | None, *, complete: bool = True) -> list[str]:
    """Return lines on memory: the range, the parts of its upper end, and the verdict.

    Args:
      peak: The range of the peak.
      chip: The chip, or None for no verdict.
      complete: Whether every primitive of the program has a rule.
    """
    kinds = sorted(peak.kinds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds)
    lines = [
        f"memory per device: {bytes_text(peak.low)} to {bytes_text(peak.high)}",
        f"  at most {parts}",
    ]
    if chip is not None:
        verdict = judge(peak, chip.hbm_bytes, complete=complete)
        lines.append(f"  {bytes_text(chip.hbm_bytes)} usable on {chip.name}: {_MEANS[verdict]}")
    return lines
