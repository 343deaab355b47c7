"""The collectives of a compiled program: which, over which mesh axes, how often, how many bytes, and from which line."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardwright.errors import MeshMismatchError, ProgramError
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.collectives.element_types import program_type
from shardwright.plan.collectives.hlo import Computation, Instruction, Module, bytes_of, parse_hlo
from shardwright.plan.collectives.replica_groups import (
    Span,
    parse_groups,
    parse_pairs,
    span_of,
    span_of_pairs,
)
from shardwright.plan.collectives.trip_counts import Frame, body_frame, called, trip_count


class Kind(enum.StrEnum):
    """What a collective does."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "permute"
    BROADCAST = "broadcast"
    RAGGED_ALL_TO_ALL = "ragged_all_to_all"


_OPCODES: Mapping[str, Kind] = {
    "all-gather": Kind.ALL_GATHER,
    "all-reduce": Kind.ALL_REDUCE,
    "reduce-scatter": Kind.REDUCE_SCATTER,
    "all-to-all": Kind.ALL_TO_ALL,
    "collective-permute": Kind.PERMUTE,
    "collective-broadcast": Kind.BROADCAST,
    "ragged-all-to-all": Kind.RAGGED_ALL_TO_ALL,
}
_BETWEEN_SLICES: Mapping[str, Kind] = {
    "ALL_GATHER": Kind.ALL_GATHER,
    "ALL_REDUCE": Kind.ALL_REDUCE,
    "REDUCE_SCATTER": Kind.REDUCE_SCATTER,
    "ALL_TO_ALL": Kind.ALL_TO_ALL,
}
# Collectives that XLA may have one day: better an error than a program that seems to send less.
_LIKE_ONE = re.compile(r"all-|collective-|reduce-scatter|ragged-all")
_HALF = re.compile(r"-(start|update|done)$")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="?([A-Za-z_]+)')
_SEND_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?: source_line=(\d+))?')
_STARTS, _ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a compiled program. Bytes are of one run, on one device.

    Attributes:
      kind: what it does.
      mesh_axes: mesh axes along which its members differ, in mesh order.
      devices: how many devices take part together; of a permute, the longest chain or ring.
      partial: whether that is fewer than the mesh axes have positions (a part of an axis).
      count: how often it runs, loops included; None where a loop ends on data.
      maybe: whether it stands in a branch, which may not be taken; `count` is then an upper bound.
      gathers: whether it is an all-reduce that sums slices into zeros: a gather that sends twice what an all-gather would.
      between_slices: whether it crosses the network between slices.
      dtype: element type that the program had, as HLO writes it (`bf16`); several are joined by `+`.
      wire_dtype: element type that travels.
      logical_bytes: bytes of the array that is put together or taken apart, in `dtype`: an all-gather's result, else the operand.
      wire_bytes: bytes that a device sends on a ring, in `wire_dtype`; for an all-reduce twice what a reduce-scatter sends.
      name: the instruction.
      op_name: the JAX operation that it comes from, with its scopes; empty where the compiler does not say.
      source: `file.py:12`, likewise.
    """

    kind: Kind
    mesh_axes: tuple[str, ...]
    devices: int
    partial: bool
    count: int | None
    maybe: bool
    gathers: bool
    between_slices: bool
    dtype: str
    wire_dtype: str
    logical_bytes: int
    wire_bytes: int
    name: str
    op_name: str
    source: str

    @property
    def total_bytes(self) -> int | None:
        """Logical bytes of all runs; None where their number is unknown."""
        return None if self.count is None else self.count * self.logical_bytes

    @property
    def total_wire_bytes(self) -> int | None:
        """Wire bytes of all runs; None where their number is unknown."""
        return None if self.count is None else self.count * self.wire_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the collective as plain data."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**data, "kind": str(self.kind), "mesh_axes": list(self.mesh_axes)}


def read_collectives(
    program: Any,
    mesh: Mesh | AbstractMesh | Mapping[str, int],
    *,
    trips: int | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> tuple[Collective, ...]:
    """Return every collective of a compiled program, in the order of its text.

    A collective among one device moves nothing and is left out. What a kernel (Pallas, a custom call) sends by itself cannot
    be seen.

    Args:
      program: `jitted.lower(...).compile()`, or its text.
      mesh: the mesh that it was compiled for. Several TPU slices need the `Mesh` itself, whose devices know their slice.
      trips: taken for loops that end on data; absent: their collectives have `count=None`.
      dtypes: by element type that travels, the one that the program had (`{"f32": "bf16"}`), where conversions do not tell.

    Raises:
      ProgramError: the program cannot be read, or runs on one device of a larger mesh.
      MeshMismatchError: it was compiled for another number of devices.

    >>> read_collectives(jax.jit(f).lower(x).compile(), mesh)  # doctest: +SKIP
    """
    module = parse_hlo(program if isinstance(program, str) else program.as_text())
    reader = _Reader.make(module, mesh, trips, dict(dtypes or {}))
    entry = Frame(computation=module.entry)
    found = tuple(one for one in reader.visit(entry, 1, False) if one.devices > 1)
    _check_all_seen(module, reader)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """What reading a program needs everywhere in it.

    Attributes:
      positions: where each device of the program lies in the mesh: of several slices, the first one's devices.
      slices: (mesh axes, number) of the slices that run the program side by side, or None.
      holding: the computations that hold a collective, called ones included.
      started: channels whose collective is cut into fusions, of which one is its start.
      seen: the computations visited.
    """

    module: Module
    sizes: Mapping[str, int]
    positions: Sequence[int]
    slices: Span | None
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
                f"the program runs in {module.replicas} replicas, as pmap made them",
                fix="use jit and shard_map",
            )
        positions, slices = _positions(module, mesh, sizes)
        return cls(
            module=module,
            sizes=sizes,
            positions=positions,
            slices=slices,
            trips=trips,
            dtypes=dtypes,
            holding=_holding(module),
            started=frozenset(
                channel for one in module.computations.values() for channel in _started(one)
            ),
        )

    def visit(self, frame: Frame, times: int | None, maybe: bool) -> Iterator[Collective]:
        """Yield the collectives of a computation that runs `times` times, called ones included."""
        self.seen.add(frame.computation.name)
        once: set[str] = set()
        for one in frame.computation.instructions.values():
            if one.opcode == "while":
                yield from self._loop(frame, one, times, maybe)
            elif one.opcode == "fusion":
                yield from self._fusion(frame, one, times, maybe, once)
            elif one.opcode in _HOLDERS:
                branches = one.opcode == "conditional"
                for name, operands in _calls(one):
                    if name in self.holding:
                        yield from self.visit(
                            called(self.module, name, frame, operands), times, maybe or branches
                        )
            elif (kind := _kind(one)) is not None:
                yield self._collective(frame.computation, one, kind, times, maybe)

    def _loop(
        self, frame: Frame, one: Instruction, times: int | None, maybe: bool
    ) -> Iterator[Collective]:
        attributes = one.attributes()
        body, condition = attributes["body"].lstrip("%"), attributes["condition"].lstrip("%")
        if not {body, condition} & self.holding:
            return
        trips = trip_count(self.module, frame, one)
        trips = self.trips if trips is None else trips
        if body in self.holding:
            yield from self.visit(body_frame(self.module, frame, one), _times(times, trips), maybe)
        if condition in self.holding:
            inside = Frame(computation=self.module.computations[condition])
            yield from self.visit(
                inside, _times(times, None if trips is None else trips + 1), maybe
            )

    def _fusion(
        self, frame: Frame, one: Instruction, times: int | None, maybe: bool, once: set[str]
    ) -> Iterator[Collective]:
        """Yield a fusion's collectives. TPU programs print one that is fused with compute three times: start, compute, done."""
        name = one.attributes()["calls"].lstrip("%")
        if name not in self.holding:
            return
        self.seen.add(name)
        inner = self.module.computations[name]
        starts = set(_started(inner))
        for found in inner.instructions.values():
            kind = _kind(found)
            if kind is None:
                if self.holding.intersection(_callees(found)):
                    raise ProgramError(
                        f"{found.name} runs collectives inside a fusion (line {found.line})",
                        fix="report it",
                    )
                continue
            channel = found.attributes().get("channel_id", "")
            if channel and (channel not in starts if channel in self.started else channel in once):
                continue
            once.add(channel)
            scatters = kind is Kind.ALL_REDUCE and _is_scattered(inner, found)
            whole = self._collective(
                inner, found, Kind.REDUCE_SCATTER if scatters else kind, times, maybe
            )
            # The compiler often leaves the operation's name on the fusion alone.
            outer = one.attributes().get("metadata", "")
            yield (
                whole
                if whole.op_name
                else dataclasses.replace(whole, op_name=_op_name(outer), source=self._source(outer))
            )

    def _collective(
        self, computation: Computation, one: Instruction, kind: Kind, times: int | None, maybe: bool
    ) -> Collective:
        attributes = one.attributes()
        between = one.opcode == "send" and _MEGASCALE.search(one.rest) is not None
        span = self._span(one, attributes, between)
        payload = (
            one.operands[:1]
            if one.opcode == "send" or kind is Kind.RAGGED_ALL_TO_ALL
            else one.operands
        )
        if "slice_sizes" in attributes or not payload:
            raise ProgramError(
                f"{one.opcode} {one.name} (line {one.line}) is of a form that is not known",
                fix="report it",
            )
        shapes = [shape for name in payload for shape in computation.instructions[name].shapes]
        wires = [shape.dtype for shape in shapes]
        own = [self._own_type(computation, one, at, wire) for at, wire in enumerate(wires)]
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
            and _is_gather(self.module, computation, one, span.devices),
            between_slices=between,
            dtype="+".join(dict.fromkeys(own)),
            wire_dtype="+".join(dict.fromkeys(wires)),
            logical_bytes=logical,
            wire_bytes=_sent(kind, wire, span.devices),
            name=one.name,
            op_name=_op_name(metadata),
            source=self._source(metadata),
        )

    def _own_type(self, computation: Computation, one: Instruction, at: int, wire: str) -> str:
        if wire in self.dtypes:
            return self.dtypes[wire]
        return (
            program_type(self.module, computation, one, at)
            if len(one.operands) > at and one.opcode != "send"
            else wire
        )

    def _span(self, one: Instruction, attributes: Mapping[str, str], between: bool) -> Span:
        if between:
            if self.slices is None:
                raise ProgramError(
                    f"{one.name} sends to other slices, and the mesh has one",
                    fix="pass the Mesh of all slices' devices",
                )
            return self.slices
        pairs = _SEND_PAIRS.search(one.rest)
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

    def _source(self, metadata: str) -> str:
        if found := _FRAME.search(metadata):
            return self.module.frames.get(found[1], "")
        found = _SOURCE.search(metadata)
        return "" if found is None else f"{found[1]}:{found[2]}" if found[2] else found[1]


