"""Read a mesh from text, sizes or a mapping into a `MeshSpec`, without JAX and devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from shardwright.errors import MeshSpecError, raise_problems
from shardwright.mesh.check import (
    CONTIGUOUS,
    DCN,
    INFER,
    LONGEST_SIZE,
    Part,
    caret,
    dcn_divides,
    dcn_problems,
    exact,
    fault,
    part_problems,
)
from shardwright.vocabulary.integers import read_integer

DEFAULT_MESH_AXES: Final = ("dp", "fsdp", "tp", "sp")
_INTEGER = re.compile(r"-?[0-9]+")

MeshLike = str | Mapping[str, int] | Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """A mesh before it has devices. Build it with `parse_mesh`, which checks it.

    Attributes:
      names: Mesh axes, slowest first.
      sizes: Total size of each axis over all slices. At most one is -1, which `resolve_sizes`
        replaces.
      dcn: The part of each size that crosses slices, or empty if none is given.
      contiguous: Whether devices keep the given order instead of following the physical topology.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dcn: tuple[int, ...] = ()
    contiguous: bool = False

    def __str__(self) -> str:
        parts = [f"{name}:{size}" for name, size in zip(self.names, self.sizes, strict=True)]
        crossing = [
            f"{DCN}{name}:{size}"
            for name, size in zip(self.names, self.dcn, strict=False)
            if size > 1
        ]
        # The text leaves out DCN parts of 1. But a text without any DCN part means that a default
        # axis crosses slices. So if all parts are 1, which means that no axis crosses slices, the
        # text shows the part of the first axis, such as `dcn.dp:1`.
        if self.dcn and not crossing:
            crossing = [f"{DCN}{self.names[0]}:1"]
        return (CONTIGUOUS if self.contiguous else "") + ",".join(crossing + parts)


def parse_mesh(
    spec: MeshLike, axis_names: Sequence[str] | None = None, *, dcn: Mapping[str, int] | None = None
) -> MeshSpec:
    """Read a mesh. Check everything that can be checked without devices.

    Args:
      spec: One of three forms: `"dp:2,fsdp:-1,tp:4"`, in the order written; `"2,-1,4"` or
        `(2, -1, 4)`, in the order of `axis_names`; or `{"dp": 2, "tp": 4}`. In text, a leading `!`
        keeps the device order, and `dcn.dp:2` names the part of an axis that crosses slices.
      axis_names: Names of the axes, if `spec` has only sizes. Defaults to `DEFAULT_MESH_AXES`. Not
        allowed if `spec` names its axes.
      dcn: The part of each axis that crosses slices. None and an empty mapping mean that no part
        is given.

    Raises:
      MeshSpecError: The mesh cannot be read. The error has every problem. For text, each problem
        has a caret at its column.

    >>> parse_mesh("dcn.dp:2,dp:4,tp:-1")
    MeshSpec(names=('dp', 'tp'), sizes=(4, -1), dcn=(2, 1), contiguous=False)
    """
    if isinstance(spec, str):
        return _parse_text(spec, axis_names, dcn)
    crossing = _dcn_parts(dcn)
    if isinstance(spec, Mapping):
        _refuse_names(axis_names, "the mapping")
        parts = [Part(name=name, size=size) for name, size in spec.items()]
    elif isinstance(spec, Sequence) and not isinstance(spec, bytes | bytearray | memoryview):
        names = _given_names(axis_names)
        _check_count(len(spec), names)
        parts = [Part(name=name, size=size) for name, size in zip(names, spec, strict=True)]
    else:
        what = f"a mesh cannot be read from {spec!r} of type {type(spec).__name__}"
        fix = 'write "dp:2,tp:4", {"dp": 2, "tp": 4} or (2, 4) with axis_names=("dp", "tp")'
        raise MeshSpecError(what, fix=fix)
    return _checked(parts, crossing, contiguous=False)


