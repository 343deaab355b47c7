"""Bars as HTML, without scripts and without anything from the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from shardwright.show.html import html_text

# Colors of the page, by position.
COLORS: Final = ("--a", "--b", "--c", "--d", "--e", "--f")
_WIDTH: Final = 1000  # units of a picture; it is scaled to the page
_LABEL: Final = 190
_VALUE: Final = 190
_ROW: Final = 24
_FAR: Final = 6  # a limit above this multiple of the parts is not drawn


def stacked_bar(
    parts: Mapping[str, int], *, low: int, usable: int | None, peak: int | None = None
) -> str:
    """Return memory as a bar of parts, with marks for the lower end, the limit and the peak.

    Args:
      parts: Name -> bytes at the upper end of the range.
      low: Bytes at the lower end.
      usable: Bytes that a program may use on the chip, or None.
      peak: Bytes that the compiled program needs, or None.
    """
    # The 1 keeps the scale finite for a program without bytes.
    whole = max(sum(parts.values()), peak or 0, 1)
    # If a limit were far to the right, the parts would be too small to read.
    usable = None if usable is None or usable > _FAR * whole else usable
    whole = max(whole, usable or 0)
    # A unit is free at each end, so that a mark on the edge is not cut off.
    scale = (_WIDTH - 2) / whole
    at, shapes = 1.0, []
    for position, size in enumerate(parts.values()):
        shapes.append(_rect(at, 22, size * scale, 22, COLORS[position % len(COLORS)]))
        at += size * scale
    marks = [("at least", low), ("compiled", peak), ("usable", usable)]
    placed = sorted((size, name) for name, size in marks if size is not None)
    # The texts are above and below the bar in turn, because marks may be close to each other.
    for level, (size, name) in enumerate(placed):
        x = 1 + size * scale
        anchor = "end" if x > _WIDTH / 2 else "start"  # the text stays inside the picture
        y = 14 if level % 2 == 0 else 62
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="17" y2="49" stroke="var(--text)"/>'
            f'<text class="quiet" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{name}</text>'
        )
    return _picture(66, "".join(shapes), "memory of one device")


def bars(values: Mapping[str, float], text: Callable[[float], str], *, label: str) -> str:
    """Return one bar per name, from zero."""
    return spans({name: (0.0, value, text(value)) for name, value in values.items()}, label=label)


def spans(values: Mapping[str, tuple[float, float, str]], *, label: str) -> str:
    """Return one bar per name, from its low to its high value.

    Args:
      values: Name -> low, high and the text beside the bar.
      label: What the picture shows, for readers who cannot see it.
    """
    # All values may be 0, and `room * low / most` divides by this.
    most = max((high for _, high, _ in values.values()), default=0.0) or 1.0
    room = _WIDTH - _LABEL - _VALUE
    shapes = []
    for row, (name, (low, high, text)) in enumerate(values.items()):
        y = row * _ROW
        start = _LABEL + room * low / most
        width = max(room * (high - low) / most, 1.5)  # a range of one value is a visible line
        shapes.append(
            f'<text x="0" y="{y + 16}">{html_text(_shortened(name))}</text>'
            f"{_rect(start, y + 5, width, 14, '--a')}"
            f'<text class="quiet" x="{start + width + 8:.1f}" y="{y + 16}">'
            f"{html_text(text)}</text>"
        )
    # Browsers do not draw a viewBox of height 0.
    return _picture(max(len(values) * _ROW, 1), "".join(shapes), label)


def key(names: Mapping[str, str]) -> str:
    """Return a legend: each color with a name and a text, in the order of the colors."""
    items = [
        f'<span><i style="background:var({COLORS[at % len(COLORS)]})"></i>'
        f"{html_text(name)} {html_text(text)}</span>"
        for at, (name, text) in enumerate(names.items())
    ]
    return f'<div class="key">{"".join(items)}</div>'


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="{height}" rx="2" '
        f'fill="var({color})"/>'
    )


def _picture(height: float, inner: str, label: str) -> str:
    return (
        f'<div class="wide"><svg viewBox="0 0 {_WIDTH} {math.ceil(height)}" role="img" '
        f'aria-label="{html_text(label)}">{inner}</svg></div>'
    )


def _shortened(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
