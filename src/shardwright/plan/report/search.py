"""Show the result of a search."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.plan.fit import Verdict
from shardwright.plan.planner import PlanReport
from shardwright.plan.report.text import bytes_text
from shardwright.plan.search.result import Candidate, SearchReport
from shardwright.plan.search.verify import VerifiedCandidate
from shardwright.plan.time import seconds_text
from shardwright.resolution.tables import WIDTH, table
from shardwright.vocabulary.modes import mode_name


def search_text(found: SearchReport, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return the candidates of the front as a table, the fastest first, and count all others.

    Args:
      found: The result.
      rows: How many candidates of the front to show. Defaults to all.
      width: Characters per line.
    """
    front = found.front
    shown = front if rows is None else front[:rows]
    lines = _table(shown, width) if shown else ["no candidate fits"]
    if len(shown) < len(front):
        lines.append(f"and {len(front) - len(shown)} more")
    result = f"{len(found.candidates)} may fit, {len(front)} are not beaten in both time and memory"
    if found.exhaustive:
        lines.append(f"judged all {found.judged} candidates on {found.topology}: {result}")
    else:
        lines.append(
            f"judged {found.judged} candidates on {found.topology}, and planned {found.walked} "
            f"programs: {result}"
        )
    if found.undecided > 1:
        lines.append(
            f"the times of {found.undecided} of them overlap, so each may be the fastest: "
            f"--verify {found.undecided} compiles them"
        )
    if found.fixed_axes:
        lines.append(
            f"mesh axes with one device, because --axes does not name them: "
            f"{', '.join(found.fixed_axes)}"
        )
    for reason, count in found.dropped.items():
        lines.append(f"dropped {count}: {reason}")
        lines += [f"  {line}" for line in found.examples.get(reason, "").splitlines()]
    return "\n".join(lines)


def settings_text(candidate: Candidate) -> str:
    """Return what a candidate changes in its strategy, as a strategy file writes it."""
    return ", ".join(f'{key} = "{text}"' for key, text in candidate.settings.items()) or "-"


def verified_text(verified: Sequence[VerifiedCandidate], *, width: int = WIDTH) -> str:
    """Return compiled candidates as a table, the fastest first.

    Args:
      verified: Compiled candidates.
      width: Characters per line.
    """
    head = ("compiled", "mesh", "settings", "time", "memory", "sent", "planned", "fits")
    rows = [
        (
            " ".join(part for part in (each.candidate.name, each.candidate.variant) if part),
            each.candidate.mesh,
            settings_text(each.candidate),
            f"at most {seconds_text(each.seconds)}",
            bytes_text(each.most_bytes),
            bytes_text(each.sent_bytes),
            bytes_text(each.candidate.sent_bytes),
            "yes" if each.fits else "no",
        )
        for each in verified
    ]
    lines = table([head, *rows], width=width)
    for each in verified:
        lines += [f"{each.candidate.mesh} is not verified: {text}" for text in each.failures]
    return "\n".join(lines)


def _table(shown: tuple[Candidate, ...], width: int) -> list[str]:
    """Return the candidates as a table. Columns that no candidate needs are left out."""
    modes = list(shown[0].reports)
    times = ["time" if len(modes) == 1 else f"{mode_name(mode)} time" for mode in modes]
    head = ["variant", "strategy", "mesh", "settings", *times, "memory per device", "sent"]
    head += ["between slices", "fits"]
    rows = [_row(candidate) for candidate in shown]
    absent = {0} if not any(candidate.variant for candidate in shown) else set()
    if not any(candidate.slice_bytes for candidate in shown):
        absent.add(len(head) - 2)
    absent |= {3} if not any(candidate.settings for candidate in shown) else set()
    kept = [[cell for at, cell in enumerate(row) if at not in absent] for row in (head, *rows)]
    return table(kept, width=width)


def _row(candidate: Candidate) -> list[str]:
    reports = candidate.reports.values()
    low = max(report.memory.low for report in reports)
    fits = "yes" if candidate.verdict is Verdict.FITS else "close"
    return [
        candidate.variant,
        candidate.name,
        candidate.mesh,
        settings_text(candidate),
        *map(_time_text, reports),
        f"{bytes_text(low)} to {bytes_text(candidate.most_bytes)}",
        bytes_text(candidate.sent_bytes),
        bytes_text(candidate.slice_bytes),
        fits if candidate.complete else f"{fits}, incomplete",
    ]


def _time_text(report: PlanReport) -> str:
    assert report.time is not None
    return f"{seconds_text(report.time.low)} to {seconds_text(report.time.high)}"
