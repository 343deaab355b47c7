"""Prove that two programs are compiled to the same partitioned program, or find a difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from shardwright import _jax
from shardwright.errors import ProgramError
from shardwright.manager.core import Manager
from shardwright.plan.annotate import annotate_axes_p
from shardwright.plan.hardware import Topology
from shardwright.plan.planner import Program, trace_program
from shardwright.plan.trace import Trace
from shardwright.plan.verify.compiler import Compiled, Platform, compile_exported, make_target
from shardwright.plan.verify.export import Exported, export_program
from shardwright.plan.verify.same import Operation, compare_programs
from shardwright.plan.walk.equations import nested_jaxprs
from shardwright.resolution.decisions import DimDecision, Resolution
from shardwright.resolution.partition_specs import spec_text
from shardwright.resolution.request import ShardingRequest
from shardwright.trees.paths import path_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSide:
    """A program under a manager, ready to be compiled.

    Attributes:
      exported: The program.
      decided: Each resolved annotation, in order: its place, and its resolution. An argument with
        its own sharding has no resolution.
      mesh: Size of each mesh axis.
    """

    exported: Exported
    decided: tuple[tuple[str, Resolution | None], ...]
    mesh: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionDifference:
    """The first annotation that the two sides resolve to different specs.

    Attributes:
      place: The argument, or the line of the model.
      dim: Position of the first dim that differs.
      axes: Semantic axis of the dim on each side.
      specs: Spec of the array on each side.
      rules: Rule of the dim on each side, with its place, or "".
    """

    place: str
    dim: int
    axes: tuple[str, str]
    specs: tuple[str, str]
    rules: tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """An instruction that only one side has.

    Attributes:
      op: Opcode and type.
      mesh_axes: Mesh axes that a collective runs over; empty for other instructions.
      source: Line of the model, or "".
    """

    op: str
    mesh_axes: tuple[str, ...]
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Whether two programs are the same, and if not, where the difference begins.

    Attributes:
      same: Whether the programs are the same.
      compiler: Compiler and version, or "" if both sides are equal before they are partitioned.
      collectives: Number of collectives of each side; (0, 0) if nothing was compiled.
      left: The first instruction that only the left side has, or None.
      right: The first instruction that only the right side has, or None.
      what: A difference that is not an instruction, as text, or "".
      cause: The first annotation that is resolved differently, or None.
    """

    same: bool
    compiler: str = ""
    collectives: tuple[int, int] = (0, 0)
    left: Differing | None = None
    right: Differing | None = None
    what: str = ""
    cause: DecisionDifference | None = None


def lower_program(
    manager: Manager,
    program: Program,
    *,
    topology: Topology | None = None,
    platform: Platform | None = None,
) -> ProgramSide:
    """Trace and export a program under a manager. `prove` then needs no code of the model.

    Raises:
      ShardingError: An annotation does not resolve.
      ProgramError: JAX cannot export the program.
    """
    target = make_target(topology, platform=platform)
    traced = trace_program(manager, program, platform=target.platform)
    exported = export_program(manager, program, traced, platform=target.platform, chip=target.chip)
    return ProgramSide(
        exported=exported,
        decided=tuple(_decided(manager, program, traced)),
        mesh=dict(manager.mesh.shape),
    )


