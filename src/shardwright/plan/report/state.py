"""Show the state by category, and the rules that replicate arrays."""

from __future__ import annotations

from shardwright.plan.report.text import bytes_text
from shardwright.plan.state import Category, StateBytes
from shardwright.resolution.tables import WIDTH, remarked_table, table

STATE_HEAD = ("state", "arrays", "per device", "on all devices", "copies")
CAUSE_HEAD = ("replicated over", "could save", "arrays", "rule", "why")
_ROWS = 5


def state_text(state: StateBytes, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return a table of bytes by category, and a table of the rules that replicate most.

    Args:
      state: The state.
      rows: How many rules to show. Defaults to 5.
      width: Characters per line.
    """
    lines = table(
        [STATE_HEAD, *(state_row(state, category) for category in state.categories)], width=width
    )
    causes = cause_rows(state)
    shown = causes[: _ROWS if rows is None else rows]
    if shown:
        lines += ["", *remarked_table([CAUSE_HEAD, *shown], width=width)]
    if len(shown) < len(causes):
        lines.append(f"and {len(causes) - len(shown)} more")
    lines += [f"not counted: {text}" for text in state.missing]
    return "\n".join(lines)


def state_row(state: StateBytes, category: Category) -> tuple[str, ...]:
    """Return the cells of a category, in the order of `STATE_HEAD`."""
    tree = state.of(category)
    return (
        str(category),
        str(len(tree.leaves)),
        bytes_text(tree.per_device),
        bytes_text(tree.held),
        f"{bytes_text(tree.replicated)} ({tree.replicated_share:.1%})",
    )


def cause_rows(state: StateBytes) -> list[tuple[str, ...]]:
    """Return one row per mesh axis and rule, the largest possible saving first."""
    return [
        (axis, bytes_text(saves), str(count), rule, why)
        for saves, count, (axis, rule, why) in _causes(state)
    ]


def _causes(state: StateBytes) -> list[tuple[int, int, tuple[str, str, str]]]:
    """Return bytes that could be saved, number of arrays, and (mesh axis, rule, reason)."""
    saved: dict[tuple[str, str, str], list[int]] = {}
    for leaf in state.leaves:
        if leaf.category is Category.INPUTS or not leaf.bytes.shape:
            continue  # inputs are often replicated on purpose, and scalars cannot be sharded
        for cause in leaf.causes:
            place = f"   ({cause.place})" if cause.place else ""
            key = (cause.mesh_axis, f"{cause.rule or '-'}{place}", cause.why)
            saved.setdefault(key, []).append(cause.saves)
    causes = [(sum(each), len(each), key) for key, each in saved.items()]
    return sorted(causes, key=lambda cause: -cause[0])
