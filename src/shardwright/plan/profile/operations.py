"""Read which operations of a compiled program compute, and which ones send."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from shardwright.plan.collectives.collective import Collective
from shardwright.plan.collectives.frames import source_of
from shardwright.plan.collectives.hlo import Computation, Instruction, Module, parse_hlo
from shardwright.plan.collectives.instructions import callees_of, kind_of, started_channels
from shardwright.plan.collectives.read import read_collectives

# Opcodes that only run other operations. Their time is the time of those operations.
_CONTROL: Final = frozenset({"while", "conditional", "call"})
# In the text of a TPU program, this marks the end of a split collective.
_ENDS: Final = '"AsyncCollectiveDone"'
# Matmuls that XLA passes to a library, such as cuBLAS,
# and attention that it passes to cuDNN, "__cudnn$fmhaSoftmax".
_LIBRARY_MATMUL: Final = re.compile(r'custom_call_target="[^"]*(gemm|matmul|fmha)', re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendOp:
    """An operation that runs or starts a collective.

    Attributes:
      collective: The collective. If the operation has several, their bytes are summed.
      parts: Logical bytes of each array that is sent.
    """

    collective: Collective
    parts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOps:
    """The operations of a program, by the names that a profile has.

    Attributes:
      sends: Operations that run or start a collective.
      ends: Operations that wait for a collective -> the operation that started it.
      waits: Operations that compute nothing: those that only run other operations, such as loops,
        and copies that run beside other operations.
      sources: Operations that compute -> line of the model, `model.py:12`, or "".
      matmuls: Operations that compute and have a matmul.
      entry: Operations outside of loops. Each runs once per run of the program.
    """

    sends: Mapping[str, SendOp]
    ends: Mapping[str, str]
    waits: frozenset[str]
    sources: Mapping[str, str]
    matmuls: frozenset[str]
    entry: frozenset[str]


def read_ops(text: str, mesh: Any, *, partitions: int = 0) -> ProgramOps:
    """Return the operations of a compiled program.

    Args:
      text: The program as HLO text.
      mesh: The mesh that it was compiled for, or the sizes of its axes.
      partitions: Number of devices that run it together. Defaults to what the text says.

    Raises:
      ProgramError: The program cannot be parsed.
      MeshMismatchError: The program was compiled for another number of devices.
    """
    module = parse_hlo(text)
    module = dataclasses.replace(module, partitions=partitions or module.partitions)
    home = {
        name: computation
        for computation in module.computations.values()
        for name in computation.instructions
    }
    # A profile names a fusion, not the instructions inside it.
    holders = {
        callee: instruction.name
        for instruction in _instructions(module)
        if instruction.opcode in ("fusion", "async-start")
        for callee in callees_of(instruction)
    }
    found: dict[str, list[Collective]] = defaultdict(list)
    for collective in read_collectives(module, mesh):
        op = collective.name
        while home[op].name in holders:
            op = holders[home[op].name]
        found[op].append(collective)
    sends = {op: _send_op(collectives, home) for op, collectives in found.items()}
    ends = dict(_ends(module, home, sends, holders))
    sources, matmuls, waits = {}, set(), set()
    for instruction in _instructions(module):
        name, opcode = instruction.name, instruction.opcode
        if name in sends or name in ends:
            continue
        if opcode in _CONTROL or opcode.endswith(("-start", "-update", "-done")):
            waits.add(name)
            continue
        line = source_of(instruction.attributes().get("metadata", ""), module.frames)
        sources[name] = line.rpartition("/")[2]
        if _has_matmul(module, instruction):
            matmuls.add(name)
    return ProgramOps(
        sends=sends,
        ends=ends,
        waits=frozenset(waits),
        sources=sources,
        matmuls=frozenset(matmuls),
        entry=frozenset(module.entry.instructions),
    )


def _instructions(module: Module) -> Iterator[Instruction]:
    for computation in module.computations.values():
        yield from computation.instructions.values()


def _send_op(collectives: list[Collective], home: Mapping[str, Computation]) -> SendOp:
    parts: list[int] = []
    for collective in collectives:
        instructions = home[collective.name].instructions
        sizes = [
            shape.bytes
            for operand in instructions[collective.name].operands
            for shape in instructions[operand].shapes
        ]
        # The operands of an all-gather are shards, and a backend may have widened their type. So
        # scale their sizes to the logical bytes.
        scale = collective.logical_bytes / max(sum(sizes), 1)
        parts += [round(size * scale) for size in sizes]
    first = collectives[0]
    # Only combined reduce-scatters share a fusion, and all of these run over the same mesh axes.
    whole = dataclasses.replace(
        first,
        logical_bytes=sum(each.logical_bytes for each in collectives),
        wire_bytes=sum(each.wire_bytes for each in collectives),
    )
    return SendOp(collective=whole, parts=tuple(parts))


def _ends(
    module: Module,
    home: Mapping[str, Computation],
    sends: Mapping[str, SendOp],
    holders: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yield each operation that waits for a collective, and the operation that started it."""
    started = {
        channel: holders[computation.name]
        for computation in module.computations.values()
        if computation.name in holders
        for channel in started_channels(computation)
    }
    for instruction in _instructions(module):
        if instruction.opcode.endswith("-done"):
            instructions = home[instruction.name].instructions
            start = instructions[instruction.operands[0]]
            while start.opcode.endswith("-update"):
                start = instructions[start.operands[0]]
            if start.name in sends:
                yield instruction.name, start.name
        elif instruction.opcode == "fusion":
            (inner,) = (module.computations[name] for name in callees_of(instruction))
            parts = inner.instructions.values()
            if any(_ENDS in part.rest for part in parts if part.opcode == "custom-call"):
                for part in parts:
                    channel = part.attributes().get("channel_id", "")
                    if kind_of(part) is not None and channel in started:
                        yield instruction.name, started[channel]


def _has_matmul(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode in ("dot", "convolution"):
        return True
    if instruction.opcode == "custom-call":
        return bool(_LIBRARY_MATMUL.search(instruction.rest))
    return instruction.opcode == "fusion" and any(
        _has_matmul(module, part)
        for name in callees_of(instruction)
        for part in module.computations[name].instructions.values()
    )
