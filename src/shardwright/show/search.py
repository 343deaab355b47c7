"""Show the result of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.plan.fit import Verdict
from shardwright.plan.planner import PlanReport
from shardwright.plan.search.result import STOPPED, Candidate, SearchReport, seconds_of, utilization
from shardwright.plan.search.verify import VerifiedCandidate
from shardwright.show.plain import named, plain
from shardwright.show.tables import table, wrap
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.shown import WIDTH, data_of
from shardwright.vocabulary.units import bytes_text, seconds_text


def search_text(found: SearchReport, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return text: the candidate to use, a table of the front, and how many others there are.

    The front has the candidates that no other candidate beats in both time and memory.

    Args:
      found: The result.
      rows: How many candidates of the front to show. Defaults to all.
      width: Characters per line.
    """
    front = found.front
    shown = front if rows is None else front[:rows]
    lines = advice_lines(found, width=width)
    if shown:
        lines += ["", *table(candidate_rows(shown), width=width)]
    if len(shown) < len(front):
        lines.append(f"and {len(front) - len(shown)} more")
    return "\n".join([*lines, *count_lines(found)])


def count_lines(found: SearchReport) -> list[str]:
    """Return how many candidates were judged, planned and dropped, and why."""
    front, lines = found.front, []
    unbeaten = f"{len(front)} {'is' if len(front) == 1 else 'are'} not beaten"
    result = f"{len(found.candidates)} may fit, {unbeaten} in both time and memory"
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
    unknown = {
        name: count
        for candidate in front
        for report in candidate.reports.values()
        for name, count in report.walked.unknown.items()
    }
    if unknown:
        counts = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
        lines.append(
            f"incomplete: no rule for {counts}, so their bytes are left out and the order may be "
            f"wrong: --verify {len(front)} compiles the candidates of the table"
        )
    if found.fixed_axes:
        lines.append(
            f"mesh axes with one device, because --axes does not name them: "
            f"{', '.join(found.fixed_axes)}"
        )
    for reason, count in found.dropped.items():
        lines.append(f"dropped {count}: {reason}")
        lines += [f"  {line}" for line in found.examples.get(reason, "").splitlines()]
    for point, why in found.refused:
        lines.append(f"refused: {point}")
        lines += [f"  {line}" for line in why.splitlines()]
    return lines


def advice_lines(found: SearchReport, *, width: int = WIDTH) -> list[str]:
    """Return which candidate to use, and its speed in each mode."""
    best = found.best
    if best is None and STOPPED in found.dropped:
        return ["the search was stopped before it planned a candidate that fits"]
    if best is None:
        return ["no candidate fits"]
    settings = f" with {settings_text(best)}" if best.settings else ""
    variant = f", {best.variant}" if best.variant else ""
    rates = [
        f"{f'{mode_name(mode)} ' if len(best.reports) > 1 else ''}{_rate_text(best, mode)}"
        for mode in best.reports
    ]
    end = "it fits"
    # If a plan has no rule for a primitive, the plan may leave out some memory of the program.
    if best.verdict is not Verdict.FITS or not best.complete:
        end = "it may not fit: --verify 1 compiles it"
    text = f"use {best.name} on {best.mesh}{settings}{variant}: {', '.join(rates)}; {end}"
    return wrap(text, width, rest="  ")


def _rate_text(candidate: Candidate, mode: str) -> str:
    """Return the tokens per second and the MFU of one mode as ranges."""
    report = candidate.reports[mode]
    assert report.time is not None
    low, high = utilization(report)
    used = f"MFU {low:.0%} to {high:.0%}"
    if mode not in candidate.tokens:
        return f"{_time_text(report)} per run, {used}"
    # The longest time gives the lowest rate.
    slow, fast = (candidate.tokens[mode] / time for time in (report.time.high, report.time.low))
    return f"{_count_text(slow)} to {_count_text(fast)} tokens/s, {used}"


