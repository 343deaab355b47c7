"""Show the plan of a move, and how a cache is resharded."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import jax
import numpy as np

from shardwright.caches.relayout import Relayout
from shardwright.reshard.plan import MoveKind
from shardwright.reshard.route import Route, Way, sent_bytes
from shardwright.reshard.tree import LeafMove, ReshardPlan
from shardwright.resolution.partition_specs import spec_text
from shardwright.show.plain import fields_of, named
from shardwright.show.tables import table
from shardwright.vocabulary.modes import mode_name
from shardwright.vocabulary.shown import WIDTH, data_of, text_of
from shardwright.vocabulary.units import bytes_text

_HEAD: Final = ("path", "shape", "from", "to", "how", "pieces", "sent")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """All steps of one kind over the same mesh axes.

    Attributes:
      kind: A collective, `transfer` (from device to device) or `upload` (from host to device).
      mesh_axes: Mesh axes of the steps, or empty without a mesh. `fsdp.0` is a part of `fsdp`.
      count: Number of runs, over all leaves and pieces.
      bytes: Bytes that all devices send.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    count: int
    bytes: int


def collective_rows(leaves: Iterable[LeafMove]) -> tuple[CollectiveRow, ...]:
    """Return the bytes that leaves send, by kind and mesh axes."""
    sums: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(lambda: [0, 0])
    for leaf in leaves:
        # A tied leaf does not move, because the first leaf of the same array moves.
        for kind, axes, count, sent in _sent(leaf.route) if leaf.moves else ():
            sums[kind, axes][0] += count
            sums[kind, axes][1] += sent
    return tuple(
        CollectiveRow(kind=kind, mesh_axes=axes, count=count, bytes=sent)
        for (kind, axes), (count, sent) in sums.items()
    )


def _sent(route: Route) -> Iterable[tuple[str, tuple[str, ...], int, int]]:
    count = route.pieces.count
    if route.way is Way.COLLECTIVES:
        assert route.common is not None
        sizes = dict(route.common.sizes)
        for step in route.steps:
            if step.kind is not MoveKind.SLICE:  # a slice sends nothing
                sent = route.pieces.of_all(sent_bytes(step, sizes))
                yield str(step.kind), _whole_axes(step.mesh_axes, sizes), count, sent
    elif route.way is Way.EXCHANGE:
        # An exchange numbers all devices in one list, so its permutes belong to no mesh axis.
        yield str(MoveKind.PERMUTE), (), count * route.rounds, route.bytes_sent
    else:
        # Any other leaf that moves is a transfer or an upload, and `route.way` has this name.
        yield str(route.way), (), count, route.bytes_sent


def _whole_axes(axes: Iterable[str], sizes: Iterable[str]) -> tuple[str, ...]:
    """Return mesh axes, with `fsdp` in place of all of its parts, such as `fsdp.0` and `fsdp.1`."""
    names = tuple(axes)
    shown: list[str] = []
    for name in names:
        whole = name.partition(".")[0]
        # A part is named after its axis and a number: `fsdp.0`. The name of a whole axis has no
        # dot.
        parts = {part for part in sizes if part.partition(".")[0] == whole}
        label = whole if parts <= set(names) else name
        if label not in shown:
            shown.append(label)
    return tuple(shown)


@text_of.register(ReshardPlan)
def reshard_text(plan: ReshardPlan) -> str:
    """Return the table of a plan: a row per leaf, then the collectives, bytes and peak."""
    rows = [_row(plan.leaves[index]) for index in plan.order]
    # Specs and bytes never wrap, since they are compared between rows.
    lines = table([_HEAD, *rows], width=WIDTH, whole=[2, 3, 6])
    for row in collective_rows(plan.leaves):
        over = f" over {'+'.join(row.mesh_axes)}" if row.mesh_axes else ""
        runs = "1 run" if row.count == 1 else f"{row.count} runs"
        lines.append(f"{row.kind}{over}: {runs}, {bytes_text(row.bytes)} sent")
    lines.append(sent_text(plan))
    if plan.bytes_to_host:
        lines.append(f"to host memory: {bytes_text(plan.bytes_to_host)}")
    lines.append(
        f"peak: on all devices at most {bytes_text(plan.peak_growth)} more than before; "
        f"one device holds at most {bytes_text(plan.peak_per_device)}"
        + (f", the host {bytes_text(plan.host_bytes)}" if plan.host_bytes else "")
    )
    # Bytes are counted with NumPy's element size, which is 1 for int4 too.
    dtypes = {leaf.route.dtype for leaf in plan.leaves}
    narrow = sorted(
        str(dtype)
        for dtype in dtypes
        if int(jax.dtypes.itemsize_bits(dtype)) < 8 and dtype != np.bool_
    )
    if narrow:
        lines.append(f"an element of {', '.join(narrow)} counts as a byte")
    if any(leaf.moves for leaf in plan.leaves):
        after = "is then deleted" if plan.donate else "is kept"
        lines.append(f"source and target of a leaf exist at the same time; the source {after}")
    return "\n".join(lines)


