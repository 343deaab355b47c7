"""`JittedStep`: a jitted training step that checks its arguments before it calls JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardwright import _jax
from shardwright.errors import (
    IndivisibleError,
    Problem,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.manager.memory import is_host
from shardwright.resolution.partition_specs import spec_text
from shardwright.trees.paths import path_text, structure_differences
from shardwright.vocabulary.annotations import is_annotation


class Argument:
    """One argument of the step, as it was given to `jit_step`.

    Args:
      name: Name in messages: `state`, or `input` and a position.
      tree: Annotations, or arrays or `ShapeDtypeStruct`s with shardings.
      shardings: The shardings of the tree's leaves, in the same structure.
      is_leaf: As in `jax.tree.flatten`.
    """

    def __init__(
        self,
        name: str,
        tree: Any,
        shardings: Any,
        *,
        is_leaf: Callable[[Any], bool] | None = None,
    ) -> None:
        self.name = name
        self.structure: Any
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        self.paths = [path for path, _ in leaves]
        self.leaves = [leaf for _, leaf in leaves]
        # None means that the step takes an array of any sharding.
        self.shardings = self.structure.flatten_up_to(shardings)

    def problem(self, path: Sequence[Any], what: str, fix: str) -> Problem:
        """Return a problem at a path in this argument."""
        return Problem(error=StrategyError, what=what, path=self.path(path), fix=fix)

    def path(self, path: Sequence[Any]) -> str:
        """Return a path in this argument as text."""
        return f"{self.name} {path_text(path)}".strip()

    def structure_problems(self, value: Any, given: str, passed: str, fix: str) -> list[Problem]:
        """Return a problem for each place where a value's structure differs from the argument's.

        Args:
          value: The value.
          given: Words before the argument's structure in the message, such as "the step takes".
          passed: Words before the value's structure, such as "it returns".
          fix: How to fix it.
        """
        return [
            self.problem(path, f"{given} {old}, and {passed} {new}", fix)
            for path, old, new in structure_differences(self.structure, value)
        ]

    def type_problems(
        self, leaves: Sequence[Any], value: Any, given: str, passed: str, fix: str
    ) -> list[Problem]:
        """Return a problem for each array whose shape or dtype differs from that of a leaf."""
        pairs = zip(self.paths, leaves, self.structure.flatten_up_to(value), strict=True)
        return [
            self.problem(path, f"{given} {_type(leaf)}, and {passed} {_type(array)}", fix)
            for path, leaf, array in pairs
            if _type(leaf) != _type(array)
        ]

    def placement_problems(self, value: Any) -> list[Problem]:
        """Return a problem for each array that is placed in another way than the argument says."""
        problems: list[Problem] = []
        for path, _, leaf, sharding, array in self._arrays(value):
            placed = getattr(array, "sharding", None)
            concrete = isinstance(sharding.mesh, jax.sharding.Mesh)
            if placed is None and concrete and not sharding.is_fully_addressable:
                what = "the array is in the memory of this process, "
                what += "and the mesh has several processes"
                fix = "join the parts of all processes: pm.global_array(rows, *axes)"
                problems.append(self.problem(path, what, fix))
            if placed is None or not getattr(array, "committed", True):
                continue
            if not placed.is_equivalent_to(sharding, len(array.shape)):
                move = "pm.shard(x, *axes)"
                if not is_annotation(leaf):
                    move = "jax.device_put(x, sharding)"
                what = f"the array is placed as {_placement(placed)}, and jit_step was given "
                what += _placement(sharding)
                fix = f"move it with {move} to the sharding that jit_step was given"
                problems.append(self.problem(path, what, fix))
        return problems

    def size_problems(self, value: Any, check: Callable[[Any, Any, str], Any]) -> list[Problem]:
        """Return a problem for each array whose shape does not fit its annotation or sharding."""
        problems: list[Problem] = []
        for path, above, leaf, sharding, array in self._arrays(value):
            shape = np.shape(array)
            try:
                # If `leaf` is an array or a `ShapeDtypeStruct`, it is no annotation: only its
                # sharding is checked.
                if is_annotation(leaf):
                    # Pass the path of the annotation, because `[[tensors]]` entries match it.
                    check(leaf, shape, self.path(above))
                sharding.shard_shape(shape)
            except ShardingError as error:
                at = self.path(path)
                problems += [dataclasses.replace(problem, path=at) for problem in error.problems]
            except ValueError:
                what = f"the shape {shape} does not fit {_placement(sharding)}"
                fix = "pass an array of a size that divides, or give jit_step an array or "
                fix += "a ShapeDtypeStruct whose sharding fits this shape"
                problem = self.problem(path, what, fix)
                problems.append(dataclasses.replace(problem, error=IndivisibleError))
        return problems

    def _arrays(self, value: Any) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
        """Yield each array that must have a sharding.

        The items are (path, path of the leaf that describes the array, leaf, sharding, array).
        """
        # One annotation may cover a subtree of the input, so each part is a tree of arrays.
        parts = self.structure.flatten_up_to(value)
        given = zip(parts, self.paths, self.leaves, self.shardings, strict=True)
        for part, path, leaf, sharding in given:
            if sharding is not None:
                for below, array in jax.tree_util.tree_flatten_with_path(part)[0]:
                    yield (*path, *below), path, leaf, sharding, array

    def repeated_problems(self, value: Any) -> list[Problem]:
        """Return a problem for each repeated array, because XLA can reuse its memory only once."""
        first: dict[int, str] = {}
        problems = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            # Only concrete arrays are donated. A repeated number or tracer is harmless.
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
                continue
            if id(leaf) in first:
                what = f"this is the same array as {first[id(leaf)]}, "
                what += "and an array can be donated only once"
                fix = "copy it, x.copy(), or pass donate=False to jit_step"
                problems.append(self.problem(path, what, fix))
            first.setdefault(id(leaf), path_text(path))
        return problems


class JittedStep:
    """The training step that `jit_step` returns. It checks its arguments, then runs the step.

    The checks run again only if the structures, the shapes or dtypes of the state, or the shapes of
    the inputs are new.

    Args:
      jitted: The result of `jax.jit`.
      state: The state that the step takes and returns.
      inputs: The other arguments of the step.
      check: Function of (annotation, shape, path) that raises an error if the annotation does not
        fit the shape.
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
        return self._run(self._jitted, self._placed(arguments))

    def lower(self, *arguments: Any, **keywords: Any) -> Any:
        """Lower the step for arguments, or for `ShapeDtypeStruct`s."""
        self._check_call(arguments, keywords)
        return self._run(self._jitted.lower, arguments)

    def trace(self, *arguments: Any, **keywords: Any) -> Any:
        """Trace the step for arguments, or for `ShapeDtypeStruct`s."""
        self._check_call(arguments, keywords)
        return self._run(self._jitted.trace, arguments)

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
            raise_problems(self._arguments[0].repeated_problems(arguments[0]))
        leaves, input_structure = jax.tree.flatten(arguments[1:])
        # Numbers have no shape or dtype, so give a default. np.shape takes five times as long, and
        # states are large.
        types = tuple([(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in state])
        key = (structure, types, input_structure, tuple(map(np.shape, leaves)))
        if key in self._known:
            return
        who = ("jit_step was given", "the call passes")
        passing = "pass the {} that jit_step was given, or call jit_step with this one"
        problems = []
        for argument, value in zip(self._arguments, arguments, strict=True):
            problems += argument.structure_problems(value, *who, passing.format(argument.name))
        raise_problems(problems)
        state_argument, *inputs = self._arguments
        fix = passing.format(state_argument.name)
        problems = state_argument.type_problems(state_argument.leaves, arguments[0], *who, fix)
        for argument, value in zip(inputs, arguments[1:], strict=True):
            problems += argument.size_problems(value, self._check)
        raise_problems(problems)
        self._known.add(key)

    def _placed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the whole state on the mesh, and refuse deleted arrays.

        The state is placed here: if JAX placed it, JAX would compile again for the state that the
        step returns. Deleted arrays are refused here, because JAX 0.10 ends the process if an
        argument is deleted.
        """
        state, structure = jax.tree.flatten(arguments[0])
        try:
            if _jax.is_deleted(arguments):
                raise_problems(self._deleted(arguments))
            if all(getattr(x, "committed", False) for x in state):
                return arguments
        except jax.errors.ConcretizationTypeError:
            return arguments  # tracers: this call runs nothing
        placed = [
            x if getattr(x, "committed", False) else jax.device_put(x, sharding)
            for x, sharding in zip(state, self._arguments[0].shardings, strict=True)
        ]
        return (jax.tree.unflatten(structure, placed), *arguments[1:])

    def _deleted(self, arguments: tuple[Any, ...]) -> list[Problem]:
        """Return a problem for each deleted array."""
        what = "the array is deleted: a step has donated it, or it was deleted by hand"
        keep = "keep the state that a step returns, state, loss = step(state, batch), "
        keep += "or pass donate=False to jit_step"
        return [
            argument.problem(path, what, "pass a new array" if at else keep)
            for at, (argument, value) in enumerate(zip(self._arguments, arguments, strict=True))
            for path, x in jax.tree_util.tree_flatten_with_path(value)[0]
            if _jax.is_deleted(x)
        ]

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except ShardingError:
            # A ShardingError is a ValueError too, and its message already names the problem.
            raise
        except ValueError as error:
            # JAX compares the shardings before it runs anything, so the arguments are still intact
            # here.
            problems = [
                problem
                for argument, value in zip(self._arguments, arguments, strict=True)
                for problem in argument.placement_problems(value)
            ]
            if not problems:
                raise
            raise problems[0].error(problems=problems) from error

    def _call_problem(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Problem:
        """Return the problem of a call with keywords or with a wrong number of arguments."""
        expected = len(self._arguments) - 1
        if keywords:
            what = f"the call passes {', '.join(keywords)} by keyword"
        elif arguments:
            count = len(arguments) - 1
            what = f"the call passes {count} inputs, jit_step was given annotations of {expected}"
        else:
            what = "the call passes no state"
        order = ", ".join(argument.name for argument in self._arguments)
        return Problem(
            error=StrategyError,
            what=what,
            path="step",
            fix=f"pass by position: {order}; give jit_step one annotation per input",
        )


def is_open_or_annotation(leaf: Any) -> bool:
    """Tell whether a leaf describes all arrays below its path in an input."""
    return leaf is None or is_annotation(leaf)


def checked_state(argument: Argument, before: Any, after: Any) -> Any:
    """Return the new state of a step, strongly typed where the old state is.

    A new state of another structure or type could not reuse the memory of the old state, and the
    next call would compile again.

    Raises:
      StrategyError: The new state differs in structure, shapes or dtypes from the state that the
        step takes.
    """
    who = ("the step takes", "it returns")
    fix = "return every part of the state, in the same containers"
    raise_problems(argument.structure_problems(after, *who, fix))
    leaves = jax.tree.leaves(before)
    fix = "return the state with the shapes and dtypes that it has, "
    fix += "for instance new.astype(old.dtype)"
    raise_problems(argument.type_problems(leaves, after, *who, fix))
    raise_problems(
        [
            argument.problem(
                path,
                f"the step takes a weakly typed {_type(old)}, and it returns a strongly typed one",
                "create the state with a dtype, for instance "
                f"pm.shard(jnp.asarray(x, jnp.{jnp.result_type(old)}))",
            )
            for path, old, new in zip(argument.paths, leaves, jax.tree.leaves(after), strict=True)
            if jax.typeof(old).weak_type and not jax.typeof(new).weak_type
        ]
    )
    return jax.tree.map(_typed_like, before, after)


def _typed_like(old: Any, new: Any) -> Any:
    """Return a new leaf of the state, strongly typed if the old leaf is.

    JAX treats a weak type as another type, so the next call would compile again.
    """
    if jax.typeof(new).weak_type and not jax.typeof(old).weak_type:
        return jax.lax.convert_element_type(new, jnp.result_type(new))
    return new


def _type(x: Any) -> str:
    if getattr(x, "dtype", None) is None and not _jax.is_array(x):
        return type(x).__name__
    return f"{jnp.result_type(x)}[{','.join(map(str, np.shape(x)))}]"


def _placement(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        kind = f" in {sharding.memory_kind} memory" if is_host(sharding.memory_kind) else ""
        return f"{spec_text(sharding.spec)} on {dict(sharding.mesh.shape_tuple)}{kind}"
    return f"{type(sharding).__name__} on {', '.join(sorted(map(str, sharding.device_set)))}"
