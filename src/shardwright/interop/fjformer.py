"""The names of fjformer's `partition_utils`, for code that uses them.

The functions constrain arrays by hand-written specs, choose specs by path, move metrics to the
host, and make a PRNG key for each call. For new code, shardwright has stricter functions: `shard`,
`match_paths` and `PartitionManager.shardings`. With the functions of this module, a code base can
migrate line by line.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from shardwright.resolution.patterns import compile_pattern
from shardwright.resolution.rules import build_rules
from shardwright.trees.paths import match_paths, path_text

__all__ = [
    "flatten_tree",
    "get_metrics",
    "get_names_from_partition_spec",
    "get_weight_decay_mask",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "named_tree_map",
    "names_in_current_mesh",
    "names_in_mesh",
    "tree_apply",
    "tree_path_to_string",
    "with_sharding_constraint",
    "wrap_function_with_rng",
]

names_in_current_mesh = names_in_mesh = current_mesh_has


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
    # A leaf that comes here is not a spec. Other containers, such as dataclasses, are flattened
    # below.
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
    mistyped mesh axis is ignored too, while `shard` raises an error for it. As for `shard`, a spec
    that is longer than its array is an error, and so is a dim that does not divide. The function
    works on Auto and Explicit axes, eagerly and in a trace. Inside `shard_map`, Manual axes are
    left out of the specs.

    Args:
      x: Arrays.
      partition_specs: A `PartitionSpec` or a tree of them. Each spec applies to all arrays below
        its node in the tree.

    Raises:
      StrategyError: A leaf is not a spec.
      ValueError: The tree of specs does not fit the tree of arrays.
      RankMismatchError, IndivisibleError, AxisConflictError: Specs do not fit their arrays. The
        error lists all such arrays.
    """
    _check_specs(partition_specs, PartitionSpec)
    mesh = current_mesh()
    # Like fjformer, ignore specs whose mesh axes are absent, so that a model for a mesh also runs
    # on a laptop.
    if mesh is None or not current_mesh_has(*get_names_from_partition_spec(partition_specs)):
        return x
    # A `PartitionSpec` is a leaf. Replace it by a list of copies, one for each array that it
    # covers, so that flattening gives one spec for each array.
    covering = jax.tree.leaves(
        jax.tree.map(lambda spec, part: [spec] * len(jax.tree.leaves(part)), partition_specs, x)
    )
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


def _check_specs(specs: Any, *kinds: type) -> None:
    for path, spec in jax.tree_util.tree_flatten_with_path(specs)[0]:
        if not isinstance(spec, kinds):
            raise StrategyError(
                f"{spec!r} of type {type(spec).__name__} is not a PartitionSpec",
                path=path_text(path),
                fix='write PartitionSpec("dp", None), or PartitionSpec() to replicate',
            )


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
    # Inside `shard_map`, an array is already local along Manual axes.
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
      rules: The rules, in order of precedence. Patterns are searched (`re.search`).
      params: Arrays, or anything else with a shape.

    Raises:
      StrategyError: No rule matches a path (all such paths are reported), or a pattern is invalid.
        A StrategyError is a ValueError.
      RankMismatchError: A spec is longer than its array. Factored moments of an optimizer, for
        example, have fewer dims than their parameters.
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
        # fjformer tests the size before it looks for a rule, so an array of one element needs no
        # rule. The product over no dims is 1, so scalars are among these arrays.
        if np.prod(shape, dtype=int) == 1:
            specs.append(PartitionSpec())
        elif path in unmatched:
            patterns = "patterns in order: " + ", ".join(pattern for pattern, _ in rules)
            problems.append(
                Problem(
                    error=StrategyError,
                    what="no partition rule matches",
                    path=path,
                    rule=patterns,
                    fix='add a rule for this path, or (".*", PartitionSpec()) at the end to '
                    "replicate the "
                    "rest on purpose",
                )
            )
        else:
            specs.append(_spec_of(path, shape, annotation, problems))
    raise_problems(problems)
    return jax.tree.unflatten(structure, specs)


