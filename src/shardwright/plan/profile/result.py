"""The results of reading a profile beside a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardwright.plan.collectives.collective import Collective
from shardwright.plan.layout import Layout
from shardwright.plan.planner import PlanReport
from shardwright.plan.verify.differences import Sent
from shardwright.plan.walk.events import Event
from shardwright.vocabulary.shown import WIDTH, data_of, text_of


def layout_on(report: PlanReport, platform: str) -> Layout | None:
    """Return the layout of a plan if its slice is of the given platform, else None.

    A program may be profiled on CPUs and planned for TPUs, which have other rates.
    """
    layout = report.layout
    return layout if layout and layout.topology.platform == platform else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """A collective of the program. Times are those of one device in one run of the program.

    Attributes:
      op: Name of its operation in the profile.
      collective: The collective, as the compiled program has it.
      planned: The events of the plan that the collective carries out. Empty if the plan has none.
      count: How often it ran.
      seconds: Its time, as the mean over the devices. It includes waiting for other devices.
      exposed: The part of this time in which the device computed nothing.
      fastest: Its time on the device that waits least, which is closest to the time of sending.
    """

    op: str
    collective: Collective
    planned: tuple[Event, ...]
    count: int
    seconds: float
    exposed: float
    fastest: float

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that a device sends in all runs."""
        return self.count * self.collective.wire_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAxis:
    """The traffic that semantic axes cause over some mesh axes, in one run on one device.

    Attributes:
      axes: The semantic axes of the planned collectives. If there are several entries, planned
        collectives of several sets of axes have the same line and size, and the profile cannot tell
        them apart. Empty if the plan does not have these collectives.
      mesh_axes: The mesh axes.
      planned: Bytes that the plan sends.
      sent: Bytes that the program sends.
      seconds: Time of its collectives, as the mean over the devices.
      exposed: Time in which one of these collectives ran while the device computed nothing.
      rate: Bytes per second, on the device that waits least. None if nothing ran.
      peak: Range of the rate at which a device of the planned slice can send over the mesh axes, in
        bytes per second. None if no slice of the profile's platform was planned, or if the mesh
        axes only cross slices.
    """

    axes: tuple[tuple[str, ...], ...]
    mesh_axes: tuple[str, ...]
    planned: int
    sent: int
    seconds: float
    exposed: float
    rate: float | None
    peak: tuple[float, float] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineTime:
    """Time in which one device computes for a line of the model, in one run.

    Attributes:
      source: The line, `model.py:12`, or "" if the compiler does not say.
      seconds: Its time, as the mean over the devices.
      ops: Number of operations.
    """

    source: str
    seconds: float
    ops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile beside the plan of its program.

    Times are those of one device in one run, in seconds.

    `seconds` is the sum of `compute`, `exposed` and `idle`.

    Attributes:
      report: The plan.
      program: Name of the program in the profile.
      platform: `cpu`, `gpu` or `tpu`.
      devices: Number of devices in the profile.
      runs: How often the program ran.
      seconds: Time of all runs and of the gaps between them, divided by the number of runs.
      compute: Time in which an operation computes.
      exposed: Time in which a collective runs while no operation computes.
      matmuls: Time of operations with matmuls.
      collectives: Collectives, most time first.
      axes: Time of the collectives by semantic axis, most time first.
      lines: Time of computing by line of the model, most time first.
      traffic: Bytes by mesh axes, as planned and as compiled, and why they differ.
      others: Other programs in the profile -> time of their operations on one device, in all runs.
    """

    report: PlanReport
    program: str
    platform: str
    devices: int
    runs: int
    seconds: float
    compute: float
    exposed: float
    matmuls: float
    collectives: tuple[MeasuredCollective, ...]
    axes: tuple[MeasuredAxis, ...]
    lines: tuple[LineTime, ...]
    traffic: tuple[Sent, ...]
    others: Mapping[str, float]

    @property
    def layout(self) -> Layout | None:
        """The layout of the plan, or None if it has none for the platform of the program."""
        return layout_on(self.report, self.platform)

    @property
    def idle(self) -> float:
        """Time in which the device neither computes nor runs a collective."""
        return self.seconds - self.compute - self.exposed

    @property
    def flops_rate(self) -> float | None:
        """Floating-point operations per second of the planned matmuls; None if none ran."""
        flops = self.report.walked.flops
        return flops / self.matmuls if flops and self.matmuls else None

    @property
    def unplanned(self) -> tuple[MeasuredCollective, ...]:
        """The collectives that the plan does not have."""
        return tuple(each for each in self.collectives if not each.planned)

    @property
    def missing(self) -> tuple[Event, ...]:
        """The events of the plan that no collective of the program carries out."""
        known = {id(event) for each in self.collectives for event in each.planned}
        return tuple(event for event in self.report.events if id(event) not in known)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data, without the plan."""
        return data_of(self)

    def text(self, *, rows: int | None = None, width: int = WIDTH) -> str:
        """Return the profile as text.

        Args:
          rows: How many collectives and lines to show. Defaults to ten.
          width: Characters per line.
        """
        return text_of(self, rows=rows, width=width)

    def __str__(self) -> str:
        return text_of(self)
