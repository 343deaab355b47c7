"""What an assertion about a program may be given, and the collectives found in it."""

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
from shardwright.plan.collectives.by_axis import carried_axes
from shardwright.plan.collectives.collective import Collective
from shardwright.plan.collectives.read import read_collectives
from shardwright.vocabulary.axes import axis_label, canonical_axis

Axis = str | Sequence[str]

# By default XLA drops a conversion to bfloat16 and back, so that a float32 collective between two of them looks like any other.
_ALL_CONVERSIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled program's collectives, and what is known about it.

    Attributes:
      name: as people know it.
      collectives: what it does.
      sizes: mesh axis → size; empty where only collectives were given.
      carried: mesh axis → the semantic axes that may lie over it; None without a manager.
    """

    name: str
    collectives: tuple[Collective, ...]
    sizes: Mapping[str, int]
    carried: Mapping[str, Sequence[str]] | None

    def over(self, axis: Axis | None, *, exactly: bool = True) -> tuple[Collective, ...]:
        """Return the collectives over a mesh axis or a semantic axis; of several, over exactly these, or over any of them.

        Mesh axes of one device do not count: nothing is sent along them.

        Raises:
          UnknownAxisError: neither the mesh nor the rules know the axis.
          TypeError: no axis is named.
        """
        if axis is None:
            return self.collectives
        if not len(axis):
            raise TypeError(
                f"axis={axis!r} names no axis, so nothing is looked at: leave it out for all, or name one"
            )
        wanted = frozenset().union(*map(self._mesh_axes, [axis] if isinstance(axis, str) else axis))
        wanted = frozenset(name for name in wanted if self.sizes.get(name) != 1)
        if exactly and not isinstance(axis, str):
            return tuple(one for one in self.collectives if set(one.mesh_axes) == wanted)
        return tuple(one for one in self.collectives if not wanted.isdisjoint(one.mesh_axes))

    def _mesh_axes(self, axis: str) -> frozenset[str]:
        known = dict.fromkeys(
            [*self.sizes, *(name for one in self.collectives for name in one.mesh_axes)]
        )
        if axis in known:
            return frozenset({axis})
        carried = self.carried or {}
        wanted = canonical_axis(axis)
        names = frozenset(name for name, axes in carried.items() if wanted in axes)
        if names:
            return names
        everything = [
            *known,
            *dict.fromkeys(axis_label(one) for axes in carried.values() for one in axes),
        ]
        lies = (
            "no rule puts it over a mesh axis of more than one device"
            if self.carried
            else "semantic axes need manager="
        )
        raise UnknownAxisError(
            f"{axis!r} is no axis of the mesh {dict(self.sizes)}, and {lies}",
            fix=did_you_mean(axis, everything) or f"name one of {', '.join(everything)}",
        )


def read_program(
    program: Any,
    args: Sequence[Any],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    manager: PartitionManager | None = None,
    trips: int | None = None,
    own_types: bool = False,
) -> Program:
    """Compile what can be compiled, and read its collectives.

    Args:
      program: a function, jitted or not, for `args`; what `lower` or `compile` returned; HLO text; or `Collective`s.
      args: arguments of a function: arrays or `ShapeDtypeStruct`s.
      mesh: absent: the manager's, else that of the program's own arguments and results.
      manager: ambient while a function is compiled; gives mesh axes their semantic axes. Absent: the ambient one.
      trips: taken for loops that end on data.
      own_types: compile once more where only that tells the element types that the program has.

    Raises:
      ProgramError: arguments for something that takes none, a program that cannot be read, or one in which nothing is sharded.
      MeshSpecError: the mesh cannot be told.
      MeshMismatchError: the program's arrays lie on another mesh.
    """
    known = manager if manager is not None else context.current()
    carried = None if known is None else carried_axes(known)
    if isinstance(program, (tuple, list)) and all(isinstance(one, Collective) for one in program):
        sizes = (
            {}
            if mesh is None and known is None
            else mesh_sizes(mesh if mesh is not None else known.mesh)
        )
        return Program(name="the program", collectives=tuple(program), sizes=sizes, carried=carried)
    with manager if manager is not None else contextlib.nullcontext():
        name, lowered = (
            ("the program", program) if isinstance(program, str) else _lowered(program, args)
        )
        compiled = lowered.compile() if isinstance(lowered, jax.stages.Lowered) else lowered
    found = _checked_mesh(
        mesh if mesh is not None else None if known is None else known.mesh, compiled
    )
    collectives = read_collectives(compiled, found, trips=trips)
    if (
        own_types
        and isinstance(lowered, jax.stages.Lowered)
        and _may_hide_bfloat16(lowered, compiled, collectives)
    ):
        told = read_collectives(
            lowered.compile(compiler_options=_ALL_CONVERSIONS), found, trips=trips
        )
        # Only what differs in nothing else says something about the program that runs.
        collectives = (
            told if list(map(_send, told)) == list(map(_send, collectives)) else collectives
        )
    if (
        not collectives
        and found.size > 1
        and not isinstance(compiled, str)
        and is_same_everywhere(compiled)
    ):
        raise ProgramError(
            f"{name} does the same on each of {found.size} devices: nothing is sharded, so nothing can be sent",
            fix="shard the arguments (pm.shard, jax.device_put), or give ShapeDtypeStructs that have shardings",
        )
    return Program(name=name, collectives=collectives, sizes=mesh_sizes(found), carried=carried)


def _lowered(program: Any, args: Sequence[Any]) -> tuple[str, Any]:
    """Return a program's name, and what is compiled of it, or is to be."""
    if isinstance(program, (jax.stages.Lowered, jax.stages.Compiled)):
        if args:
            raise ProgramError(
                f"{len(args)} arguments for a program that is lowered already",
                fix="pass the function, or no arguments",
            )
        return "the program", program
    if not callable(program):
        fix = "pass a function and its arguments, jitted.lower(...), jitted.lower(...).compile(), or its text"
        raise ProgramError(f"{type(program).__name__} is no program", fix=fix)
    jitted: Any = program if hasattr(program, "lower") else jax.jit(program)
    return function_name(program), jitted.lower(*args)


