"""Find the mesh axes that a strategy gives to no tensor of a program.

In a program without experts, devices along `ep` would only repeat the work of others. So a search
leaves out meshes in which such an axis has a size above 1, unless the caller names the axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import abstract_mesh
from shardwright.plan.planner import Program, trace_program
from shardwright.plan.search.rank import read_annotations
from shardwright.plan.search.settings import MESH
from shardwright.plan.search.space import Space
from shardwright.plan.walk.equations import nested_jaxprs
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.request import ShardingRequest
from shardwright.resolution.rules import AxisRules, default_rule
from shardwright.vocabulary.axes import Role

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy


class UnusedAxes:
    """The unused mesh axes of each strategy of a space, for all programs together.

    Annotations are read from a trace on one device, because they do not depend on the mesh.
    """

    def __init__(self, space: Space, programs: Mapping[str, Program]) -> None:
        self._space = space
        self._programs = programs
        self._asked: dict[str, list[ShardingRequest]] = {}
        self._written: set[str] = set()
        self._known: dict[int, frozenset[str]] = {}

    def of(self, strategy: Strategy) -> frozenset[str]:
        """Return the unused mesh axes; none if the caller says which axes may vary."""
        if self._space.axes is not None:
            return frozenset()
        # The search keeps its strategies alive, so no id is reused.
        if id(strategy) not in self._known:
            used = self._used(strategy)
            # The user wants a pinned axis, even if no rule names it.
            used |= {key.removeprefix(MESH) for key in self._space.pins}
            self._known[id(strategy)] = frozenset(strategy.mesh) - used
        return self._known[id(strategy)]

    def _used(self, strategy: Strategy) -> set[str]:
        rules = strategy.compile()
        # `zero1` and `largest_dim` shard over mesh axes that no rule has to name.
        used = set(rules.policy.added_mesh_axes)
        for mode in self._programs:
            for request in self._requests(strategy, mode):
                used |= _mesh_axes(request, rules, mode)
        return used | self._written

    def _requests(self, strategy: Strategy, mode: str) -> list[ShardingRequest]:
        """Return the annotations of a program.

        Record the mesh axes that the program itself names.
        """
        # The annotations of a program do not depend on the strategy, so trace it once.
        if mode not in self._asked:
            sizes = dict.fromkeys(strategy.mesh, 1)
            mesh = abstract_mesh(sizes, axis_types=strategy.axis_types)
            manager = PartitionManager(strategy, mesh=mesh).for_mode(mode)
            with _jax.types_without_size_one():
                traced = trace_program(manager, self._programs[mode])
            asked = [each.request for each in read_annotations(traced)]
            self._asked[mode] = [*asked, *(known.request for known in traced.answers)]
            specs = [each.spec for each in traced.inputs if isinstance(each, NamedSharding)]
            for spec in (*specs, *_specs(traced.jaxpr)):
                self._written.update(name for entry in spec for name in entry_names(entry))
        return self._asked[mode]


def _specs(jaxpr: Any) -> Iterator[PartitionSpec]:
    """Yield the specs that a program writes by hand: in constraints and in `shard_map`."""
    for equation in jaxpr.eqns:
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if isinstance(sharding, NamedSharding):
            yield sharding.spec
        for name in ("in_specs", "out_specs"):
            yield from (each for each in equation.params.get(name, ()) if each is not None)
        for nested in nested_jaxprs(equation):
            yield from _specs(nested)


def _mesh_axes(request: ShardingRequest, rules: AxisRules, mode: str) -> set[str]:
    """Return the mesh axes that the rules name for an array, in any of its roles."""
    found: set[str] = set()
    for dim in request.dims(rules):
        found.update(dim.literal or ())
        for axis in (
            *dim.axes,
            *(name for name, _ in dim.merged),
            *filter(None, [dim.semantic_axis]),
        ):
            for role in Role:
                rule = rules.stated(axis, mode=mode, role=role, path=request.path)
                rule = rule or default_rule(axis)
                found.update(rule.mesh_axes if rule is not None else ())
    return found
