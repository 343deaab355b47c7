"""Assign the axes of a mesh to the links of a slice, and compute the rate of each mesh axis.

On TPUs, the assignment is that of `jax.experimental.mesh_utils.create_device_mesh`: the last mesh
axis is assigned first. Each mesh axis gets as many whole physical axes as possible. Its size is the
product of their lengths. If there are no such axes for some mesh axis, all mesh axes are assigned
anew, to whole physical axes and parts of them. A part is not a ring.

The GPUs of a domain have one physical axis, and are all equally near. A domain counts as a slice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from shardwright.errors import MeshSpecError
from shardwright.mesh.build import default_dcn
from shardwright.mesh.text import MeshSpec
from shardwright.plan.collectives.collective import Kind, ring_bytes
from shardwright.plan.hardware import Topology
from shardwright.vocabulary.shown import data_of

# XLA runs these collectives in two steps: inside each slice, and between slices. In the second
# step, each device sends only its own part.
_SHARED: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AxisPart:
    """A physical axis, or a part of one, that a mesh axis covers.

    Attributes:
      side: x, y, z or core; `gpus` in a domain of GPUs.
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
        """Number of links to the farthest device."""
        return self.size // 2 if self.ring else self.size - 1

    def __str__(self) -> str:
        text = self.side if self.whole else f"{self.size} of {self.side}"
        return f"{text} (ring)" if self.ring else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The assignment of a mesh to slices of TPUs, or to domains of GPUs.

    Attributes:
      topology: The slices or domains.
      parts: Mesh axis -> the physical axes, or parts of physical axes, that it covers. A mesh axis
        of size 1 covers none.
      crossing: Mesh axis -> the number of slices or domains that it crosses, if more than one.
    """

    topology: Topology
    parts: Mapping[str, tuple[AxisPart, ...]]
    crossing: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def slices_of(self, mesh_axes: Iterable[str]) -> int:
        """Return the number of slices or domains that mesh axes cross together."""
        return math.prod(self.crossing.get(axis, 1) for axis in mesh_axes)

    def devices_inside(self, mesh_axes: Iterable[str]) -> int:
        """Return the number of devices of mesh axes inside one slice or domain."""
        return math.prod(part.size for axis in mesh_axes for part in self.parts.get(axis, ()))

    def bytes_between_slices(self, kind: Kind, mesh_axes: Sequence[str], logical_bytes: int) -> int:
        """Return the bytes that one device sends to other slices in one run of a collective.

        The devices of a slice share the work of a gather or a sum: each sends its part.
        """
        slices = self.slices_of(mesh_axes)
        if slices == 1:
            return 0
        whole = logical_bytes
        if kind in _SHARED:
            whole = -(-whole // self.devices_inside(mesh_axes))
        return ring_bytes(kind, whole, slices)

    def seconds_between_slices(
        self, kind: Kind, mesh_axes: Sequence[str], logical_bytes: int
    ) -> float:
        """Return the seconds that one run of a collective takes between slices."""
        sent = self.bytes_between_slices(kind, mesh_axes, logical_bytes)
        return sent / self.topology.chip.dcn_rate if sent else 0.0

    def rates(self, mesh_axes: Sequence[str]) -> tuple[float, float]:
        """Return the lowest and highest rate at which a device sends over mesh axes, in bytes/s.

        A TPU sends over all links of the mesh axes at the same time: over two links on a ring, one
        in each direction. A GPU behind a switch always uses all its links. A GPU without a switch
        uses only those to the other devices of the group. Mesh axes that only cross slices have no
        links, so their rate is 0.
        """
        chip = self.topology.chip
        links: float = sum(
            2 if part.ring else 1 for axis in mesh_axes for part in self.parts.get(axis, ())
        )
        if chip.domain:
            others = self.devices_inside(mesh_axes) - 1
            # If `mesh_axes` have one device in each domain, they use no link inside a domain.
            links = chip.links if others else 0
            if others and not chip.switched:
                links *= others / (chip.domain - 1)
        low, high = chip.link_rates
        return low * links, high * links

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain data."""
        return data_of(self)

    def __str__(self) -> str:
        axes = []
        for axis, parts in self.parts.items():
            count = self.crossing.get(axis, 1)
            word = self.topology.group
            places = [*([f"{count} {word}s"] if count > 1 else []), *map(str, parts)]
            axes += [f"{axis} on {' + '.join(places)}"] if places else []
        return f"{self.topology}: {', '.join(axes) or 'one device'}{self._split_sides()}"

    def _split_sides(self) -> str:
        """Return the lengths of the sides that several mesh axes share, as text, or ""."""
        split = {part.side for parts in self.parts.values() for part in parts if not part.whole}
        sides = [f"{side} = {size}" for side, size in self.topology.sides.items() if side in split]
        return f"   (sides of the {self.topology.group}: {', '.join(sides)})" if sides else ""


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
            fix="give one mesh axis the size -1, or change the topology",
        )
    crossing = _crossing(topology, sizes)
    # From here on, sizes are inside one slice. All slices have the same layout.
    sizes = {axis: size // crossing.get(axis, 1) for axis, size in sizes.items()}
    sides = {side: length for side, length in topology.sides.items() if length > 1}
    taken = _whole_sides(sides, sizes) or _parts_of_sides(sides, sizes)
    parts = {
        axis: tuple(
            AxisPart(
                side=side,
                size=length,
                whole=length == topology.sides[side],
                ring=length == topology.sides[side] and topology.is_ring(side),
            )
            for side, length in taken[axis].items()
        )
        for axis in sizes
    }
    return Layout(topology=topology, parts=parts, crossing=crossing)


def _crossing(topology: Topology, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many slices each mesh axis crosses.

    Raises:
      MeshSpecError: The part of an axis that crosses slices does not divide the axis, the product
        of these parts is not the number of slices, or no data axis can be split over the slices.
    """
    spec = MeshSpec(names=tuple(sizes), sizes=tuple(sizes.values()))
    given = {axis: part for axis, part in topology.crossing.items() if part > 1}
    if not given:
        parts = default_dcn(spec, topology.slices, group=topology.group)
        return {axis: part for axis, part in zip(sizes, parts, strict=True) if part > 1}
    mesh = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    crossing = ",".join(f"dcn.{axis}:{part}" for axis, part in given.items())
    if math.prod(given.values()) != topology.slices:
        raise MeshSpecError(
            f"the mesh {mesh} crosses {math.prod(given.values())} {topology.group}s ({crossing}), "
            f"but {topology} has {topology.slices}",
            fix=f"write --topology {math.prod(given.values())}x{topology.chip.name}:"
            f"{'x'.join(map(str, topology.shape))}, or leave dcn out",
        )
    if any(sizes.get(axis, 1) % part for axis, part in given.items()):
        raise MeshSpecError(
            f"{crossing} does not divide the mesh {mesh}",
            fix=f"make each axis a multiple of its part that crosses {topology.group}s",
        )
    return given


def _whole_sides(
    sides: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]] | None:
    """Assign as many whole sides (physical axes) as possible to each mesh axis.

    Return None if, for some mesh axis, no whole sides have its size as their product.
    """
    # As in `mesh_utils._create_device_mesh_for_nd_torus`, the last mesh axis chooses first, and a
    # choice of more sides is tried before one of fewer, since more sides have more links.
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

    It prefers, in this order: more devices on whole sides, more whole sides, more devices on sides
    of which other mesh axes have parts, and longer parts of the first sides.
    """
    free, taken = dict(sides), {}

    def rank(lengths: Mapping[str, int]) -> tuple[int, int, int, tuple[int, ...]]:
        whole = [side for side, length in lengths.items() if length == sides[side]]
        # By its own comment, JAX prefers sides that no other mesh axis has. Its code does the
        # opposite (in 0.10.2), and this function follows the code.
        shared = [side for side in lengths if free[side] < sides[side]]
        return (
            math.prod(lengths[side] for side in whole),
            len(whole),
            math.prod(lengths[side] for side in shared),
            tuple(lengths.values()),
        )

    for axis, size in reversed(list(sizes.items())):
        # The ranks follow `mesh_utils._prefer_first_logical_axis_assignment`.
        best = max(_splits(free, size), key=rank)
        taken[axis] = {side: length for side, length in best.items() if length > 1}
        for side, length in best.items():
            free[side] //= length
    return taken


def _splits(free: Mapping[str, int], size: int) -> Iterator[dict[str, int]]:
    """Yield each way to write `size` as a product of one length per side.

    Each length divides the free length of its side.
    """
    if not free:
        if size == 1:
            yield {}
        return
    (side, most), *others = free.items()
    for length in range(1, math.gcd(most, size) + 1):
        if most % length == 0 and size % length == 0:
            for rest in _splits(dict(others), size // length):
                yield {side: length, **rest}
