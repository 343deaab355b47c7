"""`gather` inside `shard_map`: all-gather the shard of a weight into its `use` sharding.

`which_shard` determines which shard of the weight the value is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardwright import _jax
from shardwright.errors import ManualAxisError, Problem, raise_problems
from shardwright.manager import constraint
from shardwright.manager.constraint import Placement
from shardwright.manager.core import late_manual_problems
from shardwright.manager.which_shard import Inputs, Weight, find_split
from shardwright.resolution.decisions import DimDecision, Resolution
from shardwright.resolution.partition_specs import canonical_spec
from shardwright.resolution.problems import dim_problem
from shardwright.resolution.resolver import marked_manual


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """The all-gather of one dim.

    Attributes:
      dim: Position of the dim.
      axes: Mesh axes over which the dim is gathered, major first.
      sizes: Sizes of these mesh axes.
      order: If the gathered axes are not the minor ones, all mesh axes that split the dim: the
        shards then move before the all-gather. Else empty.
      moves: Pairs (source, destination) of positions along `order`, or empty. A permute with these
        pairs runs before the all-gather, so that the gathered parts are in order.
    """

    dim: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[str, ...] = ()
    moves: tuple[tuple[int, int], ...] = ()

    def __call__(self, w: Any) -> Any:
        """Gather a value."""
        if self.moves:
            w = jax.lax.ppermute(w, self.order, self.moves)
        # JAX's types say that the result still varies over the gathered axes. If it were invariant,
        # the transpose would be an all-reduce instead of a reduce-scatter.
        return jax.lax.all_gather(w, self.axes, axis=self.dim, tiled=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManualGather:
    """All steps of `gather` under Manual mesh axes, as a static value.

    `stored`, `between` and `use` are placements over the mesh axes that are not Manual. They are
    None if all mesh axes are Manual.

    Attributes:
      gathers: One all-gather per dim that is gathered over Manual mesh axes.
      stored: Placement of the shard as it is stored, and of its cotangent.
      between: Placement of the shard before the all-gathers.
      use: Placement of the result.
    """

    gathers: tuple[AllGather, ...]
    stored: Placement | None
    between: Placement | None
    use: Placement | None

    def __call__(self, w: Any) -> Any:
        """Gather a value: first over mesh axes that are not Manual, while the value is small."""
        if self.stored is None or self.between is None or self.use is None:
            constraint.check_kept(w)
            return self._all_gather(w)
        w = constraint.gather(w, self.between, self.stored)
        if not self.gathers:
            return w
        spec = self.between.spec
        # Call the all-gathers in a `shard_map` over the mesh axes that are not Manual. Otherwise,
        # if these are Auto, XLA gathers the value over them first; if they are Explicit, JAX cannot
        # transpose the all-gather.
        nested = _jax.call_shard_map(
            self._all_gather,
            mesh=None,
            in_specs=spec,
            out_specs=spec,
            check_vma=_jax.tracks_varying(),
        )
        return constraint.place(nested(w), self.use)

    def _all_gather(self, w: Any) -> Any:
        for all_gather in self.gathers:
            w = all_gather(w)
        return w


def plan_gather(
    weight: Weight, inputs: Inputs | None, *, mesh: Mesh | AbstractMesh
) -> ManualGather:
    """Return the steps from a value to the `use` sharding of its weight.

    Raises:
      ShardingError: See `find_split`.
      ManualAxisError: The used weight is sharded over a Manual mesh axis that does not split the
        value, or that is minor to an axis that is not Manual.
    """
    split = find_split(weight, inputs)
    shape = weight.whole(split)
    stored, use = weight.stored(shape), weight.use(shape)
    use.require()
    missing = [
        _not_split(use, decision, axis)
        for decision, axes in zip(use.decisions, split, strict=True)
        for axis in weight.over(decision)
        if axis not in axes
    ]
    raise_problems(missing, resolution=use)
    gathers = tuple(
        _all_gather_of(weight, decision, axes)
        for decision, axes in zip(use.decisions, split, strict=True)
        if set(axes) & set(decision.gathered)
    )
    ambient = _jax.ambient_mesh()
    kinds = set(() if ambient is None else ambient.axis_types)
    # If all mesh axes are Manual, JAX accepts only the constraint P(), so make no placement.
    if kinds == {AxisType.Manual}:
        return ManualGather(gathers=gathers, stored=None, between=None, use=None)
    raise_problems(late_manual_problems(_marked(use, weight)), resolution=use)
    use_spec = _marked(use, weight).require()
    gathered_dims = {all_gather.dim for all_gather in gathers}
    between = canonical_spec(
        [None if dim in gathered_dims else entry for dim, entry in enumerate(use_spec.partitions)]
    )

    def place(spec: PartitionSpec) -> Placement:
        return constraint.make_placement(spec, mesh, ambient)

    return ManualGather(
        gathers=gathers,
        stored=place(_marked(stored, weight).require()),
        between=place(between),
        use=place(use_spec),
    )


def _marked(resolution: Resolution, weight: Weight) -> Resolution:
    """Mark the Manual mesh axes of a resolution as applied, so that its spec does not have them."""
    decisions = marked_manual(resolution.decisions, weight.manual)
    return dataclasses.replace(resolution, decisions=decisions)


def _not_split(use: Resolution, decision: DimDecision, axis: str) -> Problem:
    return dim_problem(
        ManualAxisError,
        use,
        decision,
        f"{axis} is Manual here, and the value does not vary over it, "
        "but the used weight is sharded over it",
        mesh_axes=(axis,),
        fix=f"pass the weight to shard_map with a spec over {axis}, or annotate the dim EMPTY",
    )


def _all_gather_of(weight: Weight, decision: DimDecision, axes: tuple[str, ...]) -> AllGather:
    gathered = tuple(axis for axis in axes if axis in decision.gathered)
    sizes = tuple(weight.manual[axis] for axis in gathered)
    remaining = tuple(axis for axis in axes if axis not in gathered)
    order = (*remaining, *gathered)
    if order == axes:
        return AllGather(dim=decision.dim, axes=gathered, sizes=sizes)
    # Shards are numbered along `axes`. The position of a device along `order` is the number of the
    # shard that it needs.
    # For example, a dim over (fsdp, tp) of 2 * 2 is gathered over fsdp. Device (f, t) holds shard
    # 2f + t, and the devices of one t must hold 2t and 2t + 1 afterwards. So device (f, t) first
    # gets shard 2t + f.
    numbers = np.arange(weight.shards(axes)).reshape([weight.manual[axis] for axis in order])
    sources = numbers.transpose([order.index(axis) for axis in axes]).ravel()
    moves = tuple((int(source), position) for position, source in enumerate(sources))
    return AllGather(dim=decision.dim, axes=gathered, sizes=sizes, order=axes, moves=moves)
