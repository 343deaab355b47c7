"""Show bytes by path."""

from __future__ import annotations

from typing import Any, Final

from shardwright.plan.memory import LeafBytes, TreeBytes
from shardwright.resolution.partition_specs import entry_names, spec_text
from shardwright.show.plain import fields_of, named
from shardwright.show.tables import table
from shardwright.vocabulary.shown import WIDTH, data_of, text_of
from shardwright.vocabulary.units import bytes_text

SUMS: Final = (
    *("total", "per_device", "host_per_device"),
    *("held", "replicated", "replicated_share"),
)
_HEAD: Final = ("path", "shape", "dtype", "spec", "bytes", "per device", "replicated", "over")


@text_of.register(TreeBytes)
def memory_text(found: TreeBytes, *, rows: int | None = None, width: int = WIDTH) -> str:
    """Return a table of bytes by path, with sums below.

    Args:
      found: Result of `shardwright.plan.bytes_by_path`, or a part of it.
      rows: Number of arrays to show. Defaults to all.
      width: Characters per line. Paths and specs are not wrapped, so lines may be longer.
    """
    shown = found.leaves if rows is None else found.leaves[:rows]
    # Arrays are usually in device memory, so a column with only "device" says nothing.
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
    host = f", {bytes_text(tree.host_per_device)} on the host" if tree.host_per_device else ""
    per_device = f"{bytes_text(tree.per_device)} per device{host}"
    return f"{arrays}, {bytes_text(tree.total)}; {per_device}; {held}"


@data_of.register(TreeBytes)
def _tree_bytes(tree: TreeBytes) -> dict[str, Any]:
    return named(tree, *SUMS, "leaves")


@data_of.register(LeafBytes)
def _leaf_bytes(leaf: LeafBytes) -> dict[str, Any]:
    """Return the bytes of one array as plain data. The spec is one list of mesh axes per dim."""
    entries = None if leaf.spec is None else leaf.spec.partitions
    spec = None if entries is None else [list(entry_names(entry)) for entry in entries]
    return {**fields_of(leaf), "spec": spec, **named(leaf, "held", "replicated")}
