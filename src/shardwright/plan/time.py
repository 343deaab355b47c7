"""Estimate a program's time on a slice by a roofline, as a range with its assumptions.

No part of the estimate is calibrated on hardware. The lower end assumes that all rates are at their
peak, and that everything overlaps. The upper end assumes that matmuls run at half of their peak
rate, that links run at the lower end of their range of rates, and that each hop has a latency. It
also assumes that matmuls overlap with their memory traffic, and that nothing else overlaps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from shardwright.plan.layout import Layout
from shardwright.plan.links import SecondsRange, collective_seconds
from shardwright.plan.walk.events import Walked
from shardwright.vocabulary.shown import data_of

# Share of the peak that matmuls reach at the upper end of the range.
_LEAST_USE: Final = 0.5
_NOTHING: Final = SecondsRange(low=0.0, high=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """The estimate for one run of a program.

    Attributes:
      matmuls: Time of the operations of matmuls.
      memory: Time to read and write memory: at least each argument once, at most the operands and
        results of all matmuls.
      links: Mesh axes -> time of the collectives over them.
      host: Time of the moves between the memories of device and host.
    """

    matmuls: SecondsRange
    memory: SecondsRange
    links: dict[tuple[str, ...], SecondsRange]
    host: SecondsRange = _NOTHING

    @property
    def low(self) -> float:
        """Seconds if everything overlaps."""
        sent = [span.low for span in self.links.values()]
        return max(self.matmuls.low, self.memory.low, self.host.low, *sent)

    @property
    def high(self) -> float:
        """Seconds if only matmuls and their memory traffic overlap."""
        sent = sum(span.high for span in self.links.values())
        return max(self.matmuls.high, self.memory.high) + sent + self.host.high

    def to_json(self) -> dict[str, Any]:
        """Return the range and its parts as plain data, in seconds."""
        return data_of(self)


def estimate_time(walked: Walked, layout: Layout, *, state_bytes: int) -> TimeRange:
    """Return the time of one run of a program.

    Args:
      walked: The operations and collectives of the program.
      layout: Assignment of its mesh axes to a slice.
      state_bytes: Bytes of the arguments on one device. Each argument is read at least once.
    """
    chip, work = layout.topology.chip, walked.work
    high = (
        (work.flops - work.fp8_flops - work.f32_flops) / chip.flops
        + work.fp8_flops / chip.fp8_flops
        + work.f32_flops / chip.f32_flops
    )
    # `min_flops` counts the smallest branch of each `cond`, which is assumed to have the same mix
    # of dtypes as the largest.
    low = high * work.min_flops / max(work.flops, 1)
    moved = work.host_bytes / chip.host_rate if chip.host_rate else 0.0
    # Matmuls may read an argument several times. Some arguments, such as an embedding table, are
    # not read by matmuls at all. So take the larger number of bytes.
    read = max(state_bytes, walked.matmul_bytes) / chip.hbm_rate
    links: dict[tuple[str, ...], SecondsRange] = {}
    for event in walked.events:
        span = collective_seconds(
            layout,
            event.kind,
            event.mesh_axes,
            logical_bytes=event.logical_bytes,
            wire_bytes=event.wire_bytes,
        )
        known = links.get(event.mesh_axes, SecondsRange(low=0.0, high=0.0))
        links[event.mesh_axes] = SecondsRange(
            # In the best case, the branch that contains the collective is not taken.
            low=known.low + (0.0 if event.maybe else event.runs * span.low),
            high=known.high + event.runs * span.high,
        )
    return TimeRange(
        matmuls=SecondsRange(low=low, high=high / _LEAST_USE),
        memory=SecondsRange(low=state_bytes / chip.hbm_rate, high=read),
        links=links,
        # In the best case, half of the bytes go to the host while the other half come from the
        # host.
        host=SecondsRange(low=moved / 2, high=moved),
    )
