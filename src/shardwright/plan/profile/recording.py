"""Read the files of a JAX profile: the compiled programs, and when their operations ran.

A file is an `XSpace` of XLA's `xplane.proto`. `jax.profiler.ProfileData` reads its planes, lines
and events, but not the plane that has the programs. So the programs are read from the bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardwright import _jax
from shardwright.errors import ProgramError

_DEVICE: Final = re.compile(r"/device:(GPU|TPU):\d+")
_PLATFORMS: Final = ("cpu", "gpu", "tpu")
_FIX: Final = "record it with: with jax.profiler.trace(FOLDER): ..."


class TimedOp(NamedTuple):
    """One run of an operation on one device. Times are in nanoseconds.

    Attributes:
      op: Name of the operation, or of the CUDA graph that it is a node of; see `graphs`.
      start: When it began.
      end: When it ended.
      kernel: Name of the kernel, for a node of a graph.
      node: Number of the node in its graph. -1 outside of graphs.
      launch: Number of the launch of the graph, for a node.
    """

    op: str
    start: float
    end: float
    kernel: str = ""
    node: int = -1
    launch: int = 0


# Device -> its operations, in the order of their starts.
DeviceOps = Mapping[str, list[TimedOp]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a profile recorded.

    Attributes:
      programs: Name of each program -> the program, as a serialized `HloModuleProto`. If several
        programs have the same name, their ids are added to their names: `jit_step(12)`.
      platforms: Name of each program that ran -> `cpu`, `gpu` or `tpu`.
      timelines: Name of each program that ran -> when its operations ran.
    """

    programs: Mapping[str, bytes]
    platforms: Mapping[str, str]
    timelines: Mapping[str, DeviceOps]


def read_recording(trace: str | Path) -> Recording:
    """Read a profile.

    Args:
      trace: Folder that was passed to `jax.profiler.trace`, or one file `*.xplane.pb`. If it is a
        folder, its newest profile is read.

    Raises:
      ProgramError: There is no profile, or it has no operations of a compiled program.
    """
    programs: dict[str, bytes] = {}
    # Program -> platform -> device -> operations.
    ran: dict[str, dict[str, dict[str, list[TimedOp]]]] = {}
    # One file per host.
    for file in _files(Path(trace)):
        try:
            own = list(_programs(memoryview(file.read_bytes())))
            timed_ops = _jax.read_profile(file, _timed_ops)
        # raised by the reader above, or by JAX, for bytes that are not a profile
        except (IndexError, ValueError, RuntimeError) as error:
            raise ProgramError(
                f"{file.name} is not a file of jax.profiler, or only a part of one",
                fix="pass the folder of jax.profiler.trace, or its *.xplane.pb",
            ) from error
        repeated = Counter(name for name, _, _ in own)
        # Leave out programs that ran in this process before the profile began: a profile lists them
        # too.
        seen = {key for _, _, _, key, _ in timed_ops}
        own = [each for each in own if repeated[each[0]] == 1 or each[1] in seen]
        repeated = Counter(name for name, _, _ in own)
        # Two hosts may give one program different ids, so add ids only to names that several
        # programs of a host have.
        names = {key: name if repeated[name] == 1 else f"{name}({key})" for name, key, _ in own}
        programs.update({names[key]: program for _, key, program in own})
        lone = {name: name for name, count in repeated.items() if count == 1}
        for platform, device, module, key, timed in timed_ops:
            name = names.get(key) or lone.get(module)
            if name is not None:
                devices = ran.setdefault(name, {}).setdefault(platform, {})
                devices.setdefault(f"{file.name}:{device}", []).append(timed)
    if not ran:
        raise ProgramError(
            f"the profile {str(trace)!r} has no operations of a compiled program", fix=_FIX
        )
    # A host may also have events for programs that it starts on an accelerator. Keep the events of
    # the accelerator.
    platforms = {name: max(found, key=_PLATFORMS.index) for name, found in ran.items()}
    timelines = {name: ran[name][platform] for name, platform in platforms.items()}
    for timeline in timelines.values():
        for operations in timeline.values():
            operations.sort(key=lambda timed: (timed.start, -timed.end))
    return Recording(programs=programs, platforms=platforms, timelines=timelines)