def prove(
    left: ProgramSide,
    right: ProgramSide,
    *,
    topology: Topology | None = None,
    platform: Platform | None = None,
    timeout: float,
) -> Proof:
    """Compile two programs, and compare the compiled programs.

    Raises:
      ProgramError: A worker died or ran out of time, or the compiler cannot compile a program.
    """
    # Compare arrays in host memory here, where their paths are known: compiled programs have no
    # paths.
    hosted = [
        {
            place
            for place, resolution in each.decided
            if place.startswith("argument ") and resolution is not None and resolution.on_host
        }
        for each in (left, right)
    ]
    if hosted[0] != hosted[1]:
        place = min(hosted[0] ^ hosted[1])
        return Proof(same=False, what=f"{place} is in host memory on one side only")
    if left.exported == dataclasses.replace(right.exported, program=left.exported.program):
        return Proof(same=True)
    target = make_target(topology, platform=platform)
    compiled = [
        compile_exported(each.exported, target, timeout=timeout, hlo=True) for each in (left, right)
    ]
    proof = Proof(
        same=False,
        compiler=target.compiler,
        collectives=(len(compiled[0].collectives), len(compiled[1].collectives)),
        cause=_cause(left.decided, right.decided),
    )
    if any(each.refused for each in compiled):
        raise ProgramError(
            f"a side needs more memory than {target.topology} has, so it is not compiled",
            fix="give a larger --topology, or leave --topology out to compile for CPUs",
        )
    found = compare_programs(compiled[0].hlo, compiled[1].hlo)
    if found is not None:
        return dataclasses.replace(
            proof,
            left=_differing(found.left, compiled[0]),
            right=_differing(found.right, compiled[1]),
            what=found.what,
        )
    # If two programs have no collectives, and their arrays are sharded over different mesh axes of
    # the same size, their texts may be equal. So compare the shardings too.
    places = zip(compiled[0].placed, compiled[1].placed, strict=True)
    for name, (ours, theirs) in zip(("arguments", "results"), places, strict=True):
        if ours != theirs:
            return dataclasses.replace(proof, what=f"the sharding of the {name}")
    return dataclasses.replace(proof, same=True, cause=None)


def _decided(
    manager: Manager, program: Program, traced: Trace
) -> Iterator[tuple[str, Resolution | None]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(program.shapes)
    for (path, _leaf), source in zip(leaves, traced.inputs, strict=True):
        # The first key is the position of the argument.
        place = f"argument {path[0].idx} {path_text(path[1:])}".strip()
        yield place, manager.answer(source) if isinstance(source, ShardingRequest) else None
    for equation in _annotations(traced.jaxpr):
        request = equation.params["annotation"].request
        line = Path(_jax.source_line(equation)).name
        yield f"{request.path or ''} at {line}".strip(), manager.answer(request)


def _annotations(jaxpr: Any) -> Iterator[Any]:
    """Yield the annotations of a traced program, those of loops and calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive is annotate_axes_p:
            yield equation
        for inner in nested_jaxprs(equation):
            yield from _annotations(inner)


def _cause(
    left: Sequence[tuple[str, Resolution | None]], right: Sequence[tuple[str, Resolution | None]]
) -> DecisionDifference | None:
    """Return the first pair of decisions that differ.

    The annotations are paired by their position. If one side has an extra annotation, all pairs
    after it are wrong. A pair with different shapes shows this, and the result is then None.
    """
    for (place, ours), (_, theirs) in zip(left, right, strict=False):
        if ours is None or theirs is None:
            continue
        sizes = [[dim.size for dim in each.decisions] for each in (ours, theirs)]
        if sizes[0] != sizes[1]:
            return None
        for first, second in zip(ours.decisions, theirs.decisions, strict=True):
            if first.mesh_axes != second.mesh_axes:
                return DecisionDifference(
                    place=place,
                    dim=first.dim,
                    axes=(first.label, second.label),
                    specs=(_spec(ours), _spec(theirs)),
                    rules=(_rule(first), _rule(second)),
                )
    return None


def _spec(resolution: Resolution) -> str:
    return "failed" if resolution.spec is None else spec_text(resolution.spec)


def _rule(decision: DimDecision) -> str:
    return "" if decision.rule is None else str(decision.rule)


def _differing(operation: Operation | None, compiled: Compiled) -> Differing | None:
    if operation is None:
        return None
    over = next(
        (each.mesh_axes for each in compiled.collectives if each.name == operation.name), ()
    )
    return Differing(op=operation.text, mesh_axes=over, source=operation.source)
