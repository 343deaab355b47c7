"""Show the collectives of a plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from shardwright.plan.report.text import bytes_text
from shardwright.plan.walk.events import Event
from shardwright.resolution.tables import WIDTH, remarked_table
from shardwright.vocabulary.axes import axis_label

EVENT_HEAD: Final = ("times", "collective", "over", "axis", "bytes", "sent", "where")


def event_lines(
    events: Sequence[Event], *, rows: int | None = None, width: int = WIDTH
) -> list[str]:
    """Return a table of collectives, most bytes first, and the sum of their bytes.

    Args:
      events: Collectives of a plan.
      rows: How many rows to show. Defaults to all.
      width: Characters per line.
    """
    groups = grouped_events(events)
    if not groups:
        return ["nothing is sent"]
    shown = groups if rows is None else groups[:rows]
    table = remarked_table([EVENT_HEAD, *map(event_row, shown)], width=width)
    if len(shown) < len(groups):
        table.append(f"and {len(groups) - len(shown)} more")
    most = "at most " if any(event.maybe for event in events) else ""
    return [*table, f"sent per device: {most}{bytes_text(sent_bytes(events))}"]


def grouped_events(events: Sequence[Event]) -> list[list[Event]]:
    """Return groups of collectives with equal kind, axes, bytes and line, most bytes sent first."""
    groups: dict[tuple[Any, ...], list[Event]] = {}
    for event in events:
        key = (
            *(event.kind, event.mesh_axes, event.axes, event.logical_bytes, event.source),
            event.maybe,
        )
        groups.setdefault(key, []).append(event)
    return sorted(groups.values(), key=sent_bytes, reverse=True)


def sent_bytes(events: Sequence[Event]) -> int:
    """Return the bytes that one device sends in all runs of some collectives."""
    return sum(event.total_wire_bytes for event in events)


def event_row(events: Sequence[Event]) -> tuple[str, ...]:
    """Return the cells of a group, in the order of `EVENT_HEAD`."""
    event = events[0]
    times = sum(each.runs for each in events)
    return (
        f"≤{times}" if event.maybe else str(times),
        str(event.kind),
        "+".join(event.mesh_axes),
        ", ".join(map(axis_label, event.axes)) or "-",
        bytes_text(event.logical_bytes),
        bytes_text(sent_bytes(events)),
        event.source,
    )
