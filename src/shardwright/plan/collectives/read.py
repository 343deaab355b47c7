"""Read the collectives of a compiled program: kind, mesh axes, runs, bytes and source line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardwright.errors import MeshMismatchError, ProgramError
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.collectives.collective import Collective, Kind, ring_bytes
from shardwright.plan.collectives.element_types import program_type
from shardwright.plan.collectives.frames import source_of
from shardwright.plan.collectives.hlo import Computation, Instruction, Module, bytes_of, parse_hlo
from shardwright.plan.collectives.instructions import (
    CALLING,
    MEGASCALE,
    SEND_PAIRS,
    callees_of,
    calls_of,
    computations_with_collectives,
    is_gather,
    is_scattered,
    kind_of,
    started_channels,
)
from shardwright.plan.collectives.replica_groups import (
    GroupSpan,
    parse_groups,
    parse_pairs,
    span_of,
    span_of_pairs,
)
from shardwright.plan.collectives.trip_counts import Frame, body_frame, called, trip_count

_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def read_collectives(
    program: Any,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    *,
    trips: int | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> tuple[Collective, ...]:
    """Return the collectives of a compiled program, in the order of its text.

    Collectives within one device are left out. Transfers inside kernels (Pallas, custom calls) are
    not visible.

    Args:
      program: `jitted.lower(...).compile()`, or its text, or the result of `parse_hlo`.
      mesh: Mesh that it was compiled for. For several TPU slices this must be a `Mesh`, since only
        devices have the index of their slice.
      trips: Trip count of loops whose end depends on data. By default, their collectives have
        `count=None`.
      dtypes: Element type that is sent -> element type in the program, such as `{"f32": "bf16"}`.
        It is only needed if the program has no conversions that show the element type.

    Raises:
      ProgramError: The program cannot be parsed, or runs on one device of a larger mesh.
      MeshMismatchError: The program was compiled for another number of devices.

    >>> read_collectives(jax.jit(f).lower(x).compile(), mesh)  # doctest: +SKIP
    """
    if not isinstance(program, Module):
        program = parse_hlo(program if isinstance(program, str) else program.as_text())
    module = program
    reader = _Reader.make(module, mesh, trips, dict(dtypes or {}))
    entry = Frame(computation=module.entry)
    collectives = tuple(
        collective for collective in reader.visit(entry, 1, False) if collective.devices > 1
    )
    if missed := sorted(reader.holding - reader.seen):
        raise ProgramError(
            f"no known instruction runs {missed[0]}, which contains collectives",
            fix="report this error; collectives are never skipped",
        )
    return collectives


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Visits the computations of a program and yields their collectives.

    Attributes:
      module: The program.
      sizes: Size of each mesh axis.
      positions: Position in the mesh of each device of the program. If each slice runs a program
        of its own, these are the devices of the first slice.
      slices: Mesh axes that cross slices if each slice runs a program of its own, else None.
      trips: Trip count of loops whose end depends on data, or None.
      dtypes: Element type that is sent -> element type in the program.
      holding: Computations that contain a collective, directly or through calls.
      started: Channels of collectives that are split into several fusions.
      seen: Computations visited so far.
    """

    module: Module
    sizes: Mapping[str, int]
    positions: Sequence[int]
    slices: GroupSpan | None
    trips: int | None
    dtypes: Mapping[str, str]
    holding: frozenset[str]
    started: frozenset[str]
    seen: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def make(
        cls, module: Module, mesh: Any, trips: int | None, dtypes: Mapping[str, str]
    ) -> _Reader:
        sizes = mesh_sizes(mesh)
        if module.replicas > 1:
            raise ProgramError(
                f"the program has {module.replicas} replicas, as from pmap",
                fix="use jit and shard_map",
            )
        positions, slices = _device_positions(module, mesh, sizes)
        return cls(
            module=module,
            sizes=sizes,
            positions=positions,
            slices=slices,
            trips=trips,
            dtypes=dtypes,
            holding=computations_with_collectives(module),
            started=frozenset(
                channel
                for computation in module.computations.values()
                for channel in started_channels(computation)
            ),
        )

    def visit(self, frame: Frame, times: int | None, maybe: bool) -> Iterator[Collective]:
        """Yield the collectives of a computation, which runs `times` times, and of its callees."""
        self.seen.add(frame.computation.name)
        channels: set[str] = set()  # channels of fused collectives; each channel counts once
        for instruction in frame.computation.instructions.values():
            if instruction.opcode == "while":
                yield from self._loop(frame, instruction, times, maybe)
            elif instruction.opcode == "fusion":
                yield from self._fusion(frame, instruction, times, maybe, channels)
            elif instruction.opcode in CALLING:
                is_branch = instruction.opcode == "conditional"
                for name, operands in calls_of(instruction):
                    if name in self.holding:
                        yield from self.visit(
                            called(self.module, name, frame, operands), times, maybe or is_branch
                        )
            elif (kind := kind_of(instruction)) is not None:
                yield self._collective(frame.computation, instruction, kind, times, maybe)

    def _loop(
        self, frame: Frame, instruction: Instruction, times: int | None, maybe: bool
    ) -> Iterator[Collective]:
        attributes = instruction.attributes()
        body, condition = attributes["body"].lstrip("%"), attributes["condition"].lstrip("%")
        # Counting trips may take thousands of steps, so loops that send nothing are left out first.
        if not {body, condition} & self.holding:
            return
        trips = trip_count(self.module, frame, instruction)
        trips = self.trips if trips is None else trips
        if body in self.holding:
            yield from self.visit(
                body_frame(self.module, frame, instruction), _product(times, trips), maybe
            )
        if condition in self.holding:
            # The condition runs once more than the body: its last run is false and ends the loop.
            inside = Frame(computation=self.module.computations[condition])
            yield from self.visit(
                inside, _product(times, None if trips is None else trips + 1), maybe
            )

    def _fusion(
        self,
        frame: Frame,
        instruction: Instruction,
        times: int | None,
        maybe: bool,
        channels: set[str],
    ) -> Iterator[Collective]:
        """Yield the collectives of a fusion.

        If a collective is fused with compute, the text of a TPU program shows it three times: in
        the fusions that start it, run beside it and end it.
        """
        name = instruction.attributes()["calls"].lstrip("%")
        if name not in self.holding:
            return
        self.seen.add(name)
        inner = self.module.computations[name]
        starts = set(started_channels(inner))
        for part in inner.instructions.values():
            kind = kind_of(part)
            if kind is None:
                if self.holding.intersection(callees_of(part)):
                    raise ProgramError(
                        f"{part.name} runs collectives inside a fusion (line {part.line})",
                        fix="report it",
                    )
                continue
            channel = part.attributes().get("channel_id", "")
            scatters = kind is Kind.ALL_REDUCE and is_scattered(inner, part)
            # Count a split collective once, at its start, and any other collective once, at its
            # first fusion. Combined reduce-scatters all have the same channel, but a reduce-scatter
            # is never split, so count each.
            is_repeat = channel in channels and not scatters
            if channel in self.started:
                is_repeat = channel not in starts
            if channel and is_repeat:
                continue
            channels.add(channel)
            whole = self._collective(
                inner, part, Kind.REDUCE_SCATTER if scatters else kind, times, maybe
            )
            # Often the fusion has an operation name, and the collective inside it has none. Then
            # take the name of the fusion.
            outer = instruction.attributes().get("metadata", "")
            yield (
                whole
                if whole.op_name
                else dataclasses.replace(
                    whole, op_name=_op_name(outer), source=source_of(outer, self.module.frames)
                )
            )

    def _collective(
        self,
        computation: Computation,
        instruction: Instruction,
        kind: Kind,
        times: int | None,
        maybe: bool,
    ) -> Collective:
        attributes = instruction.attributes()
        between = instruction.opcode == "send" and MEGASCALE.search(instruction.rest) is not None
        span = self._span_of(instruction, attributes, between)
        # Only operand 0 is data. A send also has a token as operand, and a ragged all-to-all also
        # has offsets and sizes.
        payload = (
            instruction.operands[:1]
            if instruction.opcode == "send" or kind is Kind.RAGGED_ALL_TO_ALL
            else instruction.operands
        )
        # A permute with `slice_sizes` sends only a part of its operands. This code cannot count the
        # bytes of such a permute, so it raises an error.
        if "slice_sizes" in attributes or not payload:
            raise ProgramError(
                f"{instruction.opcode} {instruction.name} (line {instruction.line}) "
                "has an unknown form",
                fix="report it",
            )
        shapes = [shape for name in payload for shape in computation.instructions[name].shapes]
        wires = [shape.dtype for shape in shapes]
        own = [
            self._program_dtype(computation, instruction, at, wire) for at, wire in enumerate(wires)
        ]
        # The operand of an all-gather is one shard, but the bytes of the whole result are counted.
        times_over = span.devices if kind is Kind.ALL_GATHER else 1
        logical = sum(
            times_over * bytes_of(dtype, shape.elements)
            for dtype, shape in zip(own, shapes, strict=True)
        )
        wire = sum(times_over * shape.bytes for shape in shapes)
        metadata = attributes.get("metadata", "")
        return Collective(
            kind=kind,
            mesh_axes=span.mesh_axes,
            devices=span.devices,
            partial=span.partial,
            count=times,
            maybe=maybe,
            gathers=kind is Kind.ALL_REDUCE
            and not between
            and is_gather(self.module, computation, instruction, span.devices),
            between_slices=between,
            dtype="+".join(dict.fromkeys(own)),
            wire_dtype="+".join(dict.fromkeys(wires)),
            logical_bytes=logical,
            wire_bytes=ring_bytes(kind, wire, span.devices),
            name=instruction.name,
            op_name=_op_name(metadata),
            source=source_of(metadata, self.module.frames),
        )

    def _program_dtype(
        self, computation: Computation, instruction: Instruction, at: int, wire: str
    ) -> str:
        if wire in self.dtypes:
            return self.dtypes[wire]
        return (
            program_type(self.module, computation, instruction, at)
            if len(instruction.operands) > at and instruction.opcode != "send"
            else wire
        )

    def _span_of(
        self, instruction: Instruction, attributes: Mapping[str, str], between: bool
    ) -> GroupSpan:
        if between:
            if self.slices is None:
                raise ProgramError(
                    f"{instruction.name} sends to other slices, but the mesh has one slice",
                    fix="pass the Mesh of all slices' devices",
                )
            return self.slices
        pairs = SEND_PAIRS.search(instruction.rest)
        if pairs or "source_target_pairs" in attributes:
            text = pairs[1] if pairs else attributes["source_target_pairs"]
            return span_of_pairs(
                parse_pairs(text, devices=self.module.partitions),
                self.sizes,
                positions=self.positions,
            )
        text = attributes["replica_groups"] + (
            f", device_ids={ids}" if (ids := attributes.get("device_ids")) else ""
        )
        groups = parse_groups(text, devices=self.module.partitions)
        return span_of(groups, self.sizes, positions=self.positions)


