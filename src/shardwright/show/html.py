"""Tables and pictures as HTML.

Colors are translucent, and lines have the color of the page's text. So one picture suits light and
dark pages. Everything that comes from a user is escaped.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from shardwright.errors import visible

# A picture has at most this many cells in each direction. A larger mesh has only a table.
MOST_CELLS: Final = 16
MOST_DEVICES: Final = 64
_WIDTH, _HEIGHT = 76, 30
LONGEST_CELL: Final = 12  # characters that fit into a cell

_TABLE: Final = 'style="border-collapse: collapse; color: inherit; font-size: 0.9em"'
_CELL: Final = 'style="padding: 2px 10px; text-align: left; border-bottom: 1px solid #8884"'


def html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    code: Sequence[int] = (),
    inline: bool = False,
) -> str:
    """Return a table with escaped cells.

    Args:
      head: Titles of the columns.
      rows: Cells as plain text.
      numbers: Columns that are aligned to the right on a page.
      code: Columns in the typeface of code.
      inline: Whether each cell carries its own style. A notebook needs this, because it does not
        have `page.css`.
    """
    usual = f" {_CELL}" if inline else ""
    aligned = usual if inline else ' class="number"'

    def line(tag: str, row: Sequence[str]) -> str:
        cells = []
        for at, text in enumerate(row):
            inner = html_text(text)
            if tag == "td" and at in code and text:
                inner = f"<code>{inner}</code>"
            cells.append(f"<{tag}{aligned if at in numbers else usual}>{inner}</{tag}>")
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    table = f"<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"
    # On a page, a table that is wider than the window has a scroll bar of its own.
    return f"<table {_TABLE}>{table}" if inline else f'<div class="wide"><table>{table}</div>'


def grid(
    cells: Sequence[Sequence[str]],
    caption: str,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    at: tuple[int, int] = (0, 1),
) -> str:
    """Return an SVG of cells of text with a caption under it.

    Args:
      cells: Rows of texts.
      caption: Text under the picture.
      rows: Names on the left of the rows. Defaults to none.
      columns: Names above the columns. Defaults to none.
      at: Number of this picture, and how many pictures there are. Pictures have different colors.
    """
    left, top = _WIDTH if any(rows) else 0, _HEIGHT * 2 // 3 if any(columns) else 0
    count = len(cells) * len(cells[0])
    # Add one unit on each side, for half of the width of a line.
    width, height = left + len(cells[0]) * _WIDTH + 2, top + len(cells) * _HEIGHT + 2
    middle = _HEIGHT // 2 + 4
    shapes = [
        *(
            _text(left - 8, top + row * _HEIGHT + 1 + middle, name, "end")
            for row, name in enumerate(rows)
            if name
        ),
        *(
            _text(left + column * _WIDTH + 1 + _WIDTH // 2, top - 6, name)
            for column, name in enumerate(columns)
            if name
        ),
    ]
    for row, column in itertools.product(range(len(cells)), range(len(cells[0]))):
        x, y = left + column * _WIDTH + 1, top + row * _HEIGHT + 1
        # Spread the hues over the whole color circle.
        hue = 360 * (at[0] * count + row * len(cells[0]) + column) // (at[1] * count)
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" stroke="currentColor" '
            f'stroke-opacity="0.4" fill="hsl({hue}, 70%, 50%)" fill-opacity="0.25"/>'
            f"{_text(x + _WIDTH // 2, y + middle, cells[row][column])}"
        )
    return (
        f'<figure style="margin: 6px 0"><svg role="img" aria-label="{html_text(caption)}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'style="max-width: 100%; height: auto" font-family="sans-serif">{"".join(shapes)}</svg>'
        f'<figcaption style="font-size: 0.9em">{html_text(caption)}</figcaption></figure>'
    )


def _text(x: int, y: int, text: str, anchor: str = "middle") -> str:
    # Squeeze a longer text, such as a list of devices, because it would run into the next cell.
    squeezed = f' textLength="{_WIDTH - 8}" lengthAdjust="spacingAndGlyphs"'
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor"'
        f"{squeezed if len(text) > LONGEST_CELL else ''}>{html_text(text)}</text>"
    )


def html_text(value: object) -> str:
    """Return a value as text in HTML. Escape HTML and characters that are not printable."""
    return html.escape(visible(str(value)))
