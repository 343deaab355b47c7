"""Inside `shard_map`, determine which mesh axes split a value that may be a shard of a weight.

The sharding of a weight depends on its global shape, but inside `shard_map` the value has only a
local shape. So the global shape is determined first, from one of these:

1. The caller passes it: `gather(..., shape=)`.
2. JAX tracks the Manual mesh axes that a value varies over (`check_vma=True`), and only one global
   shape fits these axes.
3. `pm.shard_map` knows the global shapes of its inputs. All inputs that could be the value must
   be split over the same mesh axes.

The global shape then resolves to the stored sharding and to the `use` sharding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jax.sharding import AbstractMesh

from shardwright import _jax
from shardwright.errors import (
    ManualAxisError,
    Problem,
    RankMismatchError,
    ShapeRequiredError,
    raise_problems,
)
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.problems import dim_problem
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import Dim

# For each dim, the Manual mesh axes that a value is split over, major first.
Split = tuple[tuple[str, ...], ...]

# At most this many ways to split one value are tried. Each trial resolves one shape. Six Manual
# mesh axes and a weight of rank 3 give 4**6 trials.
_MAX_TRIALS: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input of `pm.shard_map`, as the function receives it.

    Attributes:
      dims: The input's annotation as `Dim`s (see `vocabulary.lowering`).
      shape: Local shape.
      split: Manual mesh axes that split each dim.
    """

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    split: Split


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of the `pm.shard_map` whose function is being traced.

    Attributes:
      mesh: Ambient mesh in that function. Under another mesh, the inputs are ignored.
      leaves: One `Input` per array.
    """

    mesh: AbstractMesh | None
    leaves: tuple[Input, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight, and the value that is one shard of the weight or the whole weight.

    Attributes:
      resolve: Function of a role and a global shape that returns the resolution.
      dims: The annotation as `Dim`s, one per dim of the value.
      local: Shape of the value.
      shape: Global shape if the caller passed it, else None.
      varying: Manual mesh axes that the value varies over, or None if JAX does not track them.
      manual: Size of each Manual mesh axis that may shard a weight, in the order of the mesh.
      path: Path of the weight, or empty.
    """

    resolve: Callable[[Role, tuple[int, ...]], Resolution]
    dims: tuple[Dim, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...] | None
    varying: frozenset[str] | None
    manual: Mapping[str, int]
    path: str

    def stored(self, shape: tuple[int, ...]) -> Resolution:
        """Return the resolution of the stored weight, for a global shape."""
        return self.resolve(Role.PARAM, shape)

    def use(self, shape: tuple[int, ...]) -> Resolution:
        """Return the resolution of the used weight, for a global shape."""
        return self.resolve(Role.USE, shape)

    def shards(self, axes: Sequence[str]) -> int:
        """Return the number of shards over some Manual mesh axes."""
        return math.prod(self.manual[axis] for axis in axes)

    def whole(self, split: Split) -> tuple[int, ...]:
        """Return the global shape of the value if it has this split."""
        return tuple(size * self.shards(axes) for size, axes in zip(self.local, split, strict=True))

    def split_of(self, leaf: Input) -> Split:
        """Return the split of an input, without mesh axes of size 1."""
        return tuple(tuple(axis for axis in axes if axis in self.manual) for axes in leaf.split)

    def over(self, decision: DimDecision) -> tuple[str, ...]:
        """Return the Manual mesh axes of a decision."""
        return tuple(axis for axis in decision.mesh_axes if axis in self.manual)


def find_split(weight: Weight, inputs: Inputs | None) -> Split:
    """Return the Manual mesh axes that split each dim of the value.

    Raises:
      ShapeRequiredError: Neither `shape=`, nor the value, nor the inputs of `pm.shard_map`
        determine the split.
      RankMismatchError: The value is not a shard of a weight of the shape `shape=`.
      ManualAxisError: An input is split over mesh axes that do not shard the stored weight.
      ShardingError: The global shape of the weight does not resolve.
    """
    if weight.shape is not None:
        return _split_of_shape(weight, weight.shape)
    if (split := _split_if_gathered(weight, inputs)) is not None:
        return split
    if weight.varying is None:
        return _split_untracked(weight, inputs)
    fitting = _fitting(weight, [axis for axis in weight.manual if axis in weight.varying])
    # A value may vary over a mesh axis for another reason than its split, for instance because it
    # was added to an `axis_index`. Prefer the split that explains the largest number of axes.
    most = max(map(_count, fitting))
    best = [split for split in fitting if _count(split) == most]
    return best[0] if len(best) == 1 else _split_of_input(weight, inputs, among=best)


def _count(split: Split) -> int:
    return sum(map(len, split))


