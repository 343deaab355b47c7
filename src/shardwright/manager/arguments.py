"""What a manager is made of: rules from whatever states them, a mesh, and whether the two go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import MeshSpecError, StrategyError, raise_problems
from shardwright.manager import context
from shardwright.manager.problems import idle_mesh_axis, lost_mesh_axis
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.resolution.rules import AxisRules, Missing, foreign_mesh_axes, unnamed_mesh_axes


def compiled_rules(strategy: Any) -> AxisRules:
    """Return the rules of a `Strategy`, a `PartitionAxis` or compiled ones.

    Raises:
      StrategyError: it is none of them, or does not compile.
    """
    if isinstance(strategy, AxisRules):
        return strategy
    if isinstance(strategy, PartitionAxis):
        return strategy.compile()
    from shardwright.strategy.model import Strategy

    if not isinstance(strategy, Strategy):
        fix = "pass Strategy.load(path), Strategy.preset(name), AxisRules or a PartitionAxis"
        raise StrategyError(f"{strategy!r} is not a strategy", fix=fix)
    return strategy.compile()


def own_mesh(strategy: Any) -> Mesh | AbstractMesh:
    """Return the strategy's mesh, which starts the backend; of rules alone the ambient one.

    Raises:
      MeshSpecError: there is none.
    """
    if not isinstance(strategy, (AxisRules, PartitionAxis)):
        return strategy.make_mesh()  # type: ignore[no-any-return]
    ambient = None if _jax.in_trace() else jax.sharding.get_mesh()
    if ambient is None or ambient.empty:
        raise MeshSpecError("rules alone have no mesh", fix='pass mesh=create_mesh("dp:2,tp:4")')
    return ambient


def check_rules_on_mesh(rules: AxisRules, sizes: Mapping[str, int]) -> None:
    """Check that rules and a mesh name the same mesh axes, but for the standard ones.

    Raises:
      MeshMismatchError: a rule names a mesh axis that is neither standard nor in the mesh, or the mesh has one (of more than
        one device) that is neither standard nor idle nor named by any rule; not under `missing = "replicate"`.
    """
    if rules.policy.missing is Missing.REPLICATE:
        return  # Such a dim is dropped, and each resolution says so.
    named = (*rules.named_mesh_axes(), *rules.policy.idle)
    raise_problems([lost_mesh_axis(axis, sizes) for axis in foreign_mesh_axes(named, sizes)])
    raise_problems(
        [
            idle_mesh_axis(axis, sizes, rules.named_mesh_axes())
            for axis in unnamed_mesh_axes(rules, sizes)
        ]
    )


def jit_key(manager: Any) -> context.Key:
    """Return what JAX's caches know of a manager that is entered, made when it is first entered: equal for equal managers."""
    key = context.Key((manager.rules.fingerprint(), manager.mesh, manager.mode), repr(manager))
    object.__setattr__(manager, "_key", key)
    return key