def _spec_of(path: str, shape: tuple[int, ...], matched: Any, problems: list[Problem]) -> Any:
    """Return the spec of a matched rule; append to `problems` if it does not resolve or fit."""
    if not isinstance(matched, PartitionSpec):
        manager = context.require("match_partition_rules with semantic axes", method=False)
        # Call `explain` and not `resolve`, so that one error has the problems of all leaves.
        resolution = manager.explain(matched, role="param", shape=shape, path=path)
        problems += resolution.problems
        return resolution.spec
    if len(matched.partitions) > len(shape):
        what = (
            f"the spec {matched} has {len(matched.partitions)} entries, "
            f"and the array has shape {shape}"
        )
        fix = (
            "write a rule for this array before this rule; PartitionManager.state_shardings shards "
            "optimizer state like the parameters"
        )
        problems.append(Problem(error=RankMismatchError, what=what, path=path, fix=fix))
    return matched


def make_shard_and_gather_fns(partition_specs: Any, dtype_specs: Any = None) -> tuple[Any, Any]:
    """Return two trees of functions: shard functions and gather functions.

    A shard function casts the array, places it as its spec says, and waits until it is placed. A
    gather function casts the array and returns all of its values as a NumPy array. If several
    processes hold the values, every process must call the function. `tree_apply(fns, tree)` calls
    all functions of a tree. The functions use the mesh that is current when they are created. If
    this mesh has no devices, or there is no mesh, a function uses the mesh that is current when it
    is called.

    Args:
      partition_specs: A tree of `PartitionSpec`s, or of `NamedSharding`s, whose own mesh is then
        used.
      dtype_specs: None casts nothing. One float dtype casts every float leaf. A tree of dtypes, or
        of anything with a `dtype`, casts each leaf to its dtype.

    Raises:
      StrategyError: A leaf is not a spec, or a dtype has 64 bits while `jax_enable_x64` is off. A
        call of a function raises this error if values do not fit into the 32 bits that JAX then
        uses.
      TypeError, ValueError: A leaf is not a dtype, or the trees differ.
      NoManagerError: (From a call.) There is no mesh.
      ShardingError: (From a call.) A spec does not fit the array.
    """
    _check_specs(partition_specs, PartitionSpec, NamedSharding)
    specs, structure = jax.tree_util.tree_flatten_with_path(partition_specs)
    mesh = current_mesh()
    casts = _casts(structure, dtype_specs)
    shards = [
        _shard_fn(spec, cast, mesh, path_text(path))
        for (path, spec), cast in zip(specs, casts, strict=True)
    ]
    gathers = [functools.partial(_to_host, cast) for cast in casts]
    return jax.tree.unflatten(structure, shards), jax.tree.unflatten(structure, gathers)


Cast = Callable[[Any], Any]


def _casts(structure: Any, dtype_specs: Any) -> list[Cast]:
    """Return a function for each leaf, which casts the leaf as `dtype_specs` says."""
    if dtype_specs is None:
        # Make a function for each leaf, because fjformer returns trees of functions.
        return [_as_array] * structure.num_leaves
    if isinstance(dtype_specs, _DTYPES):
        dtype_of_all = _read_dtype(dtype_specs)
        if not jax.numpy.issubdtype(dtype_of_all, jax.numpy.floating):
            raise StrategyError(
                f"dtype_specs is {dtype_of_all}, but one dtype for all leaves must be a float",
                fix="pass a float dtype, or a tree with one dtype per leaf",
            )

        def cast_float(x: Any) -> Any:
            x = _as_array(x)
            is_float = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
            return _cast(x, dtype_of_all) if is_float else x

        return [cast_float] * structure.num_leaves
    dtypes = map(_read_dtype, structure.flatten_up_to(dtype_specs))
    # Every leaf is cast to its dtype, floats or not: fjformer does so for a tree of dtypes.
    return [functools.partial(_cast, dtype=dtype) for dtype in dtypes]


# A leaf of one of these types is a dtype or the name of a dtype. Other leaves of a tree of dtypes
# have a `dtype`.
_DTYPES = (str, type, np.dtype)


