"""`ArrayMethods`: how a manager constrains and places arrays and trees of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    ManualAxisError,
    Problem,
    RankMismatchError,
    ShapeRequiredError,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.manager import constraint
from shardwright.manager.constraint import Placement
from shardwright.manager.core import ManagerCore
from shardwright.manager.trees import map_leaves
from shardwright.manager.weights import path_required
from shardwright.processes.host_data import (
    compare_copies,
    compare_data,
    compare_parts,
    read_local,
)
from shardwright.resolution import resolver
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.problems import dim_problem, suggest_for_missing_size
from shardwright.resolution.request import Request
from shardwright.vocabulary.annotations import read_annotation, tree_of_annotations
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.integers import as_integer


class ArrayMethods(ManagerCore):
    """Constrain arrays inside a trace, place them outside of it, and map functions over shards."""

    __slots__ = ()

    def shard(
        self, x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None
    ) -> Any:
        """Shard an array, or every array of a tree, as its annotation resolves.

        Inside a trace, `shard` adds a sharding constraint, or a reshard over Explicit mesh axes.
        Outside of a trace it places the array. `shard` is strict: an array that does not fit raises
        an error. NumPy data must be equal in all processes of the mesh, which is checked. Like
        `jax.device_put`, `shard` copies only what it moves: the result may share memory with `x`,
        so a function that donates the result may delete arrays of `x`.

        Args:
          x: JAX or NumPy arrays, or a tree of them.
          *axes: Axis strings and composites, or one annotation, or a tree of annotations.
          mode: Runtime mode. Defaults to the manager's mode, else to the layout's, else to train.
          role: Role of the array. Defaults to param for weight layouts, else to activation.

        Raises:
          ShardingError: See `resolve`. For a tree, the problems of all leaves at once.
          ManualAxisError: Inside `shard_map`, the spec has a Manual mesh axis that the value does
            not vary over.
          MeshMismatchError: The ambient mesh is not the manager's.
          AgreementError: NumPy data differs between processes; see `agree` of the manager.
        """
        return self._place(x, axes, mode, role, True)

    def hint(
        self, x: Any, *axes: Any, mode: str | None = None, role: Role | str | None = None
    ) -> Any:
        """Like `shard`, but leave indivisible, conflicting and Manual dims to the compiler."""
        return self._place(x, axes, mode, role, False)

    def global_array(
        self,
        local: Any,
        *axes: Any,
        global_shape: Sequence[int] | None = None,
        mode: str | None = None,
    ) -> jax.Array:
        """Build a global array from the parts that the processes have.

        The parts must have one shape and dtype. If devices of several processes hold the same
        shard, as under a replicated spec, these processes must pass equal data for it. Processes
        compare this at each call.

        Args:
          local: The part of this process: a NumPy array, or what `np.asarray` takes.
          *axes: Annotation of the global array.
          global_shape: Global shape. Defaults to the shape that the local shape and the spec imply.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          ShapeRequiredError: The spec depends on sizes, and `global_shape` is not given.
          AgreementError: The parts of the processes differ in shape or dtype, or copies of one
            shard differ.
          StrategyError: `local` is not an array of numbers.
        """
        annotation = read_annotation(axes)
        if (group := self._group()) is not None:
            compare_parts(group, annotation, local, global_shape)
        local = read_local(local)
        if global_shape is not None:
            global_shape = _read_shape(global_shape, local)
        resolution = self.answer(Request(annotation, global_shape, mode))
        if ShapeRequiredError in {problem.error for problem in resolution.problems}:
            problems = suggest_for_missing_size(resolution, "pass global_shape=")
            raise_problems(problems, resolution=resolution)
        if len(resolution.decisions) != local.ndim:
            raise_problems([_local_rank_problem(resolution, local)], resolution=resolution)
        constraint.check_kept(local)
        sharding = self._sharding(resolution)
        if global_shape is None:
            global_shape = constraint.global_shape(sharding, local.shape)
        shape = tuple(global_shape)
        self.answer(Request(annotation, shape, mode)).require()
        if group is not None:
            compare_copies(group, sharding, local, shape)
        try:
            array: jax.Array = jax.make_array_from_process_local_data(sharding, local, shape)
        except ValueError as error:
            raise ShardingError(
                f"the local array has the shape {local.shape}, which is not the part of this "
                f"process of {shape} under {sharding.spec}",
                path="global_shape",
                fix=f"leave it out for {constraint.global_shape(sharding, local.shape)}",
            ) from error
        return array

    def shard_map(
        self,
        f: Callable[..., Any],
        *,
        in_axes: Sequence[Any],
        out_axes: Any,
        sizes: Mapping[str, int] | None = None,
        mode: str | None = None,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        """Return the jitted `jax.shard_map` of a function, given annotations instead of specs.

        Each axis resolves once per call, from the sizes of the inputs.

        Args:
          f: Function of local arrays.
          in_axes: One annotation, or a tree of annotations, per positional argument.
          out_axes: One annotation, or a tuple, list or dict of annotations.
          sizes: Global sizes of axes that no input has. Defaults to none.
          mode: Runtime mode. Defaults to the manager's mode.
          check_vma: Whether JAX tracks which mesh axes values vary over. Defaults to True.

        Raises:
          AxisConflictError: One axis would be sharded in two ways.
          StrategyError: A rule is `?`, which leaves the dim to the compiler.
        """
        if not isinstance(in_axes, (tuple, list)):
            raise StrategyError(
                f"in_axes={in_axes!r} is not a tuple",
                fix="write one annotation, or a tree of annotations, per positional argument",
            )
        from shardwright.manager.shard_map import SemanticShardMap, checked_outputs, known_sizes

        def explain(annotation: Any, shape: Sequence[int] | None, path: str | None) -> Resolution:
            ambient = _jax.ambient_mesh()
            manual = self.manual_axes(ambient)
            return self.answer(Request(annotation, shape, mode, None, path, manual), ambient)

        return SemanticShardMap(
            f,
            tuple(in_axes),
            checked_outputs(out_axes),
            known_sizes(sizes or {}, self.rules),
            self.mesh,
            explain,
            self.manual_axes,
            check_vma,
        )

    def _place(
        self,
        x: Any,
        axes: tuple[Any, ...],
        mode: str | None,
        role: Role | str | None,
        strict: bool,
        path: str | None = None,
    ) -> Any:
        """Place an array, or the arrays of a tree. Only a tree's leaves have a path."""
        # A trace calls this method thousands of times, nearly always with a tracer. So test for a
        # tracer once, and build a request only if its placement is not in the cache.
        traced = isinstance(x, jax.core.Tracer)
        if not traced and path is None:
            self._compare_data(x)
        if not traced and path is None and not _jax.is_array(x):
            return map_leaves(
                x,
                tree_of_annotations(axes),
                lambda leaf: self._place(
                    leaf.value, (leaf.annotation,), mode, role, strict, leaf.path
                ),
            )
        shape = x.shape if traced else np.shape(x)
        key: Any = (
            axes,
            shape,
            mode,
            role,
            strict,
            jax.sharding.get_abstract_mesh(),  # the empty one if no mesh is ambient
            path and self.rules.tensors and path,  # only [[tensors]] entries depend on the path
        )
        try:
            cached = self._cache[key]
        except TypeError:  # an unhashable annotation, such as a list among the axes
            cached, key = None, None
        if cached is None:
            request = Request(read_annotation(axes), shape, mode, role, path)
            cached = self._placement(request, strict=strict)
            if key is not None:
                self._cache.keep(key, cached)
        placement, resolution = cached
        if resolution is not None and strict:
            check_varying(x, resolution, path)
        if placement is None:
            return x
        if traced:
            return constraint.constrain(x, placement)
        return constraint.place(x, placement, compared=self._options.agree)

    def _compare_data(self, values: Any) -> None:
        """Compare the host data of a tree with the other processes, outside of a trace."""
        group = self._group()
        if group is not None and not _jax.in_trace():
            compare_data(group, values)

    def _placement(
        self, request: Request, *, strict: bool = True
    ) -> tuple[Placement | None, Resolution | None]:
        """Return the placement of an array, and its resolution if a dim is over Manual mesh axes.

        The placement is None if all mesh axes are Manual: `shard_map` has applied them.
        """
        ambient = _jax.ambient_mesh()
        manual = self.manual_axes(ambient)
        if manual:
            request = request._replace(manual=manual)
        resolution = self.answer(request, ambient)
        if not strict:
            resolution = resolver.left_open(resolution)
        spec: PartitionSpec = resolution.require()
        if strict and request.path is None and resolution.role is not Role.ACTIVATION:
            raise_problems(path_required(request, self.rules), resolution=resolution)
        uses_manual = any(decision.manual for decision in resolution.decisions)
        checked = resolution if uses_manual else None
        if manual == frozenset(self._sizes):
            return None, checked
        return constraint.make_placement(spec, self.mesh, ambient), checked


