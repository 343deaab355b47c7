"""Assert that a sharded function gives the same values and gradients as on one device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.errors import MeshSpecError, ProgramError, ShardingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.plan.memory import leaf_bytes
from shardwright.show.tables import table
from shardwright.testing.placements import sharding_text
from shardwright.testing.programs import function_name, is_same_everywhere
from shardwright.trees.paths import path_text
from shardwright.vocabulary.units import bytes_text

# Tolerances, relative to the largest value of an array. Only the order of summation may differ.
_RTOL = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
_HEAD = (
    "tensor",
    "shape",
    "dtype",
    "sharding",
    "per device",
    "sharded",
    "unsharded",
    "at",
    "allowed",
)
_ROWS = 20


def assert_same_as_unsharded(
    f: Callable[..., Any],
    *args: Any,
    manager: PartitionManager | None = None,
    mesh: Mesh | None = None,
    grad: bool = True,
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
) -> None:
    """Assert that a function gives the same values and gradients on a mesh and on one device.

    `assert_same_as_unsharded(loss, params, batch, manager=pm)`. The function runs twice, jitted: on
    the sharded arguments, then on copies on one device under the same rules. Gradients are compared
    too: the gradients of a weighted sum of all floating-point results, with respect to each
    floating-point argument. The weights are fixed.

    Args:
      f: the function. The function must use the ambient manager or mesh, not a manager or a mesh of
        its own.
      *args: sharded arrays, and trees of them.
      manager: Defaults to the ambient manager.
      mesh: the mesh to set, for functions without a manager. Defaults to the mesh of the arguments.
      grad: compare gradients too.
      reference: runs on one device instead of `f`, without a manager or a mesh. If `f` contains a
        `NamedSharding` of its mesh, a reference is required. If `f` contains only bare
        `PartitionSpec`s, no reference is required.
      rtol: allowed difference, relative to the largest value of the array. Defaults to 2e-5 for
        float32 and 3e-2 for bfloat16.
      atol: allowed absolute difference, added to the relative one.

    Raises:
      AssertionError: tensors differ, or nothing is sharded.
      ProgramError: the function does not run on one device; pass `reference`.
      MeshSpecError: there is no manager and no mesh, and the arguments are not all on one mesh.
    """
    __tracebackhide__ = True
    active = manager if manager is not None or mesh is not None else context.current()
    mesh = _mesh_of(args) if active is None and mesh is None else mesh
    single_device = _on_one_device(active, mesh, plain=reference is not None)
    with active if active is not None else jax.set_mesh(mesh):
        # Compile before the call, so that a program that shards nothing is refused without a run.
        compiled = jax.jit(_run(f, grad)).lower(*args).compile()
        if is_same_everywhere(compiled):
            raise AssertionError(
                f"{function_name(f)} does the same on each device: nothing is sharded, so there is "
                "nothing to compare\n"
                "  fix   place the arguments first, over mesh axes of more than one device"
            )
        sharded = compiled(*args)
    with single_device.scope():
        copies = jax.tree.map(lambda value: jax.device_put(value, single_device.place), args)
        try:
            unsharded = jax.jit(_run(reference or f, grad))(*copies)
        except (ShardingError, ValueError) as err:
            what = f"{function_name(f)} does not run on one device"
            fix = "use the ambient manager or mesh inside it (sw.shard, not pm.shard; a bare "
            fix += "PartitionSpec, not a NamedSharding), "
            fix += "or pass reference= with the unsharded function"
            raise ProgramError(what, rule=str(err).splitlines()[0], fix=fix) from err
    _check_comparable(function_name(f), sharded, unsharded)
    message = _differences(function_name(f), sharded, unsharded, rtol, atol)
    if message:
        raise AssertionError(message)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OneDevice:
    """Where the reference runs.

    `scope` returns the context to enter, and `place` is the device or sharding of the arguments.
    """

    # `scope` is a function, because `jax.set_mesh` sets the mesh as soon as it is called.
    scope: Callable[[], Any]
    place: Any


def _mesh_of(args: Any) -> Mesh:
    """Return the mesh of the arguments. All of them must have the same mesh."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    meshes = list(
        dict.fromkeys(
            sharding.mesh
            for sharding in shardings
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
        )
    )
    if len(meshes) != 1:
        on = "not on a mesh" if not meshes else "on several meshes"
        what = f"there is neither a manager nor a mesh, and the arguments are {on}"
        fix = "place the arguments, or pass manager= or mesh=: the fixture mesh, or "
        raise MeshSpecError(what, fix=f'{fix}cpu_mesh("dp:2,tp:4")')
    return meshes[0]


