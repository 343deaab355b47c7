"""`JittedStep`: a jitted training step that checks its arguments before it calls JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardwright.errors import (
    IndivisibleError,
    Problem,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import is_annotation


class Argument:
    """One argument of the step, as it was given to `jit_step`.

    Args:
      name: Name in messages: `state`, or `input` and a position.
      tree: Annotations, or arrays or `ShapeDtypeStruct`s with shardings.
      shardings: The shardings of the tree's leaves, in the same structure.
    """

    def __init__(self, name: str, tree: Any, shardings: Any) -> None:
        self.name = name
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_known)
        self.structure: Any = structure
        self.paths = [path for path, _ in leaves]
        self.leaves = [leaf for _, leaf in leaves]
        # None means that JAX does not restrict the sharding of the array.
        self.shardings = jax.tree.leaves(shardings, is_leaf=lambda leaf: leaf is None)

    def path(self, path: Sequence[Any]) -> str:
        """Return a path in this argument as text."""
        return f"{self.name} {path_text(path)}".strip()

    def structure_problems(self, value: Any) -> list[Problem]:
        """Return a problem for each place where a value's structure differs from the argument's."""
        try:
            self.structure.flatten_up_to(value)
        except ValueError as error:
            reason = str(error).splitlines()[0]
        else:
            return []
        fix = f"pass the {self.name} in the structure that jit_step was given"
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
        missing = [start for start in self.paths if not any(_starts(path, start) for path in paths)]
        unknown = [path for path in paths if not any(_starts(path, start) for start in self.paths)]
        problems = [
            Problem(error=StrategyError, what=what, path=self.path(path), fix=fix)
            for what, different in (
                ("jit_step was given this, and the call does not pass it", missing),
                ("the call passes this, and jit_step was not given it", unknown),
            )
            for path in different
        ]
        what = f"the call passes another structure than jit_step was given: {reason}"
        return problems or [Problem(error=StrategyError, what=what, path=self.name, fix=fix)]

    def size_problems(self, value: Any, check: Callable[[Any, Any, str], Any]) -> list[Problem]:
        """Return a problem for each array whose shape does not fit its annotation or sharding."""
        problems: list[Problem] = []
        parts = self.structure.flatten_up_to(value)
        for part, path, leaf, sharding in zip(
            parts, self.paths, self.leaves, self.shardings, strict=True
        ):
            if sharding is None:
                continue
            for below, array in jax.tree_util.tree_flatten_with_path(part)[0]:
                try:
                    if is_annotation(leaf):
                        # Pass the path of the annotation, because `[[tensors]]` entries match it.
                        check(leaf, np.shape(array), self.path(path))
                    _check_shards(sharding, np.shape(array))
                except ShardingError as error:
                    full = self.path((*path, *below))
                    problems += [
                        dataclasses.replace(problem, path=full) for problem in error.problems
                    ]
        return problems


class JittedStep:
    """The training step that `jit_step` returns. It checks its arguments, then runs the step.

    The checks run once for each combination of the arguments' structures and the inputs' shapes.

    Args:
      jitted: The result of `jax.jit`.
      state: The state that the step takes and returns.
      inputs: The other arguments of the step.
      check: Function of (annotation, shape, path) that raises an error if the two do not fit.
      donate: Whether the memory of the old state is reused.
    """

    def __init__(
        self,
        jitted: Any,
        state: Argument,
        inputs: Sequence[Argument],
        check: Callable[[Any, Any, str], Any],
        *,
        donate: bool,
    ) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted = jitted
        self._arguments = (state, *inputs)
        self._check = check
        self._donate = donate
        self._known: set[Any] = set()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the step on a state and its inputs, all by position."""
        self._check_call(arguments, keywords)
        return self._jitted(*arguments)

    def lower(self, *arguments: Any, **keywords: Any) -> Any:
        """Lower the step for arguments, or for `ShapeDtypeStruct`s."""
        self._check_call(arguments, keywords)
        return self._jitted.lower(*arguments)

    def trace(self, *arguments: Any, **keywords: Any) -> Any:
        """Trace the step for arguments, or for `ShapeDtypeStruct`s."""
        self._check_call(arguments, keywords)
        return self._jitted.trace(*arguments)

    def eval_shape(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the shapes of the step's results."""
        self._check_call(arguments, keywords)
        return self._jitted.eval_shape(*arguments)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` read attributes before `__init__` has run.
        if name.startswith("__") or name == "_jitted":
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def _check_call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if keywords or len(arguments) != len(self._arguments):
            raise_problems([self._call_problem(arguments, keywords)])
        state, structure = jax.tree.flatten(arguments[0])
        if self._donate and len(set(map(id, state))) != len(state):
            raise_problems(_repeated(arguments[0]))
        leaves, input_structure = jax.tree.flatten(arguments[1:])
        key = (structure, input_structure, tuple(map(np.shape, leaves)))
        if key in self._known:
            return
        pairs = list(zip(self._arguments, arguments, strict=True))
        raise_problems(
            [problem for argument, value in pairs for problem in argument.structure_problems(value)]
        )
        raise_problems(
            [
                problem
                for argument, value in pairs[1:]
                for problem in argument.size_problems(value, self._check)
            ]
        )
        self._known.add(key)

    def _call_problem(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Problem:
        """Return the problem of a call with keywords or with a wrong number of arguments."""
        expected = len(self._arguments) - 1
        if keywords:
            what = f"the call passes {', '.join(keywords)} by keyword"
        elif arguments:
            passed = len(arguments) - 1
            what = f"the call passes {passed} inputs, jit_step was given annotations of {expected}"
        else:
            what = "the call passes no state"
        order = ", ".join(argument.name for argument in self._arguments)
        return Problem(
            error=StrategyError,
            what=what,
            path="step",
            fix=f"pass by position: {order}; give jit_step one annotation per input",
        )


def _is_known(leaf: Any) -> bool:
    return leaf is None or is_annotation(leaf)


def _starts(path: Sequence[Any], start: Sequence[Any]) -> bool:
    return tuple(path[: len(start)]) == tuple(start)


def _check_shards(sharding: NamedSharding, shape: tuple[Any, ...]) -> None:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise IndivisibleError(
            f"the shape {shape} does not fit the sharding {sharding.spec} on "
            f"{dict(sharding.mesh.shape_tuple)}",
            fix="pass an array of a size that divides, or give jit_step an array or "
            "a ShapeDtypeStruct whose sharding fits this shape",
        ) from error


def _repeated(state: Any) -> list[Problem]:
    """Return a problem for each repeated array of a state. XLA can reuse its memory only once."""
    first: dict[int, str] = {}
    problems = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        # Only concrete arrays are donated. A repeated number or tracer is harmless.
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            continue
        text = path_text(path)
        if id(leaf) in first:
            problems.append(
                Problem(
                    error=StrategyError,
                    what=f"this is the same array as {first[id(leaf)]}, "
                    "and an array can be donated only once",
                    path=f"state {text}".strip(),
                    fix="copy it, x.copy(), or pass donate=False to jit_step",
                )
            )
        first.setdefault(id(leaf), text)
    return problems