def _split_untracked(weight: Weight, inputs: Inputs | None) -> Split:
    """Return the split under `check_vma=False`, where JAX does not track varying axes."""
    nowhere: Split = ((),) * len(weight.local)
    fitting = _fitting(weight, list(weight.manual))
    gathers = any(
        axis in weight.manual
        for split in (nowhere, *fitting)
        for decision in weight.use(weight.whole(split)).decisions
        for axis in decision.gathered
    )
    # If nothing is gathered, assume a split over as many Manual axes as the rules allow. `shard`,
    # too, assumes that `shard_map` has applied the Manual axes.
    return _split_of_input(weight, inputs) if gathers else max(fitting, key=_count)


def _split_of_shape(weight: Weight, shape: tuple[int, ...]) -> Split:
    """Return the split that makes the local shape out of the global shape.

    Each dim may be split over all, some or none of the mesh axes over which it is stored.
    """
    stored = weight.stored(shape)
    stored.require()
    split, problems = [], []
    for decision, size, local in zip(stored.decisions, shape, weight.local, strict=True):
        over = weight.over(decision)
        if weight.varying is None:
            parts = [
                part
                for count in range(len(over), -1, -1)
                for part in itertools.combinations(over, count)
            ]
        else:
            # A gathered value still varies over the axes it was gathered over. So the dim may also
            # be whole.
            parts = [tuple(axis for axis in over if axis in weight.varying), ()]
        fits = [part for part in dict.fromkeys(parts) if local * weight.shards(part) == size]
        if len(fits) == 1:
            split.append(fits[0])
        else:
            problems.append(_not_a_shard(stored, decision, local, over, fits))
    raise_problems(problems, resolution=stored)
    return tuple(split)


def _split_of_input(
    weight: Weight, inputs: Inputs | None, *, among: Sequence[Split] | None = None
) -> Split:
    """Find the inputs of `pm.shard_map` that the value could be, and return their split.

    All of these inputs must have the same split.

    Args:
      weight: The weight.
      inputs: The inputs of `pm.shard_map`, or None outside of it.
      among: The possible splits. None means that every split is possible.
    """
    splits = dict.fromkeys(
        split
        for leaf in _candidates(weight, inputs)
        if (split := weight.split_of(leaf)) in (among or [split])
    )
    if len(splits) != 1:
        raise_problems([_unknown_shard(weight, tuple(splits))])
    (split,) = splits
    stored = weight.stored(weight.whole(split))
    stored.require()
    elsewhere = [
        _split_elsewhere(stored, decision, axes)
        for decision, axes in zip(stored.decisions, split, strict=True)
        if axes != tuple(axis for axis in decision.mesh_axes if axis in axes)
    ]
    raise_problems(elsewhere, resolution=stored)
    return split


def _candidates(weight: Weight, inputs: Inputs | None) -> list[Input]:
    """Return the inputs that the value could be: they have its shape, and axes that fit the weight.

    A dim that is annotated `EMPTY`, or with an entry of a `PartitionSpec`, fits any axis.
    """
    return [
        leaf
        for leaf in _current_inputs(inputs)
        if leaf.shape == weight.local
        and len(leaf.dims) == len(weight.dims)
        and all(
            dim.literal is not None
            or not (dim.axes or dim.merged)
            or _axes_of(dim) == _axes_of(weight_dim)
            for dim, weight_dim in zip(leaf.dims, weight.dims, strict=True)
        )
    ]


def _current_inputs(inputs: Inputs | None) -> tuple[Input, ...]:
    return inputs.leaves if inputs is not None and inputs.mesh == _jax.ambient_mesh() else ()


def _split_if_gathered(weight: Weight, inputs: Inputs | None) -> Split | None:
    """Return the split of the value if it has the shape of a gathered input, else None.

    A gathered value varies over the same mesh axes as its shard did, so the varying axes do not
    tell whether the value is gathered.
    """
    names = [_axes_of(dim) for dim in weight.dims]
    leaves = _current_inputs(inputs)
    same_axes = [leaf for leaf in leaves if [_axes_of(dim) for dim in leaf.dims] == names]
    if any(leaf.shape == weight.local for leaf in same_axes):
        return None
    for leaf in same_axes:
        split = weight.split_of(leaf)
        shape = tuple(
            size * weight.shards(axes) for size, axes in zip(leaf.shape, split, strict=True)
        )
        used = weight.use(shape).decisions
        use_split = tuple(
            tuple(axis for axis in axes if axis in decision.mesh_axes)
            for axes, decision in zip(split, used, strict=True)
        )
        if weight.whole(use_split) == shape:
            _refuse_other_splits(weight, inputs, use_split)
            return use_split
    return None


