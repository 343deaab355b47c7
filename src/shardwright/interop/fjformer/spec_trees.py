"""Trees of `PartitionSpec`s written by hand.

`shard`, `match_paths` and `PartitionManager.shardings` do the same more strictly. The functions of
this module let a code base migrate line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    NoManagerError,
    Problem,
    RankMismatchError,
    StrategyError,
    raise_problems,
)
from shardwright.manager import constraint, context
from shardwright.manager.ambient import current_mesh, current_mesh_has
from shardwright.resolution import resolver
from shardwright.resolution.rules import build_rules
from shardwright.trees.paths import match_paths, path_text


def names_in_current_mesh(*names: str) -> bool:
    """Tell whether the current mesh has all of these axes. Without a mesh the answer is False.

    The current mesh is that of `jax.set_mesh`, of a surrounding `shard_map`, of a legacy
    `with mesh:` or of the ambient manager.

    Raises:
      MeshSpecError: A name is not a string.
    """
    return current_mesh_has(*names)


names_in_mesh = names_in_current_mesh


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Return the mesh axes that a spec, or a tree of specs, names: each once, in order.

    None and unconstrained dims are skipped.

    Raises:
      StrategyError: A leaf is not a spec.

    >>> get_names_from_partition_spec({"w": jax.P(("fsdp", "sp"), "tp"), "b": [jax.P("tp"), None]})
    ['fsdp', 'sp', 'tp']
    """
    return list(dict.fromkeys(_names(partition_specs)))


def _names(specs: Any) -> Iterable[str]:
    if specs is None or specs is PartitionSpec.UNCONSTRAINED:
        return
    if isinstance(specs, str):
        yield specs
    elif isinstance(specs, Mapping):
        for value in specs.values():
            yield from _names(value)
    elif isinstance(specs, list | tuple):
        for entry in specs:
            yield from _names(entry)
    elif isinstance(specs, PartitionSpec | NamedSharding):
        yield from _names((specs.spec if isinstance(specs, NamedSharding) else specs).partitions)
    elif jax.tree_util.all_leaves([specs]):
        raise StrategyError(
            f"{specs!r} of type {type(specs).__name__} is not a spec",
            fix="pass PartitionSpecs, or dicts and lists of them",
        )
    else:
        yield from _names(jax.tree.leaves(specs))


def with_sharding_constraint(x: Any, partition_specs: Any) -> Any:
    """Constrain an array or a tree of arrays, if the current mesh has all mesh axes of the specs.

    Otherwise return the arrays unchanged. So one model runs on any mesh, and without a mesh. But a
    mistyped mesh axis is ignored too, while `shard` raises an error for it. A spec longer than its
    array and a dim that does not divide are errors, as for `shard`. The function works on Auto and
    Explicit axes, eagerly and in a trace. Inside `shard_map` the Manual axes are left out.

    Args:
      x: Arrays.
      partition_specs: A `PartitionSpec` or a tree of them. Each spec applies to all arrays below
        its place.

    Raises:
      StrategyError: A leaf is not a spec, or the trees do not fit.
      RankMismatchError, IndivisibleError, AxisConflictError: Specs do not fit their arrays. The
        error lists all of them.
    """
    specs, structure = jax.tree.flatten(partition_specs)
    for spec in specs:
        if not isinstance(spec, PartitionSpec):
            raise StrategyError(
                f"{spec!r} of type {type(spec).__name__} is not a PartitionSpec",
                fix='write PartitionSpec("dp", None)',
            )
    mesh = current_mesh()
    if mesh is None or not names_in_current_mesh(*get_names_from_partition_spec(specs)):
        return x
    try:
        parts = structure.flatten_up_to(x)  # type: ignore[attr-defined]
    except ValueError as error:
        raise StrategyError(
            f"the tree of specs does not fit: {str(error).splitlines()[0]}",
            fix="give a spec per array or subtree",
        ) from error
    covering = [
        spec for spec, part in zip(specs, parts, strict=True) for _ in jax.tree.leaves(part)
    ]
    leaves, whole = jax.tree_util.tree_flatten_with_path(x)
    problems: list[Problem] = []
    places = [
        _placement(path_text(path), np.shape(leaf), spec, mesh, problems)
        for (path, leaf), spec in zip(leaves, covering, strict=True)
    ]
    raise_problems(problems)
    placed = [
        leaf if where is None else constraint.place(leaf, where)
        for (_, leaf), where in zip(leaves, places, strict=True)
    ]
    return jax.tree.unflatten(whole, placed)


def _placement(
    path: str,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    problems: list[Problem],
) -> constraint.Placement | None:
    """Return the placement of an array; None if all axes are Manual or the spec does not fit.

    Problems are appended to `problems`.
    """
    ambient = _jax.ambient_mesh()
    kinds = (
        {} if ambient is None else dict(zip(ambient.axis_names, ambient.axis_types, strict=True))
    )
    manual = frozenset(axis for axis, kind in kinds.items() if kind is AxisType.Manual)
    resolution = resolver.explain(
        spec, build_rules({}), mesh, shape=shape, path=path, manual=manual
    )
    problems += resolution.problems
    if resolution.problems or (kinds and len(manual) == len(kinds)):
        return None
    return constraint.make_placement(resolution.require(), mesh, ambient)