def _product(outer: int | None, inner: int | None) -> int | None:
    return None if outer is None or inner is None else outer * inner


def _op_name(metadata: str) -> str:
    match = _OP_NAME.search(metadata)
    return match[1] if match else ""


def _device_positions(
    module: Module, mesh: Any, sizes: Mapping[str, int]
) -> tuple[Sequence[int], GroupSpan | None]:
    """Return the mesh position of each device of the program, and the mesh axes that cross slices.

    The axes are None unless the program is compiled for one of several slices.
    """
    size = math.prod(sizes.values())
    if module.partitions == size:
        return range(size), None
    # With several slices, XLA compiles one program per slice. In the groups of such a program, the
    # device numbers count the devices of its slice only. Devices of a single slice have no
    # `slice_index`.
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat if isinstance(mesh, Mesh) else ()):
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(position)
    if len(slices) > 1 and all(len(members) == module.partitions for members in slices.values()):
        members = list(slices.values())
        across = tuple(
            tuple(positions[at] for positions in members) for at in range(module.partitions)
        )
        return members[0], span_of(across, sizes)
    if module.partitions == 1:
        raise ProgramError(
            f"the program runs on one device, but the mesh {dict(sizes)} has {size}: "
            "nothing is sharded, so nothing is sent",
            fix="shard the arguments (pm.shard, jax.device_put), "
            "or give ShapeDtypeStructs that have shardings",
        )
    raise MeshMismatchError(
        f"the program is compiled for {module.partitions} devices, "
        f"but the mesh {dict(sizes)} has {size}",
        fix="pass the mesh that the program's arrays are sharded over",
    )