def _files(trace: Path) -> list[Path]:
    if trace.is_file():
        return [trace]
    found = sorted(trace.rglob("*.xplane.pb"))
    if not found:
        raise ProgramError(f"there is no profile (*.xplane.pb) in {str(trace)!r}", fix=_FIX)
    newest = max(found, key=lambda file: file.stat().st_mtime).parent
    return [file for file in found if file.parent == newest]


_Found = tuple[str, str, str, str, TimedOp]


def _timed_ops(data: Any) -> list[_Found]:
    """Return platform, device, program, id of the program, and times of each operation."""
    found: list[_Found] = []
    for plane in data.planes:
        device = _DEVICE.fullmatch(plane.name)
        if plane.name == "/host:CPU":
            found += _stated("cpu", plane.lines)
        elif device is not None and device[1] == "TPU":
            found += _tpu(plane)
        elif device is not None:
            # Other lines repeat the kernels of the streams, summed up in several ways.
            streams = (line for line in plane.lines if line.name.startswith("Stream"))
            found += _stated("gpu", streams, plane.name)
    return found


def _stated(platform: str, lines: Any, device: str = "") -> Iterator[_Found]:
    """Yield the operations of events that state their program, as on CPUs and GPUs."""
    for line in lines:
        for event in line.events:
            stats = dict(event.stats)
            op = stats.get("hlo_op")
            # An event `end: X` marks the end of the operation X, which has an event of its own.
            if op is None or event.name.startswith("end: "):
                continue
            # The threads of a host run operations of all its devices.
            place = device or f"cpu{stats.get('device_ordinal', 0)}"
            module, key = str(stats.get("hlo_module", "")), str(stats.get("program_id", ""))
            timed = TimedOp(str(op), event.start_ns, event.end_ns)
            if "cuda_graph_node_id" in stats:
                # The lower 32 bits number the node, and the upper 32 bits number the graph.
                node = int(stats["cuda_graph_node_id"]) & 0xFFFFFFFF
                launch = int(stats.get("correlation_id", 0))
                timed = timed._replace(kernel=event.name, node=node, launch=launch)
            yield platform, place, module, key, timed


def _tpu(plane: Any) -> Iterator[_Found]:
    """Yield the operations of a TPU.

    One line of its plane has the runs of the programs. Another line has the operations.
    """
    lines = {line.name: line for line in plane.lines}
    if not {"XLA Modules", "XLA Ops"} <= lines.keys():
        return
    runs = sorted(
        (event.start_ns, event.end_ns, event.name) for event in lines["XLA Modules"].events
    )
    starts = [start for start, _, _ in runs]
    for event in lines["XLA Ops"].events:
        at = bisect.bisect_right(starts, event.start_ns) - 1
        if at < 0 or event.start_ns > runs[at][1]:
            continue
        module, key = _name_and_id(runs[at][2])
        # The name of an event is the text of its instruction: `%fusion.1 = f32[8] fusion(...)`.
        op = event.name.partition(" = ")[0].lstrip("%")
        yield "tpu", plane.name, module, key, TimedOp(op, event.start_ns, event.end_ns)


def _name_and_id(text: str) -> tuple[str, str]:
    """Return the two parts of `jit_step(12)`."""
    name, _, key = text.rstrip(")").rpartition("(")
    return (name, key) if name else (text, "")


def _programs(data: memoryview) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, id and `HloModuleProto` of each program. The numbers below are field numbers."""
    for plane in _values(data, 1):  # XSpace.planes
        if next(_values(plane, 2), b"") != b"/host:metadata":  # XPlane.name
            continue
        for entry in _values(plane, 4):  # XPlane.event_metadata, a map
            metadata = next(_values(entry, 2))
            name, key = _name_and_id(bytes(next(_values(metadata, 2), b"")).decode())
            for stat in _values(metadata, 5):  # XEventMetadata.stats
                for proto in _values(stat, 6):  # XStat.bytes_value, an HloProto
                    yield from ((name, key, bytes(module)) for module in _values(proto, 1))


def count_partitions(program: bytes) -> int:
    """Return the number of devices that run a program together, or 0 if it does not say.

    JAX's text of a program that was read from a profile lacks this number.
    """
    # HloModuleProto.device_assignment, and its computation_devices.
    assignments = _values(memoryview(program), 15)
    return sum(1 for assignment in assignments for _ in _values(assignment, 3))


def _values(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the length-delimited values of one field of a protobuf message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            if tag >> 3 == number:
                yield data[at : at + size]
            at += size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