def sent_text(plan: ReshardPlan) -> str:
    """Return how many arrays move, and how many bytes are sent, in one line."""
    moved = sum(leaf.moves for leaf in plan.leaves)
    moves = "moves" if moved == 1 else "move"
    return (
        f"{moved} of {len(plan.leaves)} arrays {moves}: {bytes_text(plan.bytes_sent)} sent, "
        f"the least possible is {bytes_text(plan.least_bytes)}"
    )


def _row(leaf: LeafMove) -> tuple[str, ...]:
    route = leaf.route
    return (
        leaf.path or "-",
        "x".join(map(str, route.shape)) or "scalar",
        leaf.source,
        leaf.target,
        f"tied to {leaf.tied_to}" if leaf.tied_to else _how(route),
        str(route.pieces.count) if leaf.moves else "-",
        bytes_text(route.bytes_sent) if leaf.moves else "-",
    )


def _how(route: Route) -> str:
    cast = "" if route.dtype == route.to_dtype else f"as {route.to_dtype}, "
    if route.way is Way.COLLECTIVES:
        assert route.common is not None
        sizes = dict(route.common.sizes)
        steps = [
            f"{step.kind} {'+'.join(_whole_axes(step.mesh_axes, sizes))}" for step in route.steps
        ]
        return (cast + ", ".join(steps)).removesuffix(", ")
    if route.way is Way.EXCHANGE:
        return f"{cast}{route.rounds} permutes"
    return f"{cast}{route.way}"


@data_of.register(ReshardPlan)
def reshard_data(plan: ReshardPlan) -> dict[str, Any]:
    """Return the plan of a move as plain data."""
    totals = (
        *("bytes_sent", "least_bytes", "bytes_to_host", "source_bytes", "target_bytes"),
        *("peak_growth", "peak_per_device", "host_bytes"),
    )
    return {
        "piece": plan.piece,
        "donate": plan.donate,
        **named(plan, *totals),
        "collectives": [fields_of(row) for row in collective_rows(plan.leaves)],
        "leaves": [_leaf_data(plan.leaves[index]) for index in plan.order],
    }


def _leaf_data(leaf: LeafMove) -> dict[str, Any]:
    """Return one leaf of a plan as plain data."""
    route = leaf.route
    return {
        "path": leaf.path,
        "shape": list(route.shape),
        "dtype": str(route.dtype),
        "to_dtype": str(route.to_dtype),
        "source": leaf.source,
        "target": leaf.target,
        "tied_to": leaf.tied_to,
        "way": str(route.way),
        "steps": [str(step) for step in route.steps],
        "rounds": route.rounds,
        "pieces": route.pieces.count,
        "bytes_sent": route.bytes_sent,
        "least_bytes": route.least_bytes,
    }


@text_of.register(Relayout)
def relayout_text(relayout: Relayout) -> str:
    """Return the steps of each array of a cache."""
    count = f"{relayout.collectives} collective{'' if relayout.collectives == 1 else 's'}"
    lines = [f"to {mode_name(relayout.mode)}: {count}, {relayout.bytes:,} B sent by each device"]
    for array in relayout.arrays:
        stays = "" if array.moves else "  stays"
        lines.append(
            f"  {array.name}  {spec_text(array.source)} -> {spec_text(array.target)}{stays}"
        )
        lines += [f"    {move}" for move in array.moves]
    return "\n".join(lines)
