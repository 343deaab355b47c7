"""Tell which instructions of a program are collectives, and which computations run them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shardwright.errors import ProgramError
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.collectives.hlo import Computation, Instruction, Module

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


# An opcode that matches here but is not in `_OPCODES` is an unknown collective, and an error: if it
# were skipped, the program would seem to send less than it does.
_COLLECTIVE_NAME = re.compile(r"all-|collective-|reduce-scatter|ragged-all")


_ASYNC_SUFFIX = re.compile(r"-(start|update|done)$")


MEGASCALE = re.compile(r'_xla_megascale_transfer_type="?([A-Za-z_]+)')


SEND_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')


_STARTS = "AsyncCollectiveStart"


CALLING = frozenset({"call", "conditional", "async-start", "custom-call"})


def kind_of(instruction: Instruction) -> Kind | None:
    """Return the kind of a collective.

    Returns:
      None for other instructions, and for the end of an async pair.
    """
    if instruction.opcode == "send":
        if match := MEGASCALE.search(instruction.rest):
            if match[1] not in _BETWEEN_SLICES:
                raise ProgramError(
                    f"{instruction.name} (line {instruction.line}): "
                    f"unknown transfer {match[1]} between slices",
                    fix="report it",
                )
            return _BETWEEN_SLICES[match[1]]
        return Kind.PERMUTE if SEND_PAIRS.search(instruction.rest) else None
    # Of an async collective, only `-start` counts. `-update` and `-done` are not collectives of
    # their own, but their opcodes are known, so they raise no error.
    kind = _OPCODES.get(instruction.opcode.removesuffix("-start"))
    if (
        kind is None
        and _COLLECTIVE_NAME.match(instruction.opcode)
        and _ASYNC_SUFFIX.sub("", instruction.opcode) not in _OPCODES
    ):
        raise ProgramError(
            f"{instruction.name} (line {instruction.line}): "
            f"unknown collective {instruction.opcode}",
            fix="report it",
        )
    return kind


def calls_of(instruction: Instruction) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (computation, operands) of each computation that an instruction calls.

    A conditional calls one computation per branch.
    """
    attributes = instruction.attributes()
    if instruction.opcode == "conditional":
        names = attributes.get("branch_computations", "").strip("{}").split(",")
        names = [
            *names,
            attributes.get("true_computation", ""),
            attributes.get("false_computation", ""),
        ]
        callees = [name.strip().lstrip("%") for name in names if name]
        # Operand 0 of a `conditional` is its predicate or branch index. It is not passed to a
        # branch.
        yield from zip(callees, ((operand,) for operand in instruction.operands[1:]), strict=True)
        return
    # In other instructions, `to_apply` is a scalar function that a reduction applies.
    for key in ("to_apply",) if instruction.opcode == "call" else ("calls", "called_computations"):
        for name in attributes.get(key, "").strip("{}").split(","):
            if name:
                yield name.strip().lstrip("%"), instruction.operands


def callees_of(instruction: Instruction) -> Iterator[str]:
    """Yield the names of the computations that an instruction runs, loops and fusions included."""
    if instruction.opcode == "while":
        attributes = instruction.attributes()
        yield from (attributes[key].lstrip("%") for key in ("body", "condition"))
    elif instruction.opcode in CALLING or instruction.opcode == "fusion":
        yield from (name for name, _ in calls_of(instruction))


def computations_with_collectives(module: Module) -> frozenset[str]:
    """Return the names of the computations that contain a collective, directly or through calls."""
    calls = {
        computation.name: {
            name
            for instruction in computation.instructions.values()
            for name in callees_of(instruction)
        }
        for computation in module.computations.values()
    }
    holding = {
        computation.name
        for computation in module.computations.values()
        if any(kind_of(instruction) for instruction in computation.instructions.values())
    }
    while callers := {
        name for name, names in calls.items() if name not in holding and names & holding
    }:
        holding |= callers
    return frozenset(holding)


def started_channels(computation: Computation) -> Iterator[str]:
    """Yield the channels of the asynchronous collectives that a fused computation starts."""
    if any(
        f'"{_STARTS}"' in instruction.rest
        for instruction in computation.instructions.values()
        if instruction.opcode == "custom-call"
    ):
        for instruction in computation.instructions.values():
            if kind_of(instruction) is not None:
                yield instruction.attributes().get("channel_id", "")


_RESHAPING = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})


def is_scattered(computation: Computation, instruction: Instruction) -> bool:
    """Tell whether a fused all-reduce is a reduce-scatter: each device keeps only its slice.

    A combined all-reduce has a tuple of results. Each result must be sliced.
    """
    following = computation.users.get(instruction.name, ())
    if following and all(user.opcode == "get-tuple-element" for user in following):
        return all(is_scattered(computation, part) for part in following)
    while len(following) == 1 and following[0].opcode in _RESHAPING:
        following = computation.users.get(following[0].name, ())
    return len(following) == 1 and following[0].opcode == "dynamic-slice"


def is_gather(
    module: Module, computation: Computation, instruction: Instruction, devices: int
) -> bool:
    """Tell whether an all-reduce is a gather: each device fills only its slice of a zero array."""
    operand = computation.instructions[instruction.operands[0]]
    inner = (
        module.computations[operand.attributes()["calls"].lstrip("%")]
        if operand.opcode == "fusion"
        else computation
    )
    update = inner.root if operand.opcode == "fusion" else operand
    if update.opcode != "dynamic-update-slice":
        return False
    base = inner.instructions[update.operands[0]]
    if base.opcode == "parameter" and operand.opcode == "fusion":
        # The array of zeros may be made outside of the fusion that fills it.
        base = computation.instructions[operand.operands[int(base.literal)]]
    part = inner.instructions[update.operands[1]].shapes[0]
    # XLA makes an array of zeros by the broadcast of a scalar. Here any scalar counts as 0.
    return base.opcode == "broadcast" and part.elements * devices == update.shapes[0].elements
