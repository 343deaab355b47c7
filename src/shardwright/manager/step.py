"""Optimizer state and the jitted training step, sharded like the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import Problem, ShardingError, StrategyError, raise_problems
from shardwright.manager import constraint, jitted_step, memory, trees
from shardwright.manager.core import Manager
from shardwright.resolution.problems import suggest_for_missing_size
from shardwright.resolution.request import ShardingRequest
from shardwright.trees.paths import path_text
from shardwright.vocabulary.annotations import ArraySpec, is_annotation, is_tuple_of_annotations
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import describe
from shardwright.vocabulary.modes import MODE_TRAIN


def state_shardings(
    manager: Manager,
    state: Any,
    params: Any,
    annotations: Any = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Return the shardings of an optimizer's state."""
    from shardwright.trees.optimizer_state import annotate_state

    by_path = manager.rules.reads_paths
    annotations = annotate_state(state, params, annotations, overrides=overrides, by_path=by_path)
    return trees.shardings(manager, state, annotations, mode=mode, role=Role.STATE)


def abstract_state(
    manager: Manager,
    optimizer: Any,
    params: Any,
    annotations: Any = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Return an optimizer's state as `jax.ShapeDtypeStruct`s with shardings, without arrays."""
    if not callable(getattr(optimizer, "init", None)):
        fix = "pass an optax transformation, or an object with init(params)"
        raise StrategyError(f"the optimizer is a {type(optimizer).__name__} without init", fix=fix)
    state = jax.eval_shape(optimizer.init, params)
    shardings = state_shardings(manager, state, params, annotations, overrides=overrides, mode=mode)
    return trees.with_shardings(state, shardings)


def init_state(
    manager: Manager,
    optimizer: Any,
    params: Any,
    annotations: Any = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Create an optimizer's state in one jit, each array already sharded."""
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    raise_problems(_shapes_alone(params))
    abstract = abstract_state(
        manager, optimizer, params, annotations, overrides=overrides, mode=mode
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def init(params: Any) -> Any:
        # optax creates weakly typed scalars, and a step returns strongly typed ones. Without this
        # cast, the second step would compile again.
        return jax.tree.map(
            lambda x: (
                jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
            ),
            optimizer.init(params),
        )

    return jax.jit(init, out_shardings=shardings)(params)


def jit_step(
    manager: Manager, step: Callable[..., Any], state: Any, *inputs: Any, donate: bool = True
) -> Callable[..., Any]:
    """Jit a training step `(state, *inputs) -> (state, metrics)` that donates its state.

    The jitted step moves optimizer state in host memory to the device, and back at the end.
    """
    state_shardings = _shardings_of(manager, state, "state")
    described = jitted_step.Argument("state", state, state_shardings)
    input_shardings = [
        # An input may be annotated with an empty tuple, so stop at annotations. In the state, an
        # empty tuple is an empty node.
        _shardings_of(manager, tree, f"input {position}", is_leaf=is_annotation)
        for position, tree in enumerate(inputs)
    ]

    # Parameters in host memory move layer by layer, in `gather` and in an `offloaded` optimizer. So
    # if there are any, the step gets the whole state where it is.
    keeps_params = memory.holds_params(manager.rules, manager.mode or MODE_TRAIN)

    @functools.wraps(step)
    def run(state: Any, *inputs: Any) -> tuple[Any, Any]:
        # Enter the manager inside the traced function, so that `step`, `lower` and `trace` need no
        # `with pm:`. Inside a trace, `with manager` sets no mesh, because JAX may not know the
        # devices of an abstract mesh. Here `in_shardings` name them.
        mesh = (_jax.ambient_mesh() or manager.mesh).abstract_mesh
        with manager, jax.sharding.use_abstract_mesh(mesh):
            # `out_shardings` move the state back to the host.
            moved = state if keeps_params else memory.fetch(state, state_shardings)
            result = step(moved, *inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            what = f"the step returns a {type(result).__name__}, not a pair"
            fix = "return the new state and the rest, for instance `return state, loss`"
            raise StrategyError(what, fix=fix)
        return jitted_step.checked_state(described, state, result[0]), result[1]

    jitted = jax.jit(
        run,
        in_shardings=(state_shardings, *input_shardings),
        # XLA reuses the memory of a donated array only for a result of the same sharding. Otherwise
        # JAX keeps the old array and warns.
        out_shardings=(state_shardings, None),
        donate_argnums=(0,) if donate else (),
    )
    arguments = [
        jitted_step.Argument(
            f"input {position}", tree, shardings, is_leaf=jitted_step.is_open_or_annotation
        )
        for position, (tree, shardings) in enumerate(zip(inputs, input_shardings, strict=True))
    ]

    def check(annotation: Any, shape: tuple[int, ...], path: str) -> None:
        manager.answer(ShardingRequest(annotation, shape, path=path)).require()

    return jitted_step.JittedStep(jitted, described, arguments, check, donate=donate)


def _shardings_of(
    manager: Manager, tree: Any, name: str, *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return the shardings of a step's argument, from its annotations or its arrays."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    shardings: list[NamedSharding] = []
    problems: list[Problem] = []
    for path, leaf in leaves:
        try:
            shardings.append(_argument_sharding(manager, leaf, f"{name} {path_text(path)}".strip()))
        except ShardingError as error:
            problems += error.problems
    raise_problems(problems)
    return jax.tree.unflatten(structure, shardings)


def _argument_sharding(manager: Manager, leaf: Any, path: str) -> NamedSharding:
    if is_tuple_of_annotations(leaf):
        what = f"{describe(leaf)} may be one annotation of composites, or one annotation per array"
        fix = "write one annotation for all arrays of the input, or pass arrays with shardings"
        raise StrategyError(what, path=path, fix=fix)
    if is_annotation(leaf):
        resolution = manager.answer(ShardingRequest(leaf, path=path))
        fix = 'pass arrays with shardings, or pm.abstract(batch, axes, role="activation")'
        raise_problems(suggest_for_missing_size(resolution.problems, fix), resolution=resolution)
        return manager.sharding_of(resolution)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and _same_devices(sharding.mesh, manager.mesh):
        return sharding
    # An uncommitted array has a sharding too, on the default device. JAX may move it from there, so
    # it does not count as placed.
    is_placed = sharding is not None and getattr(leaf, "committed", True)
    is_key = jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)
    is_array = _jax.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    if not is_placed and (is_key or (is_array and np.shape(leaf) == ())):
        return NamedSharding(manager.mesh, PartitionSpec())
    raise StrategyError(
        f"the {type(leaf).__name__} of shape {np.shape(leaf)} has no sharding "
        "on the manager's mesh",
        path=path,
        fix="pass arrays that pm.init, pm.init_state or pm.shard returned, "
        "or pm.abstract(specs) and pm.abstract_state(optimizer, specs)",
    )


def _shapes_alone(params: Any) -> list[Problem]:
    """Return a problem for the first parameter that has only a shape and is not an array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return [
        Problem(
            error=StrategyError,
            what=f"{type(leaf).__name__} is not an array",
            path=path_text(path),
            fix="pass the arrays that pm.init(specs, key) returns, or call pm.abstract_state",
        )
        for path, leaf in leaves
        if isinstance(leaf, (ArraySpec, jax.ShapeDtypeStruct))
    ][:1]


def _same_devices(a: Mesh | AbstractMesh, b: Mesh | AbstractMesh) -> bool:
    if isinstance(a, Mesh) and isinstance(b, Mesh):
        return a.axis_names == b.axis_names and bool(np.array_equal(a.devices, b.devices))
    equal: bool = a.shape_tuple == b.shape_tuple
    return equal
