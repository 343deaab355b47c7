"""Measure a program by its profile, and put the plan beside the measured values."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import ProgramError, did_you_mean
from shardwright.plan.collectives.collective import Collective, Kind
from shardwright.plan.collectives.hlo import parse_hlo
from shardwright.plan.layout import Layout
from shardwright.plan.planner import PlanReport
from shardwright.plan.profile.graphs import named_kernels
from shardwright.plan.profile.intervals import Interval, merged, outside, total
from shardwright.plan.profile.operations import ProgramOps, read_ops
from shardwright.plan.profile.recording import (
    DeviceOps,
    Recording,
    TimedOp,
    count_partitions,
    read_recording,
)
from shardwright.plan.profile.result import (
    LineTime,
    MeasuredAxis,
    MeasuredCollective,
    Profile,
    layout_on,
)
from shardwright.plan.verify.differences import compare_traffic
from shardwright.plan.walk.events import Event

_NANO: Final = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceTime:
    """When one device computed and sent, in nanoseconds.

    Attributes:
      operations: All operations of the program on the device.
      computed: Those of `operations` that compute.
      busy: Union of the times of `computed`.
      spans: Operation of a collective -> the times at which this collective was in flight.
    """

    operations: list[TimedOp]
    computed: list[TimedOp]
    busy: list[Interval]
    spans: dict[str, list[Interval]]

    @classmethod
    def make(cls, operations: list[TimedOp], ops: ProgramOps) -> _DeviceTime:
        sending = ops.sends.keys() | ops.ends.keys()
        # An operation that only the profile has, such as a conversion or a copy, counts as
        # computing.
        computed = [each for each in operations if each.op not in sending | ops.waits]
        return cls(
            operations=operations,
            computed=computed,
            busy=merged((each.start, each.end) for each in computed),
            spans=_spans(operations, ops),
        )

    @property
    def window(self) -> float:
        """Time from the first operation to the end of the last operation, gaps included."""
        return max(each.end for each in self.operations) - self.operations[0].start

    def exposed(self, names: Iterable[str]) -> float:
        """Return the time in which a named collective ran while the device computed nothing."""
        spans = itertools.chain.from_iterable(self.spans.get(name, ()) for name in names)
        return total(outside(spans, self.busy))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The devices of a profile, and how often each of them ran the program."""

    devices: Sequence[_DeviceTime]
    runs: int

    def mean(self, measure: Callable[[_DeviceTime], float]) -> float:
        """Return the mean over devices and runs, in seconds, of a time in nanoseconds."""
        return statistics.fmean(map(measure, self.devices)) * _NANO / self.runs

    def exposed(self, names: Sequence[str]) -> float:
        """Return the exposed time of some collectives, in seconds."""
        return self.mean(lambda device: device.exposed(names))


