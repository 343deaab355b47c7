"""Collectives as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.plan.collectives.read import Collective
from shardwright.plan.report.text import bytes_text
from shardwright.resolution.tables import WIDTH, remarked_table
from shardwright.vocabulary.axes import axis_label

_HEAD = ("times", "collective", "over", "dtype", "bytes", "all times", "where")
_LONG = 40  # characters of an operation's name: its end says most


def collectives_text(
    found: Sequence[Collective],
    *,
    carried: Mapping[str, Sequence[str]] | None = None,
    rows: int | None = None,
    width: int = WIDTH,
) -> str:
    """Lay out collectives for people, those with most bytes first; equal ones from one line of a program share a row.

    Args:
      found: what `shardwright.plan.read_collectives` returns, or a part of it.
      carried: mesh axis → semantic axes, as `shardwright.plan.carried_axes` returns them; added below.
      rows: show only so many rows; absent: all.
      width: characters per line.
    """
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for one in found:
        alike.setdefault(_alike(one), []).append(one)
    ordered = sorted(alike.values(), key=_weight, reverse=True)
    shown = ordered if rows is None else ordered[:rows]
    if not shown:
        return "no collectives"
    lines = remarked_table([_HEAD, *map(_row, shown)], width=width)
    if len(shown) < len(ordered):
        lines.append(f"and {len(ordered) - len(shown)} more")
    over = {axis for ones in shown for one in ones for axis in one.mesh_axes}
    for axis, names in (carried or {}).items():
        if axis in over:
            lines.append(f"{axis} may carry {', '.join(map(axis_label, names)) or 'no axis'}")
    return "\n".join(lines)


def over_text(one: Collective) -> str:
    """Return the mesh axes of a collective: `dp+tp`, `tp (2 devices)` for a part of an axis, `dp (dcn)` between slices."""
    axes = "+".join(one.mesh_axes)
    if one.between_slices:
        return f"{axes} (dcn)"
    return f"{axes} ({one.devices} devices)" if one.partial else axes


def _alike(one: Collective) -> tuple[str, ...]:
    """Return the cells that say what a collective is; those of one line of a program, layer by layer, share a row."""
    dtype = one.dtype if one.dtype == one.wire_dtype else f"{one.dtype} (as {one.wire_dtype})"
    unsure = "?" if one.count is None else "≤" if one.maybe else ""
    return (
        unsure,
        f"{one.kind} (a gather)" if one.gathers else str(one.kind),
        over_text(one),
        dtype,
        bytes_text(one.logical_bytes),
        _where(one),
    )


def _weight(ones: Sequence[Collective]) -> int:
    return sum(one.logical_bytes if one.total_bytes is None else one.total_bytes for one in ones)


def _row(ones: Sequence[Collective]) -> tuple[str, ...]:
    unsure, kind, over, dtype, each, where = _alike(ones[0])
    times = unsure if unsure == "?" else f"{unsure}{sum(one.count or 0 for one in ones)}"
    every = "?" if unsure == "?" else bytes_text(_weight(ones))
    return (times, kind, over, dtype, each, every, where)


def _where(one: Collective) -> str:
    name = one.op_name or one.name
    name = name if len(name) <= _LONG else "…" + name[1 - _LONG :]
    return f"{name} {one.source.rpartition('/')[2]}".strip()
