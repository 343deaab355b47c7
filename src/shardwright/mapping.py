"""`shard_map` in semantic axes: each axis resolves once per call, from the inputs, and outputs reuse it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax, placement, tree
from shardwright.annotations import Dim, as_annotation, is_annotation, lower
from shardwright.axes import Role, axis_label
from shardwright.errors import AxisConflictError, Problem, ShapeRequiredError, ShardingError, StrategyError, raise_problems
from shardwright.provenance import DimDecision, Outcome


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SemanticShardMap:
    """What `PartitionManager.shard_map` returns: a function of global arrays; see there."""

    manager: Any
    f: Callable[..., Any]
    in_axes: tuple[Any, ...]
    out_axes: Any
    sizes: dict[str, int]
    mode: str | None
    _made: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __call__(self, *args: Any) -> Any:
        """Resolve the axes from the arguments' shapes and run the function on their shards."""
        if len(args) != len(self.in_axes):
            raise StrategyError(
                f"{len(args)} arguments, in_axes has {len(self.in_axes)} entries", fix="give in_axes one entry per argument"
            )
        found: dict[str, tuple[str, ...]] = {}
        owners: dict[str, str] = {}
        problems: list[Problem] = []
        in_specs = tuple(
            self._specs(f"argument {at}", arg, axes, found, owners, problems)
            for at, (arg, axes) in enumerate(zip(args, self.in_axes, strict=True))
        )
        raise_problems(problems)
        out_specs = self._out_specs(found)
        args, nested = self._ready(args, in_specs)
        key = (jax.tree.structure((in_specs, out_specs)), tuple(jax.tree.leaves((in_specs, out_specs))), nested)
        mapped = self._made.get(key)
        if mapped is None:
            mesh = None if nested else self.manager.mesh
            # Jitted, because shard_map by itself traces and compiles anew at every eager call.
            mapped = self._made[key] = jax.jit(_jax.call_shard_map(self.f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
        return mapped(*args)

    def _ready(self, args: tuple[Any, ...], in_specs: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
        """Return the arguments as `shard_map` takes them, and whether it must use the ambient mesh.

        It refuses a mesh of its own where the ambient one is partly Manual, and over Explicit axes an argument that does not
        lie as its spec says.
        """
        ambient = _jax.ambient_mesh()
        manual = self.manager.manual_axes(ambient)
        mesh = self.manager.mesh if ambient is None else ambient
        if AxisType.Explicit in mesh.axis_types:

            def placed(x: Any, spec: PartitionSpec) -> Any:
                return placement.place(x, placement.make_placement(spec, self.manager.mesh, ambient))

            args = tuple(jax.tree.map(placed, arg, specs) for arg, specs in zip(args, in_specs, strict=True))
        return args, bool(manual)

    def _specs(
        self, name: str, arg: Any, axes: Any, found: dict[str, tuple[str, ...]], owners: dict[str, str], problems: list[Problem]
    ) -> Any:
        specs = []
        try:
            leaves = tree.annotated_leaves(arg, as_annotation(axes) if _is_axes_list(axes) else axes)
        except ShardingError as error:
            problems += [dataclasses.replace(problem, path=f"{name} {problem.path}".strip()) for problem in error.problems]
            return None
        for leaf in leaves:
            path = f"{name} {leaf.path}".strip()
            resolution = self.manager.explain(leaf.annotation, mode=self.mode, shape=np.shape(leaf.value), path=path)
            problems += resolution.problems or self._learn(path, leaf, resolution.decisions, found, owners)
            specs.append(resolution.spec)
        return jax.tree.unflatten(jax.tree.structure(arg), specs) if len(specs) == len(leaves) else None

    def _learn(
        self, path: str, leaf: Any, decisions: tuple[DimDecision, ...], found: dict[str, tuple[str, ...]], owners: dict[str, str]
    ) -> list[Problem]:
        """Note where each axis lies, and return the problems: an axis that lies in two ways, or nowhere."""
        problems = []
        for dim, decision in zip(lower(leaf.annotation, np.shape(leaf.value)).dims, decisions, strict=True):
            if decision.outcome is Outcome.UNCONSTRAINED:
                problems.append(_open(path, decision))
            elif len(dim.axes) == 1:
                axis = dim.axes[0]
                if found.setdefault(axis, decision.mesh_axes) != decision.mesh_axes:
                    problems.append(_two_ways(path, decision, found[axis], owners[axis]))
                owners.setdefault(axis, path)
        return problems

    def _out_specs(self, found: Mapping[str, tuple[str, ...]]) -> Any:
        if _is_axes_list(self.out_axes):
            return self._out_spec(as_annotation(self.out_axes), found)
        if isinstance(self.out_axes, tuple) and not any(isinstance(entry, str) for entry in self.out_axes) and self.out_axes:
            return tuple(self._out_tree(entry, found) for entry in self.out_axes)
        return self._out_tree(self.out_axes, found)

    def _out_tree(self, axes: Any, found: Mapping[str, tuple[str, ...]]) -> Any:
        return jax.tree.map(lambda annotation: self._out_spec(annotation, found), axes, is_leaf=is_annotation)

    def _out_spec(self, annotation: Any, found: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
        entries: list[Any] = []
        taken: set[str] = set()
        for at, dim in enumerate(lower(annotation).dims):
            names = dim.literal or tuple(name for axis in dim.axes for name in self._out_axis(axis, dim, found))
            clash = [name for name in names if name in taken]
            if clash:
                raise AxisConflictError(
                    f"mesh axis {clash[0]} stands twice", path="output", dim=at, axis=dim.label, fix="annotate one of the dims EMPTY"
                )
            taken.update(names)
            entries.append(None if not names else names[0] if len(names) == 1 else names)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def _out_axis(self, axis: str, dim: Dim, found: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        if axis in found:
            return found[axis]
        size = self.sizes.get(axis)
        try:
            resolution = self.manager.explain((axis,), mode=self.mode, shape=None if size is None else (size,), role=Role.ACTIVATION)
            resolution.require()
            if resolution.decisions[0].outcome is Outcome.UNCONSTRAINED:
                raise_problems([_open("output", resolution.decisions[0])], resolution=resolution)
        except ShapeRequiredError as error:
            raise ShapeRequiredError(
                "the axis stands in no input, and where it lies depends on its size",
                path="output",
                axis=dim.label,
                fix=f"pass sizes={{{axis_label(axis)}: ...}}",
            ) from error
        return resolution.decisions[0].mesh_axes  # type: ignore[no-any-return]


def _is_axes_list(axes: Any) -> bool:
    """Whether a list is one annotation, as other code writes them, and no list of annotations."""
    return isinstance(axes, list) and any(isinstance(entry, str) for entry in axes)


def _open(path: str, decision: DimDecision) -> Problem:
    return Problem(
        error=StrategyError,
        what='"?" leaves this dim to the compiler, but shard_map must know where it lies',
        path=path,
        dim=decision.dim,
        axis=decision.label,
        rule=str(decision.rule or ""),
        fix='give the axis a rule without "?"',
    )


def _two_ways(path: str, decision: DimDecision, before: tuple[str, ...], owner: str) -> Problem:
    here, there = "+".join(decision.mesh_axes) or "-", "+".join(before) or "-"
    return Problem(
        error=AxisConflictError,
        what=f"the axis lies over {here} here, and over {there} in {owner}",
        path=path,
        dim=decision.dim,
        axis=decision.label,
        rule=str(decision.rule or ""),
        fix="annotate one of them EMPTY or with another axis: inside shard_map an axis lies in one way",
    )
