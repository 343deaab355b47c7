"""`TreeMethods`: the shardings, abstract values and arrays of a whole tree."""

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
from shardwright.manager.core import ManagerCore
from shardwright.processes.compare import Fact, array_text, compare
from shardwright.resolution.partition_specs import spec_text
from shardwright.resolution.recent import Shardings
from shardwright.resolution.request import Request
from shardwright.trees import annotated, initialize, paths
from shardwright.vocabulary.annotations import ArraySpec, is_annotation, tree_of_annotations
from shardwright.vocabulary.axes import Role


class TreeMethods(ManagerCore):
    """Shard trees of parameters, or of anything else with shapes."""

    __slots__ = ()

    def shardings(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> Any:
        """Return a tree of shardings for `jit`, `device_put` or a checkpoint.

        Args:
          values: A tree of values with a shape. `ArraySpec` leaves have their own annotations.
          annotations: A tree of annotations. One annotation covers all leaves below its path.
          mode: Runtime mode. Defaults to the manager's mode.
          role: Role of the arrays. Defaults to param.

        Raises:
          ShardingError: The problems of all leaves at once, each with its path.
        """
        if isinstance(annotations, list):
            annotations = tree_of_annotations((annotations,))
        if not self.rules.tensors:
            paired = annotated.pair(values, annotations)
            # On an error, `map_leaves` below reports the leaves by their paths.
            with contextlib.suppress(AttributeError, TypeError, ShardingError):
                if paired is not None:
                    # Pass an iterator, not a list: for 45,000 leaves this saves 4 % of the time.
                    return jax.tree.unflatten(
                        paired.structure,
                        map(self._by_annotation(mode, role).__getitem__, paired.keys()),
                    )

        def shard_leaf(leaf: annotated.Leaf) -> NamedSharding:
            shape = np.shape(leaf.value)
            return self._sharding(
                self.answer(Request(leaf.annotation, shape, mode, role, leaf.path))
            )

        return map_leaves(values, annotations, shard_leaf)

    def _by_annotation(self, mode: str | None, role: Role | str) -> Shardings:
        """Return a table of shardings by annotation and shape, which computes each at first use."""
        key = ("shardings", mode, role)
        known = self._cache[key]
        if known is None:

            def make(annotation: Any, shape: tuple[int, ...]) -> NamedSharding:
                if not is_annotation(annotation):
                    raise TypeError
                return self._sharding(self.answer(Request(annotation, shape, mode, role)))

            known = self._cache.keep(key, Shardings(make))
        shardings: Shardings = known
        return shardings

    def abstract(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> Any:
        """Return a tree of `jax.ShapeDtypeStruct`s with shardings.

        Use it to lower a program, to compile ahead of time, or to restore a checkpoint.
        The arguments are those of `shardings`.

        Raises:
          IndivisibleError: A symbolic size of `jax.export` may not divide, so JAX refuses the
            sharding for an input.
          ShardingError: See `shardings`.
        """
        shardings = self.shardings(values, annotations, mode=mode, role=role)
        return with_shardings(values, shardings)

    def agree(
        self,
        values: Any,
        annotations: Any = None,
        *,
        mode: str | None = None,
        role: Role | str = Role.PARAM,
    ) -> None:
        """Check that every process of the mesh has the same tree: paths, shapes, dtypes, specs.

        All processes of the mesh must call this method. It is not a collective: it waits 8 seconds
        at most. It does nothing on a mesh of one process, and under `agree=False`. The arguments
        are those of `shardings`.

        Raises:
          AgreementError: A leaf differs between processes, or a process did not make the call.
          ShardingError: See `shardings`.
        """
        facts: dict[str, Fact] = {}

        def add_fact(leaf: annotated.Leaf) -> None:
            request = Request(leaf.annotation, np.shape(leaf.value), mode, role, leaf.path)
            text, places = array_text(leaf.value), ""
            try:
                resolution = self.answer(request)
                rules = [str(part.rule) for part in resolution.decisions if part.rule is not None]
                text, places = f"{text} as {spec_text(resolution.require())}", "; ".join(rules)
            finally:
                facts[leaf.path or "the array"] = Fact(text, places)

        failure: ShardingError | None = None
        try:
            map_leaves(values, annotations, add_fact)
        except ShardingError as error:
            # Compare before raising: otherwise, the other processes would wait for this one.
            failure = error
        if (group := self._group()) is not None:
            fix = "build the same tree, with the same specs, in every process"
            compare(group, "agree", facts, what="pm.agree", fix=fix)
        if failure is not None:
            raise failure

    def init(self, specs: Any, key: Any, *, mode: str | None = None) -> Any:
        """Initialize a tree of `ArraySpec`s in one jit. Each array is created already sharded.

        Args:
          specs: A tree of `ArraySpec`s with `init`.
          key: PRNG key. Each leaf uses this key with the leaf's path folded in, so a new parameter
            does not change the values of others.
          mode: Runtime mode. Defaults to the manager's mode.

        Raises:
          StrategyError: Leaves have no `init`.
          MeshSpecError: The mesh is abstract.
          ShardingError: See `shardings`.
        """
        if isinstance(self.mesh, AbstractMesh):
            raise constraint.no_devices()
        request = (*jax.tree.flatten(specs), mode)
        kept: tuple[Any, Any] = self._cache["init"] or (None, None)
        before, init = kept
        # Cache only the last function. An initializer of jax.nn that is created again does not
        # equal the first one, so a cache of all functions would grow.
        if before != request:
            init = jax.jit(
                initialize.initializer(specs), out_shardings=self.shardings(specs, mode=mode)
            )
            self._cache.replace("init", (request, init))
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
    return jax.tree.unflatten(jax.tree.structure(values, is_leaf=_is_spec), results)


def with_shardings(values: Any, shardings: Any) -> Any:
    """Return a tree of `jax.ShapeDtypeStruct`s from values and their shardings.

    Raises:
      StrategyError: Leaves have no shape and dtype.
      IndivisibleError: JAX refuses a sharding for a symbolic size.
    """
    raise_problems(_dtype_problems(values))
    raise_problems(_symbolic_problems(values, shardings))
    return jax.tree.map(
        lambda value, sharding: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding),
        values,
        shardings,
        is_leaf=_is_spec,
    )


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, ArraySpec)


def _dtype_problems(values: Any) -> list[Problem]:
    """Return a problem for each leaf that has no dtype."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(values)
    return [
        Problem(
            error=StrategyError,
            what=f"{type(leaf).__name__} has no shape and dtype",
            path=paths.path_text(path),
            fix="pass arrays, ShapeDtypeStructs or ArraySpecs, "
            "for instance jax.eval_shape(init, key)",
        )
        for path, leaf in leaves
        if not hasattr(leaf, "dtype")
    ]


def _symbolic_problems(values: Any, shardings: Any) -> list[Problem]:
    """Return a problem for each leaf of symbolic sizes whose sharding JAX refuses for an input."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(values, is_leaf=_is_spec)
    problems = []
    for (path, value), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        if all(type(size) is int for size in value.shape):
            continue
        try:
            sharding.shard_shape(value.shape)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            problem = Problem(
                error=IndivisibleError,
                what=f"JAX refuses {sharding.spec} for the shape {value.shape}: {reason}",
                path=paths.path_text(path),
                fix="write the size as a multiple, such as 8*b, "
                "or give the axis a rule that does not shard it",
            )
            problems.append(problem)
    return problems
