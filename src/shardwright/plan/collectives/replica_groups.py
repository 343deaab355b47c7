"""Who takes part in a collective: the forms in which HLO writes its groups of devices, and the mesh axes that they span.

Ids are positions in `mesh.devices.flat`, not `device.id`. XLA writes groups as a list, `{{0,1},{2,3}}`; as an iota,
`[2,4]<=[4,2]T(1,0)`; and by mesh axes, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}`, where `(2)2` takes part of
an axis: of size 2, after a major part of size 2. The axes are the compiler's own, so they are spelled out as ids too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.errors import ProgramError

Groups = tuple[tuple[int, ...], ...]

_LIST = re.compile(r"\{(.*)\}", re.DOTALL)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"@?mesh\[(.*?)\](?:\s*,\s*device_ids=\((.*)\))?\s*\{(.*)\}", re.DOTALL)
_MESH_AXIS = re.compile(r"(?:'((?:[^'\\]|\\.)*)'|([^',=\s]+))=(\d+)")
_GROUP_AXIS = re.compile(r"(?:'((?:[^'\\]|\\.)*)'|([^',:\s]+))(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


def parse_groups(text: str, *, devices: int) -> Groups:
    """Return the groups of device positions that a `replica_groups` attribute names.

    Args:
      text: the attribute's value; of the form by axes with its `device_ids`.
      devices: number of devices; they are one group where the list is empty.

    Raises:
      ProgramError: none of the known forms, or a position that does not exist.

    >>> parse_groups("[2,4]<=[4,2]T(1,0)", devices=8)
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    text = text.strip()
    if found := _IOTA.fullmatch(text):
        positions, shape = _iota(_ints(found[2]), found[3]), _ints(found[1])
        if positions.size != math.prod(shape):
            raise _unknown(text)
        groups = _rows(positions.reshape(shape))
    elif found := _MESH.fullmatch(text):
        groups = _by_axes(found, text)
    elif found := _LIST.fullmatch(text):
        inner = found[1].strip()
        groups = (
            tuple(tuple(_ints(one)) for one in re.findall(r"\{([\d,\s]*)\}", inner))
            if inner
            else (tuple(range(devices)),)
        )
    else:
        raise _unknown(text)
    if not groups or any(not group or max(group) >= devices for group in groups):
        raise ProgramError(
            f"groups {text!r} do not fit a program for {devices} devices",
            fix="pass the program as it was compiled",
        )
    return groups


def parse_pairs(text: str, *, devices: int) -> Groups:
    """Return the (source, target) positions of a `source_target_pairs` attribute.

    Raises:
      ProgramError: no pairs, or a position that does not exist.

    >>> parse_pairs("{{0,1},{1,0}}", devices=2)
    ((0, 1), (1, 0))
    """
    pairs = tuple(tuple(_ints(one)) for one in re.findall(r"\{([\d,\s]+)\}", text))
    if any(len(pair) != 2 for pair in pairs):
        raise _unknown(text)
    if any(max(pair) >= devices for pair in pairs):
        raise ProgramError(
            f"pairs {text!r} do not fit a program for {devices} devices",
            fix="pass the program as it was compiled",
        )
    return pairs


def _unknown(text: str) -> ProgramError:
    return ProgramError(
        f"groups of devices in an unknown form: {text[:200]!r}",
        fix="report it; collectives are never guessed",
    )


def _ints(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one.strip()]


def _iota(shape: Sequence[int], transposed: str | None) -> np.ndarray:
    positions = np.arange(math.prod(shape)).reshape(shape)
    return positions.transpose(_ints(transposed)) if transposed else positions


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(one) for one in row) for row in array.reshape(-1, array.shape[-1]))


