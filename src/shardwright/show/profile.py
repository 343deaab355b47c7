"""Show a profile beside its plan: time by semantic axis, by collective and by line.

`profile_html` returns one HTML page, which loads nothing else and has no scripts.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from shardwright.plan.profile.result import LineTime, MeasuredAxis, MeasuredCollective, Profile
from shardwright.show.html import html_table, html_text
from shardwright.show.plain import named, plain
from shardwright.show.plan import event_row, grouped_events
from shardwright.show.tables import remarked_table, table
from shardwright.show.verification import reason_texts
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.shown import WIDTH, data_of, text_of
from shardwright.vocabulary.units import bytes_text, seconds_text

AXIS_HEAD: Final = ("axis", "over", "planned", "sent", "time", "exposed", "rate", "of")
OP_HEAD: Final = ("times", "collective", "over", "axis", "bytes", "time", "exposed", "where")
LINE_HEAD: Final = ("compute", "share", "operations", "where")
_ROWS: Final = 10


@text_of.register(Profile)
def profile_text(profile: Profile, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return a profile as text. For the options, see `Profile.text`."""
    rows = _ROWS if rows is None else rows
    lines = [*summary_lines(profile), ""]
    if profile.axes:
        lines += [*table([AXIS_HEAD, *map(axis_row, profile.axes)], width=width), ""]
    for head, cells in (
        (OP_HEAD, [collective_row(each) for each in profile.collectives]),
        (LINE_HEAD, [line_row(each, profile) for each in profile.lines]),
    ):
        if cells:
            lines += remarked_table([head, *cells[:rows]], width=width)
            lines += [f"and {len(cells) - rows} more"] if len(cells) > rows else []
            lines.append("")
    lines += difference_lines(profile)
    return "\n".join(lines).rstrip()


def summary_lines(profile: Profile) -> list[str]:
    """Return lines with the program, the time of one run, and the parts of this time."""
    runs = "1 run" if profile.runs == 1 else f"{profile.runs} runs"
    devices = "1 device" if profile.devices == 1 else f"{profile.devices} devices"
    where = profile.layout.topology if profile.layout else profile.platform.upper()
    if profile.report.layout and not profile.layout:
        where = f"{where}, planned for {profile.report.layout.topology}"
    planned = profile.report.time
    beside = (
        f"; planned {seconds_text(planned.low)} to {seconds_text(planned.high)}" if planned else ""
    )
    parts = ", ".join(
        f"{name} {seconds_text(seconds)} ({_share(seconds, profile)})"
        for name, seconds in (
            ("compute", profile.compute),
            ("exposed collectives", profile.exposed),
            ("idle", profile.idle),
        )
    )
    lines = [
        f"{profile.program}: {runs} on {devices}, {where}",
        f"one run: {seconds_text(profile.seconds)}{beside}",
        f"  {parts}",
    ]
    if profile.flops_rate is not None:
        chip = profile.layout.topology.chip if profile.layout else None
        peak = f" of {chip.flops / 1e12:g}" if chip else ""
        rate = f"{profile.flops_rate / 1e12:.4g}{peak} TFLOP/s"
        lines.append(f"  matmuls {seconds_text(profile.matmuls)}: {rate} of the planned operations")
    return lines


def axis_row(axis: MeasuredAxis) -> tuple[str, ...]:
    """Return the cells of a semantic axis, in the order of `AXIS_HEAD`."""
    peak = "" if axis.peak is None else " to ".join(dict.fromkeys(map(_rate, axis.peak)))
    return (
        _label(axis.axes),
        "+".join(axis.mesh_axes),
        bytes_text(axis.planned),
        bytes_text(axis.sent),
        seconds_text(axis.seconds),
        seconds_text(axis.exposed),
        "-" if axis.rate is None else _rate(axis.rate),
        peak or "-",
    )


def collective_row(each: MeasuredCollective) -> tuple[str, ...]:
    """Return the cells of a collective, in the order of `OP_HEAD`."""
    collective = each.collective
    return (
        str(each.count),
        str(collective.kind),
        "+".join(collective.mesh_axes),
        _label(tuple(dict.fromkeys(event.axes for event in each.planned))),
        bytes_text(collective.logical_bytes),
        seconds_text(each.seconds),
        seconds_text(each.exposed),
        collective.source.rpartition("/")[2] or each.op,
    )


