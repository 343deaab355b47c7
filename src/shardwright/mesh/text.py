"""Read what people write for a mesh: text, sizes or a mapping, into a `MeshSpec`. Pure: no JAX, no devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwright.errors import MeshSpecError, Problem, did_you_mean, raise_problems
from shardwright.vocabulary.axes import EMPTY, REPLICATED, UNCONSTRAINED
from shardwright.vocabulary.integers import as_integer, read_integer

DEFAULT_MESH_AXES: Final = ("dp", "fsdp", "tp", "sp")
INFER: Final = -1

_DCN = "dcn."
_CONTIGUOUS = "!"
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
# No mesh has more devices; and Python refuses to read or write a number of thousands of digits.
_MOST = 10**19
# An array of devices is a NumPy array, which has at most this many dims.
MOST_MESH_AXES: Final = 64
_FORBIDDEN = re.compile(r"[\s+|:,?]")
_QUOTE = re.compile("[\"']")
_RULE_WORDS = (REPLICATED, UNCONSTRAINED, EMPTY)

MeshLike = str | Mapping[str, int] | Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """A mesh before it has devices. Build it with `parse_mesh`, which checks it.

    Attributes:
      names: mesh axes, slowest first.
      sizes: total size of each axis, slices included; at most one is -1 until `resolve_sizes`.
      dcn: the part of each size that crosses slices; empty when nothing was said about slices.
      contiguous: keep the devices in the order given instead of following the physical topology.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dcn: tuple[int, ...] = ()
    contiguous: bool = False

    def __str__(self) -> str:
        parts = [f"{name}:{size}" for name, size in zip(self.names, self.sizes, strict=True)]
        crossing = [
            f"{_DCN}{name}:{size}"
            for name, size in zip(self.names, self.dcn, strict=False)
            if size > 1
        ]
        if self.dcn and not crossing:
            crossing = [f"{_DCN}{self.names[0]}:1"]
        return (_CONTIGUOUS if self.contiguous else "") + ",".join(crossing + parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One axis as written; `name_at` and `size_at` are columns of the text."""

    name: Any
    size: Any
    name_at: int = 0
    size_at: int = 0


def parse_mesh(
    spec: MeshLike, axis_names: Sequence[str] | None = None, *, dcn: Mapping[str, int] | None = None
) -> MeshSpec:
    """Read a mesh and check everything that can be checked without devices.

    Args:
      spec: `"dp:2,fsdp:-1,tp:4"`, in the order written; `"2,-1,4"` or `(2, -1, 4)`, in the order of `axis_names`; or
        `{"dp": 2, "tp": 4}`. In text a leading `!` keeps the device order, and `dcn.dp:2` says which part crosses slices.
      axis_names: names for sizes that bring none; absent: `DEFAULT_MESH_AXES`. Not allowed where `spec` names its axes.
      dcn: the part of each axis that crosses slices; absent or empty: nothing is said.

    Raises:
      MeshSpecError: with every problem found; for text, a caret points at each.

    >>> parse_mesh("dcn.dp:2,dp:4,tp:-1")
    MeshSpec(names=('dp', 'tp'), sizes=(4, -1), dcn=(2, 1), contiguous=False)
    """
    if isinstance(spec, str):
        _check_number(
            spec.count(",") + 1, "parts", 2 * MOST_MESH_AXES
        )  # each axis may come again as dcn.axis
        return _parse_text(spec, axis_names, dcn)
    if isinstance(spec, Mapping | Sequence):
        _check_number(len(spec), "axes", MOST_MESH_AXES)
    crossing = _dcn_parts(dcn)
    if isinstance(spec, Mapping):
        _refuse_names(axis_names, "the mapping")
        parts = [_Part(name=name, size=size) for name, size in spec.items()]
    elif isinstance(spec, Sequence) and not isinstance(spec, bytes | bytearray | memoryview):
        names = _given_names(axis_names)
        _check_count(len(spec), names, given=axis_names is not None)
        parts = [_Part(name=name, size=size) for name, size in zip(names, spec, strict=True)]
    else:
        raise MeshSpecError(
            f"a mesh cannot be read from {spec!r} of type {type(spec).__name__}",
            fix='write "dp:2,tp:4", {"dp": 2, "tp": 4} or (2, 4) with axis_names=("dp", "tp")',
        )
    return _checked(parts, crossing, contiguous=False)


def resolve_sizes(spec: MeshSpec, count: int, *, hint: str = "") -> MeshSpec:
    """Fill the -1 for `count` devices; without a -1 the mesh uses the first of them.

    `hint` is said after the fix: what the caller knows about getting more devices.

    Raises:
      MeshSpecError: too few devices, a count that does not divide, or a dcn part that does not divide its axis.

    >>> str(resolve_sizes(parse_mesh("dp:2,fsdp:-1,tp:2"), 8))
    'dp:2,fsdp:2,tp:2'
    """
    count = read_integer(
        "devices", count, error=MeshSpecError, fix="pass the number of devices, such as 8"
    )
    known = {name: size for name, size in zip(spec.names, spec.sizes, strict=True) if size != INFER}
    needed = math.prod(known.values())
    listing = ", ".join(f"{name}={size}" for name, size in known.items())
    devices = "1 device" if count == 1 else f"{count} devices"
    if INFER not in spec.sizes:
        if needed > count:
            fix = _join(
                f"choose sizes whose product is at most {count}, or give one axis the size -1", hint
            )
            raise MeshSpecError(
                f"mesh {listing} needs {needed} devices, there {'is' if count == 1 else 'are'} {count}",
                fix=fix,
            )
        return spec
    inferred = spec.names[spec.sizes.index(INFER)]
    if count % needed:
        raise MeshSpecError(
            f"mesh axis {inferred} = -1 has no size: {devices} cannot be divided by {listing}"
            + (f" ({needed})" if len(known) > 1 else ""),
            fix=_join(f"choose sizes of the other axes whose product divides {count}", hint),
            mesh_axes=(inferred,),
        )
    filled = dataclasses.replace(
        spec, sizes=tuple(int(count) // needed if size == INFER else size for size in spec.sizes)
    )
    raise_problems(
        [
            p
            for axis in zip(spec.names, filled.sizes, spec.dcn, strict=False)
            for p in _dcn_divides(*axis)
        ]
    )
    return filled


def name_fault(name: object) -> str:
    """Return why `name` cannot name a mesh axis, or an empty string: what a mesh may have, a rule and a mesh text can write.

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
        return f"contains {bad.group()!r}, which begins and ends a text"
    if name.startswith(REPLICATED):
        return f"starts with {REPLICATED!r}, which says replicated in a rule"
    if name.startswith((_CONTIGUOUS, _DCN)):
        return (
            f"starts with {_CONTIGUOUS if name[0] == _CONTIGUOUS else _DCN!r}, which mesh texts use"
        )
    return ""


def check_axes(axes: Sequence[tuple[object, object]]) -> dict[str, int]:
    """Return (name, size) pairs as a dict of exact `str` and `int`.

    Raises:
      MeshSpecError: a bad or repeated name, or a size below 1.
    """
    parts = [_Part(name=name, size=size) for name, size in axes]
    _check_number(len(parts), "axes", MOST_MESH_AXES)
    raise_problems(_part_problems(parts, text="", infer=False))
    return {_exact(part.name): int(part.size) for part in parts}


def _parse_text(
    text: str, axis_names: Sequence[str] | None, dcn: Mapping[str, int] | None
) -> MeshSpec:
    contiguous = text.lstrip().startswith(_CONTIGUOUS)
    words = _words(text, text.index(_CONTIGUOUS) + 1 if contiguous else 0)
    named = ":" in text
    raise_problems(
        [
            _fault(what, text=text, at=at, fix=fix)
            for at, word in words
            for what, fix in _word_faults(word, named)
        ]
    )
    crossing = [
        _read_part(word.removeprefix(_DCN), at + len(_DCN))
        for at, word in words
        if word.startswith(_DCN)
    ]
    parts = [_read_part(word, at) for at, word in words if not word.startswith(_DCN)]
    _check_number(len(parts), "axes", MOST_MESH_AXES)
    if named:
        _refuse_names(axis_names, f"the text {text!r}")
    else:
        names = _given_names(axis_names)
        _check_count(len(parts), names, given=axis_names is not None, text=text)
        parts = [
            dataclasses.replace(part, name=name) for part, name in zip(parts, names, strict=True)
        ]
    if dcn and crossing:
        raise MeshSpecError(
            "slices are given twice: in the text and in dcn=",
            snippet=_caret(text, crossing[0].name_at),
            fix="keep one",
        )
    return _checked(
        parts,
        crossing or _dcn_parts(dcn),
        contiguous=contiguous,
        text=text,
        dcn_text=text if crossing else "",
    )


def _word_faults(word: str, named: bool) -> list[tuple[str, str]]:
    """Return (what, fix) if a word is neither `name:size` nor, where no word has a name, a size."""
    if not word:
        return [("a part of the mesh is empty", 'write sizes between commas, such as "dp:2,tp:4"')]
    if ":" in word:
        return []
    if _WHOLE_NUMBER.fullmatch(word):
        return (
            [(f"part {word!r} has no name, others have one", f'write "name:{word}"')]
            if named
            else []
        )
    return [(f"part {word!r} has no size", f'write "{_with_colons(word) or f"{word}:2"}"')]


# A name and a size, with anything or nothing in between that people write for the colon.
_PAIR = re.compile(r"([A-Za-z_.]{1,40})[\s=:]*(-?[0-9]{1,18})")


def _with_colons(word: str) -> str:
    """Return `dp:2,tp:4` for `dp 2 tp 4`, `dp=2 tp=4` or `dp2 tp4`; an empty string where there is more than names and sizes."""
    if len(word) > 200 or _PAIR.sub("", word).strip(" ,"):
        return ""
    return ",".join(f"{name}:{size}" for name, size in _PAIR.findall(word))


def _words(text: str, start: int) -> list[tuple[int, str]]:
    """Return (column, word) between commas, without the spaces around."""
    words = []
    for piece in text[start:].split(","):
        words.append((start + len(piece) - len(piece.lstrip()), piece.strip()))
        start += len(piece) + 1
    return words


def _read_part(word: str, column: int) -> _Part:
    if ":" not in word:
        return _Part(name="", size=_read_size(word), size_at=column)
    name, _, size = word.partition(":")
    size_at = column + len(name) + 1 + len(size) - len(size.lstrip())
    return _Part(name=name.rstrip(), size=_read_size(size.strip()), name_at=column, size_at=size_at)


def _read_size(word: str) -> int | str:
    return (int(word) if len(word) < 1000 else _MOST) if _WHOLE_NUMBER.fullmatch(word) else word


def _checked(
    parts: Sequence[_Part],
    crossing: Sequence[_Part],
    *,
    contiguous: bool,
    text: str = "",
    dcn_text: str = "",
) -> MeshSpec:
    if not parts:
        raise MeshSpecError(
            "a mesh needs at least one axis",
            snippet=_caret(text, 0),
            fix='write for instance "dp:-1"',
        )
    problems = _part_problems(parts, text=text, infer=True)
    problems += _dcn_problems(parts, crossing, text=dcn_text)
    raise_problems(problems)
    names = tuple(_exact(part.name) for part in parts)
    across = {_exact(part.name): int(part.size) for part in crossing}
    return MeshSpec(
        names=names,
        sizes=tuple(int(part.size) for part in parts),
        dcn=tuple(across.get(name, 1) for name in names) if across else (),
        contiguous=contiguous,
    )


def _part_problems(parts: Sequence[_Part], *, text: str, infer: bool) -> list[Problem]:
    found: list[Problem] = []
    seen: list[object] = []
    inferred = ""
    for part in parts:
        if reason := name_fault(part.name):
            found.append(
                _fault(
                    f"mesh axis name {part.name!r} {reason}",
                    text=text,
                    at=part.name_at,
                    fix=_NAME_FIX,
                )
            )
        elif part.name in seen:
            found.append(
                _fault(
                    f"mesh axis {part.name!r} occurs twice",
                    text=text,
                    at=part.name_at,
                    fix="give every axis once",
                )
            )
        seen.append(part.name)
        if infer and as_integer(part.size) == INFER:
            if inferred:
                what = (
                    f"mesh axes {inferred} and {part.name!r} are both -1, only one can be inferred"
                )
                found.append(
                    _fault(
                        what,
                        text=text,
                        at=part.size_at,
                        fix=f"give {part.name!r} a size, such as 1",
                    )
                )
            inferred = repr(part.name)
        else:
            found += _size_problems(part, text=text, what=f"mesh axis {part.name!r}", infer=infer)
    return found


def _size_problems(part: _Part, *, text: str, what: str, infer: bool) -> list[Problem]:
    if as_integer(part.size) is None:
        meant = _with_colons(f"{part.name}:{part.size}") if isinstance(part.size, str) else ""
        fix = f'write "{meant}"' if meant else "write a whole number, such as 4"
        return [
            _fault(
                f"{what}: size {part.size!r} is not a whole number",
                text=text,
                at=part.size_at,
                fix=fix,
            )
        ]
    if abs(part.size) >= _MOST:
        return [
            _fault(
                f"{what}: no mesh has a size of 20 digits",
                text=f"{text:.80}",
                at=min(part.size_at, 80),
                fix="write a size such as 4",
            )
        ]
    if part.size < 1:
        fix = "give a size of 1 or more" + (
            ", or -1 for what the other axes leave" if infer else ""
        )
        return [
            _fault(f"{what}: size {part.size} is not positive", text=text, at=part.size_at, fix=fix)
        ]
    return []


def _dcn_problems(parts: Sequence[_Part], crossing: Sequence[_Part], *, text: str) -> list[Problem]:
    totals = {part.name: part.size for part in parts if isinstance(part.name, str)}
    found: list[Problem] = []
    seen: list[object] = []
    for part in crossing:
        if not isinstance(part.name, str) or part.name not in totals:
            fix = did_you_mean(str(part.name), totals) or f"name one of {', '.join(totals)}"
            found.append(
                _fault(
                    f"dcn names {part.name!r}, which is no axis of the mesh",
                    text=text,
                    at=part.name_at,
                    fix=fix,
                )
            )
        elif part.name in seen:
            found.append(
                _fault(
                    f"dcn names {part.name!r} twice",
                    text=text,
                    at=part.name_at,
                    fix="give every axis once",
                )
            )
        elif bad := _size_problems(part, text=text, what=f"dcn part of {part.name!r}", infer=False):
            found += bad
        elif as_integer(totals[part.name]) is not None and totals[part.name] > 0:
            found += _dcn_divides(
                part.name, totals[part.name], part.size, text=text, at=part.size_at
            )
        seen.append(part.name)
    return found


def _dcn_divides(name: str, total: int, part: int, *, text: str = "", at: int = 0) -> list[Problem]:
    if total % part == 0:
        return []
    what = f"dcn part {part} does not divide {name} = {total} (totals include the slices)"
    return [
        _fault(
            what,
            text=text,
            at=at,
            fix=f"make {name} a multiple of {part}, as in {name} = {part * max(1, total // part)}",
        )
    ]


def _dcn_parts(dcn: Mapping[str, int] | None) -> list[_Part]:
    if dcn is not None and not isinstance(dcn, Mapping):
        raise MeshSpecError(
            f"dcn is of type {type(dcn).__name__}, not a mapping of axis to size",
            fix='write dcn={"dp": 2}',
        )
    _check_number(len(dcn or {}), "axes in dcn", MOST_MESH_AXES)
    return [_Part(name=name, size=size) for name, size in (dcn or {}).items()]


def _check_number(count: int, things: str, most: int) -> None:
    if count > most:
        fix = "leave out axes of size 1: an axis that is absent counts as one of size 1"
        raise MeshSpecError(f"the mesh has {count} {things}, at most {most} are read", fix=fix)


def _given_names(axis_names: Sequence[str] | None) -> tuple[str, ...]:
    if axis_names is None:
        return DEFAULT_MESH_AXES
    if isinstance(axis_names, str) or not isinstance(axis_names, Sequence):
        raise MeshSpecError(
            f"axis_names is {axis_names!r}, not a sequence of names",
            fix='write axis_names=("dp", "tp")',
        )
    return tuple(axis_names)


def _refuse_names(axis_names: Sequence[str] | None, source: str) -> None:
    if axis_names is not None:
        raise MeshSpecError(
            f"axis_names is given, but {source} names its axes",
            fix="leave axis_names out, or give sizes alone",
        )


def _check_count(count: int, names: Sequence[str], *, given: bool, text: str = "") -> None:
    if count != len(names):
        origin = "axis_names" if given else "the default axis names"
        sizes = "1 size" if count == 1 else f"{count} sizes"
        what = f"{sizes} for {len(names)} axes: {origin} {'are' if not given else 'is'} {', '.join(map(str, names))}"
        raise MeshSpecError(
            what,
            snippet=_caret(text, len(text)),
            fix='give one size per name, or name them: "dp:2,tp:4"',
        )


def _fault(what: str, *, text: str, at: int, fix: str) -> Problem:
    return Problem(error=MeshSpecError, what=what, snippet=_caret(text, at), fix=fix)


def _caret(text: str, at: int) -> str:
    """Return the text with a `^` under column `at`; control characters become spaces, so that columns match."""
    return (
        "".join(c if c.isprintable() else " " for c in text) + "\n" + " " * at + "^" if text else ""
    )


def _exact(name: str) -> str:
    """Return the name as exact `str`: `PartitionSpec`s are interned, so an enum member would leak through them."""
    return str.__str__(name)


def _join(fix: str, hint: str) -> str:
    return f"{fix}; {hint}" if hint else fix


_NAME_FIX = "use a plain name such as dp, fsdp, tp, ep, sp or pp"