def _by_axes(found: re.Match[str], text: str) -> Groups:
    """Spell out groups that are named by the axes of a mesh of the compiler's."""
    sizes = {one[1] or one[2]: int(one[3]) for one in _MESH_AXIS.finditer(found[1])}
    positions = _order(found[2], math.prod(sizes.values()), text).reshape(list(sizes.values()))
    # Each axis is cut into (major, member, minor); a whole axis is all member.
    cuts = {name: [(size, False)] for name, size in sizes.items()}
    taken: list[tuple[str, int]] = []
    for one in _GROUP_AXIS.finditer(found[3]):
        name = one[1] or one[2]
        if name not in sizes:
            raise _unknown(text)
        major = int(one[3] or 1)
        cuts[name] = _cut(cuts[name], major, int(one[4]), text) if one[3] else [(sizes[name], True)]
        taken.append((name, major))
    shape: list[int] = []
    member: list[int] = []
    where: dict[tuple[str, int], int] = {}
    for name, parts in cuts.items():
        major = 1
        for size, is_member in parts:
            if is_member:
                where[name, major] = len(shape)
                member.append(len(shape))
            shape.append(size)
            major *= size
    rest = [dim for dim in range(len(shape)) if dim not in member]
    order = [where[key] for key in taken]
    group = math.prod(shape[dim] for dim in order)
    return _rows(positions.reshape(shape).transpose([*rest, *order]).reshape(-1, group))


def _order(text: str | None, count: int, whole: str) -> np.ndarray:
    """Return the device positions in mesh order, from `device_ids`."""
    if text is None:
        return np.arange(count)
    found = _ORDER.fullmatch(text.strip())
    positions = _iota(_ints(found[1]), found[2]).reshape(-1) if found else np.array(_ints(text))
    if sorted(positions.tolist()) != list(range(count)):
        raise _unknown(whole)
    return positions


def _cut(parts: list[tuple[int, bool]], major: int, size: int, text: str) -> list[tuple[int, bool]]:
    """Cut the member of `size` after `major` positions out of the part of an axis that holds it."""
    done = 1
    result: list[tuple[int, bool]] = []
    for length, is_member in parts:
        if not is_member and done <= major < done * length and major % done == 0:
            before = major // done
            if length % (before * size):
                raise _unknown(text)
            pieces = [(before, False), (size, True), (length // (before * size), False)]
            result += [piece for piece in pieces if piece[0] > 1 or piece[1]]
        else:
            result.append((length, is_member))
        done *= length
    return result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The mesh axes that groups of devices lie along.

    Attributes:
      mesh_axes: axes along which members of one group differ, in mesh order.
      devices: how many devices a group has, the largest if they differ.
      partial: whether the groups have fewer members than those axes have positions together.
    """

    mesh_axes: tuple[str, ...]
    devices: int
    partial: bool


def span_of(
    groups: Groups, sizes: Mapping[str, int], *, positions: Sequence[int] | None = None
) -> Span:
    """Return the mesh axes that groups span.

    Args:
      groups: positions of devices.
      sizes: mesh axis name → size, in mesh order.
      positions: where each id of the program lies in the mesh, if it is compiled for a part of the mesh.

    >>> span_of(((0, 1), (2, 3)), {"dp": 2, "tp": 2})
    Span(mesh_axes=('tp',), devices=2, partial=False)
    """
    shape = tuple(sizes.values())
    differs = np.zeros(len(shape), dtype=bool)
    for group in groups:
        ids = np.array(group if positions is None else [positions[one] for one in group])
        coordinates = np.stack(np.unravel_index(ids, shape))
        differs |= (coordinates != coordinates[:, :1]).any(axis=1)
    axes = tuple(name for name, one in zip(sizes, differs, strict=True) if one)
    devices = max((len(group) for group in groups), default=1)
    return Span(
        mesh_axes=axes, devices=devices, partial=devices < math.prod(sizes[axis] for axis in axes)
    )


def span_of_pairs(
    pairs: Groups, sizes: Mapping[str, int], *, positions: Sequence[int] | None = None
) -> Span:
    """Return the mesh axes that sends from source to target go along; `devices` is the longest chain or ring."""
    moving = tuple(pair for pair in pairs if pair[0] != pair[1])
    span = span_of(moving, sizes, positions=positions)
    longest = _longest_chain(moving)
    return Span(
        mesh_axes=span.mesh_axes,
        devices=longest,
        partial=longest < math.prod(sizes[axis] for axis in span.mesh_axes),
    )


def _longest_chain(pairs: Groups) -> int:
    """Return the number of devices in the largest set that sends connect."""
    near: dict[int, list[int]] = {}
    for source, target in pairs:
        near.setdefault(source, []).append(target)
        near.setdefault(target, []).append(source)
    longest, seen = 1, set[int]()
    for start in near:
        found, waiting = 0, [start]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                found += 1
                waiting += near[one]
        longest = max(longest, found)
    return longest
