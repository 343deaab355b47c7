"""Parse the text of a compiled program (HLO) of CPU, GPU and TPU backends.

`compiled.as_text()` is the only view of a program that JAX offers on every backend. HLO has no
stable grammar, so a line that cannot be parsed is an error. It is never skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence

from shardwright.errors import ProgramError
from shardwright.plan.collectives.frames import source_lines

# XLA numbers the elements of long tuples with comments such as `/*index=5*/`.
_COMMENT = re.compile(r"/\*index=\d+\*/")
# Metadata of a Pallas kernel: the only attribute that XLA prints on several lines.
_BROKEN = re.compile(r'kernel_metadata=\{\n(?:"[^\n]*\n)*\}\}[^\n]*\n')
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_OPERAND = re.compile(r"%([^\s,()]+)")

# Bits of one element. Tokens and opaque values hold no data.
BITS: Mapping[str, int] = {
    "pred": 8,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "token": 0,
    "opaque": 0,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{
        f"f8{kind}": 8
        for kind in (
            "e3m4",
            "e4m3",
            "e4m3b11fnuz",
            "e4m3fn",
            "e4m3fnuz",
            "e5m2",
            "e5m2fnuz",
            "e8m0fnu",
        )
    },
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HloShape:
    """One array of a result: its element type in HLO, and its shape on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def bytes(self) -> int:
        """Bytes of all elements, rounded up to a whole byte."""
        return bytes_of(self.dtype, self.elements)


def bits_of(dtype: str) -> int:
    """Return the number of bits of one element of a type.

    Raises:
      ProgramError: The type is unknown.
    """
    if dtype not in BITS:
        raise ProgramError(
            f"unknown element type {dtype!r}",
            fix="report this error; the bytes of this program cannot be counted",
        )
    return BITS[dtype]


