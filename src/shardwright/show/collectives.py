"""Show collectives as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.plan.collectives.collective import Collective
from shardwright.show.tables import remarked_table
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.shown import WIDTH
from shardwright.vocabulary.units import bytes_text

_HEAD = ("times", "collective", "over", "dtype", "bytes", "all times", "where")
_LONG = 40  # number of characters shown of an operation's name; the start is left out


def collectives_text(
    found: Sequence[Collective],
    *,
    carried: Mapping[str, Sequence[str]] | None = None,
    rows: int | None = None,
    width: int = WIDTH,
) -> str:
    """Return a table of collectives, most bytes first.

    Equal collectives of one source line share a row.

    Args:
      found: Result of `shardwright.plan.read_collectives`, or a part of it.
      carried: Mesh axis -> semantic axes, from `shardwright.plan.carried_axes`; shown below the
        table.
      rows: Number of rows to show. Defaults to all.
      width: Characters per line.
    """
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for collective in found:
        groups.setdefault(_row_key(collective), []).append(collective)
    ordered = sorted(groups.values(), key=_weight, reverse=True)
    visible = ordered if rows is None else ordered[:rows]
    if not visible:
        return "no collectives"
    lines = remarked_table([_HEAD, *map(_row, visible)], width=width)
    if len(visible) < len(ordered):
        lines.append(f"and {len(ordered) - len(visible)} more")
    # Only the axes of rows that are shown need an explanation.
    over = {axis for group in visible for collective in group for axis in collective.mesh_axes}
    for axis, names in (carried or {}).items():
        if axis in over:
            lines.append(f"{axis} may carry {', '.join(map(axis_label, names)) or 'no axis'}")
    return "\n".join(lines)


def over_text(collective: Collective) -> str:
    """Return the mesh axes of a collective as text.

    `dp+tp` means two axes. `tp (2 devices)` means a part of one axis. `dp (dcn)` means that the
    collective crosses slices.
    """
    axes = "+".join(collective.mesh_axes)
    if collective.between_slices:
        return f"{axes} (dcn)"
    return f"{axes} ({collective.devices} devices)" if collective.partial else axes


def _row_key(collective: Collective) -> tuple[str, ...]:
    """Return the cells that collectives of one row have in common."""
    dtype = (
        collective.dtype
        if collective.dtype == collective.wire_dtype
        else f"{collective.dtype} (as {collective.wire_dtype})"
    )
    # `unsure` is part of the key, so that a row never adds exact numbers of runs and upper bounds.
    if collective.count is None:
        unsure = "?"
    else:
        unsure = "≤" if collective.maybe else ""
    return (
        unsure,
        f"{collective.kind} (a gather)" if collective.gathers else str(collective.kind),
        over_text(collective),
        dtype,
        bytes_text(collective.logical_bytes),
        _place(collective),
    )


def _weight(group: Sequence[Collective]) -> int:
    # A collective in a loop of unknown length counts as one run, so that the group can be sorted.
    return sum(
        collective.logical_bytes if collective.total_bytes is None else collective.total_bytes
        for collective in group
    )


def _row(group: Sequence[Collective]) -> tuple[str, ...]:
    unsure, kind, over, dtype, each, where = _row_key(group[0])
    times = (
        unsure if unsure == "?" else f"{unsure}{sum(collective.count or 0 for collective in group)}"
    )
    every = "?" if unsure == "?" else bytes_text(_weight(group))
    return (times, kind, over, dtype, each, every, where)


def _place(collective: Collective) -> str:
    name = collective.op_name or collective.name
    # The end of an operation's name is the most specific scope; the ellipsis is one character.
    name = name if len(name) <= _LONG else "…" + name[1 - _LONG :]
    return f"{name} {collective.source.rpartition('/')[2]}".strip()
