"""Compare two compiled programs without the names, ids and metadata of their instructions.

Each instruction gets a digest of its opcode, its type, its attributes and the digests of what it
reads. So two programs are the same if their digests are the same, whatever the order of independent
instructions is. If they differ, the difference begins at the first instruction in the text whose
digest the other program does not have: all that this instruction reads is in both programs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from shardwright.plan.collectives.frames import source_of
from shardwright.plan.collectives.hlo import Instruction, Module, parse_hlo, split
from shardwright.plan.collectives.instructions import callees_of

# Attributes that do not change the result: names and source lines, ids that the compiler assigns,
# the order in which a device runs independent instructions, and settings of the backend. (A custom
# call keeps `backend_config`, which is its kernel.)
_DROPPED: Final = frozenset(
    {"metadata", "channel_id", "control-predecessors", "backend_config", "frontend_attributes"}
)
# Frontend attributes that are kept: they say where a send goes and what is done there.
_SENT: Final = (
    "_xla_send_recv_source_target_pairs=",
    "_xla_megascale_target=",
    "_xla_megascale_transfer_type=",
    "_xla_megascale_reduce_operation=",
)
_HEAD: Final = ("input_output_alias", "buffer_donor", "entry_computation_layout", "num_partitions")
_LITERAL: Final = 40  # characters of a constant that a report shows
_NAME = re.compile(r"%([^\s,(){}]+)")
_COMMENT = re.compile(r"/\*index=\d+\*/")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An instruction of one program that the other program lacks.

    Attributes:
      name: Its name in the text.
      text: Opcode and type, such as `all-gather f32[64,256]`.
      source: Line of the model (`file.py:12`), or "".
    """

    name: str
    text: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramDifference:
    """Where two programs differ first.

    Attributes:
      left: The instruction of the left program, or None if all of its instructions are in the
        right one.
      right: The instruction of the right program, or None if all of its instructions are in the
        left one.
      what: A difference that is not an instruction, such as `the layout of the arguments`, or "".
    """

    left: Operation | None = None
    right: Operation | None = None
    what: str = ""


def compare_programs(left: str, right: str) -> ProgramDifference | None:
    """Return where the texts of two compiled programs differ first, or None if they are equal.

    Raises:
      ProgramError: A text is not HLO, or a line cannot be parsed.
    """
    sides = [_DigestedProgram(left), _DigestedProgram(right)]
    entries = [side.module.entry.name for side in sides]
    found = _difference(sides[0], sides[1], entries[0], entries[1])
    if found is None and sides[0].head != sides[1].head:
        return ProgramDifference(what="the layout of the arguments, or which of them are donated")
    return found


class _DigestedProgram:
    """A parsed program, with the digests of its instructions by computation."""

    def __init__(self, text: str) -> None:
        self.module: Module = parse_hlo(text)
        self.lines = text.splitlines()
        self._digests: dict[str, dict[str, str]] = {}
        head = split(self.lines[0])
        self.head = [piece for piece in head if piece.startswith(_HEAD)]

    def digests(self, computation: str) -> dict[str, str]:
        """Return the digest of each instruction of a computation, by name, in order."""
        if computation not in self._digests:
            found: dict[str, str] = {}
            for instruction in self.module.computations[computation].instructions.values():
                found[instruction.name] = self._digest(instruction, found)
            self._digests[computation] = found
        return self._digests[computation]

    def _digest(self, instruction: Instruction, known: dict[str, str]) -> str:
        is_call = instruction.opcode == "custom-call"
        attributes = [
            f"{name}={_NAME.sub(self._called, value)}"
            for name, value in sorted(instruction.attributes().items())
            if name not in _DROPPED or (is_call and name == "backend_config")
        ]
        frontend = instruction.attributes().get("frontend_attributes", "")
        attributes += sorted(piece for piece in split(frontend[1:-1]) if piece.startswith(_SENT))
        # Without operands, `literal` is the number of a parameter or the value of a constant.
        literal = "" if instruction.operands else instruction.literal
        operands = [known[name] for name in instruction.operands]
        root = "ROOT" if instruction.is_root else ""
        own = [instruction.opcode, self.type_of(instruction), literal, root]
        return _hash([*own, *operands, *attributes])

    def _called(self, name: re.Match[str]) -> str:
        known = self.module.computations
        return _hash(sorted(self.digests(name[1]).values())) if name[1] in known else name[0]

    def type_of(self, instruction: Instruction) -> str:
        """Return the type of the result with its layout, as the text has it."""
        line = self.lines[instruction.line - 1]
        return _COMMENT.sub("", line.partition(" = ")[2].partition(f" {instruction.opcode}(")[0])

    def operation(self, computation: str, instruction: Instruction | None) -> Operation | None:
        """Return the parts of an instruction that a report shows."""
        if instruction is None:
            return None
        shapes = [f"{each.dtype}[{','.join(map(str, each.dims))}]" for each in instruction.shapes]
        # The number of a parameter, or the value of a constant.
        own = "" if instruction.operands else f"({instruction.literal[:_LITERAL]})"
        text = f"{instruction.opcode}{own} {', '.join(shapes)}"
        users = self.module.computations[computation].users
        reader: Instruction | None = instruction
        source = ""
        # XLA gives constants no line, so take the line of their reader.
        while reader is not None and not source:
            source = source_of(reader.attributes().get("metadata", ""), self.module.frames)
            reader = next(iter(users.get(reader.name, ())), None)
        return Operation(name=instruction.name, text=text, source=source)


def _difference(
    left: _DigestedProgram, right: _DigestedProgram, left_name: str, right_name: str
) -> ProgramDifference | None:
    """Return the first difference of two computations, or of loops and fusions in them."""
    first = _first_extra(left, left_name, right.digests(right_name).values())
    second = _first_extra(right, right_name, left.digests(left_name).values())
    if first is None and second is None:
        return None
    if first is not None and second is not None and first.opcode == second.opcode:
        for inner, other in zip(callees_of(first), callees_of(second), strict=False):
            found = _difference(left, right, inner, other)
            if found is not None:
                return found
    return ProgramDifference(
        left=left.operation(left_name, first), right=right.operation(right_name, second)
    )


def _first_extra(program: _DigestedProgram, name: str, others: Iterable[str]) -> Instruction | None:
    """Return the first instruction of a computation that the other computation has less often."""
    extra = Counter(program.digests(name).values())
    extra.subtract(Counter(others))
    instructions = program.module.computations[name].instructions
    for each, digest in program.digests(name).items():
        if extra[digest] > 0:
            return instructions[each]
    return None


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
