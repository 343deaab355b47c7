"""Compile the program that an assertion gets, and read its collectives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardwright.errors import (
    MeshMismatchError,
    MeshSpecError,
    ProgramError,
    UnknownAxisError,
    did_you_mean,
)
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.collectives.collective import Collective, carried_axes
from shardwright.plan.collectives.read import read_collectives
from shardwright.vocabulary.axes import axis_label, canonical_axis

Axis = str | Sequence[str]

# By default XLA drops a conversion to bfloat16 and back. A collective between these two conversions
# then moves another type than the program says.
_ALL_CONVERSIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollectives:
    """The collectives of a compiled program.

    Attributes:
      name: the function's name, or `the program`.
      collectives: the collectives, in the order of the program.
      sizes: mesh axis → size; empty if only collectives were given.
      carried: mesh axis → the semantic axes that the rules may put on it; None without a manager.
    """

    name: str
    collectives: tuple[Collective, ...]
    sizes: Mapping[str, int]
    carried: Mapping[str, Sequence[str]] | None

    def over(self, axis: Axis | None, *, exactly: bool = True) -> tuple[Collective, ...]:
        """Return the collectives over a mesh axis, a semantic axis, or several.

        With several axes, return the collectives over exactly these axes or, if `exactly` is False,
        over any of them. Mesh axes of size 1 are ignored, since nothing is sent along them.

        Raises:
          UnknownAxisError: the axis is neither in the mesh nor in the rules.
          TypeError: no axis is named.
        """
        if axis is None:
            return self.collectives
        if not len(axis):
            what = f"axis={axis!r} names no axis, so nothing is checked: leave it out for all"
            raise TypeError(f"{what}, or name one")
        wanted = frozenset().union(*map(self._mesh_axes, [axis] if isinstance(axis, str) else axis))
        # XLA sends nothing along a mesh axis of size 1, so no collective names it.
        wanted = frozenset(name for name in wanted if self.sizes.get(name) != 1)
        if exactly and not isinstance(axis, str):
            return tuple(
                collective for collective in self.collectives if set(collective.mesh_axes) == wanted
            )
        return tuple(
            collective
            for collective in self.collectives
            if not wanted.isdisjoint(collective.mesh_axes)
        )

    def _mesh_axes(self, axis: str) -> frozenset[str]:
        # Do not use a set: the message lists the axes in the same order in every run.
        known = dict.fromkeys(
            [
                *self.sizes,
                *(name for collective in self.collectives for name in collective.mesh_axes),
            ]
        )
        if axis in known:
            return frozenset({axis})
        carried = self.carried or {}
        wanted = canonical_axis(axis)
        names = frozenset(name for name, axes in carried.items() if wanted in axes)
        if names:
            return names
        labels = dict.fromkeys(axis_label(name) for axes in carried.values() for name in axes)
        everything = [*known, *labels]
        reason = "no rule shards it over a mesh axis of more than one device"
        if not self.carried:
            reason = "semantic axes need manager="
        what = f"{axis!r} is not an axis of the mesh {dict(self.sizes)}, and {reason}"
        fix = did_you_mean(axis, everything) or f"name one of {', '.join(everything)}"
        raise UnknownAxisError(what, fix=fix)


def read_program(
    program: Any,
    args: Sequence[Any],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    manager: PartitionManager | None = None,
    trips: int | None = None,
    own_types: bool = False,
) -> CompiledCollectives:
    """Compile a program, unless it is compiled already, and read its collectives.

    Args:
      program: a function, jitted or not, for `args`; the result of `lower` or `compile`; HLO text;
        or a sequence of `Collective`s.
      args: arguments of a function: arrays or `ShapeDtypeStruct`s.
      mesh: Defaults to the manager's mesh, else to the mesh of the program's arguments and results.
      manager: the manager under which a function compiles; it maps mesh axes to semantic axes.
        Defaults to the ambient manager.
      trips: number of trips of each loop whose end depends on data.
      own_types: report the element types that the program has before XLA for CPU widens some of
        them. This may compile the program a second time.

    Raises:
      ProgramError: the program cannot be read, shards nothing, or is lowered already and `args` are
        given.
      MeshSpecError: the mesh is not known.
      MeshMismatchError: the arrays of the program are on another mesh.
    """
    active = manager if manager is not None else context.current()
    carried = None if active is None else carried_axes(active)
    requested = mesh
    if requested is None and active is not None:
        requested = active.mesh
    if isinstance(program, (tuple, list)) and all(
        isinstance(entry, Collective) for entry in program
    ):
        sizes = {} if requested is None else mesh_sizes(requested)
        return CompiledCollectives(
            name="the program", collectives=tuple(program), sizes=sizes, carried=carried
        )
    # Enter the manager, because lowering traces the function, and `sw.shard` reads the ambient
    # manager during a trace.
    with manager if manager is not None else contextlib.nullcontext():
        name, lowered = (
            ("the program", program) if isinstance(program, str) else _lowered(program, args)
        )
        compiled = lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    program_mesh = _checked_mesh(requested, compiled)
    collectives = read_collectives(compiled, program_mesh, trips=trips)
    if (
        own_types
        and isinstance(lowered, jax.stages.Lowered)
        and _may_hide_bfloat16(lowered, compiled, collectives)
    ):
        recompiled = read_collectives(
            lowered.compile(compiler_options=_ALL_CONVERSIONS), program_mesh, trips=trips
        )
        # Use the second program only if its collectives differ in nothing but the element types.
        collectives = (
            recompiled
            if list(map(_signature, recompiled)) == list(map(_signature, collectives))
            else collectives
        )
    if (
        not collectives
        and program_mesh.size > 1
        and not isinstance(compiled, str)
        and is_same_everywhere(compiled)
    ):
        what = f"{name} does the same on each of {program_mesh.size} devices: nothing is sharded, "
        fix = "shard the arguments (pm.shard, jax.device_put), or give ShapeDtypeStructs that "
        raise ProgramError(f"{what}so nothing can be sent", fix=f"{fix}have shardings")
    return CompiledCollectives(
        name=name, collectives=collectives, sizes=mesh_sizes(program_mesh), carried=carried
    )


def _lowered(program: Any, args: Sequence[Any]) -> tuple[str, Any]:
    """Return the name of a program, and the program lowered or compiled."""
    if isinstance(program, (jax.stages.Lowered, jax.stages.Compiled)):
        if args:
            what = f"{len(args)} arguments for a program that is lowered already"
            raise ProgramError(
                what, fix="pass the function instead of the program, or pass no arguments"
            )
        return "the program", program
    if not callable(program):
        fix = "pass a function and its arguments, jitted.lower(...), jitted.lower(...).compile(), "
        raise ProgramError(f"{type(program).__name__} is not a program", fix=f"{fix}or its text")
    jitted: Any = program if hasattr(program, "lower") else jax.jit(program)
    return function_name(program), jitted.lower(*args)


def _may_hide_bfloat16(lowered: Any, compiled: Any, collectives: Sequence[Collective]) -> bool:
    """Tell whether XLA for CPU may have dropped the conversions that show bfloat16 collectives."""
    if (
        # A collective that XLA widened has the `dtype` bf16 and the `wire_dtype` f32. If XLA
        # dropped the conversions, both are f32.
        not any(collective.dtype == collective.wire_dtype == "f32" for collective in collectives)
        or "bf16" not in lowered.as_text()
    ):
        return False
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return all(device.platform == "cpu" for sharding in shardings for device in sharding.device_set)


def _signature(collective: Collective) -> tuple[Any, ...]:
    # Leave out the element type of the program, which the second compilation finds.
    return (
        collective.kind,
        collective.mesh_axes,
        collective.devices,
        collective.count,
        collective.wire_dtype,
        collective.wire_bytes,
    )


def is_same_everywhere(compiled: Any) -> bool:
    """Tell whether each device runs the whole program: nothing is sharded and nothing is sent."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    # A program that reads the index of its device, by `lax.axis_index`, may work on a part of its
    # operands although all of them are replicated.
    return (
        all(sharding.is_fully_replicated for sharding in shardings)
        and "partition-id()" not in compiled.as_text()
    )


def function_name(f: Callable[..., Any]) -> str:
    """Return the name of a function, or the name of its type if it has none."""
    return getattr(f, "__name__", type(f).__name__)


def _checked_mesh(requested: Mesh | AbstractMesh | None, compiled: Any) -> Mesh | AbstractMesh:
    """Return the mesh that the caller passed, or that of the program's arguments.

    If both exist, they must agree.
    """
    shardings = (
        ()
        if isinstance(compiled, str)
        else jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    )
    own: list[Any] = [
        sharding.mesh
        for sharding in shardings
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    ]
    if requested is None and not own:
        what = "no argument and no result of the program is on a mesh"
        raise MeshSpecError(what, fix="pass mesh=, or manager=")
    if requested is not None and own and own[0].shape_tuple != requested.shape_tuple:
        what = f"the program's arrays are on the mesh {dict(own[0].shape_tuple)}, not on "
        fix = "pass the mesh or the manager that the arrays were placed with"
        raise MeshMismatchError(f"{what}{dict(requested.shape_tuple)}", fix=fix)
    return own[0] if requested is None else requested
