"""Show bytes by path as a table."""

from __future__ import annotations

from shardwright.plan.memory import LeafBytes, TreeBytes
from shardwright.resolution.partition_specs import spec_text
from shardwright.show.tables import table
from shardwright.vocabulary.shown import WIDTH
from shardwright.vocabulary.units import bytes_text

_HEAD = ("path", "shape", "dtype", "spec", "bytes", "per device", "replicated", "over")


def memory_text(found: TreeBytes, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return a table of bytes by path, with sums below.

    Args:
      found: Result of `shardwright.plan.bytes_by_path`, or a part of it.
      rows: Number of arrays to show. Defaults to all.
      width: Characters per line. Paths and specs are not wrapped, so lines may be longer.
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


def _sums(tree: TreeBytes) -> str:
    arrays = "1 array" if len(tree.leaves) == 1 else f"{len(tree.leaves)} arrays"
    held = (
        f"{bytes_text(tree.replicated)} of {bytes_text(tree.held)} held on all devices "
        f"are copies ({tree.replicated_share:.1%})"
    )
    return f"{arrays}, {bytes_text(tree.total)}; {bytes_text(tree.per_device)} per device; {held}"
