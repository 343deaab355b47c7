"""Parse the device groups of a collective, and find the mesh axes that they span.

Ids are positions in `mesh.devices.flat`, not values of `device.id`. XLA writes groups in three
forms:
- as a list, `{{0,1},{2,3}}`;
- as an iota, `[2,4]<=[4,2]T(1,0)`;
- by mesh axes, `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(2)2}`.

In the third form, `'b':(2)2` cuts axis b into two parts: a major part of size 2, then a part of
size 2. The groups span the second part. The axes of this form belong to a mesh of the compiler, not
to the mesh of the user, so the groups are expanded to ids.
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
      text: Value of the attribute; for the form by mesh axes, with its `device_ids`.
      devices: Number of devices. An empty list means one group of all devices.

    Raises:
      ProgramError: The form is unknown, or a position does not exist.

    >>> parse_groups("[2,4]<=[4,2]T(1,0)", devices=8)
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    text = text.strip()
    if match := _IOTA.fullmatch(text):
        positions, shape = _iota(_ints(match[2]), match[3]), _ints(match[1])
        if positions.size != math.prod(shape):
            raise _unknown(text)
        groups = _rows(positions.reshape(shape))
    elif match := _MESH.fullmatch(text):
        groups = _by_axes(match, text)
    elif match := _LIST.fullmatch(text):
        inner = match[1].strip()
        groups = (
            tuple(tuple(_ints(group_text)) for group_text in re.findall(r"\{([\d,\s]*)\}", inner))
            if inner
            else (tuple(range(devices)),)
        )
    else:
        raise _unknown(text)
    if not groups or any(not group or max(group) >= devices for group in groups):
        raise _misfit(text, devices)
    return groups


def parse_pairs(text: str, *, devices: int) -> Groups:
    """Return the (source, target) positions of a `source_target_pairs` attribute.

    Raises:
      ProgramError: The text has no pairs, or a position does not exist.

    >>> parse_pairs("{{0,1},{1,0}}", devices=2)
    ((0, 1), (1, 0))
    """
    pairs = tuple(tuple(_ints(pair_text)) for pair_text in re.findall(r"\{([\d,\s]+)\}", text))
    if any(len(pair) != 2 for pair in pairs):
        raise _unknown(text)
    if any(max(pair) >= devices for pair in pairs):
        raise _misfit(text, devices)
    return pairs


def _misfit(text: str, devices: int) -> ProgramError:
    return ProgramError(
        f"the groups or pairs {text!r} do not fit a program for {devices} devices",
        fix="pass the program as it was compiled",
    )


def _unknown(text: str) -> ProgramError:
    return ProgramError(
        f"device groups have an unknown form: {text[:200]!r}",
        fix="report this error; shardwright does not guess the groups",
    )


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _iota(shape: Sequence[int], transposed: str | None) -> np.ndarray:
    positions = np.arange(math.prod(shape)).reshape(shape)
    return positions.transpose(_ints(transposed)) if transposed else positions


def _rows(array: np.ndarray) -> Groups:
    return tuple(
        tuple(int(position) for position in row) for row in array.reshape(-1, array.shape[-1])
    )


def _by_axes(match: re.Match[str], text: str) -> Groups:
    """Expand groups that are written by the axes of a mesh of the compiler."""
    sizes = {axis[1] or axis[2]: int(axis[3]) for axis in _MESH_AXIS.finditer(match[1])}
    # The device positions in mesh order, from `device_ids`.
    positions = np.arange(math.prod(sizes.values()))
    if match[2] is not None:
        ids = _ORDER.fullmatch(match[2].strip())
        listed = _iota(_ints(ids[1]), ids[2]).reshape(-1) if ids else np.array(_ints(match[2]))
        if sorted(listed.tolist()) != positions.tolist():
            raise _unknown(text)
        positions = listed
    positions = positions.reshape(list(sizes.values()))
    # Each axis is cut into (major, member, minor) parts. The groups span the members. A whole axis
    # is one member.
    cuts = {name: [(size, False)] for name, size in sizes.items()}
    taken: list[tuple[str, int]] = []
    for axis in _GROUP_AXIS.finditer(match[3]):
        name = axis[1] or axis[2]
        if name not in sizes:
            raise _unknown(text)
        major = int(axis[3] or 1)
        cuts[name] = (
            _cut(cuts[name], major, int(axis[4]), text) if axis[3] else [(sizes[name], True)]
        )
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
    # The text names the axes in the order of the members, which may differ from mesh order.
    order = [where[key] for key in taken]
    group = math.prod(shape[dim] for dim in order)
    return _rows(positions.reshape(shape).transpose([*rest, *order]).reshape(-1, group))


def _cut(parts: list[tuple[int, bool]], major: int, size: int, text: str) -> list[tuple[int, bool]]:
    """Cut a member of size `size` out of the parts of an axis. The groups span the members.

    The product of the parts before the new member is `major`.
    """
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
class GroupSpan:
    """The mesh axes that groups of devices span.

    Attributes:
      mesh_axes: Axes along which the devices of a group differ, in mesh order.
      devices: Number of devices in the largest group.
      partial: Whether a group has fewer devices than the mesh has along these axes.
    """

    mesh_axes: tuple[str, ...]
    devices: int
    partial: bool


def span_of(
    groups: Groups, sizes: Mapping[str, int], *, positions: Sequence[int] | None = None
) -> GroupSpan:
    """Return the mesh axes that groups span.

    Args:
      groups: Device positions.
      sizes: Size of each mesh axis, in mesh order.
      positions: Position in the mesh of each id of the program, if it is compiled for a part of the
        mesh.

    >>> span_of(((0, 1), (2, 3)), {"dp": 2, "tp": 2})
    GroupSpan(mesh_axes=('tp',), devices=2, partial=False)
    """
    shape = tuple(sizes.values())
    differs = np.zeros(len(shape), dtype=bool)
    for group in groups:
        ids = np.array(
            group if positions is None else [positions[differing] for differing in group]
        )
        # Shape [mesh axes, devices]: the position of each device along each mesh axis.
        coordinates = np.stack(np.unravel_index(ids, shape))
        differs |= (coordinates != coordinates[:, :1]).any(axis=1)
    axes = tuple(name for name, differing in zip(sizes, differs, strict=True) if differing)
    devices = max((len(group) for group in groups), default=1)
    return GroupSpan(
        mesh_axes=axes, devices=devices, partial=devices < math.prod(sizes[axis] for axis in axes)
    )


def span_of_pairs(
    pairs: Groups, sizes: Mapping[str, int], *, positions: Sequence[int] | None = None
) -> GroupSpan:
    """Return the mesh axes along which pairs send. `devices` is the size of the longest chain."""
    # A pair such as (3, 3) sends nothing: device 3 copies within its own memory.
    moving = tuple(pair for pair in pairs if pair[0] != pair[1])
    span = span_of(moving, sizes, positions=positions)
    longest = _longest_chain(moving)
    return GroupSpan(
        mesh_axes=span.mesh_axes,
        devices=longest,
        partial=longest < math.prod(sizes[axis] for axis in span.mesh_axes),
    )


def _longest_chain(pairs: Groups) -> int:
    """Return the size of the largest set of devices that pairs connect."""
    near: dict[int, list[int]] = {}
    for source, target in pairs:
        near.setdefault(source, []).append(target)
        near.setdefault(target, []).append(source)
    # No recursion: a ring of a large slice is longer than Python's stack.
    longest, seen = 1, set[int]()
    for start in near:
        size, waiting = 0, [start]
        while waiting:
            device = waiting.pop()
            if device not in seen:
                seen.add(device)
                size += 1
                waiting += near[device]
        longest = max(longest, size)
    return longest
