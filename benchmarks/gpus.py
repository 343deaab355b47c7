"""`python -m benchmarks.gpus [NAME ...]`: times of collectives on GPUs, and published runs.

The first table has the time of single collectives. `tests/plan/test_gpus.py` works each of them out
by hand. The second table plans each run of `published_gpus.toml`, and shows the published time
beside the planned range. A run whose time is outside of its range is a miss. Nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.published import plan_published, training
from shardwright.plan.collectives.collective import Kind, ring_bytes
from shardwright.plan.hardware import parse_topology, read_hardware
from shardwright.plan.layout import Layout, lay_out
from shardwright.plan.links import SecondsRange, collective_seconds
from shardwright.plan.planner import PlanReport
from shardwright.plan.search.result import mesh_text, utilization
from shardwright.vocabulary.units import bytes_text, seconds_text

FACTS: Final = Path(__file__).with_name("published_gpus.toml")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A collective over a mesh axis of a cluster.

    Attributes:
      topology: The cluster.
      mesh: Size of each mesh axis.
      crossing: The part of each mesh axis that crosses domains, if not the default.
      kind: Kind of collective.
      axis: The mesh axis that it runs over.
      logical_bytes: Bytes of the result of an all-gather, else of the operand.
    """

    topology: str
    mesh: Mapping[str, int]
    kind: Kind
    axis: str
    logical_bytes: int = 2**30
    crossing: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The mesh on the cluster."""
        topology = parse_topology(self.topology, read_hardware())
        return lay_out(dataclasses.replace(topology, crossing=self.crossing), self.mesh)

    @property
    def seconds(self) -> SecondsRange:
        """The planned time of one run."""
        return collective_seconds(
            self.layout,
            self.kind,
            (self.axis,),
            logical_bytes=self.logical_bytes,
            wire_bytes=ring_bytes(self.kind, self.logical_bytes, self.mesh[self.axis]),
        )

    def cells(self) -> list[str]:
        """Return the row of the table."""
        span = self.seconds
        size = bytes_text(self.logical_bytes)
        ends = seconds_text(span.low), seconds_text(span.high)
        return [self.topology, mesh_text(self.mesh), f"{self.kind} {self.axis}", size, *ends]


CELLS: Final = (
    Cell(topology="h100:8", mesh={"fsdp": 8}, kind=Kind.ALL_GATHER, axis="fsdp"),
    Cell(topology="h100:8", mesh={"tp": 8}, kind=Kind.ALL_REDUCE, axis="tp"),
    Cell(
        topology="h100:8", mesh={"tp": 8}, kind=Kind.ALL_REDUCE, axis="tp", logical_bytes=64 * 1024
    ),
    Cell(topology="2xh100:8", mesh={"dp": 2, "tp": 8}, kind=Kind.ALL_REDUCE, axis="dp"),
    Cell(topology="2xh100:8", mesh={"pp": 2, "tp": 8}, kind=Kind.PERMUTE, axis="pp"),
    Cell(topology="16xh100:8", mesh={"fsdp": 128}, kind=Kind.ALL_GATHER, axis="fsdp"),
    Cell(topology="16xh100:8@tcpx", mesh={"dp": 16, "tp": 8}, kind=Kind.ALL_REDUCE, axis="dp"),
    Cell(
        topology="256xh100:8",
        mesh={"fsdp": 256, "tp": 8},
        kind=Kind.ALL_GATHER,
        axis="fsdp",
        logical_bytes=4 * 2**20,
    ),
    Cell(topology="4xgb200:72", mesh={"fsdp": 4, "tp": 72}, kind=Kind.ALL_GATHER, axis="tp"),
    Cell(topology="h100-pcie:8", mesh={"fsdp": 8}, kind=Kind.REDUCE_SCATTER, axis="fsdp"),
    Cell(topology="mi300x:8", mesh={"dp": 4, "tp": 2}, kind=Kind.ALL_REDUCE, axis="tp"),
    Cell(
        topology="2xa100:8",
        mesh={"ep": 16},
        kind=Kind.ALL_TO_ALL,
        axis="ep",
        crossing={"ep": 2},
    ),
)
CELLS_HEAD: Final = ("cluster", "mesh", "collective", "bytes", "at least", "at most")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run and its plan.

    Attributes:
      name: Its name.
      facts: What is published.
      report: Its plan.
    """

    name: str
    facts: Mapping[str, Any]
    report: PlanReport

    @property
    def at_peak(self) -> float:
        """Seconds of the useful operations at the peak of the chip."""
        assert self.report.layout is not None
        return self.report.walked.useful_flops / self.report.layout.topology.chip.flops

    @property
    def seconds(self) -> float:
        """The published time of a step, or the time of the published MFU."""
        known = self.facts.get("seconds")
        return float(self.at_peak / self.facts["mfu"] if known is None else known)

    @property
    def verdict(self) -> str:
        """`inside`, or how far the published time is outside of the planned range."""
        assert self.report.time is not None
        low, high = self.report.time.low, self.report.time.high
        if self.seconds < low:
            return f"MISS: {self.seconds / low:.2f} of the lower end"
        if self.seconds > high:
            return f"MISS: {self.seconds / high:.2f} of the upper end"
        return "inside"

    def cells(self) -> list[str]:
        """Return the row of the table."""
        assert self.report.time is not None
        low, high = utilization(self.report)
        return [
            self.name,
            f"{self.report.strategy} {mesh_text(self.facts['mesh'])}",
            f"{self.seconds:.2f} s",
            f"{self.report.time.low:.2f} to {self.report.time.high:.2f} s",
            f"{self.at_peak / self.seconds:.0%}",
            f"{low:.0%} to {high:.0%}",
            str(self.report.verdict),
            self.verdict,
        ]


RUNS_HEAD: Final = (
    *("run", "mesh", "published", "planned", "MFU", "planned MFU", "memory", "verdict"),
)


def plan_run(name: str, facts: Mapping[str, Any]) -> Run:
    """Return a published run with its plan, under the faster of two presets."""
    topology = parse_topology(facts["topology"], read_hardware())
    program = training(facts, devices=topology.devices)
    return Run(name=name, facts=facts, report=plan_published(facts["mesh"], program, topology))


def read_facts() -> dict[str, Any]:
    """Return the published runs by name."""
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table."""
    titles = list(head)
    lines: list[Iterable[str]] = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpus", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="published runs; default: all")
    given = parser.parse_args(argv)
    facts = read_facts()
    unknown = [name for name in given.names if name not in facts]
    if unknown:
        parser.error(f"unknown run {unknown[0]!r}: runs are {', '.join(facts)}")
    print(markdown(CELLS_HEAD, (cell.cells() for cell in CELLS)), end="\n\n")
    runs = (plan_run(name, facts[name]) for name in given.names or facts)
    print(markdown(RUNS_HEAD, (run.cells() for run in runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