def line_row(line: LineTime, profile: Profile) -> tuple[str, ...]:
    """Return the cells of a line of the model, in the order of `LINE_HEAD`."""
    share = _share(line.seconds, profile)
    return seconds_text(line.seconds), share, str(line.ops), line.source or "-"


def difference_lines(profile: Profile) -> list[str]:
    """Return how program and plan differ, such as collectives that only one of them has."""
    # Equal collectives share a line: an unrolled model has one for each layer.
    unplanned: dict[tuple[str, ...], list[MeasuredCollective]] = {}
    for each in profile.unplanned:
        _, kind, over, _, size, _, _, where = collective_row(each)
        unplanned.setdefault((kind, over, size, where), []).append(each)
    lines = []
    for (kind, over, size, where), members in unplanned.items():
        count, seconds = sum(each.count for each in members), sum(each.seconds for each in members)
        took = seconds_text(seconds)
        lines.append(f"not planned: {count} {kind} over {over} of {size} at {where}, {took}")
    for events in grouped_events(profile.missing):
        times, kind, over, axis, size, _, where = event_row(events)
        lines.append(
            f"not in the program: {times} {kind} over {over} of {size} at {where} ({axis})"
        )
    for sent in profile.traffic:
        lines += [f"{'+'.join(sent.mesh_axes)}: {text}" for text in reason_texts(sent)]
    others = sorted(profile.others.items(), key=lambda item: -item[1])
    lines += [f"also in the profile: {name}, {seconds_text(took)}" for name, took in others]
    return lines


def _label(axes: tuple[tuple[str, ...], ...]) -> str:
    """Return semantic axes as text; `A or B` are alternatives."""
    if not axes:
        return "not planned"
    return " or ".join(", ".join(map(axis_label, each)) or "-" for each in axes)


def _share(seconds: float, profile: Profile) -> str:
    return f"{seconds / profile.seconds:.1%}" if profile.seconds else "-"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s"


@data_of.register(Profile)
def profile_data(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain data."""
    names = ("program", "platform", "devices", "runs", "seconds", "compute", "exposed", "idle")
    rest = ("matmuls", "flops_rate", "axes", "lines", "traffic", "missing", "others")
    collectives = [
        {
            **named(each, "op", "count", "seconds", "exposed", "fastest", "collective"),
            "axes": plain(tuple(dict.fromkeys(event.axes for event in each.planned))),
        }
        for each in profile.collectives
    ]
    planned = None if profile.report.time is None else profile.report.time.to_json()
    return {
        **named(profile, *names),
        "planned": planned,
        **named(profile, *rest),
        "collectives": collectives,
    }


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
    # The page has its style inside, so that one file can be sent to somebody.
    style = importlib.resources.files("shardwright.show") / "page.css"
    name, content = html_text(title), "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title>\n<style>\n{style.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><h1>{name}</h1>{content}\n</body></html>\n"
    )


_WIDTH: Final = 1000  # units of a picture; it is scaled to the page
_LABEL: Final = 190
_VALUE: Final = 190
_ROW: Final = 24


def bars(values: Mapping[str, float], text: Callable[[float], str], *, label: str) -> str:
    """Return a picture with one bar per name. All bars begin at zero.

    Args:
      values: Name -> value.
      text: Returns the text beside the bar of a value.
      label: Description of the picture, for readers who cannot see it.
    """
    # Avoid 0, because all values may be 0, and `room * value / most` divides by `most`.
    most = max(values.values(), default=0.0) or 1.0
    room = _WIDTH - _LABEL - _VALUE
    shapes = []
    for row, (name, value) in enumerate(values.items()):
        y = row * _ROW
        width = max(room * value / most, 1.5)  # a value of 0 is a thin line
        shapes.append(
            f'<text x="0" y="{y + 16}">{html_text(_shortened(name))}</text>'
            f'<rect x="{_LABEL}" y="{y + 5}" width="{width:.1f}" height="14" rx="2" '
            f'fill="var(--a)"/><text class="quiet" x="{_LABEL + width + 8:.1f}" y="{y + 16}">'
            f"{html_text(text(value))}</text>"
        )
    # Browsers do not draw a viewBox of height 0.
    height = max(math.ceil(len(values) * _ROW), 1)
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html_text(label)}">{"".join(shapes)}</svg></div>'
    )


def _shortened(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
