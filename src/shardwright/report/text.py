"""Plain text for people: tables that keep to a width, sizes in binary units. Pure, and the same on every terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 120
_GAP = 2
_PROSE = 24  # characters: prose in a narrower column is no longer readable
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def table(
    rows: Sequence[Sequence[str]], *, indent: str = "", width: int = WIDTH, prose: int | None = None, whole: Sequence[int] = ()
) -> list[str]:
    """Lay out rows as aligned columns, the first row being the head; cells wrap at spaces where the lines would get too long.

    Args:
      rows: rows of equally many cells.
      indent: put in front of every line.
      width: characters per line, indent included; exceeded only where single words do not fit.
      prose: the column that wraps before any other does.
      whole: columns that never wrap.

    >>> table([("dim", "axis"), ("0", "BATCH")])
    ['dim  axis', '0    BATCH']
    """
    widths = _fit([list(column) for column in zip(*rows, strict=True)], width - len(indent), prose, whole)
    lines = []
    for row in rows:
        cells = [_wrap(cell, room) for cell, room in zip(row, widths, strict=True)]
        for at in range(max(map(len, cells))):
            parts = [(cell[at] if at < len(cell) else "").ljust(room) for cell, room in zip(cells, widths, strict=True)]
            lines.append((indent + (" " * _GAP).join(parts)).rstrip())
    return lines


def _fit(columns: list[list[str]], width: int, prose: int | None, whole: Sequence[int]) -> list[int]:
    """Return the width of each column: as long as its longest cell, shortened until the row fits."""
    widths = [max(map(len, column)) for column in columns]
    least = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    least = [widths[at] if at in whole else each for at, each in enumerate(least)]
    over = sum(widths) + _GAP * (len(widths) - 1) - width
    if prose is not None and over > 0:
        given = min(over, max(0, widths[prose] - max(least[prose], _PROSE)))
        widths[prose], over = widths[prose] - given, over - given
    while over > 0 and widths != least:
        widest = max((at for at in range(len(widths)) if widths[at] > least[at]), key=lambda at: widths[at])
        widths[widest], over = widths[widest] - 1, over - 1
    return widths


def _wrap(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, max(width, 1), break_long_words=False, break_on_hyphens=False) or [""]


def bytes_text(count: int) -> str:
    """Return a number of bytes in binary units.

    >>> bytes_text(512), bytes_text(3 * 2**29)
    ('512 B', '1.5 GiB')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
