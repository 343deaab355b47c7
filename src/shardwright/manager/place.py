"""Constrain arrays inside a trace, place them outside of one, and run functions in a `shard_map`.

`global_array` makes an array of all processes from the data of each process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec, get_abstract_mesh

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
from shardwright.manager.core import Manager
from shardwright.manager.effect import Decided
from shardwright.manager.trees import map_leaves
from shardwright.processes.host_data import (
    compare_copies,
    compare_data,
    compare_parts,
    read_local,
)
from shardwright.resolution import resolver
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.problems import dim_problem, suggest_for_missing_size
from shardwright.resolution.request import ShardingRequest, lower_local
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.annotations import PartOf, read_annotation, tree_of_annotations
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.integers import as_integer


def place(
    manager: Manager,
    x: Any,
    axes: tuple[Any, ...],
    mode: str | None = None,
    role: Role | str | None = None,
    strict: bool = True,
    path: str | None = None,
) -> Any:
    """Place an array, or the arrays of a tree, as `shard` (strict) and `hint` do.

    Args:
      manager: The manager.
      x: JAX or NumPy arrays, or a tree of them.
      axes: The annotation, as the positional arguments of `shard`.
      mode: Runtime mode. Defaults to the manager's mode.
      role: Role of the array.
      strict: Whether a dim that does not fit is an error.
      path: Path of the array, if it is a leaf of a tree.
    """
    # A trace calls this function thousands of times, nearly always with a tracer. So test for a
    # tracer once, and build a request only if the cache lacks its decision.
    traced = isinstance(x, Tracer)
    # Skip leaves of trees, which have a path: their data was compared together with their tree.
    if not traced and path is None:
        group = manager.group()
        if group is not None and not _jax.in_trace():
            compare_data(group, x)
        if not _jax.is_array(x):
            return map_leaves(
                x,
                tree_of_annotations(axes),
                lambda leaf: place(
                    manager, leaf.value, (leaf.annotation,), mode, role, strict, leaf.path
                ),
            )
    shape = x.aval.shape if traced else np.shape(x)  # `x.shape` of a tracer runs Python code
    key: Any = (
        axes,
        shape,
        mode,
        role,
        strict,
        get_abstract_mesh(),  # the empty mesh if none is ambient
        path if path is not None and manager.reads_paths else None,
    )
    try:
        decided = manager.cache[key]
    except TypeError:  # an unhashable annotation, such as a list among the axes
        decided, key = None, None
    if decided is None:
        request = ShardingRequest(read_annotation(axes), shape, mode, role, path)
        decided = decide_array(manager, request, strict=strict)
        if key is not None:
            manager.cache.keep(key, decided)
    if strict and decided.manual is not None:
        # `check_varying` reads the type of this value, so its result cannot be part of the cached
        # decision.
        check_varying(x, decided.manual, path)
    if traced:
        return manager.effect.place(x, decided)
    if decided.placement is None:
        return x
    constraint.check_kept(x)
    if _jax.in_trace():
        return manager.effect.place(x, decided)
    # `compare_data` above has compared the data, so that JAX need not do it by a collective.
    return constraint.put(x, decided.placement, compared=manager.options.agree)


def decide_array(manager: Manager, request: ShardingRequest, *, strict: bool = True) -> Decided:
    """Decide how an array is sharded on the current mesh.

    The placement is None if all mesh axes are Manual: `shard_map` has applied them.
    """
    ambient = _jax.ambient_mesh()
    manual = manager.manual_axes(ambient)
    request = request.under(manager.mode)._replace(manual=manual)
    resolution = manager.decide(request, ambient)
    if not strict:
        resolution = resolver.left_open(resolution)
    spec: PartitionSpec = resolution.require()
    if strict and request.path is None and resolution.role is not Role.ACTIVATION:
        raise_problems(path_required(request, manager.rules), resolution=resolution)
    uses_manual = any(decision.manual for decision in resolution.decisions)
    checked = resolution if uses_manual else None
    if manual == frozenset(manager.sizes):
        return Decided(request, None, checked, strict)
    return Decided(request, constraint.make_placement(spec, manager.mesh, ambient), checked, strict)


def path_required(
    request: ShardingRequest, rules: AxisRules, *, local: tuple[int, ...] | None = None
) -> list[Problem]:
    """Return a problem if a `[[tensors]]` entry may match a weight whose path is not known.

    Args:
      request: The weight, without a path.
      rules: The manager's rules.
      local: Shape of the weight's shard inside `shard_map`. Defaults to the shape of the request.
    """
    annotation = request.annotation
    if not rules.tensors or (isinstance(annotation, PartOf) and annotation.path):
        return []
    dims = request.dims(rules) if local is None else lower_local(annotation, local, rules)
    # `pm.init` and `pm.shardings` know the path of each leaf, and apply an entry that matches the
    # path. Here the entry would be ignored, and the weight would be gathered from another sharding
    # than its own.
    names = {name for dim in dims for name in (*dim.axes, dim.semantic_axis)}
    for entry in rules.tensors:
        for axis, rule in entry.rules:
            if axis in names:
                what = f"[[tensors]] match = {entry.match!r} may match this weight, "
                what += "but its path is not known here"
                fix = 'pass the path, gather(..., path="layers/mlp/up"), or path="" at the root; '
                fix += "shard knows the paths of a tree's leaves"
                return [Problem(error=StrategyError, what=what, rule=str(rule.ref), fix=fix)]
    return []


def global_array(
    manager: Manager,
    local: Any,
    annotation: Any,
    *,
    global_shape: Sequence[int] | None = None,
    mode: str | None = None,
) -> jax.Array:
    """Build a global array from the parts that the processes have."""
    if (group := manager.group()) is not None:
        compare_parts(group, annotation, local, global_shape)
    local = read_local(local)
    if global_shape is not None:
        sizes = tuple(map(as_integer, global_shape)) if isinstance(global_shape, Sequence) else ()
        if len(sizes) != local.ndim or None in sizes:
            what = f"global_shape={global_shape!r}, and the local array has the shape {local.shape}"
            fix = "pass one integer per dim, or omit global_shape"
            raise ShardingError(what, path="global_shape", fix=fix)
    resolution = manager.answer(ShardingRequest(annotation, global_shape, mode))
    if ShapeRequiredError in {problem.error for problem in resolution.problems}:
        problems = suggest_for_missing_size(resolution.problems, "pass global_shape=")
        raise_problems(problems, resolution=resolution)
    if len(resolution.decisions) != local.ndim:
        what = f"{resolution.annotation} has rank {len(resolution.decisions)}, "
        what += f"and the local array has shape {local.shape}"
        fix = "annotate every dim; the local array has the rank of the global one"
        raise RankMismatchError(what, fix=fix, resolution=resolution)
    constraint.check_kept(local)
    sharding = manager.sharding_of(resolution)
    if global_shape is None:
        global_shape = constraint.global_shape(sharding, local.shape)
    shape = tuple(global_shape)
    # Without `global_shape=`, the sizes become known only here. Check that they divide.
    manager.answer(ShardingRequest(annotation, shape, mode)).require()
    if group is not None:
        # `make_array_from_process_local_data` does not compare the copies of a shard. Copies that
        # differ would give wrong results without an error.
        compare_copies(group, sharding, local, shape)
    try:
        array: jax.Array = jax.make_array_from_process_local_data(sharding, local, shape)
    except ValueError as error:
        what = f"the local array has the shape {local.shape}, but under {sharding.spec} the part "
        what += f"of this process of {shape} has another shape"
        fix = f"omit global_shape: it is then {constraint.global_shape(sharding, local.shape)}"
        raise ShardingError(what, path="global_shape", fix=fix) from error
    return array


def shard_map(
    manager: Manager,
    f: Callable[..., Any],
    *,
    in_axes: Sequence[Any],
    out_axes: Any,
    sizes: Mapping[str, int] | None = None,
    mode: str | None = None,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Return the jitted `jax.shard_map` of a function, given annotations instead of specs."""
    if not isinstance(in_axes, (tuple, list)):
        fix = "write one annotation, or a tree of annotations, per positional argument"
        raise StrategyError(f"in_axes={in_axes!r} is not a tuple", fix=fix)
    from shardwright.manager.shard_map import SemanticShardMap, checked_outputs, known_sizes

    def explain(annotation: Any, shape: Sequence[int] | None, path: str | None) -> Resolution:
        ambient = _jax.ambient_mesh()
        manual = manager.manual_axes(ambient)
        return manager.answer(ShardingRequest(annotation, shape, mode, None, path, manual), ambient)

    return SemanticShardMap(
        f,
        tuple(in_axes),
        checked_outputs(out_axes),
        known_sizes(sizes or {}, manager.rules),
        manager.mesh,
        explain,
        manager.manual_axes,
        check_vma,
    )


def check_varying(x: Any, resolution: Resolution, path: str | None) -> None:
    """Check that an array varies over every Manual mesh axis that its dims are sharded over.

    `resolution` may come from a cache and have the path of another array, so errors use `path`.
    """
    varying = _jax.varying_axes(x)
    if all(axis in varying for each in resolution.decisions for axis in each.manual):
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
        for decision in resolution.decisions
        for axis in decision.manual
        if axis not in varying
    ]
    raise_problems(problems, resolution=resolution)
