"""Trees of `PartitionSpec`s: choose them by path, make functions of them, read them from arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.errors import Problem, RankMismatchError, StrategyError, raise_problems
from shardwright.interop.eformer.constraints import parse_policy, with_sharding_constraint
from shardwright.interop.eformer.environment import min_sharding_size
from shardwright.interop.eformer.meshes import current_mesh, no_mesh
from shardwright.resolution.rules import Policy, Rank
from shardwright.trees.paths import match_paths, path_text


def match_partition_rules(
    rules: Sequence[tuple[str, PartitionSpec]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    policy: Policy | str | None = None,
) -> Any:
    """Return a tree of specs, chosen by path.

    The first rule whose pattern is found in the "/"-joined path wins.

    Args:
      rules: `(pattern, spec)` in order of precedence; patterns are searched (`re.search`).
      tree: Arrays, or anything else with a shape.
      min_size: Arrays with fewer elements are replicated. None reads the environment variable
        MIN_SHARDING_SIZE, which defaults to 16384.
      strict: Check ranks, and replicate scalars and small arrays whatever rule matches them. False
        uses the spec of the rule without any check.
      policy: A policy with `rank = "fit"`, such as `"eformer"`, cuts a spec longer than its array.
        Defaults to the policy of the ambient manager, else to an error.

    Raises:
      StrategyError: No rule matches a path, or a pattern is invalid. The error lists all of them.
      RankMismatchError: A spec is longer than its array. The error lists all such specs.
    """
    annotations = match_paths(tree, rules).annotations
    least = min_sharding_size() if min_size is None else min_size
    fit = parse_policy(policy).rank is Rank.FIT
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    structure: Any = jax.tree.structure(tree)
    problems: list[Problem] = []
    specs = []
    for (path, leaf), spec in zip(pairs, structure.flatten_up_to(annotations), strict=True):
        shape = np.shape(leaf)
        if spec == () or (strict and (shape == () or np.prod(shape, dtype=int) < least)):
            specs.append(PartitionSpec())
            continue
        long = strict and len(spec.partitions) > len(shape)
        if long and not fit:
            problems.append(_too_long(path_text(path), spec, shape))
        specs.append(PartitionSpec(*spec.partitions[: len(shape)]) if long else spec)
    raise_problems(problems)
    return jax.tree.unflatten(structure, specs)


def _too_long(path: str, spec: PartitionSpec, shape: tuple[int, ...]) -> Problem:
    return Problem(
        error=RankMismatchError,
        what=f"the spec {spec} has {len(spec.partitions)} entries, and the array has shape {shape}",
        path=path,
        fix='write a separate rule for it before this one; policy="eformer" cuts the spec',
    )


def make_shard_and_gather_fns(
    partition_specs: Any, mesh: Mesh | None = None, *, policy: Policy | str | None = None
) -> tuple[Any, Any]:
    """Return two trees of functions: one places an array on the mesh, one moves it to the host.

    NumPy arrays are placed too. If there are several processes, all must hold equal data.

    Args:
      partition_specs: A tree of `PartitionSpec`s.
      mesh: Defaults to the current mesh.
      policy: See `with_sharding_constraint`. The policy of the ambient manager is read here, not in
        the calls.

    Raises:
      NoMeshError: There is no mesh.
      ShardingError: (From a call.) A spec does not fit the array.
    """
    target = current_mesh() if mesh is None else mesh
    if target is None:
        raise no_mesh()
    parsed = parse_policy(policy)
    collect = jax.jit(lambda x: x, out_shardings=NamedSharding(target, PartitionSpec()))

    def shard_fn(sharding: NamedSharding) -> Callable[[Any], Any]:
        return functools.partial(with_sharding_constraint, sharding=sharding, policy=parsed)

    def gather_fn(_: NamedSharding) -> Callable[[Any], Any]:
        return lambda x: jax.device_get(collect(x))

    shardings = jax.tree.map(lambda spec: NamedSharding(target, spec), partition_specs)
    return jax.tree.map(shard_fn, shardings), jax.tree.map(gather_fn, shardings)


def extract_shardings(tree: Any, mesh: Mesh | None = None) -> Any:
    """Return the `NamedSharding` of each leaf, or None.

    If the sharding of a leaf is a bare `PartitionSpec`, it is used on the mesh, by default the
    current mesh.

    Raises:
      NoMeshError: A leaf has a bare spec, and there is no mesh.
    """

    def sharding_of(leaf: Any) -> NamedSharding | None:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, PartitionSpec):
            target = current_mesh() if mesh is None else mesh
            if target is None:
                raise no_mesh()
            return NamedSharding(target, sharding)
        return sharding if isinstance(sharding, NamedSharding) else None

    return jax.tree.map(sharding_of, tree)


def extract_sharding_structure(pytree: Any) -> Any:
    """Return the `NamedSharding` of each array, or None."""
    return jax.tree.map(lambda leaf: leaf.sharding if _named(leaf) else None, pytree)


get_shardings_with_structure = extract_sharding_structure


def _named(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and isinstance(leaf.sharding, NamedSharding)
    )


def get_partition_spec(tree: Any) -> Any:
    """Return the spec of each array. The spec of a number is `PartitionSpec()`.

    Raises:
      StrategyError: Leaves are not on a mesh. The error lists all of them.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    unplaced = [
        (path, leaf)
        for path, leaf in pairs
        if not isinstance(leaf, int | float) and not _named(leaf)
    ]
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"a {type(leaf).__name__} that is not on a mesh has no spec",
                path=path_text(path),
                fix="place it first, with shard or jax.device_put",
            )
            for path, leaf in unplaced
        ]
    )
    specs: list[Any] = [
        getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec()) for _, leaf in pairs
    ]
    return jax.tree.unflatten(structure, specs)


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Return the mesh axes that a spec, or a tree of specs, names: each once, in order."""
    return list(dict.fromkeys(_names(partition_specs)))


def _names(specs: Any) -> Iterable[str]:
    if isinstance(specs, str):
        yield specs
    elif specs is not None and specs is not PartitionSpec.UNCONSTRAINED:
        parts = specs.values() if isinstance(specs, dict) else specs
        if isinstance(specs, PartitionSpec):
            parts = specs.partitions
        for part in parts:
            yield from _names(part)
