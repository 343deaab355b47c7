"""Bars as HTML, without scripts and without anything from the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from shardwright.show.html import html_text

_WIDTH: Final = 1000  # units of a picture; it is scaled to the page
_LABEL: Final = 190
_VALUE: Final = 190
_ROW: Final = 24


def bars(values: Mapping[str, float], text: Callable[[float], str], *, label: str) -> str:
    """Return one bar per name, from zero.

    Args:
      values: Name -> value.
      text: Returns the text beside the bar of a value.
      label: What the picture shows, for readers who cannot see it.
    """
    # All values may be 0, and `room * value / most` divides by this.
    most = max(values.values(), default=0.0) or 1.0
    room = _WIDTH - _LABEL - _VALUE
    shapes = []
    for row, (name, value) in enumerate(values.items()):
        y = row * _ROW
        width = max(room * value / most, 1.5)  # 0 is a visible line
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
