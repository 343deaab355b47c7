"""The text of a compiled program (HLO) as computations and instructions. Reads every form that XLA prints for CPU, GPU and TPU.

`compiled.as_text()` is the one view of a program that JAX offers on every backend; HLO has no stable grammar, so what cannot
be read is an error, never skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardwright.errors import ProgramError

_COMMENT = re.compile(r"/\*index=\d+\*/")
# What a Pallas kernel says of itself: the only attribute that XLA prints on lines of its own.
_BROKEN = re.compile(r'kernel_metadata=\{\n(?:"[^\n]*\n)*\}\}[^\n]*\n')
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_OPERAND = re.compile(r"%([^\s,()]+)")
# Our own package: `shardwright/`, two folders above this one.
_OWN = str(Path(__file__).parents[2]) + "/"
# What comes with Python or was installed into it: a line of it says little to whoever wrote the program.
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

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
class Shape:
    """One array of a result: element type as HLO writes it, and dims on one device."""

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
        """Whole bytes of the elements."""
        return bytes_of(self.dtype, self.elements)


def bits_of(dtype: str) -> int:
    """Return the bits of one element of a type.

    Raises:
      ProgramError: a type that HLO did not have when this was written.
    """
    if dtype not in BITS:
        raise ProgramError(
            f"element type {dtype!r} is not known",
            fix="report it; the bytes of a program that has it cannot be told",
        )
    return BITS[dtype]


def bytes_of(dtype: str, elements: int) -> int:
    """Return the whole bytes of elements of a type.

    Raises:
      ProgramError: as `bits_of` does.
    """
    return -(-elements * bits_of(dtype) // 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
      name: its name, without the percent sign.
      opcode: for instance `all-gather-start`.
      shapes: the arrays of its result, those of nested tuples in a row.
      is_tuple: whether the result is a tuple.
      operands: names of the instructions that it reads.
      literal: what stands between the parentheses: a constant's value, a parameter's number.
      rest: the attributes, as text.
      is_root: whether it is its computation's result.
      line: line of the text, from 1.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    is_tuple: bool
    operands: tuple[str, ...]
    literal: str
    rest: str
    is_root: bool
    line: int

    def attributes(self) -> Mapping[str, str]:
        """Return the attributes by name, values as text."""
        return _attributes(self.rest)


@functools.lru_cache(maxsize=4096)  # a loop's counter is asked for the same ones at every trip
def _attributes(text: str) -> Mapping[str, str]:
    pairs = (piece.partition("=") for piece in split(text))
    return types.MappingProxyType({key.strip(): value for key, _, value in pairs if value})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A named sequence of instructions: the program, a loop's body, a fusion.

    Attributes:
      name: its name, without the percent sign.
      instructions: by name, in the order of the text.
      root: its result.
      users: what reads each instruction's result.
    """

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction
    users: Mapping[str, Sequence[Instruction]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: where it starts.
      partitions: number of devices that run it together, by position in the mesh.
      replicas: copies of the whole, as `pmap` of old made them; 1 for everything that `jit` compiles.
      frames: `file.py:12` by stack frame id, where the text has that table: the innermost line outside of installed libraries.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    partitions: int
    replicas: int
    frames: Mapping[str, str]


def parse_hlo(text: str) -> Module:
    """Parse the text of a compiled program.

    Raises:
      ProgramError: it is no HLO, or has a line that cannot be read.
    """
    if not text.startswith("HloModule"):
        raise ProgramError(
            "the text is no compiled program: it does not start with HloModule",
            fix="pass jitted.lower(...).compile()",
        )
    lines = _BROKEN.sub(_joined, _COMMENT.sub("", text)).splitlines()
    head = lines[0]
    computations: dict[str, Computation] = {}
    entry = None
    for number, line in enumerate(lines, 1):
        found = _COMPUTATION.match(line)
        if found:
            computation = _computation(found[2], lines, number)
            computations[computation.name] = computation
            entry = computation if found[1] else entry
    if entry is None:
        raise ProgramError(
            "the program has no ENTRY computation", fix="pass the whole text of compiled.as_text()"
        )
    return Module(
        computations=computations,
        entry=entry,
        partitions=_number(head, "num_partitions"),
        replicas=_number(head, "replica_count"),
        frames=_frames(lines),
    )


def _joined(broken: re.Match[str]) -> str:
    # The line breaks go to the end, so that other lines keep their numbers.
    return broken[0].replace("\n", "") + "\n" * broken[0].count("\n")


def _number(head: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", head)
    return int(found[1]) if found else 1


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
        one = _instruction(line, number + 1)
        instructions[one.name] = one
        root = one if one.is_root else root
        for operand in dict.fromkeys(one.operands):
            users.setdefault(operand, []).append(one)
    if root is None:
        raise ProgramError(
            f"computation {name} has no ROOT", fix="pass the whole text of compiled.as_text()"
        )
    return Computation(name=name, instructions=instructions, root=root, users=users)


def _instruction(line: str, number: int) -> Instruction:
    found = _INSTRUCTION.match(line)
    if found is None:
        raise _unreadable(line, number)
    at = found.end()
    end = _closing(line, at) + 1 if line.startswith("(", at) else line.find(" ", at)
    is_tuple, shapes = line.startswith("(", at), tuple(_shapes(line[at:end]))
    at = end + 1
    opening = line.find("(", at)
    if end < 0 or opening < 0:
        raise _unreadable(line, number)
    closing = _closing(line, opening)
    literal = line[opening + 1 : closing]
    opcode = line[at:opening]
    return Instruction(
        name=found[2],
        opcode=opcode,
        shapes=shapes,
        is_tuple=is_tuple,
        operands=() if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(literal)),
        literal=literal,
        rest=line[closing + 1 :].lstrip(", "),
        is_root=bool(found[1]),
        line=number,
    )


def _unreadable(line: str, number: int) -> ProgramError:
    return ProgramError(
        f"line {number} of the compiled program cannot be read",
        snippet=line.strip()[:200],
        fix="report it with the line",
    )


def _shapes(text: str) -> Iterator[Shape]:
    for found in _SHAPE.finditer(text):
        # A dynamic dim is written with its bound, <=8.
        yield Shape(
            dtype=found[1], dims=tuple(int(dim.lstrip("<=")) for dim in found[2].split(",") if dim)
        )


def _closing(line: str, opening: int) -> int:
    """Return where the bracket that opens at `opening` is closed; strings are passed over."""
    depth = 0
    for at, mark in _marks(line, opening):
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth == 0:
                return at
    raise ProgramError(
        "a bracket of the compiled program is never closed",
        snippet=line.strip()[:200],
        fix="pass the whole text",
    )


def _marks(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield (position, character) of every bracket and comma outside double quotes."""
    for found in _BRACKET.finditer(text, start):
        if not found[0].startswith('"'):
            yield found.start(), found[0]


def split(text: str) -> list[str]:
    """Split at the commas that stand in no bracket and no string.

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


def _frames(lines: list[str]) -> dict[str, str]:
    """Return `file.py:12` for each stack frame of the tables at the top."""
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    current = None
    for line in lines[1:]:
        if line in tables:
            current = tables[line]
        elif line.startswith(("%", "ENTRY")):
            break
        elif current is not None and line:
            key, _, value = line.partition(" ")
            current[key] = value
    places = {key: _place(tables, value) for key, value in tables["StackFrames"].items()}
    # Parents are written one too high, 1 for none. Our own frames say nothing to whoever called them.
    parents = {
        key: str(int(_field(value, "parent_frame_id") or 1) - 1)
        for key, value in tables["StackFrames"].items()
    }
    frames = {key: _told([places[at] for at in _callers(key, parents)]) for key in places}
    return {key: place for key, place in frames.items() if place}


def _callers(frame: str, parents: Mapping[str, str]) -> Iterator[str]:
    """Yield a frame, its caller, and so on."""
    yield frame
    while int(parents[frame]) in range(1, int(frame)):
        frame = parents[frame]
        yield frame


def _told(places: Sequence[str]) -> str:
    """Return the first place outside of libraries; without one the first that is not ours, else the outermost."""
    theirs = [place for place in places if place and not place.startswith(_OWN)]
    return next(
        (place for place in theirs if not _LIBRARY.search(place)),
        theirs[0] if theirs else places[-1],
    )


def _place(tables: Mapping[str, Mapping[str, str]], frame: str) -> str:
    location = tables["FileLocations"].get(_field(frame, "file_location_id"), "")
    file = tables["FileNames"].get(_field(location, "file_name_id"), "").strip('"')
    return f"{file}:{_field(location, 'line')}" if file else ""


def _field(text: str, key: str) -> str:
    found = re.search(rf"\b{key}=(\d+)", text)
    return found[1] if found else ""