def bytes_of(dtype: str, elements: int) -> int:
    """Return the number of bytes that elements of a type take, rounded up to a whole byte.

    Raises:
      ProgramError: The type is unknown.
    """
    return -(-elements * bits_of(dtype) // 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
      name: Name, without the percent sign.
      opcode: Opcode, such as `all-gather-start`.
      shapes: Arrays of the result; nested tuples are flattened.
      is_tuple: Whether the result is a tuple.
      operands: Names of the instructions that it reads.
      literal: Text between the parentheses: a constant's value, a parameter's number.
      rest: The attributes as text.
      is_root: Whether it is the result of its computation.
      line: Line of the text, from 1.
    """

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    is_tuple: bool
    operands: tuple[str, ...]
    literal: str
    rest: str
    is_root: bool
    line: int

    def attributes(self) -> Mapping[str, str]:
        """Return the attributes as text, by name."""
        return _attributes(self.rest)


# Cached, because `trip_counts` reads the same attributes for every trip of a loop.
@functools.lru_cache(maxsize=4096)
def _attributes(text: str) -> Mapping[str, str]:
    pairs = (piece.partition("=") for piece in split(text))
    return types.MappingProxyType({key.strip(): value for key, _, value in pairs if value})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A named sequence of instructions: the program, a loop's body, a fusion.

    Attributes:
      name: Name, without the percent sign.
      instructions: Instructions by name, in the order of the text.
      root: Instruction whose result is the result of the computation.
      users: Name of an instruction -> the instructions that read its result.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction
    users: Mapping[str, Sequence[Instruction]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A compiled program.

    Attributes:
      computations: Computations by name.
      entry: Computation that starts the program.
      partitions: Number of devices that run it together.
      replicas: Copies of the program, from the old `pmap`; 1 for everything that `jit` compiles.
      frames: Source line (`file.py:12`) by stack frame id, if the text has that table. Each line is
        the innermost one outside of installed libraries.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    partitions: int
    replicas: int
    frames: Mapping[str, str]


def parse_hlo(text: str) -> Module:
    """Parse the text of a compiled program.

    Raises:
      ProgramError: The text is not HLO, or a line cannot be parsed.
    """
    if not text.startswith("HloModule"):
        raise ProgramError(
            "the text is not a compiled program: it does not start with HloModule",
            fix="pass jitted.lower(...).compile()",
        )
    lines = _BROKEN.sub(
        # Move the line breaks behind the metadata, so that all later lines keep their numbers.
        lambda broken: broken[0].replace("\n", "") + "\n" * broken[0].count("\n"),
        _COMMENT.sub("", text),
    ).splitlines()
    head = lines[0]
    computations: dict[str, Computation] = {}
    entry = None
    for number, line in enumerate(lines, 1):
        match = _COMPUTATION.match(line)
        if match:
            computation = _computation(match[2], lines, number)
            computations[computation.name] = computation
            entry = computation if match[1] else entry
    if entry is None:
        raise ProgramError(
            "the program has no ENTRY computation", fix="pass the whole text of compiled.as_text()"
        )
    return Module(
        computations=computations,
        entry=entry,
        partitions=_number(head, "num_partitions"),
        replicas=_number(head, "replica_count"),
        frames=source_lines(lines),
    )


def _number(head: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", head)
    # XLA leaves out counts of 1.
    return int(match[1]) if match else 1


def _computation(name: str, lines: list[str], start: int) -> Computation:
    instructions = {}
    users: dict[str, list[Instruction]] = {}
    root = None
    for number in range(start, len(lines)):
        line = lines[number]
        if line.startswith("}"):
            break
        if not line:
            continue
        instruction = _instruction(line, number + 1)
        instructions[instruction.name] = instruction
        root = instruction if instruction.is_root else root
        # An instruction that reads an operand twice is one user, because `is_scattered` counts
        # users.
        for operand in dict.fromkeys(instruction.operands):
            users.setdefault(operand, []).append(instruction)
    if root is None:
        raise ProgramError(
            f"computation {name} has no ROOT", fix="pass the whole text of compiled.as_text()"
        )
    return Computation(name=name, instructions=instructions, root=root, users=users)


def _instruction(line: str, number: int) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise _unreadable(line, number)
    at = match.end()
    # The type of a tuple contains spaces, as in `(f32[2], s32[])`. The type of an array has none.
    end = _closing(line, at) + 1 if line.startswith("(", at) else line.find(" ", at)
    is_tuple = line.startswith("(", at)
    shapes = tuple(
        # HLO writes a dynamic dim with its bound, as <=8.
        HloShape(dtype=each[1], dims=tuple(int(d.lstrip("<=")) for d in each[2].split(",") if d))
        for each in _SHAPE.finditer(line[at:end])
    )
    at = end + 1
    opening = line.find("(", at)
    if end < 0 or opening < 0:
        raise _unreadable(line, number)
    closing = _closing(line, opening)
    literal = line[opening + 1 : closing]
    opcode = line[at:opening]
    return Instruction(
        name=match[2],
        opcode=opcode,
        shapes=shapes,
        is_tuple=is_tuple,
        operands=() if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(literal)),
        literal=literal,
        rest=line[closing + 1 :].lstrip(", "),
        is_root=bool(match[1]),
        line=number,
    )


def _unreadable(line: str, number: int) -> ProgramError:
    return ProgramError(
        f"line {number} of the compiled program cannot be parsed",
        snippet=line.strip()[:200],
        fix="report this error with the line",
    )


def _closing(line: str, opening: int) -> int:
    """Return the position that closes the bracket at `opening`. Strings are skipped."""
    depth = 0
    for at, mark in _marks(line, opening):
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth == 0:
                return at
    raise ProgramError(
        "the compiled program has an unclosed bracket",
        snippet=line.strip()[:200],
        fix="pass the whole text",
    )


def _marks(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield (position, character) of every bracket and comma outside double quotes."""
    for match in _BRACKET.finditer(text, start):
        if not match[0].startswith('"'):
            yield match.start(), match[0]


def split(text: str) -> list[str]:
    """Split at the commas outside of brackets and strings.

    >>> split('dimensions={0,1}, to_apply=%add, metadata={op_name="a, b"}')
    ['dimensions={0,1}', 'to_apply=%add', 'metadata={op_name="a, b"}']
    """
    pieces, depth, start = [], 0, 0
    for at, mark in _marks(text):
        if mark == ",":
            if depth == 0:
                pieces.append(text[start:at].strip())
                start = at + 1
        else:
            depth += 1 if mark in "([{" else -1
    return [piece for piece in [*pieces, text[start:].strip()] if piece]
