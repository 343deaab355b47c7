"""Find a mesh on which a program fits: another one of its slice, or one of a larger slice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from shardwright.errors import ShardingError
from shardwright.manager.core import Manager
from shardwright.mesh.build import abstract_mesh, mesh_axis_types, mesh_sizes
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology, all_topologies
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import Program, price, program_state, trace_program
from shardwright.vocabulary.axes import STANDARD_MESH_AXES

_TRIES: Final = 6  # largest number of meshes that are planned, each in about a second

_MeshOnSlice = tuple[Topology, dict[str, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittingMesh:
    """A mesh on which a program fits, or may fit.

    Attributes:
      topology: Its slice.
      sizes: Size of each mesh axis.
      verdict: Whether the program fits there, `fits` or `close`.
    """

    topology: Topology
    sizes: Mapping[str, int]
    verdict: Verdict

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}:{size}" for axis, size in self.sizes.items() if size > 1)
        return f"{sizes} on {self.topology}"


def find_other_mesh(program: Program, manager: Manager, topology: Topology) -> FittingMesh | None:
    """Return a mesh of the same slice that a program fits on, else one on which it is close.

    One mesh axis gives a factor of its devices to another one. Of these meshes, those with the
    smallest state are planned.

    Args:
      program: A program that does not fit.
      manager: Its strategy, mesh and mode.
      topology: The slice.

    Returns:
      None if the program does not fit on any mesh that was tried, or if the strategy says which
      mesh axes cross slices.
    """
    if topology.crossing:
        return None
    traced = trace_program(manager, program, topology)  # its arguments are those under every mesh
    meshes: list[tuple[int, dict[str, int]]] = []
    for sizes in _exchanged(mesh_sizes(manager.mesh), manager):
        other = _on(manager, sizes)
        try:
            held = program_state(other, traced, program).of().per_device
        except ShardingError:
            continue
        if held <= topology.chip.hbm_bytes:
            meshes.append((held, sizes))
    # Without a key, meshes with equal state would be compared, and dicts have no order.
    meshes.sort(key=lambda each: each[0])
    return _first_fitting(program, manager, ((topology, sizes) for _, sizes in meshes[:_TRIES]))


def find_larger_mesh(
    program: Program, manager: Manager, topology: Topology, *, held: int
) -> FittingMesh | None:
    """Return the smallest mesh that a program fits on, else the smallest one on which it is close.

    The largest axis of the mesh grows, and all others keep their sizes. For each number of devices,
    one slice is tried.

    Args:
      program: A program that does not fit.
      manager: Its strategy, mesh and mode.
      topology: The slice that it does not fit on.
      held: Bytes of one copy of its state. Slices with less memory are not tried.

    Returns:
      None if the program does not fit on any slice that was tried, or if the strategy says which
      mesh axes cross slices.
    """
    if topology.crossing:
        return None
    return _first_fitting(program, manager, _larger(mesh_sizes(manager.mesh), topology, held))


def _on(manager: Manager, sizes: Mapping[str, int]) -> Manager:
    """Return a manager on a mesh with the same axes, of other sizes."""
    return manager.having(mesh=abstract_mesh(sizes, axis_types=mesh_axis_types(manager.mesh)))


def _first_fitting(
    program: Program, manager: Manager, meshes: Iterable[_MeshOnSlice]
) -> FittingMesh | None:
    """Plan a program on meshes. Return the first on which it fits, else the first close one."""
    close: FittingMesh | None = None
    for slice_, sizes in meshes:
        other = _on(manager, sizes)
        try:
            traced = trace_program(other, program, slice_)
            verdict = price(other, traced, program, layout=lay_out(slice_, sizes)).verdict
        except ShardingError:
            continue  # for example, the batch does not divide over this mesh
        if verdict is Verdict.FITS:
            return FittingMesh(topology=slice_, sizes=sizes, verdict=verdict)
        if verdict is Verdict.CLOSE and close is None:
            close = FittingMesh(topology=slice_, sizes=sizes, verdict=verdict)
    return close


def _exchanged(sizes: Mapping[str, int], manager: Manager) -> Iterator[dict[str, int]]:
    """Yield the meshes in which one axis gives a factor of its size to another axis of the rules.

    Axes that the mesh lacks come first, so the last mesh axes keep the nearest devices.
    """
    named = set(manager.rules.named_mesh_axes())
    missing = [axis for axis in STANDARD_MESH_AXES if axis in named and axis not in sizes]
    every = {**dict.fromkeys(missing, 1), **sizes}
    for giver, size in sizes.items():
        for factor in (factor for factor in range(2, size + 1) if size % factor == 0):
            for taker, own in every.items():
                if taker != giver:
                    yield {**every, giver: size // factor, taker: own * factor}


def _larger(sizes: Mapping[str, int], topology: Topology, held: int) -> Iterator[_MeshOnSlice]:
    """Yield slices with enough memory, smallest first, each with the mesh that fills it."""
    chip = topology.chip
    largest = max(sizes, key=lambda axis: sizes[axis])
    others = math.prod(size for axis, size in sizes.items() if axis != largest)
    slices = sorted(
        all_topologies(chip),
        # Of slices with as many devices, the most compact one is tried.
        key=lambda each: (each.devices, max(each.shape), each.shape),
    )
    seen: set[int] = set()
    for slice_ in slices:
        count = slice_.devices
        too_small = count <= topology.devices or count * chip.hbm_bytes < held
        if too_small or count in seen or count % others:
            continue
        seen.add(count)
        yield slice_, {**sizes, largest: count // others}
        if len(seen) == _TRIES:
            return
