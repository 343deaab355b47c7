"""Find a mesh on which a program fits, or rules under which its state takes less memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from shardwright.errors import ShardingError
from shardwright.manager.core import Manager
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh, mesh_axis_types, mesh_sizes
from shardwright.plan.fit import Verdict
from shardwright.plan.hardware import Topology, all_topologies
from shardwright.plan.layout import lay_out
from shardwright.plan.planner import Program, price, program_state, trace_program
from shardwright.plan.search.settings import with_settings
from shardwright.plan.state import Category, StateBytes
from shardwright.strategy.files import file_to_edit
from shardwright.vocabulary.axes import STANDARD_MESH_AXES
from shardwright.vocabulary.units import bytes_text

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

_TRIES: Final = 6  # largest number of meshes to plan; each takes about a second

_MeshOnSlice = tuple[Topology, dict[str, int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittingMesh:
    """A mesh on which a program fits, or may fit.

    Attributes:
      topology: Its slice.
      sizes: Size of each mesh axis.
      verdict: Whether the program fits on this mesh: `fits` or `close`.
    """

    topology: Topology
    sizes: Mapping[str, int]
    verdict: Verdict

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}:{size}" for axis, size in self.sizes.items() if size > 1)
        return f"{sizes} on {self.topology}"


def find_other_mesh(program: Program, manager: Manager, topology: Topology) -> FittingMesh | None:
    """Return a mesh on the same slice on which a program fits, else one with the verdict `close`.

    A factor of one mesh axis of the program's mesh is moved to another mesh axis. Of the meshes
    that this gives, only those with the smallest state are planned.

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
    # One trace is enough to count the state: the arguments are the same under every mesh.
    traced = trace_program(manager, program, topology)
    meshes: list[tuple[int, dict[str, int]]] = []
    for sizes in _exchanged(mesh_sizes(manager.mesh), manager):
        other = _on(manager, sizes)
        try:
            held = program_state(other, traced, program).of().per_device
        except ShardingError:
            continue
        if held <= topology.chip.hbm_bytes:
            meshes.append((held, sizes))
    # Sort by bytes only. Otherwise, `sort` would compare the dicts of meshes with equal bytes, and
    # fail.
    meshes.sort(key=lambda each: each[0])
    return _first_fitting(program, manager, ((topology, sizes) for _, sizes in meshes[:_TRIES]))


def find_larger_mesh(
    program: Program, manager: Manager, topology: Topology, *, held: int
) -> FittingMesh | None:
    """Return the smallest mesh that a program fits on, else the smallest with the verdict `close`.

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
    """Plan a program on meshes.

    Return the first mesh on which it fits, else the first mesh with the verdict `close`.
    """
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
    """Yield the meshes in which one mesh axis gives a factor of its size to another mesh axis.

    Standard mesh axes that the rules name and the mesh lacks are added in front, so that the last
    mesh axes keep the nearest devices.
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
        # Of the slices with the same number of devices, try only the most compact one, which comes
        # first.
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


_CAUSES: Final = 3  # largest number of rules to change; planning each takes a second


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittingRules:
    """Settings of a strategy with which a program takes less memory.

    Attributes:
      settings: Key of a strategy file, such as `params.embed` -> the value to write.
      file: Where to write the settings, as messages say it: the name of a file, or for example
        `a file with base = "fsdp"`.
      needs: Fewest bytes that a device needs with these settings.
    """

    settings: Mapping[str, str]
    file: str
    needs: int

    def __str__(self) -> str:
        # Show the header of the table, such as [params]: a dotted key that a user appends to a file
        # belongs to the file's last table.
        written = [
            f'[{table or "rules"}] {name} = "{text}"'
            for key, text in self.settings.items()
            for table, _, name in [key.rpartition(".")]
        ]
        needs = bytes_text(self.needs)
        return f"write {' and '.join(written)} in {self.file}: then it needs at least {needs}"


def find_smaller_rules(
    strategy: Strategy,
    manager: PartitionManager,
    state: StateBytes,
    plan: Callable[[PartitionManager], int],
    *,
    below: float,
) -> FittingRules | None:
    """Return the change to the settings of a strategy that saves the most memory.

    A change counts only if the program can be planned with it. Three kinds are tried: parameters
    are stored over one more mesh axis and gathered, as in FSDP; optimizer state is sharded over one
    more mesh axis, by `zero1`; or LENGTH is sharded over tp too, as in `fsdp_tp_sp`.

    Args:
      strategy: The strategy.
      manager: A manager of the strategy, with mesh and mode.
      state: The bytes of the program's state, and the rules that replicate arrays of it.
      plan: Plans the program under a manager, and returns the bytes that a device needs.
      below: A change counts only if a device needs fewer bytes than this.

    Returns:
      None if a device needs `below` bytes or more with every change that can be planned.
    """
    best: FittingRules | None = None
    for settings in _changes(strategy, manager, state):
        try:
            changed = with_settings(strategy, settings)
            needs = plan(PartitionManager(changed, mesh=manager.mesh, mode=manager.mode))
        except ShardingError:
            continue  # for example, an activation already uses the mesh axis
        if needs < (below if best is None else best.needs):
            file = file_to_edit(strategy.name, strategy.source())
            best = FittingRules(settings=settings, file=file, needs=needs)
    return best


def _changes(
    strategy: Strategy, manager: PartitionManager, state: StateBytes
) -> Iterator[dict[str, str]]:
    """Yield settings that shard the residual stream, or arrays with the most replicated bytes."""
    saved: dict[tuple[str, str], int] = {}
    for leaf in state.leaves:
        if leaf.category in (Category.INPUTS, Category.CACHE):
            continue
        for cause in leaf.causes:
            if cause.rule:
                key = cause.mesh_axis, cause.rule
                saved[key] = saved.get(key, 0) + cause.saves
    policy = manager.rules.policy
    length = str(strategy.rules.get("length", "-"))
    if manager.mesh.shape.get("tp", 1) > 1 and "tp" not in length:
        yield {"length": "tp" if length == "-" else f"{length}+tp", "params.length": "-"}
    for axis, rule in sorted(saved, key=lambda key: -saved[key])[:_CAUSES]:
        name, _, text = rule.partition(" = ")
        own = text.strip().strip('"')
        first = own.partition("|")[0].strip()
        rest = f" | {own}" if "|" in own else ""  # the fallbacks stay
        wider = axis if first == "-" else f"{first}+{axis}{rest}"
        # Gather weights over this mesh axis too. Otherwise they compete with the batch for the mesh
        # axis in matmuls.
        gather = "+".join(dict.fromkeys([*policy.gather, axis]))
        is_policy = name in ("largest_dim", "zero1")
        change = {f"{'policy' if is_policy else 'params'}.{name}": wider}
        # Optimizer state is never gathered over the mesh axes that zero1 adds.
        yield change if name == "zero1" else {**change, "policy.gather": gather}
        if policy.zero1 is None and Category.OPTIMIZER in state.categories:
            yield {"policy.zero1": f"{axis} | -"}