def _on_one_device(
    manager: PartitionManager | None, mesh: Mesh | None, *, plain: bool
) -> _OneDevice:
    whole: Any = mesh
    if whole is None and manager is not None:
        whole = manager.mesh
    if not isinstance(whole, Mesh):
        fix = 'pass a manager or a mesh of devices: mesh=cpu_mesh("dp:2,tp:4")'
        raise MeshSpecError("the mesh is abstract, so nothing can run", fix=fix)
    if plain:
        return _OneDevice(scope=contextlib.nullcontext, place=whole.devices.flat[0])
    # Keep the mesh axes, with one device each, so that specs and axis names in `f` stay valid.
    grid = np.asarray(whole.devices).reshape(-1)[:1].reshape((1,) * whole.devices.ndim)
    single_mesh = Mesh(grid, whole.axis_names, axis_types=whole.axis_types)

    def scope() -> Any:
        return (
            jax.set_mesh(single_mesh)
            if manager is None
            else PartitionManager(manager.rules, mesh=single_mesh, mode=manager.mode)
        )

    return _OneDevice(scope=scope, place=NamedSharding(single_mesh, PartitionSpec()))


def _run(f: Callable[..., Any], grad: bool) -> Callable[..., Any]:
    """Return a function that returns the result of `f`, and gradients in a tree like the arguments.

    The gradient of an argument that is not floating-point is None.
    """

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        differentiated = [
            at
            for at, leaf in enumerate(leaves)
            # `result_type` also takes Python numbers, which have no dtype.
            if grad and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        ]

        def results_of(values: list[Any]) -> Any:
            merged = list(leaves)
            for at, value in zip(differentiated, values, strict=True):
                merged[at] = value
            result = f(*jax.tree.unflatten(structure, merged))
            return [
                array
                for array in jax.tree.leaves(result)
                if jnp.issubdtype(array.dtype, jnp.inexact)
            ], result

        if not grad:
            return results_of([])[1], None
        values = [leaves[at] for at in differentiated]
        # Return the whole result as aux, because only its floats can have a cotangent.
        floats, pull_back, result = jax.vjp(results_of, values, has_aux=True)
        if not floats or not differentiated:
            raise ProgramError(
                "no floating argument or no floating result to differentiate", fix="pass grad=False"
            )
        (gradients,) = pull_back([_direction(result_leaf) for result_leaf in floats])
        by_leaf = dict(zip(differentiated, gradients, strict=True))
        return result, jax.tree.unflatten(structure, [by_leaf.get(at) for at in range(len(leaves))])

    return run


def _direction(array: Any) -> Any:
    """Return distinct numbers between -1 and 1 in the shape, dtype and sharding of an array."""
    # Equal weights would not detect two swapped elements. On Explicit meshes the type of a
    # cotangent includes the sharding of its result, which `ones_like` keeps.
    ones = jnp.ones_like(array)
    for dim in range(array.ndim):
        ones = ones * jnp.cos(
            1.0 + (dim + 1) * jax.lax.broadcasted_iota(jnp.float32, array.shape, dim)
        ).astype(array.dtype)
    return ones