def _refuse_other_splits(weight: Weight, inputs: Inputs | None, split: Split) -> None:
    """Raise an error if the value may also be an input whose split is not `split`.

    If JAX tracks the axes that the value varies over, only an input that is split over the same
    axes may be the value.
    """
    splits = dict.fromkeys(weight.split_of(leaf) for leaf in _candidates(weight, inputs))
    if weight.varying is not None:
        varying = weight.varying & set(weight.manual)
        splits = {split: None for split in splits if set(itertools.chain(*split)) == varying}
    others = tuple(other for other in splits if weight.whole(other) != weight.whole(split))
    raise_problems([_unknown_shard(weight, (split, *others))] if others else [])


def _axes_of(dim: Dim) -> Any:
    """Return the axes of a dim, or the semantic axis that its parallelism axes stand for."""
    return (dim.semantic_axis,) if dim.semantic_axis else dim.merged or dim.literal or dim.axes


def _fitting(weight: Weight, axes: list[str]) -> list[Split]:
    """Return every split, over all or some of the axes, that agrees with the rules.

    A split and the local shape imply a global shape. The split agrees if the global shape resolves
    to the same split.

    Raises:
      ShardingError: No global shape resolves.
    """
    # EMPTY does not depend on sizes, so the local shape tells which dims are never split. Ignore
    # the problems of this resolution: the global shape may not have them.
    decisions = weight.stored(weight.local).decisions
    dims = [
        dim
        for dim in range(len(weight.local))
        if not decisions or decisions[dim].outcome is not Outcome.EMPTY
    ]
    if (len(dims) + 1) ** len(axes) > _MAX_TRIALS:
        raise_problems([_unknown_shard(weight)])
    fitting: list[Split] = []
    failed: list[Resolution] = []
    # Each axis splits one of the dims, or none.
    for choice in itertools.product([*dims, None], repeat=len(axes)):
        pairs = list(zip(axes, choice, strict=True))
        trial = tuple(
            tuple(axis for axis, chosen in pairs if chosen == dim)
            for dim in range(len(weight.local))
        )
        resolution = weight.stored(weight.whole(trial))
        split = tuple(
            tuple(axis for axis in decision.mesh_axes if axis in axes)
            for decision in resolution.decisions
        )
        if resolution.problems:
            failed.append(resolution)
        # A trial has the mesh axes in the order of the mesh, and `split` has them in the order of
        # the rule, major first. So compare without order, and keep `split`.
        elif list(map(sorted, split)) == list(map(sorted, trial)):
            fitting.append(split)
    if fitting:
        return fitting
    # The resolution with the fewest problems gives the most useful messages.
    best = min(failed, key=lambda resolution: len(resolution.problems), default=None)
    problems = [_unknown_shard(weight)] if best is None else best.problems
    raise_problems(problems, resolution=best)
    return []


def _not_a_shard(
    stored: Resolution,
    decision: DimDecision,
    local: int,
    over: Sequence[str],
    fits: Sequence[Sequence[str]],
) -> Problem:
    """Return the problem of a local size that is no shard of the global size, or for which several
    choices of mesh axes are possible.
    """
    if fits:
        ways = " or ".join("+".join(axes) for axes in fits)
        what = f"local size {local} of {decision.size} is a shard over {ways}"
        fix = (
            "pass the weight to shard_map with a spec over all mesh axes of its stored sharding, "
            "or use check_vma=True"
        )
    else:
        what = f"local size {local} is neither size {decision.size} nor a shard of it"
        what += f" over {'+'.join(over)}" if over else ""
        fix = (
            "pass the weight's global shape as shape=, "
            "and pass the weight to shard_map with its stored spec"
        )
    return dim_problem(RankMismatchError, stored, decision, what, size=local, fix=fix)


def _split_elsewhere(stored: Resolution, decision: DimDecision, axes: Sequence[str]) -> Problem:
    return dim_problem(
        ManualAxisError,
        stored,
        decision,
        f"the input is split over {'+'.join(axes)}, "
        f"the weight is stored over {'+'.join(decision.mesh_axes) or '-'}",
        mesh_axes=axes,
        fix="annotate the input of shard_map as a weight: "
        "with a weight layout, an ArraySpec, or the stored spec",
    )


def _unknown_shard(weight: Weight, splits: Sequence[Split] = ()) -> Problem:
    """Return the problem of a value whose global shape is unknown or ambiguous."""
    what = f"it is unknown which shard of the weight this value of shape {weight.local} is"
    shapes = dict.fromkeys(weight.whole(split) for split in splits)
    if len(shapes) > 1:
        what = (
            f"the value of shape {weight.local} can be a shard of inputs with different global "
            f"shapes: {' or '.join(map(str, shapes))}"
        )
    return Problem(
        error=ShapeRequiredError,
        what=what,
        path=weight.path,
        fix="pass the global shape as gather(..., shape=), or try check_vma=True",
    )
