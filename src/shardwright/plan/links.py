"""Compute how long a collective takes over mesh axes, inside slices or domains and between them.

All times of collectives are computed here: for a plan, for the ranking of a search, and for a
compiled program.

For GPUs, this module has the cost model of NCCL, with the constants of `src/graph/tuning.cc` (as of
2026): seconds = latency + bytes / bandwidth, and NCCL chooses the algorithm and protocol with the
fewest seconds. LL128 and CollNet are left out: they only make a collective faster, and not every
cluster has them. For the same reason, NVLink SHARP counts only at the lower end of a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.layout import Layout

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
    """Return the seconds of one run of a collective, inside slices or domains and between them.

    Args:
      layout: Assignment of the mesh axes to the slices or domains.
      kind: Kind of collective.
      mesh_axes: Mesh axes that it runs over. Mesh axes that only cross slices have no links.
      logical_bytes: Bytes of the result of an all-gather, or of the operand of another collective.
      wire_bytes: Bytes that a device sends on a ring.
    """
    inside = inside_seconds(layout, kind, mesh_axes, wire_bytes)
    between = layout.seconds_between_slices(kind, mesh_axes, logical_bytes)
    # At best, links and the network send at the same time. At worst, three steps follow each other:
    # a reduce-scatter inside a slice, a sum between slices, and an all-gather inside a slice.
    low, high = max(inside.low, between), inside.high + between
    if layout.topology.chip.domain and high:
        ways = nccl_ways(
            kind,
            layout.devices_inside(mesh_axes),
            layout.slices_of(mesh_axes),
            pcie=not layout.topology.chip.nvlink,
        )
        # NCCL runs the algorithm and protocol that take the fewest seconds by its cost model,
        # latency + bytes / bandwidth.
        high = min(latency + high / share for share, latency in ways)
    return SecondsRange(low=low, high=high)


def inside_seconds(
    layout: Layout, kind: Kind, mesh_axes: Sequence[str], wire_bytes: int
) -> SecondsRange:
    """Return the seconds in which devices send bytes over the links inside their slice or domain.

    On GPUs, the latency is not included, because it depends on the number of domains too.
    """
    slow, fast = layout.rates(mesh_axes)
    # Over mesh axes that only cross slices, nothing is sent inside a slice.
    if not fast or not wire_bytes:
        return SecondsRange(low=0.0, high=0.0)
    chip = layout.topology.chip
    if chip.domain:
        # With a switch that sums (NVLink SHARP), a device sends each byte once. On a ring it sends
        # each byte twice.
        sums = chip.switch_sums and kind is Kind.ALL_REDUCE and layout.slices_of(mesh_axes) == 1
        sent = wire_bytes / 2 if sums else wire_bytes
        return SecondsRange(low=sent / fast, high=wire_bytes / slow)
    parts = [part for axis in mesh_axes for part in layout.parts.get(axis, ())]
    hops = sum(part.hops for part in parts)
    if kind is Kind.PERMUTE:
        # A permute sends to a neighbor: one hop, over one link.
        slow, hops = chip.link_rates[0], min(1, len(parts))
    exchanged = wire_bytes * _EXCHANGE if kind is Kind.ALL_TO_ALL else wire_bytes
    # Sending and latency overlap, so the longer of both counts, as in the scaling book.
    return SecondsRange(low=exchanged / fast, high=max(wire_bytes / slow, hops * _HOP))


_MICROSECOND: Final = 1e-6
_GATHERS: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """A protocol of NCCL: share of the bandwidth, and microseconds to start and for each hop."""

    share: float
    start: float
    nvlink: float
    pcie: float
    network: float


# LL, then Simple: two protocols of NCCL. LL sends a flag with every 4 bytes. NCCL gives LL half of
# the bandwidth, capped by tables of CPUs and GPUs. Here LL has a quarter, as in releases without
# the tables. Simple has the whole bandwidth.
_RING: Final = (
    _Protocol(share=0.25, start=6.6, nvlink=0.6, pcie=1.0, network=2.7),
    _Protocol(share=1.0, start=8.4, nvlink=3.4, pcie=5.7, network=14.0),
)
_TREE: Final = (
    _Protocol(share=0.92 / 3.8, start=6.8, nvlink=0.6, pcie=1.0, network=5.0),
    _Protocol(share=0.92, start=8.4, nvlink=4.0, pcie=4.0, network=14.0),
)


def nccl_ways(
    kind: Kind, inside: int, domains: int, *, pcie: bool = False
) -> Iterator[tuple[float, float]]:
    """Yield (share of the bandwidth, seconds of latency) for each algorithm and protocol.

    Args:
      kind: Kind of collective. NCCL has no model of sends between pairs: an all-to-all counts as a
        ring, and a permute as one hop.
      inside: Devices of the group in each domain.
      domains: Domains that the group crosses.
      pcie: Whether the devices of a domain are joined by PCIe, and not by NVLink.
    """
    for protocol in _RING:
        hop = protocol.pcie if pcie else protocol.nvlink
        if kind is Kind.PERMUTE:
            steps = protocol.network if domains > 1 else hop
        else:
            # In a ring of all devices, one of every `inside` steps crosses to the next domain.
            passes = 2 if kind is Kind.ALL_REDUCE else 1
            steps = passes * ((inside - 1) * domains * hop + (domains - 1) * protocol.network)
        yield protocol.share, (protocol.start + steps) * _MICROSECOND
    # floor(log2(domains)), as NCCL counts the levels of its trees.
    levels = domains.bit_length() - 1
    if kind is Kind.ALL_REDUCE:
        for protocol in _TREE:
            hop = protocol.pcie if pcie else protocol.nvlink
            steps = 2 * ((inside - 1) * hop + levels * protocol.network)
            yield protocol.share, (protocol.start + steps) * _MICROSECOND
    if kind in _GATHERS and inside == 1 and domains > 1:
        # PAT (parallel aggregated trees): NCCL has this algorithm only for one device per node.
        yield 0.75, (8.0 + levels * 14.0 / 3.5 + domains * 2.8) * _MICROSECOND