def check_varying(x: Any, resolution: Resolution, path: str | None) -> None:
    """Check that an array varies over every Manual mesh axis that its dims are sharded over.

    A cached resolution may have the path of another array, so the error has the path given here.
    """
    varying = _jax.varying_axes(x)
    missing = [
        (decision, axis)
        for decision in resolution.decisions
        for axis in decision.manual
        if axis not in varying
    ]
    if not missing:
        return
    resolution = dataclasses.replace(resolution, path=path or resolution.path)
    problems = [
        dim_problem(
            ManualAxisError,
            resolution,
            decision,
            f"{axis} is Manual here, and the value does not vary over it",
            mesh_axes=(axis,),
            fix=f"shard the value over {axis} in the inputs of shard_map, annotate the dim EMPTY, "
            "or use hint",
        )
        for decision, axis in missing
    ]
    raise_problems(problems, resolution=resolution)


def _read_shape(global_shape: Any, local: Any) -> tuple[int, ...]:
    """Return `global_shape` as a tuple of integers, one per dim of the local array."""
    sizes = tuple(map(as_integer, global_shape)) if isinstance(global_shape, Sequence) else ()
    if len(sizes) != local.ndim or None in sizes:
        raise ShardingError(
            f"global_shape={global_shape!r}, and the local array has the shape {local.shape}",
            path="global_shape",
            fix="pass one integer per dim, or leave it out",
        )
    return tuple(size for size in sizes if size is not None)


def _local_rank_problem(resolution: Resolution, local: Any) -> Problem:
    return Problem(
        error=RankMismatchError,
        what=f"{resolution.annotation} has rank {len(resolution.decisions)}, "
        f"and the local array has shape {local.shape}",
        fix="annotate every dim; the local array has the rank of the global one",
    )
