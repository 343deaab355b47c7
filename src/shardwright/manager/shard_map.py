"""`shard_map` with annotations instead of specs.

Each axis resolves once per call, from the sizes of the inputs. The outputs use the same mesh axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    AxisConflictError,
    MissingMeshAxisError,
    Problem,
    RankMismatchError,
    ShapeRequiredError,
    ShardingError,
    StrategyError,
    raise_problems,
    under,
)
from shardwright.manager import constraint, context
from shardwright.manager.shards import nested_shard_map, place_for_shard_map, reduced_specs
from shardwright.manager.which_shard import Input, Inputs
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.partition_specs import canonical_spec, entry_names, entry_of
from shardwright.resolution.rules import AxisRules
from shardwright.resolution.unknown_axes import missing_entry_fix, unknown_axis
from shardwright.trees import annotated, paths
from shardwright.vocabulary.annotations import (
    as_annotation,
    is_annotation,
    is_axes_list,
    is_tuple_of_annotations,
)
from shardwright.vocabulary.axes import LAYERS, UNCONSTRAINED, axis_label, canonical_axis
from shardwright.vocabulary.lowering import Dim, as_shape, lower
from shardwright.vocabulary.merged_dims import MergedDim

# The mesh axes of each dim of the inputs. The key is the tuple of axes of the dim: several for a
# composite.
_AxesByName = dict[tuple[str, ...], tuple[str, ...]]


@dataclasses.dataclass(slots=True)
class _ResolvedInputs:
    """The resolutions of the inputs of one call, collected argument by argument.

    Attributes:
      mesh_axes: Mesh axes of each dim, by the axes of the dim.
      owners: Path of the first array with such a dim, by the axes of the dim.
      dims: The annotation of each array as `Dim`s (see `vocabulary.lowering`).
      problems: Problems of all arrays.
    """

    mesh_axes: _AxesByName = dataclasses.field(default_factory=dict)
    owners: dict[tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    dims: list[tuple[Dim, ...]] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)


# `jax.jit` of this object takes a weak reference to it, and hashes it by identity.
@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SemanticShardMap:
    """The function of global arrays that `PartitionManager.shard_map` returns.

    Attributes:
      f: Function of local arrays.
      in_axes: One annotation, or a tree of annotations, per positional argument.
      out_axes: Annotations of the outputs, as `checked_outputs` returns them.
      sizes: Global sizes of axes that no input has.
      mesh: The manager's mesh.
      explain: Function of (annotation, shape, path) that resolves under the current ambient mesh.
      manual_axes: Function that checks the ambient mesh and returns its Manual axes.
      check_vma: As in `jax.shard_map`.
    """

    f: Callable[..., Any]
    in_axes: tuple[Any, ...]
    out_axes: Any
    sizes: dict[str, int]
    mesh: Mesh | AbstractMesh
    explain: Callable[[Any, Sequence[int] | None, str | None], Resolution]
    manual_axes: Callable[[AbstractMesh | None], frozenset[str]]
    check_vma: bool = True
    _cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __call__(self, *args: Any) -> Any:
        """Resolve the axes from the arguments' shapes and run the function on their shards."""
        if len(args) != len(self.in_axes):
            what = f"the call has {len(args)} arguments, and in_axes has length {len(self.in_axes)}"
            raise StrategyError(what, fix="give in_axes one entry per argument")
        resolved = _ResolvedInputs()
        in_specs = tuple(
            self._specs(f"argument {position}", arg, axes, resolved)
            for position, (arg, axes) in enumerate(zip(args, self.in_axes, strict=True))
        )
        raise_problems(resolved.problems)
        mesh_axes, dims = resolved.mesh_axes, tuple(resolved.dims)
        args, in_specs, mesh = self._place_arguments(args, in_specs)
        f = self._with_inputs(in_specs, dims) if mesh is not None else self.f
        outputs = self._outputs(f, args, in_specs, mesh)
        out_specs = jax.tree.map(
            lambda output: self._out_spec(output.annotation, mesh_axes), outputs
        )
        # `dims` is part of the key, because `_with_inputs` puts it into the cached function.
        key = (
            jax.tree.structure((in_specs, out_specs)),
            tuple(jax.tree.leaves((in_specs, out_specs))),
            mesh,
            dims,
        )
        mapped = self._cache.get(key)
        if mapped is None:
            if mesh is None and self.check_vma and _jax.tracks_varying():
                mapped = nested_shard_map(f, in_specs=in_specs, out_specs=out_specs)
            else:
                mapped = _jax.call_shard_map(
                    f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=self.check_vma
                )
            # Without jit, shard_map traces and compiles at every eager call. Inside another
            # `shard_map`, do not share the function between calls: see `attention.run_inline`.
            mapped = self._cache[key] = jax.jit(mapped, inline=mesh is None)
        return mapped(*args)

    def _with_inputs(
        self, in_specs: tuple[Any, ...], dims: tuple[tuple[Dim, ...], ...]
    ) -> Callable[..., Any]:
        """Return the function in a context from which `gather` reads how the inputs are split.

        Inside another `shard_map` the shapes of the inputs are not global, so this method is not
        used there.
        """
        specs = jax.tree.leaves(in_specs)

        @functools.wraps(self.f)
        def with_inputs(*local: Any) -> Any:
            leaves, structure = jax.tree.flatten(local)
            vary = [
                _jax.vary_together(leaf, over=tuple(spec.reduced)) if spec.reduced else leaf
                for leaf, spec in zip(leaves, specs, strict=True)
            ]
            local = jax.tree.unflatten(structure, vary)
            # `dims`, leaves and specs have the same order, since the specs have the structure of
            # the arguments. INPUTS is part of JAX's cache keys, so a function that is jitted inside
            # `f` is traced again for other inputs.
            with context.INPUTS(inputs_of(dims, jax.tree.leaves(local), specs)):
                return self.f(*local)

        return with_inputs

    def _place_arguments(
        self, args: tuple[Any, ...], in_specs: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Mesh | AbstractMesh | None]:
        """Return the placed arguments, their specs, and the mesh for `shard_map`.

        The mesh is None if the ambient mesh has Manual axes: `shard_map` then accepts no other
        mesh than the ambient one.
        """
        ambient = _jax.ambient_mesh()
        manual = self.manual_axes(ambient)
        mesh = constraint.mesh_here(self.mesh, ambient)
        # Only a `shard_map` that tracks varying mesh axes can leave a gradient unreduced.
        keep = self.check_vma and not manual
        args = place_for_shard_map(args, in_specs, mesh=mesh, keep_reduced=keep)
        if keep:
            in_specs = reduced_specs(args, in_specs)
        return args, in_specs, None if manual else mesh

    def _outputs(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        mesh: Mesh | AbstractMesh | None,
    ) -> Any:
        """Return the annotations of the outputs.

        A tuple of annotations can also be read as one annotation of composites. The structure of
        the outputs decides, so the function is traced, once for each combination of argument
        shapes.
        """
        if not any(
            is_tuple_of_annotations(output.annotation) for output in jax.tree.leaves(self.out_axes)
        ):
            return self.out_axes
        leaves, structure = jax.tree.flatten(
            # `ShapeDtypeStruct`s can be hashed, which arrays cannot.
            (jax.eval_shape(lambda *arrays: arrays, *args), in_specs)
        )
        key = ("outputs", structure, mesh, *leaves)
        outputs = self._cache.get(key)
        if outputs is None:
            outputs = self._cache[key] = self._paired_outputs(f, args, in_specs, mesh)
        return outputs

    def _paired_outputs(
        self,
        f: Callable[..., Any],
        args: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        mesh: Mesh | AbstractMesh | None,
    ) -> Any:
        shapes: list[Any] = []

        def trace(*local: Any) -> tuple[()]:
            # Only the ranks are used, so the dtype does not matter.
            shapes.append(
                jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.bool_), f(*local))
            )
            return ()

        jax.eval_shape(
            _jax.call_shard_map(
                trace, mesh=mesh, in_specs=in_specs, out_specs=(), check_vma=self.check_vma
            ),
            *args,
        )
        try:
            leaves = annotated.annotated_leaves(
                shapes[0], jax.tree.map(lambda output: output.annotation, self.out_axes)
            )
        except ShardingError as error:
            raise type(error)(problems=under("output", error)) from error
        return jax.tree.unflatten(
            jax.tree.structure(shapes[0]), [_AnnotatedOutput(leaf.annotation) for leaf in leaves]
        )

    def _specs(self, name: str, arg: Any, axes: Any, resolved: _ResolvedInputs) -> Any:
        """Return the specs of an argument, or None if it has problems. Update `resolved`."""
        specs = []
        try:
            leaves = annotated.annotated_leaves(
                arg, as_annotation(axes) if is_axes_list(axes) else axes
            )
        except ShardingError as error:
            resolved.problems += under(name, error)
            return None
        for leaf in leaves:
            path = f"{name} {leaf.path}".strip()
            constraint.check_kept(leaf.value, path=path)
            resolution = self.explain(leaf.annotation, np.shape(leaf.value), path)
            if resolution.problems:
                resolved.problems += resolution.problems
                continue
            dims = lower(leaf.annotation, np.shape(leaf.value)).dims
            resolved.dims.append(dims)
            resolved.problems += self._record(path, dims, resolution.decisions, resolved)
            specs.append(resolution.spec)
        return (
            jax.tree.unflatten(jax.tree.structure(arg), specs)
            if len(specs) == len(leaves)
            else None
        )

    def _record(
        self,
        path: str,
        dims: tuple[Dim, ...],
        decisions: tuple[DimDecision, ...],
        resolved: _ResolvedInputs,
    ) -> list[Problem]:
        """Record the mesh axes of each dim. Return a problem for each dim that is unconstrained,
        or differs from an earlier dim with the same axes or from `sizes`.
        """
        problems = []
        for dim, decision in zip(dims, decisions, strict=True):
            if decision.outcome is Outcome.UNCONSTRAINED:
                problems.append(_open(path, decision))
            elif dim.axes:
                # `sizes` has the global sizes of single axes. Do not compare a dim that an outer
                # `shard_map` has split, whose size is local, or a composite, whose size is a
                # product.
                local = decision.manual or len(dim.axes) > 1
                size = None if local else self.sizes.get(dim.axes[0])
                if size is not None and size != decision.size:
                    what = f"the axis has size {decision.size} here, and {size} in sizes="
                    fix = "remove this axis from sizes=, which is for axes that no input has"
                    problems.append(_problem(RankMismatchError, path, decision, what, fix))
                names = tuple(axis for axis in decision.mesh_axes if axis not in decision.manual)
                before = resolved.mesh_axes.setdefault(dim.axes, names)
                if before != names:
                    here, earlier = ("+".join(each) or "-" for each in (names, before))
                    what = f"the axis is sharded over {here} here, but over {earlier} in "
                    what += resolved.owners[dim.axes]
                    fix = "annotate one of them EMPTY or with another axis: "
                    fix += "inside shard_map an axis has one sharding"
                    problems.append(_problem(AxisConflictError, path, decision, what, fix))
                resolved.owners.setdefault(dim.axes, path)
        return problems

    def _out_spec(self, annotation: Any, mesh_axes: _AxesByName) -> PartitionSpec:
        entries: list[Any] = []
        used: set[str] = set()
        for position, dim in enumerate(lower(annotation).dims):
            names = (
                self._out_dim(dim, mesh_axes)
                if dim.literal is None
                else self._literal(position, dim.literal)
            )
            repeated = [name for at, name in enumerate(names) if name in used or name in names[:at]]
            if repeated:
                what = f"mesh axis {repeated[0]} occurs twice"
                fix = "annotate one of the dims EMPTY"
                raise AxisConflictError(what, path="output", dim=position, axis=dim.label, fix=fix)
            used.update(names)
            entries.append(entry_of(names))
        return canonical_spec(entries)

    def _literal(self, position: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """Check the mesh axes of an entry of a literal `PartitionSpec`, and return them."""
        for name in names:
            if name == UNCONSTRAINED:
                what, fix = "UNCONSTRAINED leaves this dim to the compiler", "write None"
                raise StrategyError(what, path="output", dim=position, fix=fix)
            if name not in self.mesh.shape:
                what = f"mesh axis {name!r} is not in the mesh"
                fix = missing_entry_fix(name, self.mesh.shape)
                raise MissingMeshAxisError(what, path="output", dim=position, fix=fix)
        return names

    def _out_dim(self, dim: Dim, mesh_axes: _AxesByName) -> tuple[str, ...]:
        """Return the mesh axes of an output's dim.

        If a dim of an input has the same axes, return the mesh axes of this dim. Otherwise return
        the mesh axes of each axis in turn.
        """
        if dim.axes in mesh_axes:
            return mesh_axes[dim.axes]
        inside = [
            axis
            for axis in dim.axes
            if (axis,) not in mesh_axes and any(axis in axes for axes in mesh_axes)
        ]
        if inside:
            what = f"{axis_label(inside[0])} is in the inputs only as part of a composite, "
            what += "so its own mesh axes are not decided"
            fix = "annotate the output's dim with the same composite, "
            fix += "or an input's dim with the axis alone"
            raise AxisConflictError(what, path="output", axis=dim.label, fix=fix)
        return tuple(
            name
            for axis in dim.axes
            for name in (mesh_axes[axis,] if (axis,) in mesh_axes else self._out_axis(axis, dim))
        )

    def _out_axis(self, axis: str, dim: Dim) -> tuple[str, ...]:
        size = self.sizes.get(axis)
        resolution = self.explain((axis,), None if size is None else (size,), "output")
        if ShapeRequiredError in {problem.error for problem in resolution.problems}:
            what = "no input has this axis, and its mesh axes depend on its size"
            fix = f"pass sizes={{{axis_label(axis)}: ...}}"
            raise ShapeRequiredError(what, path="output", axis=dim.label, fix=fix)
        resolution.require()
        decision = resolution.decisions[0]
        if decision.outcome is Outcome.UNCONSTRAINED:
            raise_problems([_open("output", decision)], resolution=resolution)
        return tuple(name for name in decision.mesh_axes if name not in decision.manual)


def inputs_of(
    dims: Sequence[tuple[Dim, ...]], values: Sequence[Any], specs: Sequence[PartitionSpec]
) -> Inputs:
    """Return the inputs of a `shard_map` as `gather` reads them. Call it inside the `shard_map`.

    Args:
      dims: The annotation of each input as `Dim`s.
      values: The inputs, as the function receives them.
      specs: Spec of each input.
    """
    leaves = [
        entry
        for leaf, value, spec in zip(dims, values, specs, strict=True)
        for entry in _inputs(leaf, jnp.shape(value), spec)
    ]
    return Inputs(mesh=_jax.ambient_mesh(), leaves=tuple(dict.fromkeys(leaves)))


def _inputs(dims: tuple[Dim, ...], shape: tuple[int, ...], spec: PartitionSpec) -> list[Input]:
    """Return an input as the function receives it and, for stacked layers, one layer of it."""
    entries = (*spec.partitions, *[None] * len(shape))[: len(shape)]
    whole = Input(dims=dims, shape=shape, split=tuple(map(entry_names, entries)))
    # The dim of the layers may be LAYERS, EMPTY (no axes), or an entry of a `PartitionSpec`.
    if (
        not shape
        or whole.split[0]
        or (dims[0].literal is None and dims[0].axes not in ((LAYERS,), ()))
    ):
        return [whole]
    # `jax.lax.scan` over the layers gives `gather` one layer at a time.
    return [whole, Input(dims=dims[1:], shape=shape[1:], split=whole.split[1:])]


@dataclasses.dataclass(frozen=True, slots=True)
class _AnnotatedOutput:
    """The annotation of an output, wrapped as a leaf.

    JAX would treat a bare tuple of axes as a node of the tree.
    """

    annotation: Any


def checked_outputs(out_axes: Any) -> Any:
    """Check the annotations of the outputs, and return a tree with each annotation as a leaf.

    A tuple or list that has an axis or a merged dim as an entry is one annotation. Any other tuple
    or list has one entry per output.

    Raises:
      StrategyError: An entry is not an annotation.
    """
    several = type(out_axes) is tuple and bool(out_axes) and not _is_dims(out_axes)
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        out_axes,
        is_leaf=lambda node: (
            not (several and node is out_axes) and (is_annotation(node) or _is_dims(node))
        ),
    )
    problems: list[Problem] = []
    outputs = []
    for path, axes in pairs:
        try:
            annotation = as_annotation((axes,) if isinstance(axes, MergedDim) else axes)
            outputs.append(_AnnotatedOutput(annotation))
        except ShardingError as error:
            at = f"output {paths.path_text(path)}".strip()
            problems += [dataclasses.replace(problem, path=at) for problem in error.problems]
    raise_problems(problems)
    return jax.tree.unflatten(structure, outputs)


def _is_dims(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(
        isinstance(entry, (str, MergedDim)) for entry in value
    )


def known_sizes(sizes: Mapping[str, int], rules: AxisRules) -> dict[str, int]:
    """Return `sizes` by canonical axis.

    Raises:
      UnknownAxisError: An axis is unknown.
      RankMismatchError: A size is not a positive integer.
    """
    by_axis = {canonical_axis(axis): as_shape((size,))[0] for axis, size in sizes.items()}
    raise_problems(
        [
            dataclasses.replace(unknown_axis(axis, rules.known_axes), path="sizes")
            for axis in by_axis
            if axis not in rules.known_axes
        ]
    )
    return by_axis


def _problem(
    error: type[ShardingError], path: str, decision: DimDecision, what: str, fix: str
) -> Problem:
    return Problem(
        error=error,
        what=what,
        path=path,
        dim=decision.dim,
        axis=decision.label,
        rule=str(decision.rule or ""),
        fix=fix,
    )


def _open(path: str, decision: DimDecision) -> Problem:
    what = '"?" leaves this dim to the compiler, but shard_map needs a decision for every dim'
    return _problem(StrategyError, path, decision, what, 'give the axis a rule without "?"')