_HOLDERS = frozenset({"call", "conditional", "async-start", "custom-call"})


def _times(outer: int | None, inner: int | None) -> int | None:
    return None if outer is None or inner is None else outer * inner


def _op_name(metadata: str) -> str:
    found = _OP_NAME.search(metadata)
    return found[1] if found else ""


def _kind(one: Instruction) -> Kind | None:
    """Return what a collective instruction does; None for others, and for the second half of an asynchronous one."""
    if one.opcode == "send":
        if found := _MEGASCALE.search(one.rest):
            if found[1] not in _BETWEEN_SLICES:
                raise ProgramError(
                    f"{one.name} (line {one.line}): a transfer {found[1]} between slices is not known",
                    fix="report it",
                )
            return _BETWEEN_SLICES[found[1]]
        return Kind.PERMUTE if _SEND_PAIRS.search(one.rest) else None
    kind = _OPCODES.get(one.opcode.removesuffix("-start"))
    if kind is None and _LIKE_ONE.match(one.opcode) and _HALF.sub("", one.opcode) not in _OPCODES:
        raise ProgramError(
            f"{one.name} (line {one.line}): {one.opcode} is no collective that is known",
            fix="report it",
        )
    return kind


def _calls(one: Instruction) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (computation, operands) of everything that an instruction runs, once per branch."""
    attributes = one.attributes()
    if one.opcode == "conditional":
        names = attributes.get("branch_computations", "").strip("{}").split(",")
        names = [
            *names,
            attributes.get("true_computation", ""),
            attributes.get("false_computation", ""),
        ]
        found = [name.strip().lstrip("%") for name in names if name]
        yield from zip(found, ((operand,) for operand in one.operands[1:]), strict=True)
        return
    for key in ("to_apply",) if one.opcode == "call" else ("calls", "called_computations"):
        for name in attributes.get(key, "").strip("{}").split(","):
            if name:
                yield name.strip().lstrip("%"), one.operands


def _callees(one: Instruction) -> Iterator[str]:
    if one.opcode == "while":
        attributes = one.attributes()
        yield from (attributes[key].lstrip("%") for key in ("body", "condition"))
    elif one.opcode in _HOLDERS or one.opcode == "fusion":
        yield from (name for name, _ in _calls(one))


def _holding(module: Module) -> frozenset[str]:
    """Return the computations that hold a collective, or call one that does."""
    calls = {
        one.name: {name for each in one.instructions.values() for name in _callees(each)}
        for one in module.computations.values()
    }
    holding = {
        one.name
        for one in module.computations.values()
        if any(_kind(each) for each in one.instructions.values())
    }
    while more := {
        name for name, names in calls.items() if name not in holding and names & holding
    }:
        holding |= more
    return frozenset(holding)


def _started(computation: Computation) -> Iterator[str]:
    """Yield the channels of the collectives whose asynchronous start a fused computation is."""
    if any(
        f'"{_STARTS}"' in one.rest
        for one in computation.instructions.values()
        if one.opcode == "custom-call"
    ):
        for one in computation.instructions.values():
            if _kind(one) is not None:
                yield one.attributes().get("channel_id", "")


def _is_scattered(computation: Computation, one: Instruction) -> bool:
    """Tell whether a fused all-reduce only hands on this device's slice of it, which is a reduce-scatter."""
    following = computation.users.get(one.name, ())
    while len(following) == 1 and following[0].opcode in (
        "bitcast",
        "copy",
        "convert",
        "reshape",
        "transpose",
    ):
        following = computation.users.get(following[0].name, ())
    return len(following) == 1 and following[0].opcode == "dynamic-slice"


