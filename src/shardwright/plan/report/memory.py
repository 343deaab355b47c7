"""Bytes by path as a table."""

from __future__ import annotations

from shardwright.plan.memory import LeafBytes, TreeBytes
from shardwright.plan.report.text import bytes_text
from shardwright.resolution.partition_specs import spec_text
from shardwright.resolution.tables import WIDTH, table

_HEAD = ("path", "shape", "dtype", "spec", "bytes", "per device", "replicated", "over")


def memory_text(found: TreeBytes, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Lay out bytes by path for people, with the sums below.

    Args:
      found: what `shardwright.plan.bytes_by_path` returns, or a part or another order of it.
      rows: show only so many arrays, the first ones; absent: all.
      width: characters per line, exceeded where paths are long: neither they nor specs wrap.
    """
    shown = found.leaves if rows is None else found.leaves[:rows]
    kinds = any(leaf.memory_kind for leaf in shown)
    head = (*_HEAD, "memory") if kinds else _HEAD
    lines = table(
        [head, *(_row(leaf, kinds=kinds) for leaf in shown)],
        width=width,
        whole=[_HEAD.index("spec")],
    )
    if len(shown) < len(found.leaves):
        lines.append(f"and {len(found.leaves) - len(shown)} more")
    return "\n".join([*lines, _sums(found)])


def _row(leaf: LeafBytes, *, kinds: bool) -> tuple[str, ...]:
    cells = (
        leaf.path or "-",
        "x".join(map(str, leaf.shape)) or "scalar",
        leaf.dtype,
        "-" if leaf.spec is None else spec_text(leaf.spec),
        bytes_text(leaf.total),
        bytes_text(leaf.per_device),
        bytes_text(leaf.replicated),
        " ".join(leaf.replicated_over) or "-",
    )
    return (*cells, leaf.memory_kind or "device") if kinds else cells


def _sums(found: TreeBytes) -> str:
    arrays = "1 array" if len(found.leaves) == 1 else f"{len(found.leaves)} arrays"
    held = f"{bytes_text(found.replicated)} of {bytes_text(found.held)} held on all devices are copies ({found.replicated_share:.1%})"
    return f"{arrays}, {bytes_text(found.total)}; {bytes_text(found.per_device)} per device; {held}"
