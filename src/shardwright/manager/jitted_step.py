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
from shardwright.resolution.partition_specs import spec_text
from shardwright.trees.paths import path_text
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
        # None means that JAX does not restrict the sharding of the array.
        self.shardings = self.structure.flatten_up_to(shardings)

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

    def type_problems(self, value: Any) -> list[Problem]:
        """Return a problem for each array whose shape or dtype differs from the argument's."""
        arrays = self.structure.flatten_up_to(value)
        return [
            Problem(
                error=StrategyError,
                what=f"jit_step was given {_type(leaf)}, and the call passes {_type(array)}",
                path=self.path(path),
                fix=f"pass the {self.name} that jit_step was given, or call jit_step with this one",
            )
            for path, leaf, array in zip(self.paths, self.leaves, arrays, strict=True)
            if _type(leaf) != _type(array)
        ]

    def placement_problems(self, value: Any) -> list[Problem]:
        """Return a problem for each array that is placed in another way than the argument says."""
        problems: list[Problem] = []
        # One annotation may cover a subtree of the input, so each part is a tree of arrays.
        parts = self.structure.flatten_up_to(value)
        for part, path, leaf, sharding in zip(
            parts, self.paths, self.leaves, self.shardings, strict=True
        ):
            move = "pm.shard(x, *axes)" if is_annotation(leaf) else "jax.device_put(x, sharding)"
            for below, array in jax.tree_util.tree_flatten_with_path(part)[0]:
                placed = getattr(array, "sharding", None)
                if placed is None and sharding is not None and not sharding.is_fully_addressable:
                    problems.append(_host_problem(self.path((*path, *below))))
                if sharding is None or placed is None or not getattr(array, "committed", True):
                    continue
                if placed.is_equivalent_to(sharding, len(array.shape)):
                    continue
                problem = Problem(
                    error=StrategyError,
                    what=f"the array is placed as {_placement(placed)}, and jit_step was given "
                    f"{_placement(sharding)}",
                    path=self.path((*path, *below)),
                    fix=f"move it with {move}, as jit_step was given it",
                )
                problems.append(problem)
        return problems

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
                    # An array or a `ShapeDtypeStruct` in place of an annotation has only a sharding
                    # to check.
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

    The checks run once for each combination of structures, of the state's shapes and dtypes, and of
    the inputs' shapes.

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
            raise_problems(_repeated(arguments[0]))
        leaves, input_structure = jax.tree.flatten(arguments[1:])
        # Numbers have no shape or dtype. np.shape takes five times as long, and states are large.
        types = tuple([(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in state])
        key = (structure, types, input_structure, tuple(map(np.shape, leaves)))
        if key in self._known:
            return
        pairs = list(zip(self._arguments, arguments, strict=True))
        raise_problems(
            [problem for argument, value in pairs for problem in argument.structure_problems(value)]
        )
        problems = self._arguments[0].type_problems(arguments[0])
        for argument, value in pairs[1:]:
            problems += argument.size_problems(value, self._check)
        raise_problems(problems)
        self._known.add(key)

    def _placed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the whole state on the mesh, none of them deleted.

        JAX would place the state too, but would then compile again for the state that the step
        returns. If an array is deleted, JAX 0.10 ends the process.
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
        state = self._arguments[0]
        return [
            Problem(
                error=StrategyError,
                what="the array is deleted: a step has donated it, or it was deleted by hand",
                path=argument.path(path),
                fix="keep the state that a step returns, state, loss = step(state, batch), "
                "or pass donate=False to jit_step"
                if argument is state
                else "pass a new array",
            )
            for argument, value in zip(self._arguments, arguments, strict=True)
            for path, x in jax.tree_util.tree_flatten_with_path(value)[0]
            if _jax.is_deleted(x)
        ]

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except ShardingError:
            # A ShardingError is a ValueError, and one of the step itself already says what is
            # wrong.
            raise
        except ValueError as error:
            # JAX compares the shardings before it runs anything.
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
    """Tell whether a leaf describes all arrays of an input below its path."""
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


def _host_problem(path: str) -> Problem:
    return Problem(
        error=StrategyError,
        what="the array is in the memory of this process, and the mesh has several processes",
        path=path,
        fix="join the parts of all processes: pm.global_array(rows, *axes)",
    )


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


def checked_state(before: Any, after: Any) -> Any:
    """Return the state that a step returns, strongly typed where the state that it takes is.

    A state that differs cannot reuse the memory of the old state, and the next call would compile
    again.

    Raises:
      StrategyError: It has other structure, shapes or dtypes than the state that the step takes.
    """
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=what,
                path=f"state {path_text(path)}".strip(),
                fix="return every part of the state, in the same containers",
            )
            for path, what in _structure_changes(before, after)
        ]
    )
    leaves, _ = jax.tree_util.tree_flatten_with_path(before)
    triples = [
        (f"state {path_text(path)}".strip(), old, new)
        for (path, old), new in zip(leaves, jax.tree.leaves(after), strict=True)
    ]
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"the step takes {_type(old)} and returns {_type(new)}",
                path=path,
                fix="return the state with the shapes and dtypes that it has, "
                "for instance new.astype(old.dtype)",
            )
            for path, old, new in triples
            if _type(old) != _type(new)
        ]
    )
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"the step takes a weakly typed {_type(old)} and returns a strongly typed one",
                path=path,
                fix="create the state with a dtype, for instance "
                f"pm.shard(jnp.asarray(x, jnp.{jnp.result_type(old)}))",
            )
            for path, old, new in triples
            if jax.typeof(old).weak_type and not jax.typeof(new).weak_type
        ]
    )
    return jax.tree.map(_typed_like, before, after)


def _structure_changes(before: Any, after: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield the path and a description of each part in which two trees differ."""
    structure: Any = jax.tree.structure(before)
    if structure == jax.tree.structure(after):
        return
    old, new = _children(before), _children(after)
    if old is None or new is None or type(before) is not type(after):
        names = [
            "an array" if children is None else type(node).__name__
            for node, children in ((before, old), (after, new))
        ]
        yield path, f"the step takes {names[0]} and returns {names[1]}"
        return
    found = False
    for key in dict.fromkeys((*old, *new)):
        if key not in new:
            changes = [((*path, key), "the step takes this and does not return it")]
        elif key not in old:
            changes = [((*path, key), "the step returns this and does not take it")]
        else:
            changes = list(_structure_changes(old[key], new[key], (*path, key)))
        found = found or bool(changes)
        yield from changes
    if not found:
        yield path, f"the step returns a {type(before).__name__} with other static fields"


def _children(node: Any) -> dict[Any, Any] | None:
    """Return the children of a node of a tree by their keys. None for a leaf."""
    # `is_leaf` stops below the node itself, so this flattens a single level.
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if any(not path for path, _ in children):
        return None
    return {path[0]: child for path, child in children}


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
        return f"{spec_text(sharding.spec)} on {dict(sharding.mesh.shape_tuple)}"
    return f"{type(sharding).__name__} on {', '.join(sorted(map(str, sharding.device_set)))}"
