"""Find a larger mesh of the same chips for a program that does not fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Final

from shardwright.errors import ShardingError
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh, mesh_sizes
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import Program, price, trace_program

_TRIES: Final = 6  # largest number of slices that are planned, each in about a second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargerMesh:
    """A mesh on a larger slice.

    Attributes:
      topology: The slice.
      sizes: Size of each mesh axis.
      verdict: Whether the program fits there, `fits` or `close`.
    """

    topology: Topology
    sizes: Mapping[str, int]
    verdict: Verdict

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}:{size}" for axis, size in self.sizes.items() if size > 1)
        return f"{sizes} on {self.topology}"


def find_larger_mesh(
    program: Program, manager: PartitionManager, topology: Topology, *, held: int
) -> LargerMesh | None:
    """Return the smallest mesh that a program fits on, else the smallest one on which it is close.

    The largest axis of the mesh grows, and all others keep their sizes. For each number of devices,
    one slice is tried.

    Args:
      program: A program that does not fit.
      manager: Its strategy, mesh and mode.
      topology: The slice that it does not fit on.
      held: Bytes of one copy of its state. Slices with less memory are not tried.

    Returns:
      None if the program does not fit on any slice that was tried, or if it is on several slices.
    """
    if topology.slices > 1:
        return None
    close: LargerMesh | None = None
    for slice_, sizes in _larger(mesh_sizes(manager.mesh), topology, held):
        other = PartitionManager(manager.rules, mesh=abstract_mesh(sizes), mode=manager.mode)
        try:
            traced = trace_program(other, program)
            verdict = price(other, traced, program, layout=lay_out(slice_, sizes)).verdict
        except ShardingError:
            continue  # for example, the batch does not divide over this mesh
        if verdict is Verdict.FITS:
            return LargerMesh(topology=slice_, sizes=sizes, verdict=verdict)
        if verdict is Verdict.CLOSE and close is None:
            close = LargerMesh(topology=slice_, sizes=sizes, verdict=verdict)
    return close


def _larger(
    sizes: Mapping[str, int], topology: Topology, held: int
) -> Iterator[tuple[Topology, dict[str, int]]]:
    """Yield slices with enough memory, smallest first, each with the mesh that fills it."""
    chip = topology.chip
    largest = max(sizes, key=lambda axis: sizes[axis])
    others = math.prod(size for axis, size in sizes.items() if axis != largest)
    slices = sorted(
        (Topology(chip=chip, shape=shape) for shape in chip.slices()),
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
