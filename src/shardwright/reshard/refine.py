"""Find one mesh that can express the specs of two meshes of the same devices.

`fsdp:2,tp:4` and `fsdp:4,tp:2` may have the same eight devices. A mesh `2,2,2` of these devices can
express the specs of both. So a move from one to the other is a sequence of collectives over parts
of mesh axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from shardwright.reshard.grid import Grid
from shardwright.reshard.plan import Dims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommonAxes:
    """One mesh for the source and the target of a move. Its devices have the order of the target.

    Attributes:
      sizes: The axes of this mesh with their sizes, major first. An axis has the name of the
        target's axis of which it is a part, with a number if there are several parts: `fsdp.0`.
      source: Axes of each dimension before the move.
      target: Axes of each dimension after the move.
    """

    sizes: tuple[tuple[str, int], ...]
    source: Dims
    target: Dims


def common_axes(source: Grid, target: Grid) -> CommonAxes | None:
    """Return the axes of a mesh that expresses both specs, or None if there is none.

    There is none if the source or the target is not on a mesh, if the meshes have different
    devices, if their sizes have no common factorization (such as `2,3` and `3,2`), or if the device
    order of the source is not a transposition of that of the target.
    """
    if not source.axes or set(source.devices) != set(target.devices):
        return None
    target_strides = _own_strides(target.axes)
    source_strides = _strides_in(source, target.devices)
    if source_strides is None:
        return None
    spans = [*_spans(source.axes, source_strides), *_spans(target.axes, target_strides)]
    cuts = sorted({1, len(target.devices), *(cut for span in spans for cut in span)})
    if any(upper % lower for lower, upper in pairwise(cuts)):
        return None
    # Major first, each as (stride, stride of the next larger axis).
    parts = [(lower, upper) for lower, upper in pairwise(cuts)][::-1]
    names = _names(target, target_strides, parts)
    return CommonAxes(
        sizes=tuple((names[part], part[1] // part[0]) for part in parts),
        source=_split(source, source_strides, parts, names),
        target=_split(target, target_strides, parts, names),
    )


def _own_strides(axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name] = stride
        stride *= size
    return strides


def _strides_in(grid: Grid, devices: Sequence[int]) -> dict[str, int] | None:
    """Return the stride of each axis in a list of devices, or None if one has no fixed stride."""
    place = {device: at for at, device in enumerate(devices)}
    own = _own_strides(grid.axes)
    first = place[grid.devices[0]]
    strides = {
        name: place[grid.devices[own[name]]] - first if size > 1 else 1 for name, size in grid.axes
    }
    for at, device in enumerate(grid.devices):
        expected = sum(at // own[name] % size * strides[name] for name, size in grid.axes)
        if place[device] != expected:
            return None
    return strides


def _spans(axes: Sequence[tuple[str, int]], strides: dict[str, int]) -> list[tuple[int, int]]:
    return [(strides[name], strides[name] * size) for name, size in axes if size > 1]


def _names(
    target: Grid, strides: dict[str, int], parts: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    names = {}
    for name, size in target.axes:
        inside = _inside(strides[name], size, parts)
        for number, part in enumerate(inside):
            names[part] = name if len(inside) == 1 else f"{name}.{number}"
    return names


def _inside(stride: int, size: int, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts that make up an axis, major first."""
    return [(lower, upper) for lower, upper in parts if stride <= lower and upper <= stride * size]


def _split(
    grid: Grid,
    strides: dict[str, int],
    parts: Sequence[tuple[int, int]],
    names: dict[tuple[int, int], str],
) -> Dims:
    sizes = dict(grid.axes)
    return tuple(
        tuple(names[part] for name in axes for part in _inside(strides[name], sizes[name], parts))
        for axes in grid.dims
    )