def _is_gather(module: Module, computation: Computation, one: Instruction, devices: int) -> bool:
    """Tell whether an all-reduce sums arrays in which each device has filled in its slice alone."""
    made = computation.instructions[one.operands[0]]
    inner = (
        module.computations[made.attributes()["calls"].lstrip("%")]
        if made.opcode == "fusion"
        else computation
    )
    update = inner.root if made.opcode == "fusion" else made
    if update.opcode != "dynamic-update-slice":
        return False
    base = inner.instructions[update.operands[0]]
    if base.opcode == "parameter" and made.opcode == "fusion":
        base = computation.instructions[made.operands[int(base.literal)]]
    part = inner.instructions[update.operands[1]].shapes[0]
    return base.opcode == "broadcast" and part.elements * devices == update.shapes[0].elements


def _sent(kind: Kind, whole: int, devices: int) -> int:
    """Return the bytes that each device sends on a ring, where the whole array has `whole` bytes."""
    if kind in (Kind.PERMUTE, Kind.BROADCAST):
        return whole
    once = -(-whole * (devices - 1) // devices)
    return 2 * once if kind is Kind.ALL_REDUCE else once


def _positions(
    module: Module, mesh: Any, sizes: Mapping[str, int]
) -> tuple[Sequence[int], Span | None]:
    """Return where the program's devices lie in the mesh, and the span of its slices if it is compiled for one of several."""
    size = 1
    for one in sizes.values():
        size *= one
    if module.partitions == size:
        return range(size), None
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat if isinstance(mesh, Mesh) else ()):
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(position)
    if len(slices) > 1 and all(len(members) == module.partitions for members in slices.values()):
        members = list(slices.values())
        across = tuple(tuple(one[at] for one in members) for at in range(module.partitions))
        return members[0], span_of(across, sizes)
    if module.partitions == 1:
        raise ProgramError(
            f"the program runs on one device, the mesh {dict(sizes)} has {size}: nothing is sharded, so nothing can be sent",
            fix="shard the arguments (pm.shard, jax.device_put), or give ShapeDtypeStructs that have shardings",
        )
    raise MeshMismatchError(
        f"the program is compiled for {module.partitions} devices, the mesh {dict(sizes)} has {size}",
        fix="pass the mesh that the program's arrays lie on",
    )


def _check_all_seen(module: Module, reader: _Reader) -> None:
    """Check that nothing that holds a collective was passed over."""
    missed = sorted(reader.holding - reader.seen)
    if missed:
        raise ProgramError(
            f"nothing known runs {missed[0]}, which holds collectives",
            fix="report it; collectives are never passed over",
        )


def total(collectives: Iterable[Collective]) -> int | None:
    """Return the logical bytes of all runs together; None if the number of runs of one is unknown."""
    found = [one.total_bytes for one in collectives]
    return None if None in found else sum(one for one in found if one is not None)
