"""Compute how long a collective takes over mesh axes: inside a slice or domain, and between them.

Every time of a collective comes from here: those of a plan, of the ranking of a search, and of a
compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.layout import Layout
from shardwright.plan.nccl import nccl_ways

# Seconds of one hop on the interconnect of TPUs, from the scaling book.
_HOP: Final = 1e-6
# Time of an all-to-all / time of an all-gather of the same bytes, on a ring that sends both ways.
_EXCHANGE: Final = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondsRange:
    """A range of seconds."""

    low: float
    high: float


def collective_seconds(
    layout: Layout,
    kind: Kind,
    mesh_axes: Sequence[str],
    *,
    logical_bytes: int,
    wire_bytes: int,
) -> SecondsRange:
    """Return the seconds of one run of a collective, between all its devices.

    Args:
      layout: Assignment of the mesh axes to the slices or domains.
      kind: Kind of collective.
      mesh_axes: Mesh axes that it runs over. Mesh axes that only cross slices have no links.
      logical_bytes: Bytes of the result of an all-gather, or of the operand of another collective.
      wire_bytes: Bytes that a device sends on a ring.
    """
    inside = inside_seconds(layout, kind, mesh_axes, wire_bytes)
    between = layout.seconds_between_slices(kind, mesh_axes, logical_bytes)
    # At best, links and the network send at once. At worst, the legs follow each other: a reduce-
    # scatter inside, a sum between slices, and an all-gather inside.
    low, high = max(inside.low, between), inside.high + between
    if layout.topology.chip.domain and high:
        ways = nccl_ways(
            kind,
            layout.devices_inside(mesh_axes),
            layout.slices_of(mesh_axes),
            pcie=not layout.topology.chip.nvlink,
        )
        # NCCL runs what its cost model finds fastest: latency + bytes / bandwidth.
        high = min(latency + high / share for share, latency in ways)
    return SecondsRange(low=low, high=high)


def inside_seconds(
    layout: Layout, kind: Kind, mesh_axes: Sequence[str], wire_bytes: int
) -> SecondsRange:
    """Return the seconds in which devices send bytes over the links inside their slice or domain.

    On GPUs, this is without the latency, which depends on the number of domains too.
    """
    slow, fast = layout.rates(mesh_axes)
    # Over mesh axes that only cross slices, nothing is sent inside a slice.
    if not fast or not wire_bytes:
        return SecondsRange(low=0.0, high=0.0)
    chip = layout.topology.chip
    if chip.domain:
        # A switch that sums (NVLink SHARP) takes each byte once, and a ring sends it twice.
        sums = chip.switch_sums and kind is Kind.ALL_REDUCE and layout.slices_of(mesh_axes) == 1
        sent = wire_bytes / 2 if sums else wire_bytes
        return SecondsRange(low=sent / fast, high=wire_bytes / slow)
    parts = [part for axis in mesh_axes for part in layout.parts.get(axis, ())]
    hops = sum(part.hops for part in parts)
    if kind is Kind.PERMUTE:
        # A neighbor is one hop away, over one link.
        slow, hops = chip.link_rates[0], min(1, len(parts))
    exchanged = wire_bytes * _EXCHANGE if kind is Kind.ALL_TO_ALL else wire_bytes
    # Bytes and latency overlap, so the longer one counts, as in the scaling book.
    return SecondsRange(low=exchanged / fast, high=max(wire_bytes / slow, hops * _HOP))
