"""Plan a program under every mesh of a slice and every given strategy, and keep the best.

The search is exhaustive. It plans every candidate, and counts the dropped candidates by reason.
Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardwright.errors import MeshSpecError, ShardingError, StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology, parse_topology, read_hardware
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import PlanReport, Program, price, trace_program
from shardwright.plan.trace import Trace
from shardwright.vocabulary.modes import parse_mode

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

_MOST: Final = 5_000  # candidates, which take about five minutes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy on a mesh that the program may run under.

    Attributes:
      name: Name of the strategy that it comes from.
      sizes: Size of each mesh axis, in mesh order.
      strategy: The strategy with this mesh, ready to be written to a file.
      report: Its plan.
    """

    name: str
    sizes: Mapping[str, int]
    strategy: Strategy
    report: PlanReport

    @property
    def mesh(self) -> str:
        """The mesh axes of size > 1 as text."""
        return mesh_text(self.sizes)

    @property
    def seconds(self) -> float:
        """Upper end of the estimated time, at which nothing overlaps."""
        assert self.report.time is not None
        return self.report.time.high

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as plain data."""
        memory, time = self.report.memory, self.report.time
        assert time is not None
        return {
            "strategy": self.name,
            "mesh": dict(self.sizes),
            "seconds": [time.low, time.high],
            "memory": [memory.low, memory.high],
            "verdict": self.report.verdict,
            "sent_bytes": self.report.sent_bytes,
            "complete": self.report.walked.complete,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """The result of a search.

    Attributes:
      topology: The slice.
      candidates: Candidates that may fit, the fastest first.
      dropped: Reason -> number of candidates.
    """

    topology: Topology
    candidates: tuple[Candidate, ...]
    dropped: Mapping[str, int]

    @property
    def judged(self) -> int:
        """Number of candidates in all."""
        return len(self.candidates) + sum(self.dropped.values())

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front: no other candidate is better in both time and memory. Fastest first."""
        front: list[Candidate] = []
        least = math.inf
        for candidate in self.candidates:
            if candidate.report.memory.high < least:
                front.append(candidate)
                least = candidate.report.memory.high
        return tuple(front)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "topology": str(self.topology),
            "judged": self.judged,
            "dropped": dict(self.dropped),
            "front": [candidate.to_json() for candidate in self.front],
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the mesh axes of size > 1 as text."""
    return ",".join(f"{axis}:{size}" for axis, size in sizes.items() if size > 1) or "one device"


def search(
    program: Program,
    strategies: Mapping[str, Strategy],
    *,
    topology: str | Topology,
    mode: str | None = None,
    axes: Sequence[str] | None = None,
) -> SearchReport:
    """Plan a program under every mesh of a slice and every strategy.

    The sizes of the mesh axes multiply to the number of devices. Their order is that of the
    strategy's `[mesh]`. Candidates that do not resolve, or do not fit, are dropped and counted. The
    rest is ordered by the upper end of the estimated time, then by memory.

    Args:
      program: What to plan.
      strategies: Name -> strategy with a `[mesh]`.
      topology: The slice, such as `v5p:4x4x4`.
      mode: Runtime mode. Defaults to train.
      axes: Mesh axes that may have a size above 1, where a strategy has them. Defaults to all.

    Raises:
      StrategyError: A strategy has no mesh, or there are no or too many candidates.
      MeshSpecError: There is no such slice, or no strategy has one of `axes`.
      ShardingError: No candidate resolves. The error is that of the first candidate.
    """
    mode = None if mode is None else parse_mode(mode)
    slice_ = parse_topology(topology, read_hardware()) if isinstance(topology, str) else topology
    known = {axis: None for strategy in strategies.values() for axis in strategy.mesh}
    for axis in axes or ():
        if axis not in known:
            fix = f"the mesh axes are {', '.join(known)}"
            raise MeshSpecError(f"no strategy has the mesh axis {axis!r}", fix=fix)
    meshes = {
        name: list(_meshes(name, strategy, slice_.devices, axes))
        for name, strategy in strategies.items()
    }
    count = sum(map(len, meshes.values()))
    if not count:
        raise StrategyError("there are no candidates", fix="name at least one strategy and axis")
    if count > _MOST:
        raise StrategyError(
            f"there are {count:,} candidates, and a search judges at most {_MOST:,}",
            fix='name the mesh axes that may vary, such as axes=("fsdp", "tp")',
        )
    found: list[Candidate] = []
    dropped: Counter[str] = Counter()
    traces: list[Trace] = []
    first_error: ShardingError | None = None
    for name, each in meshes.items():
        for sizes in each:
            try:
                candidate = _judge(program, name, strategies[name], sizes, slice_, mode, traces)
            except ShardingError as error:
                dropped[_reason(error)] += 1
                first_error = first_error or error
                continue
            if candidate.report.verdict is Verdict.DOES_NOT_FIT:
                dropped["does not fit"] += 1
            else:
                found.append(candidate)
    if first_error is not None and not found and "does not fit" not in dropped:
        raise first_error
    found.sort(key=lambda each: (each.seconds, each.report.memory.high, each.name, each.mesh))
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return SearchReport(topology=slice_, candidates=tuple(found), dropped=dict(ordered))


def _meshes(
    name: str, strategy: Strategy, devices: int, axes: Sequence[str] | None
) -> Iterator[dict[str, int]]:
    """Yield every mesh of a number of devices over the axes of a strategy."""
    if not strategy.mesh:
        raise StrategyError(f"strategy {name} has no [mesh]", fix="name its mesh axes in [mesh]")
    vary = [axis for axis in strategy.mesh if axes is None or axis in axes]
    for split in _splits(devices, len(vary)):
        chosen = dict(zip(vary, split, strict=True))
        yield {axis: chosen.get(axis, 1) for axis in strategy.mesh}


def _splits(devices: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as a product of so many factors, in order."""
    if parts == 0:
        if devices == 1:
            yield ()
        return
    for first in range(1, devices + 1):
        if devices % first == 0:
            for rest in _splits(devices // first, parts - 1):
                yield (first, *rest)


def _judge(
    program: Program,
    name: str,
    base: Strategy,
    sizes: Mapping[str, int],
    topology: Topology,
    mode: str | None,
    traces: list[Trace],
) -> Candidate:
    strategy = base | type(base)(mesh=dict(sizes))
    manager = PartitionManager(strategy, mesh=abstract_mesh(dict(sizes)))
    if mode is not None:
        manager = manager.for_mode(mode)
    # Candidates share a trace if they resolve all requests that changed it in the same way.
    traced = next((known for known in traces if known.fits(manager)), None)
    if traced is None:
        traced = trace_program(manager, program)
        traces.append(traced)
    report = price(manager, traced, program, layout=lay_out(topology, sizes))
    return Candidate(name=name, sizes=sizes, strategy=strategy, report=report)


def _reason(error: ShardingError) -> str:
    """Return why a candidate does not resolve: the first problem, without sizes."""
    problem = error.problems[0]
    axis = f" {problem.axis}" if problem.axis else ""
    return f"{problem.error.__name__}{axis}"
