"""Check the axes of a mesh as the user wrote them: names, sizes and the parts that cross slices.

This module is pure: it reads no devices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final

from shardwright.errors import MeshSpecError, Problem, did_you_mean, raise_problems
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.integers import as_integer, quoted

INFER: Final = -1
LONGEST_SIZE: Final = 19  # most digits that a size may have; no mesh needs more
# CONTIGUOUS before a mesh text means that devices keep their order. DCN before a name marks the
# part of a mesh axis that crosses slices.
CONTIGUOUS: Final = "!"
DCN: Final = "dcn."

# A name has no blanks, no quotes, and no symbols of rules or mesh texts.
_NAME = re.compile(r"""(?![-!])[^\s+|:,?"']+""")
_NAME_FIX = "use a plain name such as dp, fsdp, tp, ep, sp or pp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One axis as the user wrote it. `name_at` and `size_at` are columns of the mesh text."""

    name: Any
    size: Any
    name_at: int = 0
    size_at: int = 0


def check_axes(axes: Sequence[tuple[object, object]]) -> dict[str, int]:
    """Return (name, size) pairs as a dict of plain `str` and `int`.

    Raises:
      MeshSpecError: A name is not allowed or occurs twice, or a size is not a positive integer.
    """
    parts = [Part(name=name, size=size) for name, size in axes]
    raise_problems(part_problems(parts, text="", infer=False))
    return {exact(part.name): int(part.size) for part in parts}


def name_fault(name: object) -> str:
    """Return why `name` cannot name a mesh axis, or an empty string if it can.

    >>> name_fault("d p")
    'cannot be written in rules and mesh texts'
    """
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not a string"
    # `_` has a meaning in annotations, so it cannot be a mesh axis.
    if name == EMPTY or name.startswith(DCN) or not _NAME.fullmatch(name):
        return "cannot be written in rules and mesh texts"
    return ""


def part_problems(parts: Sequence[Part], *, text: str, infer: bool) -> list[Problem]:
    """Return what is wrong with names and sizes. If `infer` is true, one size may be -1."""
    problems: list[Problem] = []
    names: list[object] = []
    inferred = ""
    for part in parts:
        what = f"mesh axis {part.name!r}"
        if reason := name_fault(part.name):
            what_name = f"mesh axis name {part.name!r} {reason}"
            problems.append(fault(what_name, text=text, at=part.name_at, fix=_NAME_FIX))
        elif part.name in names:
            fix = "name each axis once"
            problems.append(fault(f"{what} occurs twice", text=text, at=part.name_at, fix=fix))
        names.append(part.name)
        if not infer or as_integer(part.size) != INFER:
            problems += _size_problems(part, text=text, what=what, infer=infer)
            continue
        if inferred:
            both = (
                f"mesh axes {inferred} and {part.name!r} are both -1, "
                "and only one size can be inferred"
            )
            fix = f"give {part.name!r} a size, such as 1"
            problems.append(fault(both, text=text, at=part.size_at, fix=fix))
        inferred = repr(part.name)
    return problems


def _size_problems(part: Part, *, text: str, what: str, infer: bool) -> list[Problem]:
    size = as_integer(part.size)
    if size is None:
        digits = part.size.isdecimal() and len(part.size) if isinstance(part.size, str) else 0
        reason = "is too large" if digits > LONGEST_SIZE else "is not an integer"
        what = f"{what}: size {quoted(part.size)} {reason}"
        fix = "write an integer, such as 4"
    elif size < 1:
        what = f"{what}: size {size} is not positive"
        fix = f"give a size of 1 or more{', or -1 for the remaining devices' if infer else ''}"
    else:
        return []
    return [fault(what, text=text, at=part.size_at, fix=fix)]


def dcn_problems(parts: Sequence[Part], crossing: Sequence[Part], *, text: str) -> list[Problem]:
    """Return what is wrong with the parts of axes that cross slices."""
    totals = {part.name: part.size for part in parts if isinstance(part.name, str)}
    problems: list[Problem] = []
    names: list[object] = []
    for part in crossing:
        name, at = part.name, part.name_at
        if not isinstance(name, str) or name not in totals:
            fix = did_you_mean(str(name), totals) or f"name one of {', '.join(totals)}"
            what = f"dcn names {name!r}, which is not an axis of the mesh"
            problems.append(fault(what, text=text, at=at, fix=fix))
        elif name in names:
            fix = "name each axis once"
            problems.append(fault(f"dcn names {name!r} twice", text=text, at=at, fix=fix))
        elif bad := _size_problems(part, text=text, what=f"dcn part of {name!r}", infer=False):
            problems += bad
        elif as_integer(totals[name]) is not None and totals[name] > 0:
            problems += dcn_divides(name, totals[name], part.size, text=text, at=part.size_at)
        names.append(name)
    return problems


def dcn_divides(name: str, total: int, part: int, *, text: str = "", at: int = 0) -> list[Problem]:
    """Return a problem if the part of an axis across slices does not divide the axis size."""
    if total % part == 0:
        return []
    what = f"dcn part {part} does not divide {name} = {total} (sizes include all slices)"
    fix = f"make {name} a multiple of {part}, as in {name} = {part * max(1, total // part)}"
    return [fault(what, text=text, at=at, fix=fix)]


def fault(what: str, *, text: str, at: int, fix: str) -> Problem:
    """Return a problem whose snippet marks a column of the text."""
    return Problem(error=MeshSpecError, what=what, snippet=caret(text, at), fix=fix)


def caret(text: str, at: int) -> str:
    """Return the text with a `^` under column `at`, or an empty string if there is no text."""
    # A line break in the text would move the caret to another line.
    return f"{text.replace(chr(10), ' ')}\n{' ' * at}^" if text else ""


def exact(name: str) -> str:
    """Return the name as a plain `str`, not as an instance of a subclass.

    JAX interns `PartitionSpec`s, so an enum member would also appear in specs of other code.
    """
    return str.__str__(name)
