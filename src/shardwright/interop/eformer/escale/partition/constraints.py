"""Constraints by literal `PartitionSpec`s, and trees of them, under the names of eformer."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright.errors import (
    Problem,
    RankMismatchError,
    StrategyError,
    did_you_mean,
    raise_problems,
)
from shardwright.interop.eformer import absent
from shardwright.interop.eformer.axis import without_repeats
from shardwright.interop.eformer.errors import WrongTypeError
from shardwright.interop.eformer.meshes import (
    get_axes_size_in_mesh,
    get_incontext_mesh,
    get_mesh_axis_names,
    get_mesh_axis_size,
    get_submesh_device_index,
    names_in_current_mesh,
    no_mesh,
)
from shardwright.interop.fjformer import get_names_from_partition_spec
from shardwright.manager import context, manager
from shardwright.manager.ambient import current_mesh
from shardwright.resolution import resolver
from shardwright.resolution.decisions import DimDecision, Outcome, Reason, Resolution, RuleRef
from shardwright.resolution.partition_specs import entry_of
from shardwright.resolution.rules import (
    POLICY_PRESETS,
    AxisRules,
    Conflict,
    Indivisible,
    Missing,
    Policy,
    Rank,
    Rule,
    build_rules,
)
from shardwright.trees.paths import match_paths, path_text
from shardwright.vocabulary.axes import AxisType, Role

__all__ = [
    "AxisType",
    "extract_sharding_structure",
    "extract_shardings",
    "get_axes_size_in_mesh",
    "get_corrected_named_sharding",
    "get_incontext_mesh",
    "get_mesh_axis_names",
    "get_mesh_axis_size",
    "get_names_from_partition_spec",
    "get_partition_spec",
    "get_shardings_with_structure",
    "get_submesh_device_index",
    "lax_reshard",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "names_in_current_mesh",
    "with_sharding_constraint",
]

POLICY_VARIABLE = "SHARDWRIGHT_EFORMER_POLICY"
_CHANGED = (
    Outcome.POLICY_MISSING,
    Outcome.POLICY_PREFIX,
    Outcome.POLICY_REPLICATE,
    Outcome.POLICY_DROP,
    Outcome.POLICY_FIRST_DIM,
)


def parse_policy(policy: Policy | str | None) -> Policy:
    """Return `policy` itself, or the policy of the preset that it names.

    None means the policy of the ambient manager. Without a manager, it means the policy that the
    environment variable `SHARDWRIGHT_EFORMER_POLICY` names, or else the strict policy.

    Raises:
      StrategyError: The preset is unknown.
    """
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        ambient = context.current()
        if ambient is not None:
            own: Policy = ambient.rules.policy
            return own
        policy = default_policy() or "strict"
    if policy not in POLICY_PRESETS:
        hint = did_you_mean(str(policy), POLICY_PRESETS)
        raise StrategyError(
            f"policy {policy!r} is not a preset",
            fix=f"{hint} presets are {', '.join(POLICY_PRESETS)}".strip(),
        )
    return POLICY_PRESETS[policy]


def is_strict(policy: Policy) -> bool:
    """Tell whether a policy makes every misfit an error."""
    return (policy.indivisible, policy.conflict, policy.missing, policy.rank) == (
        Indivisible.ERROR,
        Conflict.ERROR,
        Missing.SKIP,
        Rank.ERROR,
    )


def with_sharding_constraint(
    arr: Any, sharding: PartitionSpec | NamedSharding, *, policy: Policy | str | None = None
) -> Any:
    """Place an array, or every array of a tree, by a spec on the current mesh, or by a sharding.

    `P()` replicates, and UNCONSTRAINED leaves a dim to the compiler. NumPy arrays are placed too. A
    `ShapeDtypeStruct` gets the sharding. Without a mesh, the arrays are returned as they are if the
    policy has `missing = "replicate"`, as `"eformer"` has. The function is also named
    `lax_reshard`.

    Args:
      arr: Arrays.
      sharding: One spec or sharding for all arrays.
      policy: What happens to a dim that does not fit. Defaults to the policy of the ambient
        manager, else to that of `SHARDWRIGHT_EFORMER_POLICY`, else to an error.

    Raises:
      NoMeshError: There is no mesh, and the policy is strict.
      ShardingError: The spec does not fit. The error lists the problems of all leaves.
    """
    if not isinstance(sharding, (PartitionSpec, NamedSharding)):
        raise WrongTypeError(
            f"{sharding!r} is neither a PartitionSpec nor a NamedSharding",
            fix='write PartitionSpec("dp", None)',
        )
    mesh, spec = current_mesh(), sharding
    if isinstance(sharding, NamedSharding):
        mesh, spec = sharding.mesh, sharding.spec
        if sharding.memory_kind not in (None, "device"):
            raise StrategyError(
                f"a constraint cannot have the memory kind {sharding.memory_kind!r}",
                fix="use jax.device_put",
            )
    parsed = parse_policy(policy)
    # eformer ignores a constraint without a mesh.
    if mesh is None and parsed.missing is Missing.REPLICATE:
        return arr
    if mesh is None:
        raise no_mesh()
    native = manager.PartitionManager(_rules_for(mesh, parsed), mesh=mesh)
    warn_of_changes(native, arr, spec)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arr)):
        return native.shard(arr, spec)

    def place(leaf: Any, target: NamedSharding) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)
        return native.shard(leaf, spec)

    return jax.tree.map(place, arr, native.shardings(arr, spec, role=Role.ACTIVATION))


lax_reshard = with_sharding_constraint


def _rules_for(mesh: Mesh | AbstractMesh, policy: Policy) -> AxisRules:
    """Return rules that allow literal specs to name all axes of a mesh."""
    # The resolver knows only mesh axes that rules name, so this rule names all axes of the mesh.
    names = Rule(
        candidates=tuple((name,) for name in mesh.axis_names),
        ref=RuleRef(key="mesh", text=" | ".join(mesh.axis_names)),
    )
    return build_rules({"rules": {"__MESH__": names}}, user_axes=("__MESH__",), policy=policy)


def warn_of_changes(
    native: manager.PartitionManager, arrays: Any, annotation: Any, mode: str | None = None
) -> None:
    """If `LOG_SHARDING_MOVE` is set, warn of each array whose sharding a policy changes."""
    if log_sharding_move():
        for leaf in jax.tree.leaves(arrays):
            _warn(native.explain(annotation, mode=mode, shape=np.shape(leaf)))


def _warn(resolution: Resolution) -> None:
    changed = any(decision.outcome in _CHANGED for decision in resolution.decisions)
    if resolution.notes or changed:
        warnings.warn(f"the policy changed a sharding: {resolution}", stacklevel=4)


def get_corrected_named_sharding(
    shape: Sequence[int],
    partition_spec: PartitionSpec,
    raise_mesh_error: bool = True,
    *,
    policy: Policy | str | None = None,
) -> NamedSharding:
    """Return the sharding of a spec on the current mesh.

    The spec has one entry per dim, and keeps mesh axes of size 1.

    Args:
      shape: Shape of the array.
      partition_spec: A literal spec.
      raise_mesh_error: Whether a missing mesh is an error. If False, a replicated sharding on the
        empty mesh is returned.
      policy: What happens to a dim that does not fit; `"eformer"` replicates it. For the default,
        see `with_sharding_constraint`.

    Raises:
      NoMeshError: There is no mesh.
      ShardingError: The spec does not fit.
    """
    mesh = current_mesh()
    if mesh is None:
        if raise_mesh_error:
            raise no_mesh()
        return NamedSharding(Mesh(np.empty((), dtype=object), ()), PartitionSpec())
    resolution = resolver.resolve(
        partition_spec, _rules_for(mesh, parse_policy(policy)), mesh, shape=tuple(shape)
    )
    if log_sharding_move():
        _warn(resolution)
    # eformer keeps mesh axes of size 1 in the spec, but the resolver leaves them out. So take the
    # entries as written.
    entries = without_repeats([as_written(decision) for decision in resolution.decisions])
    return NamedSharding(
        mesh,
        PartitionSpec(*entries) if any(entry is not None for entry in entries) else PartitionSpec(),
    )


def as_written(decision: DimDecision) -> Any:
    """Return the entry of a dim: as a policy changed it, else as written.

    An entry as written includes mesh axes of size 1.
    """
    if decision.outcome in _CHANGED or decision.outcome is Outcome.UNCONSTRAINED:
        return decision.entry
    ones = {skip.mesh_axis for skip in decision.skipped if skip.reason is Reason.SIZE_ONE}
    applied = {*decision.mesh_axes, *ones} - {*decision.manual}
    text = "" if decision.rule is None else decision.rule.text
    names = tuple(name for name in text.split("+") if name in applied)
    return entry_of(names)


def match_partition_rules(
    rules: Sequence[tuple[str, PartitionSpec]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    policy: Policy | str | None = None,
) -> Any:
    """Return a tree of specs, chosen by path.

    The first rule whose pattern is found in the "/"-joined path decides.

    Args:
      rules: `(pattern, spec)` in order of precedence; patterns are searched (`re.search`).
      tree: Arrays, or anything else with a shape.
      min_size: Arrays with fewer elements are replicated. None reads the environment variable
        MIN_SHARDING_SIZE, which defaults to 16384.
      strict: Whether to check ranks, and to replicate scalars and small arrays whatever rule
        matches them. If False, the spec of the rule is used without any check.
      policy: A policy with `rank = "fit"`, such as `"eformer"`, cuts a spec longer than its array.
        For the default, see `with_sharding_constraint`.

    Raises:
      StrategyError: No rule matches a path, or a pattern is invalid. The error lists all such paths
        and patterns.
      RankMismatchError: A spec is longer than its array. The error lists all such specs.
    """
    annotations = match_paths(tree, rules).annotations
    smallest = min_sharding_size() if min_size is None else min_size
    # Under `strict`, eformer always cuts a spec that is longer than its array. Here, the spec is an
    # error unless the policy allows the cut.
    fit = parse_policy(policy).rank is Rank.FIT
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    structure: Any = jax.tree.structure(tree)
    problems: list[Problem] = []
    specs = []
    for (path, leaf), spec in zip(pairs, structure.flatten_up_to(annotations), strict=True):
        shape = np.shape(leaf)
        # eformer replicates scalars and small arrays even if the rule that matches says otherwise.
        if spec == () or (strict and (shape == () or np.prod(shape, dtype=int) < smallest)):
            specs.append(PartitionSpec())
            continue
        long = strict and len(spec.partitions) > len(shape)
        if long and not fit:
            what = f"the spec {spec} has {len(spec.partitions)} entries for shape {shape}"
            fix = 'write a rule for this array before this rule; policy="eformer" cuts the spec'
            problems.append(
                Problem(error=RankMismatchError, what=what, path=path_text(path), fix=fix)
            )
        specs.append(PartitionSpec(*spec.partitions[: len(shape)]) if long else spec)
    raise_problems(problems)
    return jax.tree.unflatten(structure, specs)


def make_shard_and_gather_fns(
    partition_specs: Any, mesh: Mesh | None = None, *, policy: Policy | str | None = None
) -> tuple[Any, Any]:
    """Return two trees of functions: shard functions and gather functions.

    A shard function places a JAX or NumPy array on the mesh. A gather function moves an array to
    the host. If there are several processes, all of them must pass equal data to a shard function.

    Args:
      partition_specs: A tree of `PartitionSpec`s.
      mesh: Defaults to the current mesh.
      policy: See `with_sharding_constraint`. The policy of the ambient manager is read when the
        functions are created, not when they are called.

    Raises:
      NoMeshError: There is no mesh.
      ShardingError: A shard function raises it: its spec does not fit the array.
    """
    target = current_mesh() if mesh is None else mesh
    if target is None:
        raise no_mesh()
    parsed = parse_policy(policy)
    # `device_get` needs all values in this process, so replicate them first, as eformer does.
    collect = jax.jit(lambda x: x, out_shardings=NamedSharding(target, PartitionSpec()))

    def shard_fn(sharding: NamedSharding) -> Callable[[Any], Any]:
        return functools.partial(with_sharding_constraint, sharding=sharding, policy=parsed)

    def gather_fn(_: NamedSharding) -> Callable[[Any], Any]:
        return lambda x: jax.device_get(collect(x))

    shardings = jax.tree.map(lambda spec: NamedSharding(target, spec), partition_specs)
    return jax.tree.map(shard_fn, shardings), jax.tree.map(gather_fn, shardings)


def extract_shardings(tree: Any, mesh: Mesh | None = None) -> Any:
    """Return the `NamedSharding` of each leaf, or None.

    If the sharding of a leaf is a bare `PartitionSpec`, the result has this spec on `mesh`, which
    defaults to the current mesh.

    Raises:
      NoMeshError: A leaf has a bare spec, and there is no mesh.
    """

    def sharding_of(leaf: Any) -> NamedSharding | None:
        sharding = getattr(leaf, "sharding", None)
        # A ShapeDtypeStruct keeps a bare spec if it was given one.
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
      StrategyError: Leaves are not on a mesh. The error lists all such leaves.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    unplaced = [
        (path, leaf)
        for path, leaf in pairs
        # As in eformer, a Python number has the spec of a replicated array.
        if not isinstance(leaf, int | float) and not _named(leaf)
    ]
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"a {type(leaf).__name__} that is not on a mesh has no spec",
                path=path_text(path),
                fix="place the array first, with shard or jax.device_put",
            )
            for path, leaf in unplaced
        ]
    )
    specs: list[Any] = [
        getattr(getattr(leaf, "sharding", None), "spec", PartitionSpec()) for _, leaf in pairs
    ]
    return jax.tree.unflatten(structure, specs)


def log_sharding_move() -> bool:
    """Tell whether `LOG_SHARDING_MOVE` asks for a warning when a policy changes a sharding."""
    return os.environ.get("LOG_SHARDING_MOVE", "false").lower() in ("true", "yes", "1", "on")


def min_sharding_size() -> int:
    """Return the number of elements in the environment variable `MIN_SHARDING_SIZE`.

    `match_partition_rules(min_size=None)` replicates smaller arrays.

    Raises:
      StrategyError: The variable is not a number.
    """
    text = os.environ.get("MIN_SHARDING_SIZE", "16384")
    try:
        return int(text)
    except ValueError as error:
        raise StrategyError(
            f"the environment variable MIN_SHARDING_SIZE is {text!r}",
            fix="set MIN_SHARDING_SIZE to a number of elements",
        ) from error


# Read the environment once: a later change would not affect programs that are already compiled.
@functools.cache
def default_policy() -> str:
    """Return the policy that the environment names, or an empty text if it names none.

    This policy is the default of managers and calls.

    Raises:
      StrategyError: The environment variable names no preset.
    """
    name = os.environ.get(POLICY_VARIABLE, "").strip().lower()
    if name and name not in POLICY_PRESETS:
        fix = f"set it to one of {', '.join(POLICY_PRESETS)}, or unset it"
        raise StrategyError(f"the environment variable {POLICY_VARIABLE} is {name!r}", fix=fix)
    return name


def __getattr__(name: str) -> Any:
    # eformer reads both variables at import. Here each access reads the environment.
    if name == "LOG_SHARDING_MOVE":
        return log_sharding_move()
    return min_sharding_size() if name == "MIN_SHARDING_SIZE" else getattr(absent, name)
