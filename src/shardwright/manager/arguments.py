"""Read the arguments of a manager, rules and a mesh, and check that they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardwright import _jax
from shardwright.errors import (
    MeshMismatchError,
    MeshSpecError,
    Problem,
    StrategyError,
    did_you_mean,
    raise_problems,
)
from shardwright.resolution.partition_axis import PartitionAxis
from shardwright.resolution.rules import AxisRules, Missing, foreign_mesh_axes, unnamed_mesh_axes
from shardwright.vocabulary.axes import STANDARD_MESH_AXES


def compiled_rules(strategy: Any) -> AxisRules:
    """Return the rules of a `Strategy` or a `PartitionAxis`. Return compiled rules unchanged.

    Raises:
      StrategyError: The value is none of these, or does not compile.
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


def mesh_for(strategy: Any, mesh: Any) -> Mesh | AbstractMesh:
    """Return the mesh of a manager: the mesh that is passed, the mesh of the strategy or, for rules
    alone, the ambient mesh.

    Building the mesh of a strategy starts the backend.

    Raises:
      MeshSpecError: There is no mesh, or what is passed is not a mesh.
    """
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    if mesh is not None:
        fix = 'pass create_mesh("dp:2,tp:4"), or abstract_mesh("dp:2,tp:4") to plan without devices'
        raise MeshSpecError(f"mesh={mesh!r} is neither a Mesh nor an AbstractMesh", fix=fix)
    if not isinstance(strategy, (AxisRules, PartitionAxis)):
        return strategy.make_mesh()  # type: ignore[no-any-return]
    # `get_mesh` raises an error inside a trace.
    ambient = None if _jax.in_trace() else jax.sharding.get_mesh()
    if ambient is None or ambient.empty:
        raise MeshSpecError("rules alone have no mesh", fix='pass mesh=create_mesh("dp:2,tp:4")')
    return ambient


def check_rules_on_mesh(rules: AxisRules, sizes: Mapping[str, int]) -> None:
    """Check that rules and a mesh name the same mesh axes, apart from the standard mesh axes.

    Nothing is checked under `missing = "replicate"`.

    Raises:
      MeshMismatchError: A rule names a mesh axis that is neither standard nor in the mesh. Or the
        mesh has an axis of more than one device that is neither standard nor idle nor named by any
        rule.
    """
    if rules.policy.missing is Missing.REPLICATE:
        return  # A dim is replicated over a missing axis, and each resolution records that.
    names = (*rules.named_mesh_axes(), *rules.policy.idle)
    # Presets name standard mesh axes that many meshes lack, so a missing standard axis is no error.
    problems = []
    for axis in foreign_mesh_axes(names, sizes):
        what = f"a rule names the mesh axis {axis!r}, which the mesh {dict(sizes)} does not have"
        known = ", ".join(dict.fromkeys([*sizes, *STANDARD_MESH_AXES]))
        fix = did_you_mean(axis, sizes) or f"add it to the mesh, or name one of {known}"
        problem = Problem(error=MeshMismatchError, what=what, mesh_axes=(axis,), fix=fix)
        problems.append(problem)
    named = ", ".join(rules.named_mesh_axes()) or "no mesh axis"
    is_axis = any(rule.ref.source == "PartitionAxis" for _, rule in rules.activations[0])
    # If no rule names a mesh axis, nothing can be sharded over it.
    for axis in unnamed_mesh_axes(rules, sizes):
        what = f"no rule names the mesh axis {axis}={sizes[axis]}, so everything would be "
        what += f"replicated over it; the rules name {named}"
        fix = (_NAME_IN_AXIS if is_axis else _NAME_IN_RULES).format(axis=axis)
        problem = Problem(error=MeshMismatchError, what=what, mesh_axes=(axis,), fix=fix)
        problems.append(problem)
    raise_problems(problems)


_NAME_IN_RULES = (
    'use {axis} in a rule, for instance batch = "{axis}", build the mesh with axes that the rules '
    'name, for instance jax.sharding.Mesh(mesh.devices, ("fsdp", "tp")), or declare that it is '
    'idle, [policy] idle = "{axis}"'
)
_NAME_IN_AXIS = (
    'name it in the PartitionAxis, for instance tensor_parallel_axis="{axis}", build the mesh with '
    'axes that it names, or declare that it is idle, by policy=sw.Policy(idle=("{axis}",)) of '
    "PartitionAxis.compile or of the PartitionManager of interop.eformer"
)
