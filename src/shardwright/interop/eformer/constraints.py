"""Constraints by literal `PartitionSpec`s."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright.errors import StrategyError, did_you_mean
from shardwright.interop.eformer.axis import without_repeats
from shardwright.interop.eformer.environment import default_policy, log_sharding_move
from shardwright.interop.eformer.errors import WrongTypeError
from shardwright.interop.eformer.meshes import current_mesh, no_mesh
from shardwright.manager import context, manager
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
from shardwright.vocabulary.axes import Role

_CHANGED = (
    Outcome.POLICY_MISSING,
    Outcome.POLICY_PREFIX,
    Outcome.POLICY_REPLICATE,
    Outcome.POLICY_DROP,
    Outcome.POLICY_FIRST_DIM,
)


def parse_policy(policy: Policy | str | None) -> Policy:
    """Return a policy, or the policy of a preset.

    None means the policy of the ambient manager. Without a manager it means the default policy:
    that of the environment variable `SHARDWRIGHT_EFORMER_POLICY`, or else the strict one.

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
    `ShapeDtypeStruct` gets the sharding. Without a mesh, a policy with `missing = "replicate"`,
    such as `"eformer"`, returns the arrays as they are. The function is also named `lax_reshard`.

    Args:
      arr: Arrays.
      sharding: One spec or sharding for all arrays.
      policy: What happens to a dim that does not fit. Defaults to the policy of the ambient
        manager, else to an error.

    Raises:
      NoMeshError: There is no mesh, and the policy is strict.
      ShardingError: The spec does not fit. The error lists the problems of all leaves.
    """
    mesh, spec = _mesh_and_spec(sharding)
    parsed = parse_policy(policy)
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


def _mesh_and_spec(sharding: Any) -> tuple[Mesh | AbstractMesh | None, PartitionSpec]:
    if isinstance(sharding, NamedSharding):
        if sharding.memory_kind not in (None, "device"):
            raise StrategyError(
                f"a constraint cannot have the memory kind {sharding.memory_kind!r}",
                fix="use jax.device_put",
            )
        return sharding.mesh, sharding.spec
    if not isinstance(sharding, PartitionSpec):
        raise WrongTypeError(
            f"{sharding!r} is neither a PartitionSpec nor a NamedSharding",
            fix='write PartitionSpec("dp", None)',
        )
    return current_mesh(), sharding


def _rules_for(mesh: Mesh | AbstractMesh, policy: Policy) -> AxisRules:
    """Return rules that allow literal specs to name all axes of a mesh."""
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

    The spec stays as written: it has one entry per dim, and mesh axes of size 1 stay.

    Args:
      shape: Shape of the array.
      partition_spec: A literal spec.
      raise_mesh_error: Whether a missing mesh is an error. If False, a replicated sharding on the
        empty mesh is returned.
      policy: What happens to a dim that does not fit; `"eformer"` replicates it. Defaults to the
        policy of the ambient manager, else to an error.

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
    entries = without_repeats([as_written(decision) for decision in resolution.decisions])
    return NamedSharding(
        mesh,
        PartitionSpec(*entries) if any(entry is not None for entry in entries) else PartitionSpec(),
    )


def as_written(decision: DimDecision) -> Any:
    """Return the entry of a dim as written, with axes of size 1, or as a policy changed it."""
    if decision.outcome in _CHANGED or decision.outcome is Outcome.UNCONSTRAINED:
        return decision.entry
    ones = {skip.mesh_axis for skip in decision.skipped if skip.reason is Reason.SIZE_ONE}
    applied = {*decision.mesh_axes, *ones} - {*decision.manual}
    text = "" if decision.rule is None else decision.rule.text
    names = tuple(name for name in text.split("+") if name in applied)
    return entry_of(names)
