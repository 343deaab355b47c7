"""`gather` under Manual mesh axes: which shard of a weight a value is, and the all-gather that makes it whole.

Sizes are local inside `shard_map`, but a weight is stored as its global shape resolves. So the global shape is found first:

1. The caller gives it: `gather(..., shape=)`.
2. JAX tracks which Manual mesh axes a value varies over (`check_vma=True`). One global shape fits them.
3. `pm.shard_map` knows the global shapes of its inputs.

Everything else follows from how that shape resolves, once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardwright import _jax
from shardwright.errors import raise_problems
from shardwright.manager import constraint
from shardwright.manager.constraint import Placement
from shardwright.manager.problems import (
    late_manual,
    not_a_shard,
    not_split,
    split_elsewhere,
    unknown_shard,
)
from shardwright.resolution.decisions import DimDecision, Outcome, Resolution
from shardwright.resolution.partition_specs import canonical_spec
from shardwright.resolution.resolver import marked_manual
from shardwright.vocabulary.annotations import Dim
from shardwright.vocabulary.axes import Role

# Mesh axes by dim, major first: over which Manual ones a value is split.
Split = tuple[tuple[str, ...], ...]

# How many ways to split one value are tried at most.
_MAX_TRIALS: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input of `pm.shard_map` inside its function: the axes of its dims, its local shape, and how it is split."""

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    split: Split


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of the `pm.shard_map` whose function is being traced.

    Attributes:
      mesh: the ambient mesh in that function; under another one the inputs say nothing.
      leaves: one `Input` per array.
    """

    mesh: AbstractMesh | None
    leaves: tuple[Input, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight, and the value that is to be gathered.

    Attributes:
      resolve: resolves a global shape for a role.
      dims: the lowered annotation's dims.
      local: shape of the value.
      shape: global shape, if the caller gave it.
      varying: Manual mesh axes that the value varies over, or None if JAX does not track them.
      manual: size of each Manual mesh axis that may shard a weight, in the order of the mesh.
      path: the weight's path, or empty.
    """

    resolve: Callable[[Role, tuple[int, ...]], Resolution]
    dims: tuple[Dim, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...] | None
    varying: frozenset[str] | None
    manual: Mapping[str, int]
    path: str

    def stored(self, shape: tuple[int, ...]) -> Resolution:
        """Return where a weight of this shape is stored."""
        return self.resolve(Role.PARAM, shape)

    def use(self, shape: tuple[int, ...]) -> Resolution:
        """Return where a weight of this shape is used."""
        return self.resolve(Role.USE, shape)

    def shards(self, axes: Sequence[str]) -> int:
        """Return the number of shards over some Manual mesh axes."""
        return math.prod(self.manual[axis] for axis in axes)

    def whole(self, split: Split) -> tuple[int, ...]:
        """Return the global shape of a value that is split so."""
        return tuple(size * self.shards(axes) for size, axes in zip(self.local, split, strict=True))

    def over(self, decision: DimDecision) -> tuple[str, ...]:
        """Return the Manual mesh axes among those of a decision."""
        return tuple(axis for axis in decision.mesh_axes if axis in self.manual)


# Which shard.


def find_split(weight: Weight, inputs: Inputs | None) -> Split:
    """Return the Manual mesh axes that split each dim of the value.

    Raises:
      ShapeRequiredError: neither `shape=`, nor the value, nor the inputs of `pm.shard_map` tell.
      RankMismatchError: the value is not a shard of a weight of the shape `shape=`.
      ManualAxisError: an input is split over mesh axes over which the weight is not stored.
      ShardingError: the weight's global shape does not resolve.
    """
    if weight.shape is not None:
        return _split_of_shape(weight, weight.shape)
    if (used := _gathered_before(weight, inputs)) is not None:
        return used
    if weight.varying is None:
        return _split_untracked(weight, inputs)
    fitting = _fitting(weight, [axis for axis in weight.manual if axis in weight.varying])
    most = max(map(_count, fitting))
    best = [split for split in fitting if _count(split) == most]
    return best[0] if len(best) == 1 else _split_of_input(weight, inputs, among=best)


def _count(split: Split) -> int:
    return sum(map(len, split))


def _split_untracked(weight: Weight, inputs: Inputs | None) -> Split:
    """Return the split under `check_vma=False`, where no value shows what it varies over."""
    nowhere: Split = ((),) * len(weight.local)
    fitting = _fitting(weight, list(weight.manual))
    gathers = any(
        axis in weight.manual
        for split in (nowhere, *fitting)
        for decision in weight.use(weight.whole(split)).decisions
        for axis in decision.gathered
    )
    # Where nothing is gathered, Manual axes are trusted, as `shard` trusts them.
    return _split_of_input(weight, inputs) if gathers else max(fitting, key=_count)


