"""The sharding of a value at one point of a program, and the annotation that decided it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
from jax.sharding import AxisType, PartitionSpec

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.entries import Buffer
from shardwright.resolution.partition_specs import entry_names

# The mesh axes of each dim, major first. Mesh axes of size 1 never occur.
Dims: TypeAlias = tuple[tuple[str, ...], ...]
# In the target of a constraint, KEEP means that the sharding of the dim does not change.
KEEP: Final = ("*",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Why a mesh axis shards a dim.

    Attributes:
      axis: Semantic axis of the dim, or "" if the spec was written by hand.
      rule: The rule that chose the mesh axis, as text.
      source: Line of the annotation in the model, `model.py:12`.
      path: Path of the tensor, or "".
    """

    axis: str = ""
    rule: str = ""
    source: str = ""
    path: str = ""


UNKNOWN_ORIGIN = Origin()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedValue:
    """The sharding of one value of a program.

    Attributes:
      dims: Mesh axes of each dim.
      owed: Mesh axes over which the value is a partial sum that must still be added up.
      groups: Parts of `owed` over which XLA sums one after the other, since reductions and matmuls
        sum dim by dim. Empty means one group.
      sum_dtype: Element type of the terms of a partial sum, if the sum is converted later. XLA adds
        the terms before it converts the sum. Empty means the type of the value.
      widened_from: Element type that the value, or the terms of the sum, had before they were
        converted to a wider type. If the sum is converted back, it is added in this type.
      is_matmul: Whether the value is the result of a matmul. Compilers choose the layout of such
        results.
      runs: How often the value is computed. A loop-invariant value is computed once, because XLA
        moves it out of the loop.
      free: Whether every device can compute the value by itself, such as a constant or an iota.
        Such a value gets any sharding without a collective.
      origins: Mesh axis -> why it is in `dims` or `owed`.
      lookups: The lookups whose gradients the value adds up. For each: the ids of its equation (see
        `PlanStep.place`), and the mesh axes that shard its table, indices or rows.
      table_moves: If the value is a scatter into zeros that is then added to another value: the
        moves of this other value, as pairs of shardings. XLA scatters into the other value instead
        of the zeros, so it moves the other value as it would move the zeros.
      summed: If the value was a partial sum: kinds and mesh axes of the collectives that completed
        the sum.
      buffer: Its memory. None for constants, which need no memory. Also None if the walk does not
        count memory.
    """

    dims: Dims
    owed: frozenset[str] = frozenset()
    groups: tuple[frozenset[str], ...] = ()
    sum_dtype: str = ""
    widened_from: str = ""
    is_matmul: bool = False
    runs: int = 1
    free: bool = False
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    lookups: frozenset[tuple[tuple[int, ...], frozenset[str]]] = frozenset()
    table_moves: tuple[tuple[Dims, Dims], ...] = ()
    summed: tuple[tuple[Kind, tuple[str, ...]], ...] = ()
    buffer: Buffer | None = None

    @property
    def mesh_axes(self) -> frozenset[str]:
        """Mesh axes that shard some dim."""
        return axes_of(self.dims)

    def with_dims(self, dims: Iterable[Iterable[str]]) -> ShardedValue:
        """Return the value with other `dims`. All other fields stay."""
        return dataclasses.replace(self, dims=tuple(tuple(dim) for dim in dims))

    def pruned(self) -> ShardedValue:
        """Return the value, without origins of mesh axes that are in neither `dims` nor `owed`."""
        held = self.mesh_axes | self.owed
        if held >= self.origins.keys():
            return self
        origins = {axis: origin for axis, origin in self.origins.items() if axis in held}
        return dataclasses.replace(self, origins=origins)


def replicated(ndim: int) -> ShardedValue:
    """Return a value that is replicated."""
    return ShardedValue(dims=((),) * ndim)


def anywhere(ndim: int) -> ShardedValue:
    """Return a value that every device can compute by itself."""
    return ShardedValue(dims=((),) * ndim, free=True)


def dims_of_spec(spec: Sequence[Any], ndim: int, sizes: Mapping[str, int]) -> Dims:
    """Return the mesh axes of each dim in a PartitionSpec, without mesh axes of size 1.

    Args:
      spec: Entries of a PartitionSpec. An unconstrained entry becomes `KEEP`.
      ndim: Rank of the value.
      sizes: Size of each mesh axis that has more than one device.
    """
    entries = [*spec, *[None] * (ndim - len(spec))]
    return tuple(
        KEEP
        if entry is PartitionSpec.UNCONSTRAINED
        else tuple(name for name in entry_names(entry) if name in sizes)
        for entry in entries
    )


def on_host(aval: Any) -> bool:
    """Tell whether values of a type are in the memory of the host."""
    # A token has no memory space.
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def explicit_axes(aval: Any) -> frozenset[str]:
    """Return the Explicit mesh axes of a type. Over these, the type has a sharding."""
    # A token has no sharding.
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return frozenset()
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    return frozenset(axis for axis, kind in kinds if kind is AxisType.Explicit)


def typed_dims(aval: Any, dims: Dims, sizes: Mapping[str, int]) -> Dims:
    """Return `dims` with the Explicit mesh axes of a type, in front of the Auto mesh axes."""
    explicit = explicit_axes(aval)
    if not explicit:
        return dims
    own = dims_of_spec(aval.sharding.spec.partitions, aval.ndim, sizes)
    return tuple(
        (*typed, *(axis for axis in held if axis not in explicit))
        for typed, held in zip(own, dims, strict=True)
    )


def with_kept(dims: Dims, current: Dims) -> Dims:
    """Return `dims`, with each `KEEP` replaced by the mesh axes that the value has in this dim."""
    if KEEP not in dims:
        return dims
    used = axes_of(dims)
    return tuple(
        # A mesh axis may shard only one dim. So dims that the constraint decides get their mesh
        # axes first.
        tuple(axis for axis in held if axis not in used) if axes == KEEP else axes
        for axes, held in zip(dims, current, strict=True)
    )


def axes_of(dims: Dims) -> frozenset[str]:
    """Return the mesh axes that shard some dim."""
    return frozenset(axis for axes in dims for axis in axes)


def shards(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number of shards along mesh axes."""
    return math.prod(map(sizes.__getitem__, axes))


def local_elements(shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]) -> int:
    """Return the number of elements on one device. A dim that does not divide is padded."""
    return math.prod(
        -(-size // shards(axes, sizes)) for size, axes in zip(shape, dims, strict=True)
    )


def most_runs(values: Iterable[ShardedValue]) -> int:
    """Return how often an equation with these operands runs."""
    return max((value.runs for value in values), default=1)


def merged_origins(values: Iterable[ShardedValue]) -> dict[str, Origin]:
    """Merge the origins of values. For each mesh axis, prefer an origin with a semantic axis."""
    origins: dict[str, Origin] = {}
    for value in values:
        for axis, origin in value.origins.items():
            if not origins.get(axis, UNKNOWN_ORIGIN).axis:
                origins[axis] = origin
    return origins
