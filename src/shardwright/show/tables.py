"""Lay out tables as plain text of a fixed width, the same on every terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from shardwright.errors import LONGEST_TEXT, shortened, visible
from shardwright.vocabulary.shown import WIDTH

_GAP = 2
_PROSE = 24  # characters: prose in a narrower column is hard to read
# The space in 1.5 MiB, 12 µs or 45 GB/s.
_BEFORE_UNIT = re.compile(r"(?<=[0-9]) (?=(?:[KMGTP]i?)?B\b|[mnµ]?s\b)")
_JOINED = "\0"  # not in texts (`visible` escapes it), and `textwrap` does not break at it


def table(
    rows: Sequence[Sequence[str]],
    *,
    indent: str = "",
    width: int = WIDTH,
    prose: int | None = None,
    whole: Sequence[int] = (),
) -> list[str]:
    """Lay out rows as aligned columns. The first row is the head.

    If a line is too long, cells wrap at spaces.

    Args:
      rows: Rows with the same number of cells.
      indent: Text in front of every line.
      width: Characters per line, indent included. A line is longer only if its words do not fit.
      prose: The column that wraps before any other column, or None.
      whole: Columns that never wrap.

    >>> table([("dim", "axis"), ("0", "BATCH")])
    ['dim  axis', '0    BATCH']
    """
    rows = _visible(rows)
    widths = _fit(_columns(rows), width - len(indent), prose, whole)
    return [indent + line for row in rows for line in _row_lines(row, widths)]


def remarked_table(
    rows: Sequence[Sequence[str]], *, indent: str = "", width: int = WIDTH
) -> list[str]:
    r"""Lay out rows whose last cell is a remark.

    If there is enough room, the remarks are the last column. Otherwise each remark is below its
    row, from the second column to the end of the line.

    >>> print(
    ...     *remarked_table([("dim", "axis", "why"), ("0", "BATCH", "dp has size 1")], width=20),
    ...     sep="\n",
    ... )
    dim  axis
         why
    0    BATCH
         dp has size 1
    """
    rows = _visible(rows)
    *others, remarks = [max(map(len, column)) for column in _columns(rows)]
    room = width - len(indent) - sum(others) - _GAP * len(others)
    words = [word for row in rows for word in _joined(row[-1]).split()]
    # Keep one table if the remarks need no line breaks, or if their column is wide enough to read.
    if room >= min(remarks, max(_PROSE, *map(len, words))):
        return table(rows, indent=indent, width=width, prose=len(others))
    widths = _fit(_columns([row[:-1] for row in rows]), width - len(indent), None, ())
    margin = " " * (widths[0] + _GAP)
    lines = []
    for row in rows:
        lines += _row_lines(row[:-1], widths)
        lines += [margin + part for part in wrap(row[-1], width - len(indent) - len(margin))]
    return [indent + line for line in lines]


def _visible(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[shortened(visible(cell), LONGEST_TEXT) for cell in row] for row in rows]


def _columns(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _row_lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of one row, each cell wrapped to the width of its column."""
    cells = [wrap(cell, room) for cell, room in zip(row, widths, strict=True)]
    height = max(map(len, cells))
    padded = [[*cell, *[""] * (height - len(cell))] for cell in cells]
    lines = zip(*padded, strict=True)
    return [
        (" " * _GAP)
        .join(part.ljust(room) for part, room in zip(line, widths, strict=True))
        .rstrip()
        for line in lines
    ]


def _fit(
    columns: list[list[str]], width: int, prose: int | None, whole: Sequence[int]
) -> list[int]:
    """Return the width of each column: that of its longest cell, reduced until the row fits."""
    widths = [max(map(len, column)) for column in columns]
    # Words stay whole, so a column is at least as wide as its longest word.
    min_widths = [
        max((len(word) for cell in column for word in _joined(cell).split()), default=0)
        for column in columns
    ]
    min_widths = [widths[at] if at in whole else each for at, each in enumerate(min_widths)]
    over = sum(widths) + _GAP * (len(widths) - 1) - width
    if prose is not None and over > 0:
        reduction = min(over, max(0, widths[prose] - max(min_widths[prose], _PROSE)))
        widths[prose], over = widths[prose] - reduction, over - reduction
    while over > 0 and widths != min_widths:
        widest = max(
            (at for at in range(len(widths)) if widths[at] > min_widths[at]),
            key=lambda at: widths[at],
        )
        # One character less may move a whole word to the next line. The column can then shrink
        # further.
        narrower = max(
            len(line) for cell in columns[widest] for line in wrap(cell, widths[widest] - 1)
        )
        over -= widths[widest] - narrower
        widths[widest] = narrower
    return widths


def wrap(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Wrap text at spaces, but not between a number and its unit.

    Paths, specs and rules are long words that a reader copies, so they stay whole.

    Args:
      text: One paragraph.
      width: Characters per line. A line is longer only if it is a single word.
      first: Text in front of the first line.
      rest: Text in front of all other lines.

    >>> wrap("at most 512.0 KiB", 13)
    ['at most', '512.0 KiB']
    """
    lines = textwrap.wrap(
        _joined(text),
        max(width, 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_JOINED, " ") for line in lines] or [first]


def _joined(text: str) -> str:
    return _BEFORE_UNIT.sub(_JOINED, text)
