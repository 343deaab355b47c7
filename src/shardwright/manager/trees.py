"""The shardings, abstract values and arrays of a whole tree."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from shardwright.errors import (
    IndivisibleError,
    Problem,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.manager import constraint
from shardwright.manager.core import Manager
from shardwright.processes.compare import Fact, array_text, compare
from shardwright.resolution.partition_specs import spec_text
from shardwright.resolution.recent import Shardings
from shardwright.resolution.request import ShardingRequest
from shardwright.trees import annotated, initialize, paths
from shardwright.vocabulary.annotations import is_annotation, tree_of_annotations
from shardwright.vocabulary.axes import Role


def shardings(
    manager: Manager,
    values: Any,
    annotations: Any = None,
    *,
    mode: str | None = None,
    role: Role | str = Role.PARAM,
) -> Any:
    """Return a tree of shardings for `jit`, `device_put` or a checkpoint."""
    if isinstance(annotations, list):
        annotations = tree_of_annotations((annotations,))
    if not manager.rules.reads_paths:
        paired = annotated.pair(values, annotations)
        # On an error, `map_leaves` below reports the leaves by their paths.
        with contextlib.suppress(AttributeError, TypeError, ShardingError):
            if paired is not None:
                # Pass an iterator, not a list: for 45,000 leaves this saves 4 % of the time.
                return jax.tree.unflatten(
                    paired.structure,
                    map(_by_annotation(manager, mode, role).__getitem__, paired.keys()),
                )

    def shard_leaf(leaf: annotated.Leaf) -> NamedSharding:
        shape = np.shape(leaf.value)
        return manager.sharding_of(
            manager.answer(ShardingRequest(leaf.annotation, shape, mode, role, leaf.path))
        )

    return map_leaves(values, annotations, shard_leaf)


def _by_annotation(manager: Manager, mode: str | None, role: Role | str) -> Shardings:
    """Return a table of shardings by annotation and shape. A sharding is computed at first use."""
    key = ("shardings", mode, role)
    known = manager.cache[key]
    if known is None:

        def make(annotation: Any, shape: tuple[int, ...]) -> NamedSharding:
            # `shardings` suppresses this error, because its loop over the leaves raises the error
            # again, with the path.
            if not is_annotation(annotation):
                raise TypeError
            return manager.sharding_of(
                manager.answer(ShardingRequest(annotation, shape, mode, role))
            )

        known = manager.cache.keep(key, Shardings(make))
    table: Shardings = known
    return table


def abstract(
    manager: Manager,
    values: Any,
    annotations: Any = None,
    *,
    mode: str | None = None,
    role: Role | str = Role.PARAM,
) -> Any:
    """Return a tree of `jax.ShapeDtypeStruct`s with shardings."""
    return with_shardings(values, shardings(manager, values, annotations, mode=mode, role=role))


def agree(
    manager: Manager,
    values: Any,
    annotations: Any = None,
    *,
    mode: str | None = None,
    role: Role | str = Role.PARAM,
) -> None:
    """Check that every process of the mesh has the same tree: paths, shapes, dtypes, specs."""
    facts: dict[str, Fact] = {}

    def add_fact(leaf: annotated.Leaf) -> None:
        request = ShardingRequest(leaf.annotation, np.shape(leaf.value), mode, role, leaf.path)
        text, places = array_text(leaf.value), ""
        try:
            resolution = manager.answer(request)
            rules = [str(part.rule) for part in resolution.decisions if part.rule is not None]
            text, places = f"{text} as {spec_text(resolution.require())}", "; ".join(rules)
        finally:
            # Include leaves that do not resolve, so that they do not seem to be missing in this
            # process.
            facts[leaf.path or "the array"] = Fact(text, places)

    failure: ShardingError | None = None
    try:
        map_leaves(values, annotations, add_fact)
    except ShardingError as error:
        # Compare before raising: otherwise, the other processes would wait for this one.
        failure = error
    if (group := manager.group()) is not None:
        fix = "build the same tree, with the same specs, in every process"
        compare(group, "agree", facts, what="pm.agree", fix=fix)
    if failure is not None:
        raise failure


def init(manager: Manager, specs: Any, key: Any, *, mode: str | None = None) -> Any:
    """Initialize a tree of `ArraySpec`s in one jit. Each array is created already sharded."""
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    request = (*jax.tree.flatten(specs), mode)
    kept: tuple[Any, Any] = manager.cache["init"] or (None, None)
    before, init = kept
    # Cache only the last function. Two initializers of jax.nn are unequal even with equal
    # arguments, so a cache of all functions would grow.
    if before != request:
        init = jax.jit(
            initialize.initializer(specs), out_shardings=shardings(manager, specs, mode=mode)
        )
        manager.cache.replace("init", (request, init))
    return init(key)


def map_leaves(values: Any, annotations: Any, f: Callable[[annotated.Leaf], Any]) -> Any:
    """Map a function over the annotated leaves of a tree. Raise all problems at once."""
    results: list[Any] = []
    problems: list[Problem] = []
    resolution = None
    for leaf in annotated.annotated_leaves(values, annotations):
        try:
            results.append(f(leaf))
        except ShardingError as error:
            problems += [
                problem if problem.path else dataclasses.replace(problem, path=leaf.path)
                for problem in error.problems
            ]
            resolution = resolution or error.resolution
    raise_problems(problems, resolution=resolution)
    return jax.tree.unflatten(jax.tree.structure(values, is_leaf=paths.is_array_spec), results)


def with_shardings(values: Any, shardings: Any) -> Any:
    """Return a tree of `jax.ShapeDtypeStruct`s from values and their shardings.

    Raises:
      StrategyError: Leaves have no shape and dtype.
      IndivisibleError: JAX refuses a sharding for a symbolic size.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(values, is_leaf=paths.is_array_spec)
    results: list[Any] = []
    problems: list[Problem] = []
    for (path, value), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if not hasattr(value, "dtype"):
            what = f"{type(value).__name__} has no shape and dtype"
            fix = "pass arrays, ShapeDtypeStructs or ArraySpecs, such as jax.eval_shape(init, key)"
            at = paths.path_text(path)
            problems.append(Problem(error=StrategyError, what=what, path=at, fix=fix))
            continue
        try:
            if any(type(size) is not int for size in value.shape):
                sharding.shard_shape(value.shape)
        except ValueError as error:
            what = f"JAX refuses {sharding.spec} for the shape {value.shape}: "
            what += str(error).splitlines()[0]
            fix = "write the size as a multiple, such as 8*b, "
            fix += "or give the axis a rule that does not shard it"
            at = paths.path_text(path)
            problems.append(Problem(error=IndivisibleError, what=what, path=at, fix=fix))
        results.append(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
    raise_problems(problems)
    return jax.tree.unflatten(structure, results)
