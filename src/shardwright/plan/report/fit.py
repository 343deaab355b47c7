"""Show the range of a program's peak memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.plan.fit import Verdict, judge
from shardwright.plan.hardware import Chip
from shardwright.plan.report.text import bytes_text
from shardwright.plan.walk.entries import CONSTANTS, LOOPS, RESULTS, TEMPORARY, Live, Peak
from shardwright.resolution.tables import WIDTH, remarked_table

_MEANS = {
    Verdict.FITS: "fits",
    Verdict.DOES_NOT_FIT: "does not fit",
    Verdict.CLOSE: "close: compile the program to know",
}
# Kinds that the table of the state does not list.
_MADE = (TEMPORARY, LOOPS, RESULTS, CONSTANTS)
LIVE_HEAD = ("at the peak", "values", "of each", "for", "where")


def live_rows(live: Sequence[Live], *, rows: int = 5) -> list[tuple[str, ...]]:
    """Return the cells of the largest values that a program makes, in the order of `LIVE_HEAD`."""
    made = [each for each in live if each.kind in _MADE][:rows]
    return [
        (
            bytes_text(each.size),
            str(each.count),
            f"{each.dtype}[{','.join(map(str, each.shape))}]" if each.dtype else "moved operands",
            each.kind,
            each.source or "-",
        )
        for each in made
    ]


def live_lines(live: Sequence[Live]) -> list[str]:
    """Return a table of the largest values that a program holds at its peak."""
    rows = live_rows(live)
    if not rows:
        return []
    return remarked_table([LIVE_HEAD, *rows], indent="  ", width=WIDTH)


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
    return [*lines, *live_lines(peak.live)]
