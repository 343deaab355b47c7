"""Show plans as one HTML page that loads nothing else. It has a light and a dark mode."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping

from shardwright.plan.fit import Verdict
from shardwright.plan.planner import PlanReport
from shardwright.plan.profile.result import Profile
from shardwright.plan.search.result import SearchReport
from shardwright.plan.verify.run import Verification
from shardwright.show.charts import bars, key, spans, stacked_bar
from shardwright.show.html import html_table, html_text
from shardwright.show.plan import (
    CAUSE_HEAD,
    EVENT_HEAD,
    LIVE_HEAD,
    STATE_HEAD,
    cause_rows,
    event_row,
    grouped_events,
    live_rows,
    state_row,
    time_rows,
    unsure_lines,
)
from shardwright.show.profile import (
    AXIS_HEAD,
    LINE_HEAD,
    OP_HEAD,
    axis_row,
    collective_row,
    difference_lines,
    line_row,
    summary_lines,
)
from shardwright.show.search import advice_lines, candidate_rows, count_lines
from shardwright.show.verification import (
    MEMORY_HEAD,
    SENT_HEAD,
    memory_rows,
    reason_texts,
    refusal_text,
    sent_rows,
)
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.units import bytes_text, seconds_text

_WORDS = {
    Verdict.FITS: ("fits", "good"),
    Verdict.DOES_NOT_FIT: ("does not fit", "bad"),
    Verdict.CLOSE: ("close", "warn"),
}


def plan_html(
    reports: Mapping[str, PlanReport],
    *,
    title: str = "Plan",
    verified: Mapping[str, Verification] | None = None,
) -> str:
    """Return plans as one HTML page. It loads nothing, and follows the reader's light or dark mode.

    Args:
      reports: Name of a mode -> its plan.
      title: Title of the page, such as the model's name.
      verified: Name of a mode -> its verification, for the modes that were compiled.

    >>> page = plan_html({}, title="a < b")
    >>> "a &lt; b" in page, "http" in page
    (True, False)
    """
    links = "".join(f'<a href="#{html_text(mode)}">{html_text(mode)}</a>' for mode in reports)
    sections = [
        f'<section id="{html_text(mode)}"><h2>{html_text(mode)}</h2>'
        f"{''.join(_section(report, (verified or {}).get(mode)))}</section>"
        for mode, report in reports.items()
    ]
    body = (
        "<p>What each device holds, computes and sends in one run. The program was not run.</p>"
        f"<nav>{links if len(reports) > 1 else ''}</nav>\n{chr(10).join(sections)}"
    )
    return _page(title, body)


def search_html(searches: Mapping[str, SearchReport], *, title: str = "Search") -> str:
    """Return searches as one HTML page: what to use, the table, and the plan of what to use.

    Args:
      searches: Names of modes, such as `prefill+decode` -> the result.
      title: Title of the page, such as the model's name.
    """
    body = []
    for name, found in searches.items():
        body.append(f"<h2>{html_text(name)}</h2>")
        body += [f"<p><b>{html_text(' '.join(advice_lines(found)))}</b></p>"]
        if found.best is None:
            continue
        head, *rows = candidate_rows(found.front)
        body.append(html_table(head, rows, code=(1,)))
        body += [f"<p>{html_text(line)}</p>" for line in count_lines(found)]
        for mode, report in found.best.reports.items():
            body.append(f"<section><h2>{html_text(mode_name(mode))}: what to use</h2>")
            body += [*_section(report, None), "</section>"]
    return _page(title, "\n".join(body))


def profile_html(profile: Profile, *, title: str = "Profile") -> str:
    """Return a profile beside its plan as one HTML page.

    Args:
      profile: The profile.
      title: Title of the page, such as the model's name.
    """
    body = [f"<p>{html_text(line)}</p>" for line in summary_lines(profile)]
    parts = {"compute": profile.compute, "exposed": profile.exposed, "idle": profile.idle}
    body.append(bars(parts, seconds_text, label="time of one device in one run"))
    axes = {f"{row[0]} over {row[1]}": axis for axis in profile.axes for row in [axis_row(axis)]}
    if axes:
        body.append("<h3>Exposed time of collectives, by semantic axis</h3>")
        exposed = {name: axis.exposed for name, axis in axes.items()}
        body.append(bars(exposed, seconds_text, label="exposed time by semantic axis"))
    for name, head, rows, numbers in (
        ("By semantic axis", AXIS_HEAD, [*map(axis_row, profile.axes)], (2, 3, 4, 5, 6)),
        ("Collectives", OP_HEAD, [*map(collective_row, profile.collectives)], (0, 4, 5, 6)),
        ("Compute", LINE_HEAD, [line_row(each, profile) for each in profile.lines], (0, 1, 2)),
    ):
        if rows:
            code = (len(head) - 1,) if head[-1] == "where" else ()
            body += [f"<h3>{name}</h3>", html_table(head, rows, numbers=numbers, code=code)]
    differences = "".join(f"<li>{html_text(line)}</li>" for line in difference_lines(profile))
    if differences:
        body.append(f"<h3>Beside the plan</h3><ul>{differences}</ul>")
    return _page(title, "\n".join(body))


def _page(title: str, body: str) -> str:
    # The page has its style inside, so that one file can be sent to somebody.
    style = importlib.resources.files("shardwright.show") / "page.css"
    name = html_text(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title>\n<style>\n{style.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><h1>{name}</h1>{body}\n</body></html>\n"
    )


def _section(report: PlanReport, verification: Verification | None) -> Iterator[str]:
    layout = f"; {report.layout}" if report.layout is not None else ""
    yield f"<p>Strategy <b>{html_text(report.strategy or '-')}</b> on {html_text(report.mesh)}"
    yield f"{html_text(layout)}</p>"
    yield f"<p>{html_text('; '.join(map(str, report.attention)))}</p>" if report.attention else ""
    yield f'<div class="tiles">{"".join(_tiles(report, verification))}</div>'
    yield from _memory(report, verification)
    yield from _time(report)
    yield from _traffic(report)
    yield from _state(report)
    if verification is not None:
        yield from _verification(verification)
    unsure = unsure_lines(report)
    if unsure:
        items = "".join(f"<li>{html_text(line)}</li>" for line in unsure)
        yield "<h3>Where the plan is unsure</h3><p>In these places a compiler may decide otherwise."
        yield f"</p><ul>{items}</ul>"


def _tiles(report: PlanReport, verification: Verification | None) -> Iterator[str]:
    verdict = report.verdict if verification is None else verification.verdict
    if verdict is not None:
        word, style = _WORDS[verdict]
        how = "planned" if verification is None else "compiled"
        yield _tile("verdict", word, how, style=style)
    span = f"{bytes_text(report.memory.low)} to {bytes_text(report.memory.high)}"
    peak = None if verification is None else verification.compiled.peak
    if peak is None:
        yield _tile("memory per device", span, "planned, at least to at most")
    else:
        yield _tile("memory per device", bytes_text(peak), f"compiled; planned {span}")
    if report.time is not None:
        times = f"{seconds_text(report.time.low)} to {seconds_text(report.time.high)}"
        yield _tile("time of one run", times, "from full overlap to none; not calibrated")
    yield _tile("sent per device", bytes_text(report.sent_bytes), "planned, in all collectives")
    stored = report.state.stored
    yield _tile("copies in the state", f"{stored.replicated_share:.1%}", "of its bytes")


def _tile(name: str, value: str, remark: str, *, style: str = "") -> str:
    return (
        f'<div class="tile"><span>{html_text(name)}</span>'
        f'<b class="{style}">{html_text(value)}</b><span>{html_text(remark)}</span></div>'
    )


def _memory(report: PlanReport, verification: Verification | None) -> Iterator[str]:
    memory = report.memory
    parts = dict(sorted(memory.kinds.items(), key=lambda item: -item[1]))
    usable = None if report.layout is None else report.layout.topology.chip.hbm_bytes
    peak = None if verification is None else verification.compiled.peak
    yield "<h3>Memory of one device, at most</h3>"
    yield stacked_bar(parts, low=memory.low, usable=usable, peak=peak)
    yield key({name: bytes_text(size) for name, size in parts.items()})
    if usable is not None and report.layout is not None:
        share = f"{bytes_text(memory.high)} of {bytes_text(usable)}"
        yield f"<p>{share} usable on {html_text(report.layout.topology.chip.name)}.</p>"
    rows = live_rows(memory.live)
    if rows:
        yield html_table(LIVE_HEAD, rows, numbers=(0, 1))


def _time(report: PlanReport) -> Iterator[str]:
    if report.time is None or report.layout is None:
        return
    rows = time_rows(report.time, report.layout)
    yield "<h3>Time of one run</h3>"
    yield spans(
        {
            name: (low, high, f"{seconds_text(low)} to {seconds_text(high)}")
            for name, low, high, _ in rows
        },
        label="time of each part, at least and at most",
    )
    yield f"<p>Assumed: {html_text('; '.join(f'{name}: {how}' for name, _, _, how in rows))}.</p>"


def _traffic(report: PlanReport) -> Iterator[str]:
    yield "<h3>What one device sends</h3>"
    if not report.events:
        yield "<p>Nothing is sent.</p>"
        return
    mesh = {"+".join(axes): float(sent) for axes, sent in report.by_mesh_axes().items()}
    axes = {axis_label(axis) or "-": float(sent) for axis, sent in report.by_axis().items()}
    for label, sent in (("over mesh axes", mesh), ("because of semantic axes", axes)):
        ordered = dict(sorted(sent.items(), key=lambda item: -item[1]))
        yield f"<p>{label.capitalize()}:</p>"
        yield bars(ordered, lambda size: bytes_text(int(size)), label=label)
    rows = [event_row(group) for group in grouped_events(report.events)]
    yield html_table(EVENT_HEAD, rows, numbers=(0, 4, 5), code=(6,))


def _state(report: PlanReport) -> Iterator[str]:
    state = report.state
    if not state.leaves:
        return
    yield "<h3>State</h3>"
    rows = [state_row(state, category) for category in state.categories]
    yield html_table(STATE_HEAD, rows, numbers=(1, 2, 3, 4))
    causes = cause_rows(state)
    if causes:
        yield "<h3>Why state is replicated</h3>"
        yield html_table(CAUSE_HEAD, causes, numbers=(1, 2), code=(3,))


def _verification(verification: Verification) -> Iterator[str]:
    compiled = verification.compiled
    yield f"<h3>Compiled by {html_text(compiled.target.compiler)}</h3>"
    if compiled.refused:
        yield f'<p class="bad">does not fit: {html_text(refusal_text(compiled))}</p>'
        return
    yield html_table(MEMORY_HEAD, list(memory_rows(verification)), numbers=(1, 2))
    rows = [row for sent in verification.traffic for row in sent_rows(sent)]
    yield html_table(SENT_HEAD, rows, numbers=(2, 3))
    reasons = [
        f"<li>{html_text('+'.join(sent.mesh_axes))}: {html_text(text)}</li>"
        for sent in verification.traffic
        for text in reason_texts(sent)
    ]
    yield f"<ul>{''.join(reasons)}</ul>"
