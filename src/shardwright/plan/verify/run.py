"""Verify a plan: compile its program, and compare the plan with the compiled program."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from shardwright.manager.core import Manager
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import PlanReport, Program, price, trace_program
from shardwright.plan.verify.compiler import (
    TIMEOUT,
    Compiled,
    Effort,
    Platform,
    compile_exported,
    make_target,
)
from shardwright.plan.verify.differences import Sent, compare_traffic
from shardwright.plan.verify.export import export_program
from shardwright.vocabulary.shown import data_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A plan, and the result of compiling the same program.

    Attributes:
      report: The plan.
      compiled: The result of compiling.
      traffic: Planned and compiled bytes over each set of mesh axes.
    """

    report: PlanReport
    compiled: Compiled
    traffic: tuple[Sent, ...]

    @property
    def verdict(self) -> Verdict | None:
        """Whether the program fits: by the compiler, or by the plan if the peak is unknown."""
        layout, peak = self.report.layout, self.compiled.peak
        if self.compiled.refused:
            return Verdict.DOES_NOT_FIT
        if layout is None or peak is None:
            return self.report.verdict
        # No margin is needed: `judge` has one because plans may be too low, but this peak is exact.
        fits = peak <= layout.topology.chip.hbm_bytes
        return Verdict.FITS if fits else Verdict.DOES_NOT_FIT

    @property
    def slice_bytes(self) -> int | None:
        """Bytes that one device sends to other slices in the compiled program; None if unknown."""
        sent = [each for each in self.compiled.collectives if each.between_slices]
        if any(each.total_wire_bytes is None for each in sent):
            return None
        return sum(each.total_wire_bytes or 0 for each in sent)

    @property
    def most_bytes(self) -> int:
        """Bytes that one device needs: the compiled peak, or the upper end of the plan's peak."""
        peak = self.compiled.peak
        return self.report.memory.high if peak is None else peak

    def to_json(self) -> dict[str, Any]:
        """Return the compiled numbers and the differences as plain data, without the plan."""
        return data_of(self)


def verify_plan(
    manager: Manager,
    program: Program,
    *,
    topology: str | Topology | None = None,
    platform: Platform | None = None,
    effort: Effort = "low",
    timeout: float = TIMEOUT,
    cache: Path | None = None,
) -> Verification:
    """Plan a program, compile it for its target in a worker process, and compare both.

    No device of the target is needed. A compile for TPUs needs libtpu, which the extra `tpu-aot`
    installs. A compile for GPUs needs a CUDA plugin of JAX. A compile for CPUs shows the sharding
    only: its bytes and its memory differ from those of a TPU.

    Args:
      manager: Strategy, mesh and mode.
      program: The program to verify.
      topology: The slice that the mesh is on, such as `v5p:4x4x4`. By default, the program is
        compiled for CPUs.
      platform: `tpu`, `gpu` or `cpu`. Defaults to the platform of the topology, else to `cpu`.
      effort: How much the compiler optimizes. `low` takes a quarter of the time to compile, and
        changes the memory by less than 10%.
      timeout: Seconds after which the worker is killed.
      cache: Folder of compiled results. Defaults to none.

    Raises:
      ShardingError: An annotation does not resolve.
      StrategyError: There is no compiler for the slice, or it is not installed.
      ProgramError: The worker died or ran out of time, or the compiler cannot compile the program.
    """
    if isinstance(topology, str):
        topology = parse_topology(topology, read_hardware())
    target = make_target(topology, platform=platform, effort=effort)
    layout = None if topology is None else lay_out(topology, mesh_sizes(manager.mesh))
    if layout is not None and layout.crossing:
        parts = tuple(layout.slices_of([axis]) for axis in mesh_sizes(manager.mesh))
        target = dataclasses.replace(target, dcn=parts)
    traced = trace_program(manager, program, platform=target.platform)
    report = price(manager, traced, program, layout=layout)
    exported = export_program(manager, program, traced, platform=target.platform, chip=target.chip)
    lines = [event.source for event in report.events]
    compiled = compile_exported(exported, target, timeout=timeout, cache=cache, lines=lines)
    traffic = compare_traffic(
        report.events,
        compiled.collectives,
        cpu=target.platform == "cpu",
        unknown=report.walked.unknown,
    )
    return Verification(report=report, compiled=compiled, traffic=traffic)