def _spans(operations: Sequence[TimedOp], ops: ProgramOps) -> dict[str, list[Interval]]:
    """Return when each collective was in flight.

    On a TPU, one operation starts a collective, and another operation waits for its end. On a GPU,
    the operation that starts the collective is the kernel itself, on a stream of its own.
    """
    starts: dict[str, list[TimedOp]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    for each in operations:
        if each.op in ops.sends:
            starts[each.op].append(each)
        elif each.op in ops.ends:
            ends[ops.ends[each.op]].append(each.end)
    spans: dict[str, list[Interval]] = {}
    for name, begun in starts.items():
        spans[name], at = [], 0
        for each in begun:
            # A profile may begin between a start and its end. If XLA pipelines a loop, the next
            # start may come before the end: the ends then come in the order of the starts.
            at = bisect.bisect_left(ends[name], each.start, at)
            spans[name].append((each.start, max([each.end, *ends[name][at : at + 1]])))
            at += 1
    return spans


def profile_trace(
    trace: str | Path,
    report: PlanReport,
    *,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    program: str | None = None,
) -> Profile:
    """Return a profile beside a plan. See `PartitionManager.profile`."""
    recording = read_recording(trace)
    name = _choose(recording, program)
    timeline = recording.timelines[name]
    module = recording.programs[name]
    try:
        text = _jax.hlo_text(module)
    except RuntimeError as error:
        raise ProgramError(
            f"this jaxlib cannot read {name}: {error!s:.200}",
            fix="read the profile with the jaxlib that recorded it",
        ) from error
    ops = read_ops(text, mesh, partitions=count_partitions(module))
    if recording.platforms[name] == "gpu":
        parsed = parse_hlo(text)
        timeline = {
            device: named_kernels(operations, parsed) for device, operations in timeline.items()
        }
    runs = _count_runs(timeline, ops)
    devices = [_DeviceTime.make(operations, ops) for operations in timeline.values()]
    measured = _Measured(devices=devices, runs=runs)
    collectives = _collectives(measured, ops, report.events)
    layout = layout_on(report, recording.platforms[name])
    return Profile(
        report=report,
        program=name,
        platform=recording.platforms[name],
        devices=len(devices),
        runs=runs,
        seconds=measured.mean(lambda device: device.window),
        compute=measured.mean(lambda device: total(device.busy)),
        exposed=measured.mean(lambda device: device.exposed(device.spans)),
        matmuls=measured.mean(
            lambda device: total(
                _interval(each) for each in device.computed if each.op in ops.matmuls
            )
        ),
        collectives=_most_first(collectives),
        axes=_most_first(_axes(measured, collectives, report.events, layout)),
        lines=_most_first(_lines(measured, ops)),
        traffic=compare_traffic(
            report.events,
            [dataclasses.replace(each.collective, count=each.count) for each in collectives],
            cpu=recording.platforms[name] == "cpu",
            unknown=report.walked.unknown,
        ),
        others={
            other: statistics.fmean(
                total(merged((each.start, each.end) for each in operations))
                for operations in recording.timelines[other].values()
            )
            * _NANO
            for other in recording.timelines
            if other != name
        },
    )


def _interval(timed: TimedOp) -> Interval:
    return timed.start, timed.end


T = TypeVar("T", MeasuredCollective, MeasuredAxis, LineTime)


def _most_first(parts: Iterable[T]) -> tuple[T, ...]:
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _choose(recording: Recording, program: str | None) -> str:
    """Return `program`, or the name of the program that took the most time if `program` is None.

    Raises:
      ProgramError: There is no such program.
    """
    timed = [name for name in recording.timelines if name in recording.programs]
    if program is None and timed:
        return max(
            timed,
            key=lambda name: sum(
                total(map(_interval, operations))
                for operations in recording.timelines[name].values()
            ),
        )
    if program not in timed:
        hint = "" if program is None else did_you_mean(program, timed)
        names = ", ".join(timed) or "none"
        what = "no program" if program is None else f"no program {program!r}"
        raise ProgramError(
            f"the profile has {what}", fix=f"{hint} its programs are {names}".strip()
        )
    return program


def _count_runs(timeline: DeviceOps, ops: ProgramOps) -> int:
    """Return how often the program ran, by a vote of the operations with a known count per run."""
    per_run = {op: send.collective.count or 0 for op, send in ops.sends.items()}
    per_run |= dict.fromkeys(ops.entry, 1)
    counted = Counter(
        (device, each.op)
        for device, operations in timeline.items()
        for each in operations
        if per_run.get(each.op)
    )
    if not counted:
        raise ProgramError(
            "the profile has no operation of the program",
            fix="record the profile again; jax.profiler.ProfileOptions may leave operations out, "
            "and so do "
            "CUDA graphs: XLA_FLAGS=--xla_gpu_enable_command_buffer= runs a program without them",
        )
    # On a GPU, an operation may be several kernels, and a profile may begin inside a run. So take
    # the most frequent count.
    return max(1, statistics.mode(count // per_run[op] for (_, op), count in counted.items()))


def _collectives(
    measured: _Measured, ops: ProgramOps, events: Sequence[Event]
) -> list[MeasuredCollective]:
    """Return the collectives that ran."""
    collectives = []
    for op, send in ops.sends.items():
        took = [
            [end - start for start, end in device.spans[op]]
            for device in measured.devices
            if op in device.spans
        ]
        if not took:
            continue
        if len({len(each) for each in took}) == 1:
            # In each run, the device that arrives last waits least, so the minimum over the devices
            # has no waiting. Take the minimum of each run, because another device may be last in
            # the next run.
            fastest = sum(map(min, zip(*took, strict=True)))
        else:
            # Some devices lack a part of the first or the last run, so their runs cannot be paired.
            fastest = min(map(statistics.fmean, took)) * statistics.fmean(map(len, took))
        collectives.append(
            MeasuredCollective(
                op=op,
                collective=send.collective,
                planned=planned_for(send.collective, send.parts, events),
                count=round(statistics.fmean(map(len, took)) / measured.runs),
                seconds=sum(map(sum, took)) * _NANO / len(took) / measured.runs,
                exposed=measured.exposed([op]),
                fastest=fastest * _NANO / measured.runs,
            )
        )
    return collectives


# Kind of a compiled collective -> planned kinds that it may replace. XLA for CPUs runs a
# reduce-scatter as an all-reduce, and a collective matmul is a loop of permutes.
_REPLACED: Final[Mapping[Kind, tuple[Kind, ...]]] = {
    Kind.ALL_REDUCE: (Kind.REDUCE_SCATTER,),
    Kind.REDUCE_SCATTER: (Kind.ALL_REDUCE,),
    Kind.ALL_GATHER: (Kind.ALL_REDUCE,),
    Kind.PERMUTE: (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL),
}


def planned_for(
    collective: Collective, parts: Collection[int], events: Sequence[Event]
) -> tuple[Event, ...]:
    """Return the events of a plan that a collective agrees with best; none if it was not planned.

    The events run over the mesh axes of the collective. At least one of source line, bytes and
    argument path must be equal, unless the compiler kept neither a line nor a name.

    Args:
      collective: Collective of the compiled program.
      parts: Logical bytes of each of its arrays. It has several arrays if the compiler combined
        collectives.
      events: Collectives of the plan.
    """
    kinds = (collective.kind, *_REPLACED.get(collective.kind, ()))
    if collective.gathers:
        kinds = (Kind.ALL_GATHER,)
    line = collective.source.rpartition("/")[2]

    def agreement(event: Event) -> tuple[int, int]:
        # An argument with the path `blocks/up`, for example, has the name `params['blocks']['up']`
        # in the program.
        steps = [f"['{step}']" for step in event.path.split("/") if step]
        equal = (
            event.source == line != "",
            event.logical_bytes in parts,
            bool(steps) and "".join(steps) in collective.op_name,
        )
        return sum(equal), -kinds.index(event.kind)

    near = [
        event for event in events if event.mesh_axes == collective.mesh_axes and event.kind in kinds
    ]
    best = max(map(agreement, near), default=(0, 0))
    if best[0] == 0 and (line or collective.op_name):
        return ()
    return tuple(event for event in near if agreement(event) == best)


def _axes(
    measured: _Measured,
    collectives: Sequence[MeasuredCollective],
    events: Sequence[Event],
    layout: Layout | None,
) -> Iterator[MeasuredAxis]:
    """Yield the traffic that semantic axes cause. Each event and each collective counts once."""
    for mesh_axes, axes in _groups(collectives, events):
        members = [
            each
            for each in collectives
            if each.collective.mesh_axes == mesh_axes
            and {event.axes for event in each.planned} <= axes
            and bool(each.planned) == bool(axes)
        ]
        sent = sum(each.total_wire_bytes for each in members)
        fastest = sum(each.fastest for each in members)
        peak = None if layout is None else layout.rates(mesh_axes)
        yield MeasuredAxis(
            axes=tuple(sorted(axes)),
            mesh_axes=mesh_axes,
            planned=sum(
                event.total_wire_bytes
                for event in events
                if event.mesh_axes == mesh_axes and event.axes in axes
            ),
            sent=sent,
            seconds=sum(each.seconds for each in members),
            exposed=measured.exposed([each.op for each in members]),
            rate=sent / fastest if fastest else None,
            # Mesh axes that only cross slices have no links, so they have no peak rate.
            peak=peak if peak and peak[1] else None,
        )


def _groups(
    collectives: Sequence[MeasuredCollective], events: Sequence[Event]
) -> list[tuple[tuple[str, ...], set[tuple[str, ...]]]]:
    """Return groups of semantic axes whose traffic is counted together, with their mesh axes.

    If two events have the same line and size, it is unknown which of them a collective carries out.
    So the semantic axes of both are in one group.
    """
    groups: list[tuple[tuple[str, ...], set[tuple[str, ...]]]] = []
    for mesh_axes, axes in [
        *(
            (each.collective.mesh_axes, {event.axes for event in each.planned})
            for each in collectives
        ),
        *((event.mesh_axes, {event.axes}) for event in events),
    ]:
        same = [group for group in groups if group[0] == mesh_axes and group[1] & axes]
        group = (mesh_axes, axes.union(*(other for _, other in same)))
        groups = [each for each in groups if each not in same and each != group]
        groups.append(group)
    return groups


def _lines(measured: _Measured, ops: ProgramOps) -> Iterator[LineTime]:
    """Yield the compute time of each source line."""
    members: dict[str, list[TimedOp]] = defaultdict(list)
    for device in measured.devices:
        for each in device.computed:
            members[ops.sources.get(each.op, "")].append(each)
    for source, timed in members.items():
        yield LineTime(
            source=source,
            seconds=total(map(_interval, timed)) * _NANO / len(measured.devices) / measured.runs,
            ops=len({each.op for each in timed}),
        )
