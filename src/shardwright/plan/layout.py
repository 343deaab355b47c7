"""Assign the axes of a mesh to the links of a slice, and compute the rate of each mesh axis.

The assignment is that of `jax.experimental.mesh_utils.create_device_mesh`: the last mesh axis is
assigned first, to as many whole physical axes as its size allows. If whole axes do not fit every
mesh axis, all mesh axes are assigned anew, to whole physical axes and parts of them. A part is not
a ring.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.errors import MeshSpecError
from shardwright.plan.hardware import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A physical axis, or a part of one, that a mesh axis covers.

    Attributes:
      side: x, y, z or core.
      size: Devices along it.
      whole: Whether it is the whole physical axis.
      ring: Whether its links wrap around.
    """

    side: str
    size: int
    whole: bool
    ring: bool

    @property
    def hops(self) -> int:
        """Links to the farthest device."""
        return self.size // 2 if self.ring else self.size - 1

    def __str__(self) -> str:
        text = self.side if self.whole else f"{self.size} of {self.side}"
        return f"{text} (ring)" if self.ring else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The assignment of a mesh to a slice.

    Attributes:
      topology: The slice.
      parts: Mesh axis -> the parts that it covers. A mesh axis of size 1 has none.
    """

    topology: Topology
    parts: Mapping[str, tuple[Part, ...]]

    def rates(self, mesh_axes: tuple[str, ...]) -> tuple[float, float]:
        """Return the lowest and highest rate at which a device sends over mesh axes, in bytes/s.

        A device sends over all its links at the same time. On a ring, it has links both ways.
        """
        links = sum(
            2 if part.ring else 1 for axis in mesh_axes for part in self.parts.get(axis, ())
        )
        low, high = self.topology.chip.link_rates
        return low * links, high * links

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data."""
        return {
            "topology": str(self.topology),
            "parts": {
                axis: [dataclasses.asdict(part) for part in parts]
                for axis, parts in self.parts.items()
            },
        }

    def __str__(self) -> str:
        axes = [
            f"{axis} on {' + '.join(map(str, parts))}"
            for axis, parts in self.parts.items()
            if parts
        ]
        return f"{self.topology}: {', '.join(axes) or 'one device'}"


def lay_out(topology: Topology, sizes: Mapping[str, int]) -> Layout:
    """Assign the axes of a mesh to the physical axes of a slice.

    Args:
      topology: The slice.
      sizes: Size of each mesh axis, in mesh order.

    Raises:
      MeshSpecError: The mesh and the slice have different numbers of devices.
    """
    if math.prod(sizes.values()) != topology.devices:
        mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
        raise MeshSpecError(
            f"the mesh {mesh} has {math.prod(sizes.values())} devices, "
            f"but {topology} has {topology.devices}",
            fix="give one mesh axis the size -1, or change the slice",
        )
    sides = {side: length for side, length in topology.sides.items() if length > 1}
    taken = _whole_sides(sides, sizes) or _parts_of_sides(sides, sizes)
    parts = {
        axis: tuple(_part(topology, side, length) for side, length in taken[axis].items())
        for axis in sizes
    }
    return Layout(topology=topology, parts=parts)


def _whole_sides(
    sides: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]] | None:
    """Assign as many whole sides as possible to each mesh axis, or return None if one has none."""
    free, taken = dict(sides), {}
    for axis, size in reversed(list(sizes.items())):
        chosen = next(
            (
                each
                for count in range(len(free), 0, -1)
                for each in itertools.combinations(free, count)
                if math.prod(free[side] for side in each) == size
            ),
            (),
        )
        if size > 1 and not chosen:
            return None
        taken[axis] = {side: free.pop(side) for side in chosen}
    return taken


def _parts_of_sides(
    sides: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Assign parts of sides to each mesh axis, in the order that `create_device_mesh` prefers.

    It prefers the most devices on whole sides, then the most whole sides, then the most devices on
    sides that other mesh axes have parts of, then long parts of the first sides.
    """
    free, taken = dict(sides), {}

    def rank(lengths: Mapping[str, int]) -> tuple[int, int, int, tuple[int, ...]]:
        whole = [side for side, length in lengths.items() if length == sides[side]]
        shared = [side for side in lengths if free[side] < sides[side]]
        return (
            math.prod(lengths[side] for side in whole),
            len(whole),
            math.prod(lengths[side] for side in shared),
            tuple(lengths.values()),
        )

    for axis, size in reversed(list(sizes.items())):
        best = max(_splits(free, size), key=rank)
        taken[axis] = {side: length for side, length in best.items() if length > 1}
        for side, length in best.items():
            free[side] //= length
    return taken


def _splits(free: Mapping[str, int], size: int) -> Iterator[dict[str, int]]:
    """Yield a length of each side. The lengths divide the sides and multiply to `size`."""
    if not free:
        if size == 1:
            yield {}
        return
    (side, most), *others = free.items()
    for length in range(1, math.gcd(most, size) + 1):
        if most % length == 0 and size % length == 0:
            for rest in _splits(dict(others), size // length):
                yield {side: length, **rest}


def _part(topology: Topology, side: str, size: int) -> Part:
    whole = size == topology.sides[side]
    return Part(side=side, size=size, whole=whole, ring=whole and topology.is_ring(side))
