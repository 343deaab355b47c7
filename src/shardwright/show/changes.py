"""Show what changes between two plans."""

from __future__ import annotations

from typing import Any

from shardwright.plan.compare_plans import PlanComparison, QuantityChange, Traffic
from shardwright.show.plain import named
from shardwright.show.tables import remarked_table, table
from shardwright.vocabulary.axes import axis_label
from shardwright.vocabulary.shown import WIDTH, data_of
from shardwright.vocabulary.units import bytes_text, seconds_text

_HEAD = ("on each device", "before", "after", "change")
_TRAFFIC = ("collective", "over", "axis", "times", "sent before", "sent after", "where")
_MOVED = 5  # number of moved source lines that are named


def changes_text(comparison: PlanComparison, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return the differences of two plans: quantities, collectives, and where the plans are unsure.

    Args:
      comparison: Both plans, compared.
      rows: How many rows of collectives to show. Defaults to all.
      width: Characters per line.
    """
    lines = [f"- {comparison.before}", f"+ {comparison.after}", ""]
    if not comparison.changed:
        return "\n".join([*lines, "both plans are equal", *_moved_lines(comparison)])
    changes = [change for change in comparison.changes if change.changed]
    if changes:
        lines += table([_HEAD, *map(_change_row, changes)], width=width)
    # Equal rows are counted below the table, so that the table shows only changes.
    traffic = [row for row in comparison.traffic if row.changed]
    shown = traffic if rows is None else traffic[:rows]
    if shown:
        lines += ["", *remarked_table([_TRAFFIC, *map(_traffic_row, shown)], width=width)]
    if len(shown) < len(traffic):
        lines.append(f"and {len(traffic) - len(shown)} more")
    same = len(comparison.traffic) - len(traffic)
    if same:
        lines.append(f"{same} other {'row' if same == 1 else 'rows'} of collectives are equal")
    lines += [f"- {text}" for text in comparison.gone]
    lines += [f"+ {text}" for text in comparison.new]
    lines += _moved_lines(comparison)
    return "\n".join(lines)


def _moved_lines(comparison: PlanComparison) -> list[str]:
    """Return one line of text: the source lines that have new line numbers. Empty if none has."""
    places = [_place_text(old, new) for old, new in comparison.moved.items()]
    more = f" and {len(places) - _MOVED} more" if len(places) > _MOVED else ""
    return [f"moved: {', '.join(places[:_MOVED])}{more}"] if places else []


def _place_text(old: str, new: str) -> str:
    # `old` and `new` are lines of one file, so the line number of `new` is enough.
    return f"{old} -> {new.rpartition(':')[2]}"


def _change_row(change: QuantityChange) -> tuple[str, ...]:
    name = change.name
    if name.startswith("sent for "):
        name = f"sent for {axis_label(name.removeprefix('sent for '))}"
    sides = [_value_text(value, change.unit) for value in (change.before, change.after)]
    return (name, *sides, _share_text(change))


def _value_text(value: float | str | None, unit: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if unit == "s":
        return seconds_text(value)
    return bytes_text(int(value)) if unit == "B" else f"{value / 1e9:,.2f} G{unit}"


def _share_text(change: QuantityChange) -> str:
    """Return the change in percent, or as a factor if the factor is above 2.

    Returns:
      "" if a value is not a number, or if `before` is 0.
    """
    before, after = change.before, change.after
    if isinstance(before, str) or isinstance(after, str) or not before or after is None:
        return ""
    if after > 2 * before:
        return f"x {after / before:.1f}"
    return f"{(after - before) / before:+.1%}"


def _traffic_row(row: Traffic) -> tuple[str, ...]:
    (runs, sent), (runs_after, sent_after) = row.before, row.after
    return (
        str(row.kind),
        "+".join(row.mesh_axes),
        ", ".join(map(axis_label, row.axes)) or "-",
        str(runs) if runs == runs_after else f"{runs} -> {runs_after}",
        bytes_text(sent),
        bytes_text(sent_after),
        _place_text(row.moved_from, row.source) if row.moved_from else row.source,
    )


@data_of.register(PlanComparison)
def _comparison(comparison: PlanComparison) -> dict[str, Any]:
    unsure = {"before": list(comparison.gone), "after": list(comparison.new)}
    sides = named(comparison, "before", "after", "changes", "traffic")
    return {**sides, "unsure": unsure, **named(comparison, "moved", "changed")}


@data_of.register(Traffic)
def _traffic(row: Traffic) -> dict[str, Any]:
    sides = {
        side: dict(zip(("runs", "sent_bytes"), pair, strict=True))
        for side, pair in (("before", row.before), ("after", row.after))
    }
    return {**named(row, "kind", "mesh_axes", "axes", "source", "moved_from"), **sides}
