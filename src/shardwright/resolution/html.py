"""HTML for notebooks: a table of decisions, and a picture of which device holds which part.

Colors are translucent, and lines have the color of the page's text. So one picture suits light and
dark pages. Everything that comes from a user is escaped.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from shardwright.errors import visible
from shardwright.resolution.partition_specs import spec_text
from shardwright.vocabulary.modes import mode_name

if TYPE_CHECKING:
    from shardwright.resolution.decisions import DimDecision, Resolution

# A picture has at most this many cells in each direction. A larger mesh has only a table.
MOST_CELLS: Final = 16
MOST_DEVICES: Final = 64
# A cell lists at most this many device numbers.
_MOST_NUMBERS: Final = 4
_WIDTH, _HEIGHT = 76, 30

_TABLE: Final = 'style="border-collapse: collapse; color: inherit; font-size: 0.9em"'
_CELL: Final = 'style="padding: 2px 10px; text-align: left; border-bottom: 1px solid #8884"'


def resolution_html(resolution: Resolution, head: Sequence[str], rows: Iterable[object]) -> str:
    """Return a resolution as HTML: its spec, the picture if it is small enough, and the table.

    Args:
      resolution: What to show.
      head: Names of the table's columns.
      rows: Rows of cells.
    """
    spec = "failed" if resolution.spec is None else spec_text(resolution.spec)
    title = f"{resolution.annotation} as {resolution.role} in {mode_name(resolution.mode)}"
    title = f"{resolution.path}: {title}" if resolution.path else title
    parts = [f"<div><b>{html_text(title)}</b> → <code>{html_text(spec)}</code></div>"]
    parts += [picture(resolution), table(head, rows)]
    parts += [f"<div>note: {html_text(note)}</div>" for note in resolution.notes]
    parts += [f"<pre>{html.escape(str(problem))}</pre>" for problem in resolution.problems]
    return f"<div>{''.join(parts)}</div>"


def table(head: Sequence[str], rows: Iterable[object]) -> str:
    """Return a table with escaped cells."""
    names = "".join(f"<th {_CELL}>{html_text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<table {_TABLE}><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def _cells(row: object) -> str:
    assert isinstance(row, tuple)
    return "".join(f"<td {_CELL}>{html_text(cell)}</td>" for cell in row)


def picture(resolution: Resolution) -> str:
    """Return an SVG with the numbers of the devices that hold each part, or an empty string.

    Devices are numbered in the order of the mesh, the last mesh axis fastest. There is no picture
    of a failed resolution, of a mesh with more than 64 devices, or of more than two sharded dims.
    """
    sizes = dict(resolution.mesh)
    if resolution.spec is None or not sizes or math.prod(sizes.values()) > MOST_DEVICES:
        return ""
    sharded = [
        decision
        for decision in resolution.decisions
        if math.prod(sizes.get(axis, 1) for axis in decision.mesh_axes) > 1
    ]
    if len(sharded) > 2:
        return ""
    directions: list[DimDecision | None] = [*[None] * (2 - len(sharded)), *sharded]
    rows, columns = directions
    holders = _holders(sizes, rows, columns)
    counts = _parts(sizes, rows), _parts(sizes, columns)
    if max(counts) > MOST_CELLS:
        return ""
    cells = [
        [_numbers(holders[row, column]) for column in range(counts[1])] for row in range(counts[0])
    ]
    captions = [
        f"{name}: {decision.label or f'dim {decision.dim}'}"
        f"{'' if decision.size is None else f' {decision.size}'}"
        f" over {'+'.join(decision.mesh_axes)}"
        for name, decision in (("Rows", rows), ("Columns", columns))
        if decision is not None
    ]
    caption = ". ".join(captions) or "Every device holds all of it"
    return grid(cells, f"Devices by the part that they hold. {caption}")


def _parts(sizes: dict[str, int], decision: DimDecision | None) -> int:
    axes = () if decision is None else decision.mesh_axes
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _holders(
    sizes: dict[str, int], rows: DimDecision | None, columns: DimDecision | None
) -> dict[tuple[int, int], list[int]]:
    """Return the numbers of the devices that hold each part, by its row and column."""
    holders: dict[tuple[int, int], list[int]] = {}
    positions = itertools.product(*map(range, sizes.values()))
    for number, position in enumerate(positions):
        at = dict(zip(sizes, position, strict=True))
        part = (_part(at, sizes, rows), _part(at, sizes, columns))
        holders.setdefault(part, []).append(number)
    return holders


def _part(at: dict[str, int], sizes: dict[str, int], decision: DimDecision | None) -> int:
    """Return the number of the part of a dim that a device holds. The first mesh axis is major."""
    index = 0
    for axis in () if decision is None else decision.mesh_axes:
        index = index * sizes.get(axis, 1) + at.get(axis, 0)
    return index


def _numbers(devices: Sequence[int]) -> str:
    """Return numbers of devices in one short line."""
    if len(devices) <= _MOST_NUMBERS:
        return ", ".join(map(str, devices))
    first, last = devices[0], devices[-1]
    if last - first + 1 == len(devices):
        return f"{first} to {last}"
    return f"{first}, {devices[1]}, … {last}"


def grid(cells: Sequence[Sequence[str]], caption: str) -> str:
    """Return an SVG of cells of text with a caption under it."""
    rows, columns = len(cells), len(cells[0])
    width, height = columns * _WIDTH + 2, rows * _HEIGHT + 2
    shapes = []
    for row, column in itertools.product(range(rows), range(columns)):
        x, y = column * _WIDTH + 1, row * _HEIGHT + 1
        hue = 360 * (row * columns + column) // (rows * columns)
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" stroke="currentColor" '
            f'stroke-opacity="0.4" fill="hsl({hue}, 70%, 50%)" fill-opacity="0.25"/>'
            f'<text x="{x + _WIDTH // 2}" y="{y + _HEIGHT // 2 + 4}" text-anchor="middle" '
            f'font-size="11" fill="currentColor">{html_text(cells[row][column])}</text>'
        )
    return (
        f'<figure style="margin: 6px 0"><svg role="img" aria-label="{html_text(caption)}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'style="max-width: 100%" font-family="sans-serif">{"".join(shapes)}</svg>'
        f'<figcaption style="font-size: 0.9em">{html_text(caption)}</figcaption></figure>'
    )


def html_text(value: object) -> str:
    """Return a value as text in HTML. Escape what is HTML, and what is not printable."""
    return html.escape(visible(str(value)))
