"""`WeightMethods`: how a manager gathers stored weights into the sharding that computation uses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardwright import _jax
from shardwright.errors import Problem, RankMismatchError, StrategyError, raise_problems
from shardwright.manager import constraint, context, manual_gather
from shardwright.manager.constraint import Placement
from shardwright.manager.core import ManagerCore
from shardwright.manager.trees import map_leaves
from shardwright.manager.which_shard import Weight
from shardwright.resolution.request import Request, lower_local
from shardwright.resolution.rules import AxisRules
from shardwright.trees import annotated
from shardwright.vocabulary.annotations import (
    ArraySpec,
    PartOf,
    read_annotation,
    tree_of_annotations,
)
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import as_shape, lower


class WeightMethods(ManagerCore):
    """Gather weights where they are used."""

    __slots__ = ()

    def gather(
        self,
        w: Any,
        *axes: Any,
        path: str | None = None,
        mode: str | None = None,
        shape: Any = None,
    ) -> Any:
        """Gather a stored weight, or a tree of them, into the sharding that computation uses.

        The weight is constrained to its `use` sharding, and its gradient to its `param` sharding.
        Inside `shard_map` this is an all-gather of the shard, whose transpose is a reduce-scatter.
        `gather` has derivatives of any order.

        Args:
          w: A weight, or a tree of weights.
          *axes: The annotation of `w`, as for `shard`.
          path: Path of the weight, required if a `[[tensors]]` entry may match it. For a tree, the
            path of the tree itself: "" at the root.
          mode: Runtime mode. Defaults to the manager's mode.
          shape: Global shape, or a tree of shapes. Required inside `shard_map` if the global shape
            cannot be inferred from the value.

        Raises:
          ShardingError: The annotation does not fit the weight, the rules or the mesh.
          StrategyError: `path` is None, and a `[[tensors]]` entry names an axis of the weight.
          ShapeRequiredError: Inside `shard_map`, it is unknown which shard of the weight `w` is.
          ManualAxisError: Inside `shard_map`, `w` is not split over the mesh axes of its use.
        """
        if _jax.is_array(w):
            return self._gather(w, Request(read_annotation(axes), shape, mode, None, path))
        prefix, shapes = f"{path}/" if path else "", iter(annotated.shapes_like(w, shape))

        def gather_leaf(leaf: annotated.Leaf) -> Any:
            leaf_path = None if path is None else prefix + leaf.path
            return self._gather(
                leaf.value, Request(leaf.annotation, next(shapes), mode, None, leaf_path)
            )

        return map_leaves(w, tree_of_annotations(axes), gather_leaf)

    def _gather(self, w: Any, request: Request) -> Any:
        """Gather one weight. The shape of the request is the caller's `shape`, or None."""
        local, ambient = np.shape(w), jax.sharding.get_abstract_mesh()
        annotation, shape = request.annotation, request.shape
        if isinstance(annotation, ArraySpec):
            shape = annotation.shape if shape is None else shape
            lower(annotation, as_shape(shape) if ambient.manual_axes else local)
            annotation = annotation.axes
        shape = None if shape is None else as_shape(shape)
        path = request.path and self.rules.tensors and request.path
        key: Any = ("gather", annotation, local, shape, request.mode, path, ambient)
        if ambient.manual_axes:
            request = request._replace(annotation=annotation, shape=shape)
            return self._gather_shard(w, request, key)
        if shape not in (None, local):
            raise_problems([_shape_problem(request, local)])
        placements = self._cache[key]
        if placements is None:
            request = request._replace(annotation=annotation)
            placements = [
                self._weight_placement(request.of(role, local)) for role in (Role.USE, Role.PARAM)
            ]
            self._cache.keep(key, placements)
        return constraint.gather(w, *placements)

    def _weight_placement(self, request: Request) -> Placement:
        ambient = _jax.ambient_mesh()
        self.manual_axes(ambient)  # checks the ambient mesh
        resolution = self.answer(request, ambient)
        spec = resolution.require()
        if request.path is None:
            raise_problems(path_required(request, self.rules), resolution=resolution)
        return constraint.make_placement(spec, self.mesh, ambient)

    def _gather_shard(self, w: Any, request: Request, key: Any) -> Any:
        """Gather a value inside `shard_map`. The plan is cached for values of the same kind."""
        varying = _jax.varying_axes(w) if _jax.tracks_varying() else None
        key = (*key, varying, context.INPUTS.value)
        plan = self._cache[key]
        if plan is None:
            plan = self._cache.keep(key, self._plan_gather(request, np.shape(w), varying))
        return plan(w)

    def _plan_gather(
        self, request: Request, local: tuple[int, ...], varying: frozenset[str] | None
    ) -> manual_gather.ManualGather:
        manual = self.manual_axes(_jax.ambient_mesh())
        dims = lower_local(request.annotation, local, self.rules)
        if request.path is None:
            raise_problems(path_required(request, self.rules, local=local))
        weight = Weight(
            resolve=lambda role, shape: self.answer(request.of(role, shape)),
            dims=dims,
            local=local,
            shape=None if request.shape is None else tuple(request.shape),
            varying=varying,
            manual={
                axis: size for axis, size in self._sizes.items() if axis in manual and size > 1
            },
            path=request.path or "",
        )
        return manual_gather.plan_gather(weight, context.INPUTS.value, mesh=self.mesh)


def path_required(
    request: Request, rules: AxisRules, *, local: tuple[int, ...] | None = None
) -> list[Problem]:
    """Return a problem if a `[[tensors]]` entry may match a weight whose path is not known.

    Args:
      request: The weight, without a path.
      rules: The manager's rules.
      local: Shape of the weight's shard inside `shard_map`. Defaults to the shape of the request.
    """
    annotation = request.annotation
    if not rules.tensors or (isinstance(annotation, PartOf) and annotation.path):
        return []
    if local is None:
        dims = request.dims(rules)
    else:
        dims = lower_local(annotation, local, rules)
    names = {name for dim in dims for name in (*dim.axes, dim.means)}
    covering = [
        (entry, rule) for entry in rules.tensors for axis, rule in entry.rules if axis in names
    ]
    return [
        Problem(
            error=StrategyError,
            what=f"[[tensors]] match = {entry.match!r} may match this weight, "
            "but its path is not known here",
            rule=str(rule.ref),
            fix='pass the path, gather(..., path="layers/mlp/up"), or path="" at the root; '
            "shard knows the paths of a tree's leaves",
        )
        for entry, rule in covering[:1]
    ]


def _shape_problem(request: Request, local: tuple[int, ...]) -> Problem:
    return Problem(
        error=RankMismatchError,
        what=f"the weight has shape {local}, but shape= is {as_shape(request.shape)}",
        path=request.path or "",
        fix="omit shape=, or pass the shape of the weight: outside shard_map every shape is global",
    )
