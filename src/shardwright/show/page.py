"""Show profiles as one HTML page that loads nothing else. It has a light and a dark mode."""

from __future__ import annotations

import importlib.resources

from shardwright.plan.profile.result import Profile
from shardwright.show.charts import bars
from shardwright.show.html import html_table, html_text
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
from shardwright.vocabulary.units import seconds_text


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