def _check_comparable(name: str, sharded: Any, unsharded: Any) -> None:
    """Check that both results have the same tree, and that the tree contains numbers."""
    __tracebackhide__ = True
    has, wants = (str(jax.tree.structure(tree[0])) for tree in (sharded, unsharded))
    if has != wants:
        raise AssertionError(
            f"{name} and its reference return different trees: {has}, not {wants}\n"
            f"  fix   return the same names in the same order from both"
        )
    has_numbers = any(value.size for value in jax.tree.leaves(sharded[0]))
    bare = "" if has_numbers else "it returns no number"
    for path, value in _named(sharded):
        if jnp.issubdtype(value.dtype, jnp.inexact) and value.size:
            bare = bare or ("" if np.isfinite(_numbers(value)).any() else f"{path} is not finite")
    if bare:
        raise AssertionError(
            f"{name} has nothing to compare: {bare}\n"
            f"  fix   return the values to compare, and choose arguments that give finite values"
        )


def _differences(name: str, sharded: Any, unsharded: Any, rtol: float | None, atol: float) -> str:
    """Return the message about tensors that differ; empty if none does."""
    pairs = zip(_named(sharded), _named(unsharded), strict=True)
    rows = [
        row for (path, value), (_, other) in pairs if (row := _row(path, value, other, rtol, atol))
    ]
    if not rows:
        return ""
    count = "1 tensor differs" if len(rows) == 1 else f"{len(rows)} tensors differ"
    lines = [
        f"{count} between {name} on the mesh and on one device:",
        "",
        *table([_HEAD, *rows[:_ROWS]]),
    ]
    return "\n".join([*lines, *[f"and {len(rows) - _ROWS} more"] * (len(rows) > _ROWS)])


def _named(results: tuple[Any, Any]) -> list[tuple[str, Any]]:
    named = []
    for what, tree in zip(("result", "gradient"), results, strict=True):
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
            text = path_text(path)
            named.append((f"{what} {text}" if text else what, value))
    return named


def _row(
    path: str, array: Any, other: Any, rtol: float | None, atol: float
) -> tuple[str, ...] | None:
    """Return the row of a tensor at its largest difference; None if the difference is allowed."""
    shape = "x".join(map(str, array.shape)) or "scalar"
    columns = (
        path,
        shape,
        str(array.dtype),
        sharding_text(array.sharding),
        bytes_text(leaf_bytes(array, array.sharding).per_device),
    )
    if array.shape != other.shape or array.dtype != other.dtype:
        return (*columns, "-", f"{other.dtype} {'x'.join(map(str, other.shape))}", "-", "-")
    a, b = _numbers(array), _numbers(other)
    if not a.size:
        return None
    allowed = atol
    if jnp.issubdtype(array.dtype, jnp.inexact):
        # Errors of a sum grow with its summands, not with its result, which may be near zero. So
        # the limit is relative to the largest value of the array, not to each value.
        finite = np.abs(b[np.isfinite(b)])
        # A complex number rounds like its two parts. Types that `_RTOL` lacks, such as float8, have
        # at most three bits of mantissa, so allow 0.1.
        relative = _RTOL.get(str(np.zeros((), array.dtype).real.dtype), 0.1)
        allowed += (relative if rtol is None else rtol) * float(finite.max(initial=0.0))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    # The difference of two infinities is NaN, and NumPy warns of it.
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
    apart = np.where(np.isnan(apart), np.inf, apart)  # a NaN on one side is the worst
    worst = np.unravel_index(int(apart.argmax()), a.shape)
    if apart[worst] <= allowed:
        return None
    place = ",".join(map(str, worst)) or "-"
    return (*columns, f"{a[worst]:.6g}", f"{b[worst]:.6g}", place, f"±{allowed:.1e}")


def _numbers(value: Any) -> np.ndarray:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    kind = np.complex128 if jnp.issubdtype(value.dtype, jnp.complexfloating) else np.float64
    return np.asarray(value).astype(kind)
