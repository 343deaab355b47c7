"""`shard_map` in semantic axes: each axis resolves once per call, from the inputs, and outputs reuse it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax, placement, resolver, tree
from shardwright.annotations import Dim, as_annotation, is_annotation, lower
from shardwright.axes import axis_label
from shardwright.errors import AxisConflictError, Problem, ShapeRequiredError, ShardingError, StrategyError, raise_problems
from shardwright.provenance import DimDecision, ModeFrom, Outcome, Resolution
from shardwright.specs import canonical_spec, entry_of

# Where each dim of the inputs lies, by its axes: several for a composite, which is decided as a whole.
_Found = dict[tuple[str, ...], tuple[str, ...]]


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
        found: _Found = {}
        owners: dict[tuple[str, ...], str] = {}
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

    def _specs(self, name: str, arg: Any, axes: Any, found: _Found, owners: dict[tuple[str, ...], str], problems: list[Problem]) -> Any:
        specs = []
        try:
            leaves = tree.annotated_leaves(arg, as_annotation(axes) if _is_axes_list(axes) else axes)
        except ShardingError as error:
            problems += [dataclasses.replace(problem, path=f"{name} {problem.path}".strip()) for problem in error.problems]
            return None
        for leaf in leaves:
            path = f"{name} {leaf.path}".strip()
            resolution = self._explain(leaf.annotation, shape=np.shape(leaf.value), path=path)
            problems += resolution.problems or self._learn(path, leaf, resolution.decisions, found, owners)
            specs.append(resolution.spec)
        return jax.tree.unflatten(jax.tree.structure(arg), specs) if len(specs) == len(leaves) else None

    def _learn(
        self, path: str, leaf: Any, decisions: tuple[DimDecision, ...], found: _Found, owners: dict[tuple[str, ...], str]
    ) -> list[Problem]:
        """Note where each axis lies, and return the problems: an axis that lies in two ways, or nowhere."""
        problems = []
        for dim, decision in zip(lower(leaf.annotation, np.shape(leaf.value)).dims, decisions, strict=True):
            if decision.outcome is Outcome.UNCONSTRAINED:
                problems.append(_open(path, decision))
            elif dim.axes:
                lies = tuple(axis for axis in decision.mesh_axes if axis not in decision.manual)
                if found.setdefault(dim.axes, lies) != lies:
                    problems.append(_two_ways(path, decision, found[dim.axes], owners[dim.axes]))
                owners.setdefault(dim.axes, path)
        return problems

    def _out_specs(self, found: _Found) -> Any:
        if _is_axes_list(self.out_axes):
            return self._out_spec(as_annotation(self.out_axes), found)
        if isinstance(self.out_axes, tuple) and not any(isinstance(entry, str) for entry in self.out_axes) and self.out_axes:
            return tuple(self._out_tree(entry, found) for entry in self.out_axes)
        return self._out_tree(self.out_axes, found)

    def _out_tree(self, axes: Any, found: _Found) -> Any:
        return jax.tree.map(lambda annotation: self._out_spec(annotation, found), axes, is_leaf=is_annotation)

    def _out_spec(self, annotation: Any, found: _Found) -> PartitionSpec:
        entries: list[Any] = []
        taken: set[str] = set()
        for at, dim in enumerate(lower(annotation).dims):
            names = dim.literal or self._out_dim(dim, found)
            clash = [name for name in names if name in taken]
            if clash:
                raise AxisConflictError(
                    f"mesh axis {clash[0]} stands twice", path="output", dim=at, axis=dim.label, fix="annotate one of the dims EMPTY"
                )
            taken.update(names)
            entries.append(entry_of(names))
        return canonical_spec(entries)

    def _out_dim(self, dim: Dim, found: _Found) -> tuple[str, ...]:
        """Return where an output's dim lies: as the inputs' dim of the same axes, else each of its axes by itself."""
        if dim.axes in found:
            return found[dim.axes]
        inside = [axis for axis in dim.axes if (axis,) not in found and any(axis in axes for axes in found)]
        if inside:
            raise AxisConflictError(
                f"{axis_label(inside[0])} stands in the inputs only inside a composite, so where it lies by itself is not decided",
                path="output",
                axis=dim.label,
                fix="annotate the output's dim with the same composite, or an input's dim with the axis alone",
            )
        return tuple(name for axis in dim.axes for name in (found[axis,] if (axis,) in found else self._out_axis(axis, dim)))

    def _out_axis(self, axis: str, dim: Dim) -> tuple[str, ...]:
        size = self.sizes.get(axis)
        resolution = self._explain((axis,), shape=None if size is None else (size,), path=None)
        if ShapeRequiredError in {problem.error for problem in resolution.problems}:
            raise ShapeRequiredError(
                "the axis stands in no input, and where it lies depends on its size",
                path="output",
                axis=dim.label,
                fix=f"pass sizes={{{axis_label(axis)}: ...}}",
            )
        resolution.require()
        decision = resolution.decisions[0]
        if decision.outcome is Outcome.UNCONSTRAINED:
            raise_problems([_open("output", decision)], resolution=resolution)
        return tuple(name for name in decision.mesh_axes if name not in decision.manual)

    def _explain(self, annotation: Any, *, shape: tuple[int, ...] | None, path: str | None) -> Resolution:
        """Resolve with the mesh axes of a surrounding `shard_map` as already applied."""
        manager = self.manager
        said, said_by = (self.mode, ModeFrom.CALL) if self.mode is not None else (manager.mode, ModeFrom.MANAGER)
        manual = manager.manual_axes(_jax.ambient_mesh())
        return resolver.explain(
            annotation, manager.rules, manager.mesh, mode=said, shape=shape, path=path, manual=manual, mode_from=said_by
        )


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
