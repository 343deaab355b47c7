"""Trees of `PartitionSpec`s: from path rules, into functions, and back from arrays."""

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
    """Return a tree of specs: of the first rule whose pattern is found in the "/"-joined path.

    Args:
      rules: `(pattern, spec)` in order of precedence; patterns are searched (`re.search`).
      tree: arrays or anything else with a shape.
      min_size: arrays of fewer elements are replicated; None: what the environment variable MIN_SHARDING_SIZE says, else 16384.
      strict: check ranks, and replicate scalars whatever matches them; False: take the rules as they are.
      policy: with `rank = "fit"`, as in `"eformer"`, a spec longer than its array is cut; absent: what the entered manager's
        policy says, else it is an error.

    Raises:
      StrategyError: paths that no rule matches, or a bad pattern; all at once.
      RankMismatchError: a spec longer than its array; all at once.
    """
    matched = match_paths(tree, rules).annotations
    least = min_sharding_size() if min_size is None else min_size
    fit = parse_policy(policy).rank is Rank.FIT
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    structure: Any = jax.tree.structure(tree)
    problems: list[Problem] = []
    specs = []
    for (path, leaf), spec in zip(pairs, structure.flatten_up_to(matched), strict=True):
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
        what=f"the spec {spec} has {len(spec.partitions)} entries, the array has shape {shape}",
        path=path,
        fix='write a rule of its own before that one; policy="eformer" cuts the spec',
    )


def make_shard_and_gather_fns(
    partition_specs: Any, mesh: Mesh | None = None, *, policy: Policy | str | None = None
) -> tuple[Any, Any]:
    """Return two trees of functions like a tree of specs: one places an array on the mesh, one brings it to the host.

    NumPy arrays are placed too, in one process and in several (where all must hold equal data).

    Args:
      partition_specs: a tree of `PartitionSpec`s.
      mesh: absent: the mesh at hand.
      policy: see `with_sharding_constraint`; what the entered manager says is looked up here, not at the calls.

    Raises:
      NoMeshError: there is no mesh.
      ShardingError: (from a call) a spec that does not fit the array.
    """
    found = current_mesh() if mesh is None else mesh
    if found is None:
        raise no_mesh()
    said = parse_policy(policy)
    collect = jax.jit(lambda x: x, out_shardings=NamedSharding(found, PartitionSpec()))

    def shard_fn(sharding: NamedSharding) -> Callable[[Any], Any]:
        return functools.partial(with_sharding_constraint, sharding=sharding, policy=said)

    def gather_fn(_: NamedSharding) -> Callable[[Any], Any]:
        return lambda x: jax.device_get(collect(x))

    shardings = jax.tree.map(lambda spec: NamedSharding(found, spec), partition_specs)
    return jax.tree.map(shard_fn, shardings), jax.tree.map(gather_fn, shardings)


def extract_shardings(tree: Any, mesh: Mesh | None = None) -> Any:
    """Return the `NamedSharding` of each leaf, None where it has none.

    A leaf whose sharding is a bare `PartitionSpec` gets it on the mesh, by default the mesh at hand.

    Raises:
      NoMeshError: a bare spec, and no mesh.
    """

    def one(leaf: Any) -> NamedSharding | None:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, PartitionSpec):
            found = current_mesh() if mesh is None else mesh
            if found is None:
                raise no_mesh()
            return NamedSharding(found, sharding)
        return sharding if isinstance(sharding, NamedSharding) else None

    return jax.tree.map(one, tree)


def extract_sharding_structure(pytree: Any) -> Any:
    """Return the `NamedSharding` of each array, None where it has none."""
    return jax.tree.map(lambda leaf: leaf.sharding if _named(leaf) else None, pytree)


get_shardings_with_structure = extract_sharding_structure


def _named(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and isinstance(leaf.sharding, NamedSharding)
    )


def get_partition_spec(tree: Any) -> Any:
    """Return the spec of each array; numbers are replicated.

    Raises:
      StrategyError: leaves that lie on no mesh; all of them at once.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    lost = [
        (path, leaf)
        for path, leaf in pairs
        if not isinstance(leaf, int | float) and not _named(leaf)
    ]
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"a {type(leaf).__name__} that lies on no mesh has no spec",
                path=path_text(path),
                fix="place it first, with shard or jax.device_put",
            )
            for path, leaf in lost
        ]
    )
    specs: list[Any] = [
        getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec()) for _, leaf in pairs
    ]
    return jax.tree.unflatten(structure, specs)


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Return the mesh axes that a spec, or any nesting of dicts, lists and specs, names: each once, in order."""
    return list(dict.fromkeys(_names(partition_specs)))


def _names(specs: Any) -> Iterable[str]:
    if isinstance(specs, str):
        yield specs
    elif specs is not None and specs is not PartitionSpec.UNCONSTRAINED:
        parts = (
            specs.values()
            if isinstance(specs, dict)
            else specs.partitions
            if isinstance(specs, PartitionSpec)
            else specs
        )
        for one in parts:
            yield from _names(one)