def _count_text(count: float) -> str:
    """Return a number rounded to three significant digits, such as 1,230,000."""
    # A negative number of digits rounds to tens, hundreds and so on.
    digits = max(0, len(str(round(count))) - 3)
    return f"{round(count, -digits):,.0f}"


def settings_text(candidate: Candidate) -> str:
    """Return the settings that a candidate changes, in the format of a strategy file."""
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


def candidate_rows(shown: Sequence[Candidate]) -> list[list[str]]:
    """Return candidates as rows below a head. Leave out columns that no candidate fills."""
    modes = list(shown[0].reports)
    times = ["time" if len(modes) == 1 else f"{mode_name(mode)} time" for mode in modes]
    head = ["variant", "strategy", "mesh", "settings", *times, "memory per device", "sent"]
    layout = shown[0].report.layout
    assert layout is not None
    head += ["host link", f"between {layout.topology.group}s", "fits"]
    rows = [_row(candidate) for candidate in shown]
    # Columns by position in `head`: 0 has the variant, 3 the settings, -2 the bytes between slices,
    # and -3 the moves over the host link.
    absent = {0} if not any(candidate.variant for candidate in shown) else set()
    if not any(candidate.slice_bytes for candidate in shown):
        absent.add(len(head) - 2)
    if not any(candidate.host_bytes for candidate in shown):
        absent.add(len(head) - 3)
    absent |= {3} if not any(candidate.settings for candidate in shown) else set()
    return [[cell for at, cell in enumerate(row) if at not in absent] for row in (head, *rows)]


def _row(candidate: Candidate) -> list[str]:
    reports = candidate.reports.values()
    # All modes run on one mesh, so show the memory of the mode that needs most.
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
        _host_text(candidate),
        bytes_text(candidate.slice_bytes),
        fits if candidate.complete else f"{fits}, incomplete",
    ]


def _host_text(candidate: Candidate) -> str:
    """Return the bytes that a candidate moves over the host link, and the longest time for it."""
    if not candidate.host_bytes:
        return "-"
    times = [report.time for report in candidate.reports.values()]
    seconds = sum(time.host.high for time in times if time is not None)
    cost = f"at most {seconds_text(seconds)}" if seconds else "rate not known"
    return f"{bytes_text(candidate.host_bytes)}, {cost}"


def _time_text(report: PlanReport) -> str:
    assert report.time is not None
    return f"{seconds_text(report.time.low)} to {seconds_text(report.time.high)}"


@data_of.register(SearchReport)
def _search(found: SearchReport) -> dict[str, Any]:
    names = ("judged", "walked", "exhaustive", "dropped", "examples", "fixed_axes")
    return {"topology": str(found.topology), **named(found, *names, "front", "candidates")}


@data_of.register(Candidate)
def _candidate(candidate: Candidate) -> dict[str, Any]:
    reports = candidate.reports
    return {
        "variant": candidate.variant,
        "strategy": candidate.name,
        "mesh": dict(candidate.sizes),
        "settings": dict(candidate.settings),
        # The lower and the upper bound of the time.
        "seconds": [candidate.min_seconds, candidate.seconds],
        "memory": [
            max(report.memory.low for report in reports.values()),
            candidate.most_bytes,
        ],
        **named(candidate, "verdict", "sent_bytes", "slice_bytes", "host_bytes", "complete"),
        "modes": {
            mode_name(mode): {
                "seconds": seconds_of(report),
                "memory": report.memory.high,
                "sent_bytes": report.sent_bytes,
                "tokens": candidate.tokens.get(mode),
                "mfu": list(utilization(report)),
            }
            for mode, report in reports.items()
        },
    }


@data_of.register(VerifiedCandidate)
def _verified_candidate(verified: VerifiedCandidate) -> dict[str, Any]:
    compiled = {
        **named(verified, "seconds"),
        "memory": verified.most_bytes,
        **named(verified, "sent_bytes", "fits", "failures"),
    }
    return {**plain(verified.candidate), "compiled": compiled}