def _split_of_shape(weight: Weight, shape: tuple[int, ...]) -> Split:
    """Return the split that makes the local shape of the global one: over all, some or none of the stored mesh axes."""
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
            parts = [tuple(axis for axis in over if axis in weight.varying), ()]
        fits = [part for part in dict.fromkeys(parts) if local * weight.shards(part) == size]
        if len(fits) == 1:
            split.append(fits[0])
        else:
            problems.append(not_a_shard(stored, decision, local, over, fits))
    raise_problems(problems, resolution=stored)
    return tuple(split)


def _split_of_input(
    weight: Weight, inputs: Inputs | None, *, among: Sequence[Split] | None = None
) -> Split:
    """Return how the inputs of `pm.shard_map` with the weight's axes and local shape are split, if all agree."""
    known = {one.split for one in _like(weight, inputs) if among is None or one.split in among}
    if len(known) != 1:
        raise_problems([unknown_shard(weight.local, weight.path)])
    (split,) = known
    stored = weight.stored(weight.whole(split))
    stored.require()
    elsewhere = [
        split_elsewhere(stored, decision, axes)
        for decision, axes in zip(stored.decisions, split, strict=True)
        if axes != tuple(axis for axis in decision.mesh_axes if axis in axes)
    ]
    raise_problems(elsewhere, resolution=stored)
    return split


def _like(weight: Weight, inputs: Inputs | None) -> list[Input]:
    """Return the inputs with the weight's local shape and axes; those of literal specs only if no other has them."""
    same = [one for one in _here(inputs) if one.shape == weight.local]
    return _of_axes(weight, same) or [
        one for one in same if any(dim.literal is not None for dim in one.dims)
    ]


def _here(inputs: Inputs | None) -> tuple[Input, ...]:
    return inputs.leaves if inputs is not None and inputs.mesh == _jax.ambient_mesh() else ()


def _of_axes(weight: Weight, inputs: Sequence[Input]) -> list[Input]:
    names = [_axes_of(dim) for dim in weight.dims]
    return [one for one in inputs if [_axes_of(dim) for dim in one.dims] == names]


def _gathered_before(weight: Weight, inputs: Inputs | None) -> Split | None:
    """Return the split of a value that has the shape of an input once that is gathered, or None if it has not.

    A gathered value varies like its shard does, so JAX's tracking alone does not tell them apart.
    """
    alike = _of_axes(weight, _here(inputs))
    if any(one.shape == weight.local for one in alike):
        return None
    for one in alike:
        shape = tuple(
            size * weight.shards(axes) for size, axes in zip(one.shape, one.split, strict=True)
        )
        used = weight.use(shape).decisions
        kept = tuple(
            tuple(axis for axis in axes if axis in use.mesh_axes)
            for axes, use in zip(one.split, used, strict=True)
        )
        if weight.whole(kept) == shape:
            return kept
    return None


def _axes_of(dim: Dim) -> Any:
    """Return what a dim means: in a weight layout a parallelism axis stands for a semantic one."""
    return (dim.means,) if dim.means else dim.merged or dim.literal or dim.axes


def _fitting(weight: Weight, axes: list[str]) -> list[Split]:
    """Return every split over all or some of the axes that agrees with how the global shape, which it implies, resolves.

    Raises:
      ShardingError: no global shape resolves.
    """
    here = weight.stored(weight.local).decisions
    dims = [
        at for at in range(len(weight.local)) if not here or here[at].outcome is not Outcome.EMPTY
    ]
    if (len(dims) + 1) ** len(axes) > _MAX_TRIALS:
        raise_problems([unknown_shard(weight.local, weight.path)])
    fitting: list[Split] = []
    failed: list[Resolution] = []
    for homes in itertools.product([*dims, None], repeat=len(axes)):
        placed = list(zip(axes, homes, strict=True))
        trial = tuple(
            tuple(axis for axis, home in placed if home == at) for at in range(len(weight.local))
        )
        found = weight.stored(weight.whole(trial))
        split = tuple(
            tuple(axis for axis in decision.mesh_axes if axis in axes)
            for decision in found.decisions
        )
        if found.problems:
            failed.append(found)
        elif list(map(sorted, split)) == list(map(sorted, trial)):
            fitting.append(split)
    if not fitting:
        best = min(failed, key=lambda found: len(found.problems), default=None)
        raise_problems(
            [unknown_shard(weight.local, weight.path)] if best is None else best.problems,
            resolution=best,
        )
    return fitting


# What is done to it.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllGather:
    """The all-gather of one dim.

    Attributes:
      dim: the dim.
      axes: mesh axes that are gathered, major first.
      sizes: their sizes.
      order: mesh axes that split the dim, where some of `axes` come before others that stay; else empty.
      moves: (from, to) by position along `order`: each shard goes to where its neighbors are gathered.
    """

    dim: int
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    order: tuple[str, ...] = ()
    moves: tuple[tuple[int, int], ...] = ()

    def __call__(self, w: Any, *, beside_explicit: bool) -> Any:
        """Gather a value."""
        if self.moves:
            w = jax.lax.ppermute(w, self.order, self.moves)
        return _all_gather_beside_explicit(w, self) if beside_explicit else _all_gather(w, self)