def resolve_sizes(spec: MeshSpec, count: int, *, hint: str = "") -> MeshSpec:
    """Replace the size -1, given the number of devices.

    Without a -1, only check that there are enough devices.

    Args:
      spec: The mesh.
      count: Number of devices.
      hint: Text to add to the fix of an error: how to get more devices.

    Raises:
      MeshSpecError: There are too few devices, their number is not divisible by the given sizes, or
        a dcn part does not divide its axis.

    >>> str(resolve_sizes(parse_mesh("dp:2,fsdp:-1,tp:2"), 8))
    'dp:2,fsdp:2,tp:2'
    """
    count = read_integer(
        "devices", count, error=MeshSpecError, fix="pass the number of devices, such as 8"
    )
    known = {name: size for name, size in zip(spec.names, spec.sizes, strict=True) if size != INFER}
    needed = math.prod(known.values())
    listing = ", ".join(f"{name}={size}" for name, size in known.items())
    more = f"; {hint}" if hint else ""
    if INFER not in spec.sizes:
        if needed > count:
            what = f"mesh {listing} needs {needed} devices, the number of devices is {count}"
            fix = f"choose sizes whose product is at most {count}, or give one axis the size -1"
            raise MeshSpecError(what, fix=fix + more)
        return spec
    inferred = spec.names[spec.sizes.index(INFER)]
    if count % needed:
        what = f"mesh axis {inferred} = -1 has no size: {needed} ({listing}) does not divide "
        what += f"the number of devices, {count}"
        fix = f"choose sizes of the other axes whose product divides {count}"
        raise MeshSpecError(what, fix=fix + more, mesh_axes=(inferred,))
    filled = dataclasses.replace(
        spec, sizes=tuple(int(count) // needed if size == INFER else size for size in spec.sizes)
    )
    # Until now the size of the axis was -1, so check only here that the DCN part divides the size.
    axes = zip(spec.names, filled.sizes, spec.dcn, strict=False)
    raise_problems([problem for axis in axes for problem in dcn_divides(*axis)])
    return filled


def _parse_text(
    text: str, axis_names: Sequence[str] | None, dcn: Mapping[str, int] | None
) -> MeshSpec:
    contiguous = text.lstrip().startswith(CONTIGUOUS)
    words = _words(text, text.index(CONTIGUOUS) + 1 if contiguous else 0)
    named = ":" in text
    raise_problems(
        [
            fault(what, text=text, at=at, fix=fix)
            for at, word in words
            for what, fix in _word_faults(word, named)
        ]
    )
    crossing = [
        _read_part(word.removeprefix(DCN), at + len(DCN))
        for at, word in words
        if word.startswith(DCN)
    ]
    parts = [_read_part(word, at) for at, word in words if not word.startswith(DCN)]
    if named:
        _refuse_names(axis_names, f"the text {text!r}")
    else:
        names = _given_names(axis_names)
        _check_count(len(parts), names, text=text)
        parts = [
            dataclasses.replace(part, name=name) for part, name in zip(parts, names, strict=True)
        ]
    if dcn and crossing:
        what = "slices are given twice: in the text and in dcn="
        raise MeshSpecError(what, snippet=caret(text, crossing[0].name_at), fix="keep one")
    return _checked(
        parts,
        crossing or _dcn_parts(dcn),
        contiguous=contiguous,
        text=text,
        # Pass no text if dcn= gives the parts: then the parts have no columns in the text.
        dcn_text=text if crossing else "",
    )


def _word_faults(word: str, named: bool) -> list[tuple[str, str]]:
    """Return the faults of a word, each as (what, fix).

    A word must be `name:size`, or a size in a text without names.
    """
    if not word:
        return [("a part of the mesh is empty", 'write sizes between commas, such as "dp:2,tp:4"')]
    if ":" in word or (not named and _INTEGER.fullmatch(word)):
        return []
    if _INTEGER.fullmatch(word):
        return [(f"part {word!r} has no name, but others have one", f'write "name:{word}"')]
    return [(f"part {word!r} has no size", 'write a name, a colon and a size, such as "dp:2"')]


def _words(text: str, start: int) -> list[tuple[int, str]]:
    """Return the words between commas, each as (column, word) without surrounding spaces."""
    words = []
    for piece in text[start:].split(","):
        words.append((start + len(piece) - len(piece.lstrip()), piece.strip()))
        start += len(piece) + 1
    return words


def _read_part(word: str, column: int) -> Part:
    if ":" not in word:
        return Part(name="", size=_read_size(word), size_at=column)
    name, _, size = word.partition(":")
    size_at = column + len(name) + 1 + len(size) - len(size.lstrip())
    return Part(name=name.rstrip(), size=_read_size(size.strip()), name_at=column, size_at=size_at)


def _read_size(word: str) -> int | str:
    # Python refuses to convert text of thousands of digits, so return such text unchanged.
    return int(word) if _INTEGER.fullmatch(word) and len(word) <= LONGEST_SIZE else word


def _checked(
    parts: Sequence[Part],
    crossing: Sequence[Part],
    *,
    contiguous: bool,
    text: str = "",
    dcn_text: str = "",
) -> MeshSpec:
    if not parts:
        what, fix = "a mesh needs at least one axis", 'write for instance "dp:-1"'
        raise MeshSpecError(what, snippet=caret(text, 0), fix=fix)
    problems = part_problems(parts, text=text, infer=True)
    problems += dcn_problems(parts, crossing, text=dcn_text)
    raise_problems(problems)
    names = tuple(exact(part.name) for part in parts)
    across = {exact(part.name): int(part.size) for part in crossing}
    return MeshSpec(
        names=names,
        sizes=tuple(int(part.size) for part in parts),
        dcn=tuple(across.get(name, 1) for name in names) if across else (),
        contiguous=contiguous,
    )


def _dcn_parts(dcn: Mapping[str, int] | None) -> list[Part]:
    if dcn is not None and not isinstance(dcn, Mapping):
        what = f"dcn is of type {type(dcn).__name__}, not a mapping of axis to size"
        raise MeshSpecError(what, fix='write dcn={"dp": 2}')
    return [Part(name=name, size=size) for name, size in (dcn or {}).items()]


def _given_names(axis_names: Sequence[str] | None) -> tuple[str, ...]:
    if axis_names is None:
        return DEFAULT_MESH_AXES
    if isinstance(axis_names, str) or not isinstance(axis_names, Sequence):
        what = f"axis_names is {axis_names!r}, not a sequence of names"
        raise MeshSpecError(what, fix='write axis_names=("dp", "tp")')
    return tuple(axis_names)


def _refuse_names(axis_names: Sequence[str] | None, source: str) -> None:
    if axis_names is not None:
        what = f"axis_names is given, but {source} names its axes"
        raise MeshSpecError(what, fix="leave axis_names out, or give the sizes without names")


def _check_count(count: int, names: Sequence[str], *, text: str = "") -> None:
    if count != len(names):
        what = f"{count} sizes for {len(names)} axis names: {', '.join(map(str, names))}"
        fix = 'give one size per name, or name them: "dp:2,tp:4"'
        raise MeshSpecError(what, snippet=caret(text, len(text)), fix=fix)
