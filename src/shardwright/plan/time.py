"""Estimate a program's time on a slice by a roofline, as a range with its assumptions.

No part of it is calibrated on hardware. The lower end assumes that all rates are at their peak, and
that everything overlaps. The upper end assumes that matmuls run at half of their peak, links at
their lower rate and with a latency per hop. It also assumes that only matmuls overlap with their
memory traffic.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.layout import Layout
from shardwright.plan.walk.events import Event, Walked
from shardwright.vocabulary.shown import data_of

# Share of the peak that matmuls reach at the upper end of the range.
_LEAST_USE: Final = 0.5
# Seconds of one hop on the interconnect, from the scaling book.
_HOP: Final = 1e-6
# Time of an all-to-all / time of an all-gather of the same bytes, on a ring that sends both ways.
_EXCHANGE: Final = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondsRange:
    """A range of seconds."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """The estimate for one run of a program.

    Attributes:
      matmuls: Time of the operations of matmuls.
      memory: Time to read and write memory: at least each argument once, at most the operands and
        results of all matmuls.
      links: Mesh axes -> time of the collectives over them.
    """

    matmuls: SecondsRange
    memory: SecondsRange
    links: dict[tuple[str, ...], SecondsRange]

    @property
    def low(self) -> float:
        """Seconds if everything overlaps."""
        sent = [span.low for span in self.links.values()]
        return max(self.matmuls.low, self.memory.low, *sent)

    @property
    def high(self) -> float:
        """Seconds if only matmuls and their memory traffic overlap."""
        sent = sum(span.high for span in self.links.values())
        return max(self.matmuls.high, self.memory.high) + sent

    def to_json(self) -> dict[str, Any]:
        """Return the range and its parts as plain data, in seconds."""
        return data_of(self)


def estimate_time(walked: Walked, layout: Layout, *, state_bytes: int) -> TimeRange:
    """Return the time of one run of a program.

    Args:
      walked: What the program computes and sends.
      layout: Assignment of its mesh axes to a slice.
      state_bytes: Bytes of the arguments on one device. Each argument is read at least once.
    """
    chip = layout.topology.chip
    low, high = walked.work.min_flops / chip.flops, walked.flops / chip.flops
    # Matmuls may read an argument several times or, as a table of embeddings, not at all.
    read = max(state_bytes, walked.matmul_bytes) / chip.hbm_rate
    links: dict[tuple[str, ...], SecondsRange] = {}
    for event in walked.events:
        span = _sending(event, layout)
        known = links.get(event.mesh_axes, SecondsRange(low=0.0, high=0.0))
        links[event.mesh_axes] = SecondsRange(low=known.low + span.low, high=known.high + span.high)
    return TimeRange(
        matmuls=SecondsRange(low=low, high=high / _LEAST_USE),
        memory=SecondsRange(low=state_bytes / chip.hbm_rate, high=read),
        links=links,
    )


def _sending(event: Event, layout: Layout) -> SecondsRange:
    """Return the time of all runs of a collective: inside the slices, and between them."""
    parts = [part for axis in event.mesh_axes for part in layout.parts[axis]]
    slow, fast = layout.rates(event.mesh_axes)
    # Over mesh axes that only cross slices, nothing is sent inside a slice.
    sent = event.wire_bytes if parts else 0
    exchanged = sent * _EXCHANGE if event.kind is Kind.ALL_TO_ALL else sent
    hops = sum(part.hops for part in parts)
    if event.kind is Kind.PERMUTE:
        # A neighbor is one hop away, over one link.
        slow, hops = layout.topology.chip.link_rates[0], min(1, len(parts))
    between = layout.seconds_between_slices(event.kind, event.mesh_axes, event.logical_bytes)
    # Bytes and latency overlap, so the longer one counts, as in the scaling book.
    inside = max(sent / slow, hops * _HOP) if sent else 0.0
    fastest_inside = exchanged / fast if sent else 0.0
    # At best, a branch is not taken, and links and the network between slices send at once.
    low = 0.0 if event.maybe else event.runs * max(fastest_inside, between)
    return SecondsRange(low=low, high=event.runs * (inside + between))
