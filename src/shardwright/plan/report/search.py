"""Show the result of a search."""

from __future__ import annotations

from shardwright.plan.fit import Verdict
from shardwright.plan.report.text import bytes_text
from shardwright.plan.search import Candidate, SearchReport
from shardwright.plan.time import seconds_text
from shardwright.resolution.tables import WIDTH, table

_HEAD = ("strategy", "mesh", "time", "memory per device", "sent", "fits")


def search_text(found: SearchReport, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return the Pareto front as a table, the fastest first, and the dropped candidates.

    Args:
      found: The result.
      rows: How many candidates to show. Defaults to all of the front.
      width: Characters per line.
    """
    front = found.front
    shown = front if rows is None else front[:rows]
    lines = table([_HEAD, *map(_row, shown)], width=width) if shown else ["no candidate fits"]
    if len(shown) < len(front):
        lines.append(f"and {len(front) - len(shown)} more")
    lines.append(
        f"judged all {found.judged} candidates on {found.topology}: {len(found.candidates)} may "
        f"fit, {len(front)} are not beaten in both time and memory"
    )
    lines += [f"dropped {count}: {reason}" for reason, count in found.dropped.items()]
    return "\n".join(lines)


def _row(candidate: Candidate) -> tuple[str, ...]:
    report = candidate.report
    time, memory = report.time, report.memory
    assert time is not None
    fits = "yes" if report.verdict is Verdict.FITS else "close"
    return (
        candidate.name,
        candidate.mesh,
        f"{seconds_text(time.low)} to {seconds_text(time.high)}",
        f"{bytes_text(memory.low)} to {bytes_text(memory.high)}",
        bytes_text(report.sent_bytes),
        fits if report.walked.complete else f"{fits}, incomplete",
    )