def _may_hide_bfloat16(lowered: Any, compiled: Any, found: Sequence[Collective]) -> bool:
    """Tell whether XLA for CPU may have left out the conversions by which bfloat16 collectives are known."""
    if (
        not any(one.dtype == one.wire_dtype == "f32" for one in found)
        or "bf16" not in lowered.as_text()
    ):
        return False
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return all(device.platform == "cpu" for one in shardings for device in one.device_set)


def _send(one: Collective) -> tuple[Any, ...]:
    return (one.kind, one.mesh_axes, one.devices, one.count, one.wire_dtype, one.wire_bytes)


def is_same_everywhere(compiled: Any) -> bool:
    """Tell whether each device of a compiled program does the whole of it: nothing comes, goes or is cut in parts."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return (
        all(one.is_fully_replicated for one in shardings)
        and "partition-id()" not in compiled.as_text()
    )


def function_name(f: Callable[..., Any]) -> str:
    """Return a function's name, or its type's."""
    return getattr(f, "__name__", type(f).__name__)


def _checked_mesh(asked: Mesh | AbstractMesh | None, compiled: Any) -> Mesh | AbstractMesh:
    """Return the mesh that was asked for, else that of the program's arguments and results; they may not disagree."""
    shardings = (
        ()
        if isinstance(compiled, str)
        else jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    )
    own: list[Any] = [
        one.mesh for one in shardings if isinstance(one, NamedSharding) and one.mesh.size > 1
    ]
    if asked is None and not own:
        raise MeshSpecError(
            "no argument and no result of the program lies on a mesh", fix="pass mesh=, or manager="
        )
    if asked is not None and own and own[0].shape_tuple != asked.shape_tuple:
        raise MeshMismatchError(
            f"the program's arrays lie on the mesh {dict(own[0].shape_tuple)}, asked is {dict(asked.shape_tuple)}",
            fix="pass the mesh or the manager that the arrays were placed with",
        )
    return own[0] if asked is None else asked