def match_partition_rules(rules: Iterable[tuple[str, Any]], params: Any) -> Any:
    """Return a tree of specs, chosen by path.

    A rule is `(pattern, spec or axes)`. The first rule whose pattern is found in the "/"-joined
    path decides. The tree may be parameters, a train state or an optimizer state. **Scalars and
    arrays of one element are replicated, whatever rule matches them.** The ambient manager resolves
    semantic axes with the role param. Specs are used as written.

    Args:
      rules: In order of precedence; patterns are searched (`re.search`).
      params: Arrays, or anything else with a shape.

    Raises:
      StrategyError: No rule matches a path (all such paths at once), or a pattern is invalid. (It
        is a ValueError.)
      RankMismatchError: A spec is longer than its array, as for factored moments of an optimizer.
      NoManagerError: A rule has semantic axes, and there is no ambient manager.
      ShardingError: Axes do not resolve.
    """
    rules = list(rules)
    matches = match_paths(params, rules, strict=False)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    annotations = structure.flatten_up_to(matches.annotations)  # type: ignore[attr-defined]
    unmatched = {*matches.unmatched}
    problems: list[Problem] = []
    specs: list[Any] = []
    for (key_path, leaf), annotation in zip(leaves, annotations, strict=True):
        path, shape = path_text(key_path), np.shape(leaf)
        if np.prod(shape, dtype=int) == 1:
            specs.append(PartitionSpec())
        elif path in unmatched:
            problems.append(_no_rule(path, rules))
        else:
            specs.append(_spec_of(path, shape, annotation, problems))
    raise_problems(problems)
    return jax.tree.unflatten(structure, specs)


def _no_rule(path: str, rules: list[tuple[str, Any]]) -> Problem:
    fix = (
        'add a rule for it, or (".*", PartitionSpec()) at the end to replicate the rest on purpose'
    )
    patterns = "patterns in order: " + ", ".join(pattern for pattern, _ in rules)
    return Problem(
        error=StrategyError, what="no partition rule matches", path=path, rule=patterns, fix=fix
    )


def _spec_of(path: str, shape: tuple[int, ...], matched: Any, problems: list[Problem]) -> Any:
    """Return the spec of a matched rule, or append the problems."""
    if not isinstance(matched, PartitionSpec):
        manager = context.require("match_partition_rules with semantic axes", method=False)
        resolution = manager.explain(matched, role="param", shape=shape, path=path)
        problems += resolution.problems
        return resolution.spec
    if len(matched.partitions) > len(shape):
        what = (
            f"the spec {matched} has {len(matched.partitions)} entries, "
            f"and the array has shape {shape}"
        )
        fix = (
            "write a separate rule for it before this one; PartitionManager.state_shardings shards "
            "optimizer state like its parameters"
        )
        problems.append(Problem(error=RankMismatchError, what=what, path=path, fix=fix))
    return matched


def make_shard_and_gather_fns(partition_specs: Any, dtype_specs: Any = None) -> tuple[Any, Any]:
    """Return two trees of functions: one places an array on the mesh, one moves it to the host.

    A shard function casts the array, places it as its spec says, and waits until it is placed. A
    gather function casts the array and returns all of its values as a NumPy array. If several
    processes hold the values, every process must call the function. `tree_apply(fns, tree)` calls
    all functions of a tree. The mesh is the current mesh when the functions are created. If there
    is none with devices, it is the current mesh when a function is called.

    Args:
      partition_specs: A tree of `PartitionSpec`s, or of `NamedSharding`s, which have a mesh.
      dtype_specs: None casts nothing. One float dtype casts every float leaf. A tree of dtypes, or
        of anything with a `dtype`, casts each leaf to its dtype.

    Raises:
      StrategyError: A leaf is not a spec or not a dtype, a dtype has 64 bits without x64, or the
        trees differ. A call raises it if values do not fit into the 32 bits that JAX uses instead
        of 64, or if a PRNG key would be cast or become a NumPy array.
      NoManagerError: (From a call.) There is no mesh.
      ShardingError: (From a call.) A spec does not fit the array.
    """
    specs, structure = jax.tree_util.tree_flatten_with_path(partition_specs)
    for path, spec in specs:
        if not isinstance(spec, PartitionSpec | NamedSharding):
            fix = "write PartitionSpec() to replicate, or pass what match_partition_rules returns"
            raise StrategyError(
                f"{spec!r} of type {type(spec).__name__} is not a PartitionSpec",
                path=path_text(path),
                fix=fix,
            )
    mesh = current_mesh()
    casts = _casts(structure, dtype_specs)
    shards = [
        _shard_fn(spec, cast, mesh, path_text(path))
        for (path, spec), cast in zip(specs, casts, strict=True)
    ]
    return jax.tree.unflatten(structure, shards), jax.tree.unflatten(
        structure, [_gather_fn(cast) for cast in casts]
    )


