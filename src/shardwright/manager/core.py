"""`ManagerCore`: resolutions and shardings, for all methods of a manager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright.errors import (
    ManualAxisError,
    MeshMismatchError,
    Problem,
    StrategyError,
    raise_problems,
)
from shardwright.manager import constraint
from shardwright.mesh.build import MeshSizes
from shardwright.processes.compare import ProcessGroup, ProcessOptions, process_group
from shardwright.resolution.decisions import Outcome, Resolution
from shardwright.resolution.problems import decision_rule, dim_problem
from shardwright.resolution.recent import Recent
from shardwright.resolution.request import Request
from shardwright.resolution.resolver import explain_request
from shardwright.resolution.rules import AxisRules


class ManagerCore:
    """Resolve requests under one set of rules on one mesh. `PartitionManager` sets the attributes.

    Attributes:
      rules: Compiled rules.
      mesh: A mesh with devices, or an abstract one.
      mode: Mode of requests that do not have one, or None.
      name: Name of the strategy, or empty.
    """

    __slots__ = ()

    rules: AxisRules
    mesh: Mesh | AbstractMesh
    mode: str | None
    name: str
    _sizes: MeshSizes
    _uniform: bool  # whether all axes of the mesh have one axis type
    _options: ProcessOptions
    _met: bool  # whether an entry has already compared with the other processes
    _cache: Recent

    def answer(self, request: Request, ambient: AbstractMesh | None = None) -> Resolution:
        """Resolve a request. A spec that JAX cannot express on the mesh is a problem too.

        The rooms above call this method and not the resolver, so that a planning manager can record
        their requests.

        Args:
          request: The request.
          ambient: The ambient mesh, whose axis types apply. None means the manager's mesh.
        """
        resolution = explain_request(request.under(self.mode), self.rules, self._sizes)
        if resolution.spec is None or (ambient is None and self._uniform):
            return resolution
        mesh = self.mesh if ambient is None else ambient
        if len(set(mesh.axis_types)) == 1:
            return resolution
        problems = [*_order_problems(resolution, mesh), *late_manual_problems(resolution)]
        if not problems:
            return resolution
        refused: Resolution = self._cache.keep(
            ("refused", resolution), dataclasses.replace(resolution, problems=tuple(problems))
        )
        return refused

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the cached value of a key. If there is none, compute and cache it.

        Rooms above cache here what they derive from resolutions, so that no cache outlives the
        manager. At least the last 10,000 values are kept.

        Args:
          key: Key of the value. It starts with the name of the calling function.
          compute: Function that returns the value, which is not None.
        """
        value = self._cache[key]
        return self._cache.keep(key, compute()) if value is None else value

    def _group(self) -> ProcessGroup | None:
        """Return the processes to compare with: None for a local mesh, or under `agree=False`."""
        if isinstance(self.mesh, AbstractMesh) or not self.mesh.is_multi_process:
            return None
        return process_group(self.mesh) if self._options.agree else None

    def _sharding(self, resolution: Resolution, memory_kind: str | None = None) -> NamedSharding:
        """Return the sharding of a resolution. Equal specs give the identical object.

        Raises:
          ShardingError: The resolution has problems.
          StrategyError: A rule leaves a dim to the compiler.
        """
        spec = resolution.require()
        if PartitionSpec.UNCONSTRAINED in spec.partitions:
            raise_problems(needs_sharding(resolution), resolution=resolution)
        key = ("sharding", spec, memory_kind)
        known = self._cache[key]
        if known is None:
            known = self._cache.keep(key, NamedSharding(self.mesh, spec, memory_kind=memory_kind))
        sharding: NamedSharding = known
        return sharding

    def manual_axes(self, ambient: AbstractMesh | None) -> frozenset[str]:
        """Check that an ambient mesh is the manager's mesh, and return its Manual axes.

        Raises:
          MeshMismatchError: The ambient mesh has other names or sizes.
        """
        if ambient is None:
            return frozenset()
        if ambient.shape_tuple != self.mesh.shape_tuple:
            raise MeshMismatchError(
                f"the ambient mesh is {dict(ambient.shape_tuple)}, "
                f"the manager's mesh is {dict(self.mesh.shape_tuple)}",
                fix="enter the manager (with pm:) instead of another mesh, "
                "or build the manager on that mesh",
            )
        kinds = zip(ambient.axis_names, ambient.axis_types, strict=True)
        return frozenset(axis for axis, kind in kinds if kind is AxisType.Manual)


def needs_sharding(resolution: Resolution) -> list[Problem]:
    """Return a problem for each dim that a rule leaves to the compiler."""
    return [
        dim_problem(
            StrategyError,
            resolution,
            decision,
            '"?" leaves this dim to the compiler, but a sharding must decide every dim',
            fix='use shard or hint inside jit, or give the axis a rule without "?"',
        )
        for decision in resolution.decisions
        if decision.outcome is Outcome.UNCONSTRAINED
    ]


def _order_problems(resolution: Resolution, mesh: Mesh | AbstractMesh) -> list[Problem]:
    """Return a problem for each dim with an Auto mesh axis before an Explicit one."""
    assert resolution.spec is not None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    problems = {
        problem.dim: problem for problem in constraint.order_problems(resolution.spec, types)
    }
    return [
        dataclasses.replace(
            problems[decision.dim],
            path=resolution.path,
            axis=decision.label,
            rule=decision_rule(resolution, decision),
        )
        for decision in resolution.decisions
        if decision.dim in problems
    ]


def late_manual_problems(resolution: Resolution) -> list[Problem]:
    """Return a problem for each dim with a Manual mesh axis after one that is not Manual.

    `shard_map` has already split the array over the Manual axis, so the Manual axis is major.
    """
    return [
        dim_problem(
            ManualAxisError,
            resolution,
            decision,
            f"{_joined(decision.manual)} is Manual here and so comes first, "
            f"but the rule {_joined(decision.mesh_axes)} puts it later",
            mesh_axes=decision.mesh_axes,
            fix=f"shard_map over {_joined(decision.mesh_axes)}, "
            f"write {_joined(decision.manual)} first in the rule, or use hint",
        )
        for decision in resolution.decisions
        if decision.mesh_axes[: len(decision.manual)] != decision.manual
    ]


def _joined(mesh_axes: Sequence[str]) -> str:
    return "+".join(mesh_axes)