def _read_dtype(value: Any) -> Any:
    dtype = jax.numpy.dtype(value) if isinstance(value, _DTYPES) else value.dtype
    # NumPy would cast to 64 bits, and JAX would then place 32 bits without a message.
    if isinstance(dtype, np.dtype) and (own := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise StrategyError(
            f"dtype_specs has {dtype}, but JAX uses {own} while jax_enable_x64 is off",
            fix='jax.config.update("jax_enable_x64", True), or pass a dtype of 32 bits',
        )
    return dtype


def _as_array(x: Any) -> Any:
    if hasattr(x, "dtype"):
        return x
    constraint.check_kept(x)
    # A Python number gets the dtype that JAX uses, not the 64 bits of NumPy.
    return np.asarray(jax.numpy.asarray(x))


def _cast(x: Any, dtype: Any) -> Any:
    x = _as_array(x)
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
            # An abstract mesh, as inside jit, has no devices to place on.
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
        # Wait for the copy: after the return, the caller may release or overwrite the host's array.
        return placed.block_until_ready()

    return shard_fn


def _to_host(cast: Cast, x: Any) -> np.ndarray:
    x = cast(x)
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        # With `tiled=True`, the result has the global shape, without a leading axis of processes.
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def tree_path_to_string(path: Sequence[Any], sep: str | None = None) -> Any:
    """Return a key path as a tuple of strings, or as one string joined by `sep`.

    >>> tree_path_to_string((jax.tree_util.DictKey("w"), jax.tree_util.SequenceKey(0)), sep="/")
    'w/0'
    """
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return names if sep is None else sep.join(names)


def flatten_tree(
    xs: Any, is_leaf: Callable[[Any], bool] | None = None, sep: str | None = None
) -> dict[Any, Any]:
    """Return a tree as a flat dict from path to leaf, in flattening order.

    Paths are tuples of strings, or strings joined by `sep`.

    Raises:
      StrategyError: Two leaves have the same name, as in `{"a/b": 1, "a": {"b": 2}}` joined by "/".

    >>> flatten_tree({"attn": {"q": 1, "k": 2}}, sep="/")
    {'attn/k': 2, 'attn/q': 1}
    """
    flat: dict[Any, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(xs, is_leaf=is_leaf)[0]:
        name = tree_path_to_string(path, sep=sep)
        if name in flat:
            raise StrategyError(
                f"two leaves have the name {name!r}", fix="pass a sep that no key contains"
            )
        flat[name] = leaf
    return flat


def named_tree_map(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> Any:
    """Map `f(name, leaf, *others)` over a tree, where `others` are the leaves of `rest`.

    Names are those of `tree_path_to_string`.

    >>> named_tree_map(lambda name, x: f"{name}={x}", {"a": 1, "b": [2]}, sep="/")
    {'a': 'a=1', 'b': ['b/0=2']}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: f(tree_path_to_string(path, sep=sep), *leaves),
        tree,
        *rest,
        is_leaf=is_leaf,
    )


def tree_apply(fns: Any, tree: Any) -> Any:
    """Call each function of a tree with the leaf at the same path of another tree.

    Raises:
      ValueError: The structures differ.

    >>> tree_apply({"a": abs, "b": str}, {"a": -1, "b": -1})
    {'a': 1, 'b': '-1'}
    """
    # Map over `tree` and not over `fns`, so that a function never gets a whole subtree.
    return jax.tree.map(lambda leaf, fn: fn(leaf), tree, fns)


def get_weight_decay_mask(exclusions: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function for `optax.add_decayed_weights(mask=...)`.

    The returned function maps parameters to a tree of bools: False (no decay) if `re.search` finds
    one of the patterns in the "/"-joined path, else True.

    Raises:
      StrategyError: A pattern is invalid, or `exclusions` is one string.

    >>> get_weight_decay_mask(["bias$", "norm"])({"up": {"kernel": 1, "bias": 1}, "norm": 1})
    {'norm': False, 'up': {'bias': False, 'kernel': True}}
    """
    if isinstance(exclusions, str):
        raise StrategyError(
            f"exclusions is the text {exclusions!r}, not patterns", fix=f"write [{exclusions!r}]"
        )
    patterns = [compile_pattern(exclusion) for exclusion in exclusions]

    def weight_decay_mask(params: Any) -> Any:
        return named_tree_map(
            lambda name, _: not any(pattern.search(name) for pattern in patterns), params, sep="/"
        )

    return weight_decay_mask


def wrap_function_with_rng(rng: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that passes a new key as the first argument of every call.

    Each call splits the stored key: `rng, key = jax.random.split(rng)`. Several threads may call
    the function at once. Each call gets a different key, which depends on the order of the calls.
    All functions that one decorator decorates share the stored key.

    Raises:
      StrategyError: (From a call.) The call is inside a trace, and the key was created outside of
        it. So every run of the compiled program would use the same key.

    >>> @wrap_function_with_rng(jax.random.key(0))
    ... def noise(key, shape):
    ...     return jax.random.normal(key, shape)
    >>> bool((noise((2,)) != noise((2,))).all())
    True
    """
    lock = threading.Lock()
    stored = rng

    def next_key() -> Any:
        nonlocal stored
        with lock:
            # Inside a trace, `split` returns tracers, even if the key is a constant of the trace.
            following, key = jax.random.split(stored)
            if isinstance(following, jax.core.Tracer) and not isinstance(stored, jax.core.Tracer):
                raise StrategyError(
                    (
                        "the call is inside a trace, so every run of the compiled program would "
                        "use the same key"
                    ),
                    fix="call the function outside jit, or pass a key to it as an argument",
                )
            stored = following
            return key

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_key(*args: Any, **kwargs: Any) -> Any:
            return function(next_key(), *args, **kwargs)

        return with_key

    return decorate


def get_metrics(metrics: Any, unreplicate: bool = False, stack: bool = False) -> Any:
    """Move metrics to the host, as a dict of floats. With `stack`, as a dict of NumPy arrays.

    Args:
      metrics: A dict of scalars. With `stack`, a list with one dict per step; these dicts may be
        nested.
      unreplicate: Whether metrics have a leading axis of replicas. If so, the metrics of the first
        replica are returned.
      stack: Whether to stack the steps along a new leading axis.

    Raises:
      StrategyError: A scalar is text. Or, with `stack`, there are no steps, or steps have different
        metrics.
      TypeError, ValueError: A metric is not a real scalar; or steps do not stack.

    >>> get_metrics({"loss": jax.numpy.float32(0.5)})
    {'loss': 0.5}
    """
    if stack:
        _check_steps(metrics)
    if unreplicate:
        metrics = jax.tree.map(lambda value: value[0], metrics)
    values = jax.device_get(metrics)
    if stack:
        return jax.tree.map(lambda *steps: np.stack(steps), *values)
    # `item` refuses arrays of several elements. `float` refuses complex values, and values that are
    # not numbers.
    items = {name: np.asarray(value).item() for name, value in values.items()}
    for name, item in items.items():
        if isinstance(item, str | bytes):
            raise StrategyError(
                f"metric {name!r} is the text {item!r}, not a number",
                fix="leave this value out of the metrics",
            )
    return {name: float(item) for name, item in items.items()}


def _check_steps(metrics: Any) -> None:
    if not isinstance(metrics, list | tuple) or not metrics:
        what = f"a {type(metrics).__name__}" if metrics else f"{metrics!r}"
        raise StrategyError(
            f"metrics to stack are {what}", fix="pass a list with one dict per step"
        )
    first: Any = jax.tree.structure(metrics[0])
    for number, step in enumerate(metrics):
        # `jax.tree.map` would accept a whole subtree of a later step in place of a leaf of step 0.
        if (structure := jax.tree.structure(step)) != first:
            raise StrategyError(
                f"step {number} has the metrics {structure}, and step 0 has {first}",
                fix="stack steps with the same metrics",
            )