def _all_gather(w: Any, one: AllGather) -> Any:
    return jax.lax.all_gather(w, one.axes, axis=one.dim, tiled=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _all_gather_beside_explicit(w: Any, one: AllGather) -> Any:
    """Beside Explicit mesh axes JAX cannot transpose an all-gather: the tangent is a sum, its transpose a sum and a slice."""
    return _all_gather(w, one)


@_all_gather_beside_explicit.defjvp
def _all_gather_jvp(one: AllGather, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _all_gather_beside_explicit(*primals, one), _sum_of_padded(*tangents, one)


@functools.partial(jax.jit, static_argnums=1)
def _sum_of_padded(x: Any, one: AllGather) -> Any:
    """Gather a value by a sum. Jitted, since an eager `zeros_like` loses the type over Explicit axes."""
    zeros = jnp.concatenate([jnp.zeros_like(x)] * math.prod(one.sizes), axis=one.dim)
    start = jax.lax.axis_index(one.axes) * x.shape[one.dim]
    summed = jax.lax.psum(
        jax.lax.dynamic_update_slice_in_dim(zeros, x, start, axis=one.dim), one.axes
    )
    return jax.lax.pcast(summed, one.axes, to="varying") if _jax.tracks_varying() else summed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManualGather:
    """Everything that `gather` does to a value under Manual mesh axes; static.

    Attributes:
      gathers: the dims that are gathered over Manual mesh axes.
      stored: where the shard lies over the other mesh axes, or None if all are Manual; its cotangent too.
      between: where it lies while it is gathered.
      use: where the result lies.
      beside_explicit: whether any of the other mesh axes is Explicit.
    """

    gathers: tuple[AllGather, ...]
    stored: Placement | None
    between: Placement | None
    use: Placement | None
    beside_explicit: bool

    def __call__(self, w: Any) -> Any:
        """Gather a value: over other mesh axes first, while it is small."""
        if self.stored is None or self.between is None or self.use is None:
            constraint.check_kept(w)
        else:
            w = constraint.gather(w, self.between, self.stored)
        for one in self.gathers:
            w = one(w, beside_explicit=self.beside_explicit)
        return constraint.place(w, self.use) if self.use is not None and self.gathers else w


def plan_gather(
    weight: Weight, inputs: Inputs | None, *, mesh: Mesh | AbstractMesh
) -> ManualGather:
    """Return how a value becomes the weight as it is used.

    Raises:
      ShardingError: see `find_split`.
      ManualAxisError: the use is sharded over a Manual mesh axis that does not split the value, or that cannot come first.
    """
    split = find_split(weight, inputs)
    shape = weight.whole(split)
    stored, use = weight.stored(shape), weight.use(shape)
    use.require()
    missing = [
        not_split(use, decision, axis, weight.path)
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
    if kinds == {AxisType.Manual}:
        return ManualGather(
            gathers=gathers, stored=None, between=None, use=None, beside_explicit=False
        )
    raise_problems(late_manual(_marked(use, weight)), resolution=use)
    rest = _marked(use, weight).require()
    whole = {one.dim for one in gathers}
    between = canonical_spec(
        [None if at in whole else entry for at, entry in enumerate(rest.partitions)]
    )

    def placed(spec: PartitionSpec) -> Placement:
        return constraint.make_placement(spec, mesh, ambient)

    return ManualGather(
        gathers=gathers,
        stored=placed(_marked(stored, weight).require()),
        between=placed(between),
        use=placed(rest),
        beside_explicit=AxisType.Explicit in kinds,
    )


def _marked(found: Resolution, weight: Weight) -> Resolution:
    """Return a resolution whose Manual mesh axes are marked as applied, so that its spec has the others."""
    return dataclasses.replace(found, decisions=marked_manual(found.decisions, weight.manual))


def _all_gather_of(weight: Weight, decision: DimDecision, axes: tuple[str, ...]) -> AllGather:
    gathered = tuple(axis for axis in axes if axis in decision.gathered)
    sizes = tuple(weight.manual[axis] for axis in gathered)
    kept = tuple(axis for axis in axes if axis not in gathered)
    if (*kept, *gathered) == axes:
        return AllGather(dim=decision.dim, axes=gathered, sizes=sizes)
    # Shards are numbered along `axes`. The one that belongs at a place has the place's number along (*kept, *gathered).
    order = (*kept, *gathered)
    numbers = np.arange(weight.shards(axes)).reshape([weight.manual[axis] for axis in order])
    wanted = numbers.transpose([order.index(axis) for axis in axes]).ravel()
    moves = tuple((int(source), place) for place, source in enumerate(wanted))
    return AllGather(dim=decision.dim, axes=gathered, sizes=sizes, order=axes, moves=moves)
