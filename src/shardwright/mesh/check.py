"""Check the axes of a mesh as the user wrote them: names, sizes and the parts that cross slices.

This module is pure: it reads no devices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final

from shardwright.errors import MeshSpecError, Problem, did_you_mean, raise_problems
from shardwright.vocabulary.axes import EMPTY, REPLICATED, UNCONSTRAINED
from shardwright.vocabulary.integers import as_integer

INFER: Final = -1
# The devices of a mesh are a NumPy array, which has at most this many dims.
MOST_MESH_AXES: Final = 64
# More devices than any mesh has. A limit is needed because Python refuses to convert text of
# thousands of digits to an integer.
MOST_SIZE: Final = 10**19
# Prefix of mesh text: devices keep their order. And prefix of a name: the part that crosses slices.
CONTIGUOUS: Final = "!"
DCN: Final = "dcn."

_FORBIDDEN = re.compile(r"[\s+|:,?]")
_QUOTE = re.compile("[\"']")
_RULE_WORDS = (REPLICATED, UNCONSTRAINED, EMPTY)
_NAME_FIX = "use a plain name such as dp, fsdp, tp, ep, sp or pp"
# A name and a size. A colon joins them, or an equals sign or spaces by mistake, or nothing.
_PAIR = re.compile(r"([A-Za-z][A-Za-z_.]{0,39})[\s=:]*(-?[0-9]{1,18})(?![\w.])")
# An integer that is written `2.0` or `1_000`.
_OTHER_INTEGER = re.compile(r"[0-9]{1,18}\.0{0,18}|[0-9]{1,3}(_[0-9]{1,3}){1,5}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One axis as the user wrote it. `name_at` and `size_at` are columns of the mesh text."""

    name: Any
    size: Any
    name_at: int = 0
    size_at: int = 0


def check_axes(axes: Sequence[tuple[object, object]]) -> dict[str, int]:
    """Return (name, size) pairs as a dict of exact `str` and `int`.

    Raises:
      MeshSpecError: A name is not allowed or occurs twice, or a size is not a positive integer.
    """
    parts = [Part(name=name, size=size) for name, size in axes]
    check_number(len(parts), "axes", MOST_MESH_AXES)
    raise_problems(part_problems(parts, text="", infer=False))
    return {exact(part.name): int(part.size) for part in parts}


def check_number(count: int, things: str, most: int) -> None:
    """Check the number of axes or parts of a mesh.

    Raises:
      MeshSpecError: There are more than `most`.
    """
    if count > most:
        fix = "leave out axes of size 1: an absent axis counts as one of size 1"
        raise MeshSpecError(f"the mesh has {count} {things}, at most {most} are read", fix=fix)


def name_fault(name: object) -> str:
    """Return why `name` cannot name a mesh axis, or an empty string if it can.

    Rules and mesh texts must be able to contain the name.

    >>> name_fault("d p")
    "contains ' ', which rules and mesh texts use"
    """
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not a string"
    if not name:
        return "is empty"
    if name in _RULE_WORDS:
        return "is a word of the rule grammar"
    if bad := _FORBIDDEN.search(name):
        return f"contains {bad.group()!r}, which rules and mesh texts use"
    if bad := _QUOTE.search(name):
        return f"contains {bad.group()!r}, which is a quote"
    if name.startswith(REPLICATED):
        return f"starts with {REPLICATED!r}, which means replicated in a rule"
    if name.startswith((CONTIGUOUS, DCN)):
        return f"starts with {CONTIGUOUS if name[0] == CONTIGUOUS else DCN!r}, which mesh texts use"
    return ""


def with_colons(word: str) -> str:
    """Return `dp:2,tp:4` for `dp 2 tp 4`, `dp=2 tp=4` or `dp2 tp4`.

    Return an empty string if the text has anything but names and sizes. Full-width letters, digits
    and colons count as plain ones.
    """
    if len(word) > 200:
        return ""
    import unicodedata  # imported late: only error messages need it

    word = unicodedata.normalize("NFKC", word)
    if _PAIR.sub("", word).strip(" ,"):
        return ""
    return ",".join(f"{name}:{size}" for name, size in _PAIR.findall(word))


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
    size, at = part.size, part.size_at
    if as_integer(size) is None:
        corrected = ""
        if isinstance(size, str):
            plain = str(int(size.partition(".")[0])) if _OTHER_INTEGER.fullmatch(size) else size
            corrected = with_colons(f"{part.name}:{plain}")
        fix = f'write "{corrected}"' if corrected else "write an integer, such as 4"
        return [fault(f"{what}: size {size!r} is not an integer", text=text, at=at, fix=fix)]
    if abs(size) >= MOST_SIZE:
        long = f"{what}: a size of 20 digits is too large"
        return [fault(long, text=f"{text:.80}", at=min(at, 80), fix="write a size such as 4")]
    if size < 1:
        alternative = ", or -1 for the remaining devices" if infer else ""
        fix = f"give a size of 1 or more{alternative}"
        return [fault(f"{what}: size {size} is not positive", text=text, at=at, fix=fix)]
    return []


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
    """Return a problem if the part of an axis that crosses slices does not divide its size."""
    if total % part == 0:
        return []
    what = f"dcn part {part} does not divide {name} = {total} (totals include the slices)"
    fix = f"make {name} a multiple of {part}, as in {name} = {part * max(1, total // part)}"
    return [fault(what, text=text, at=at, fix=fix)]


def fault(what: str, *, text: str, at: int, fix: str) -> Problem:
    """Return a problem whose snippet marks a column of the text."""
    return Problem(error=MeshSpecError, what=what, snippet=caret(text, at), fix=fix)


def caret(text: str, at: int) -> str:
    """Return the text with a `^` under column `at`, or an empty string if there is no text."""
    if not text:
        return ""
    # Control characters become spaces, so that the columns match.
    line = "".join(character if character.isprintable() else " " for character in text)
    return f"{line}\n{' ' * at}^"


def exact(name: str) -> str:
    """Return the name as exact `str`.

    JAX interns `PartitionSpec`s, so an enum member would also appear in specs of other code.
    """
    return str.__str__(name)
