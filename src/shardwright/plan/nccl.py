"""The cost model of NCCL: share of the bandwidth and latency of each way to run a collective.

The model and its constants are those of NCCL's `src/graph/tuning.cc` (as of 2026): seconds =
latency + bytes / bandwidth, and NCCL runs the way with the fewest seconds. Left out are the ways
that only make a collective faster and that not every cluster has: LL128, NVLink SHARP and CollNet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from shardwright.plan.collectives.collective import Kind

_MICROSECOND: Final = 1e-6
_GATHERS: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """A protocol of an algorithm: share of the bandwidth, and microseconds to start and per hop."""

    share: float
    start: float
    nvlink: float
    pcie: float
    network: float


# LL sends a flag with every 4 bytes. NCCL gives it half of the bandwidth, and caps it by tables of
# CPUs and GPUs. Here it has a quarter, as in releases without the tables. Simple uses all of it.
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
    """Yield the share of the bandwidth and the seconds of latency of each way.

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
            # A ring of all devices: one step of every `inside` crosses to the next domain.
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
        # PAT, parallel aggregated trees, which NCCL has for one device per node only.
        yield 0.75, (8.0 + levels * 14.0 / 3.5 + domains * 2.8) * _MICROSECOND