Cast = Callable[[Any], Any]


def _casts(structure: Any, dtype_specs: Any) -> list[Cast]:
    """Return the cast of each leaf, from None, one float dtype or a tree of dtypes."""
    if dtype_specs is None:
        return [_as_array] * structure.num_leaves
    dtype_of_all = _dtype(dtype_specs)
    _check_bits([dtype_of_all])
    if dtype_of_all is not None:
        if not jax.numpy.issubdtype(dtype_of_all, jax.numpy.floating):
            raise StrategyError(
                f"dtype_specs is {dtype_of_all}, but one dtype for all leaves must be a float",
                fix="pass a float dtype, or a tree with one per leaf",
            )
        return [
            lambda x: (
                _cast(x, dtype_of_all)
                if jax.numpy.issubdtype(_as_array(x).dtype, jax.numpy.floating)
                else _as_array(x)
            )
        ] * structure.num_leaves
    try:
        leaves = structure.flatten_up_to(dtype_specs)
    except ValueError as error:
        raise StrategyError(
            f"dtype_specs does not fit the tree of specs: {str(error).splitlines()[0]}",
            fix="give one dtype per spec",
        ) from error
    dtypes = [_dtype(getattr(leaf, "dtype", leaf)) for leaf in leaves]
    for leaf, dtype in zip(leaves, dtypes, strict=True):
        if dtype is None:
            raise StrategyError(
                f"{leaf!r} of type {type(leaf).__name__} has no dtype",
                fix="give a dtype or something with a dtype per spec",
            )
    _check_bits(dtypes)
    return [lambda x, dtype=dtype: _cast(x, dtype) for dtype in dtypes]  # type: ignore[misc]


def _check_bits(dtypes: Iterable[Any]) -> None:
    wide = [
        dtype
        for dtype in dtypes
        if isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype
    ]
    if wide:
        what = (
            f"dtype_specs has {wide[0]}, but JAX uses "
            f"{jax.dtypes.canonicalize_dtype(wide[0])} while jax_enable_x64 is off"
        )
        raise StrategyError(
            what, fix='jax.config.update("jax_enable_x64", True), or pass a dtype of 32 bits'
        )


def _is_key(dtype: Any) -> bool:
    kind = getattr(dtype, "type", None)
    return isinstance(kind, type) and issubclass(kind, jax.dtypes.extended)


def _dtype(value: Any) -> Any:
    """Return the dtype that a value is or names, or None if it is not a dtype."""
    if _is_key(value):
        return value
    if not isinstance(value, str | type | np.dtype):
        return None
    try:
        return jax.numpy.dtype(value)
    except TypeError:
        return None


def _as_array(x: Any) -> Any:
    # A Python number gets the dtype that JAX uses, not the 64 bits of NumPy.
    if not hasattr(x, "dtype"):
        constraint.check_kept(x)
    return x if hasattr(x, "dtype") else np.asarray(jax.numpy.asarray(x))


def _cast(x: Any, dtype: Any) -> Any:
    x = _as_array(x)
    if x.dtype != dtype and (_is_key(x.dtype) or _is_key(dtype)):
        raise StrategyError(
            f"{x.dtype} cannot be cast to {dtype}",
            fix="give the key's own dtype, or pass jax.random.key_data(key)",
        )
    return x if x.dtype == dtype else x.astype(dtype)


def _shard_fn(
    spec: PartitionSpec | NamedSharding,
    cast: Cast,
    mesh_at_creation: Mesh | AbstractMesh | None,
    path: str,
) -> Callable[[Any], jax.Array]:
    def shard_fn(x: Any) -> jax.Array:
        x = cast(x)
        if isinstance(spec, NamedSharding):
            mesh: Any = spec.mesh
        else:
            mesh = mesh_at_creation if isinstance(mesh_at_creation, Mesh) else current_mesh()
        if not isinstance(mesh, Mesh):
            raise NoManagerError(
                "there is no mesh with devices to place an array on",
                fix=(
                    "enter jax.set_mesh(mesh) or a manager where the functions are created, "
                    "outside jit"
                ),
            )
        literal = spec.spec if isinstance(spec, NamedSharding) else spec
        fitted = resolver.resolve(
            literal, build_rules({}), mesh, shape=np.shape(x), path=path or None
        ).require()
        kind = spec.memory_kind if isinstance(spec, NamedSharding) else None
        constraint.check_kept(x, path=path)
        placed: jax.Array = jax.device_put(x, NamedSharding(mesh, fitted, memory_kind=kind))
        return placed.block_until_ready()

    return shard_fn


def _gather_fn(cast: Cast) -> Callable[[Any], np.ndarray]:
    def gather_fn(x: Any) -> np.ndarray:
        x = cast(x)
        if _is_key(x.dtype):
            what = f"a PRNG key ({x.dtype}) cannot become a NumPy array"
            raise StrategyError(
                what,
                fix=(
                    "gather jax.random.key_data(key), and call jax.random.wrap_key_data on "
                    "the result"
                ),
            )
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            from jax.experimental import multihost_utils

            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return gather_fn
