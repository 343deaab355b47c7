"""Assign the axes of a mesh to the links of a slice, and compute the rate of each mesh axis.

The assignment is that of `jax.experimental.mesh_utils.create_device_mesh`: the last mesh axis is
assigned first, to as many whole physical axes as its size allows. If no whole axes fit, a mesh axis
takes parts of physical axes. A part is not a ring.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
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
    free = {side: length for side, length in topology.sides.items() if length > 1}
    parts: dict[str, tuple[Part, ...]] = {}
    for axis, size in reversed(list(sizes.items())):
        if size == 1:
            parts[axis] = ()
            continue
        taken = {side: free[side] for side in _whole_sides(free, size)}
        taken = taken or _split_sides(free, size)
        parts[axis] = tuple(_part(topology, side, length) for side, length in taken.items())
        for side, length in taken.items():
            free[side] //= length
    ordered = {axis: parts[axis] for axis in sizes}
    return Layout(topology=topology, parts=ordered)


def _whole_sides(free: Mapping[str, int], size: int) -> tuple[str, ...]:
    """Return as many free sides as possible whose lengths multiply to `size`."""
    sides = [side for side, length in free.items() if length > 1]
    for count in range(len(sides), 0, -1):
        for chosen in itertools.combinations(sides, count):
            if math.prod(free[side] for side in chosen) == size:
                return chosen
    return ()


def _split_sides(free: Mapping[str, int], size: int) -> dict[str, int]:
    """Return parts of free sides whose lengths multiply to `size`. Prefer long parts."""
    taken: dict[str, int] = {}
    while size > 1:
        left = {side: length // taken.get(side, 1) for side, length in free.items()}
        side = max(left, key=lambda each: math.gcd(left[each], size))
        # The mesh has as many devices as the slice, so some side and the size have a common factor.
        length = math.gcd(left[side], size)
        taken[side] = taken.get(side, 1) * length
        size //= length
    return taken


def _part(topology: Topology, side: str, size: int) -> Part:
    whole = size == topology.sides[side]
    return Part(side=side, size=size, whole=whole, ring=whole and topology.is_ring(side))
