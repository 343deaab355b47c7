"""Lower an annotation to its one internal form: a tuple of `Dim`s, one per dim of the array.

Lowering checks that an annotation and a shape fit each other. It uses neither rules nor a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.errors import RankMismatchError, ShapeRequiredError, StrategyError
from shardwright.vocabulary.axes import (
    EMPTY,
    HEAD,
    HEAD_DIM,
    KNOWN_AXES,
    KV_HEAD,
    KV_HEAD_DIM,
    LAYERS,
    PARALLELISM_AXES,
    SEMANTIC_AXES,
    UNCONSTRAINED,
    Role,
    axis_label,
    canonical_axis,
)
from shardwright.vocabulary.integers import quoted
from shardwright.vocabulary.layouts import DynamicShardingAxes, StackedLayout, is_layout
from shardwright.vocabulary.merged_dims import MergedDim
from shardwright.vocabulary.modes import MODE_DECODE, MODE_TRAIN

# A flat dim of heads and head dims is row-major. If the number of shards does not divide the number
# of heads, a shard would split a head.
_HEAD_DIM_OF = {HEAD: HEAD_DIM, KV_HEAD: KV_HEAD_DIM}
_HEAD_DIMS = frozenset(_HEAD_DIM_OF.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One dim of a lowered annotation.

    Attributes:
      axes: Canonical axes: several for a composite, none for `EMPTY`.
      semantic_axis: The axis that the parallelism axes of a weight layout stand for, or empty.
      merged: The members of a merged dim, or empty.
      literal: The mesh axes of a literal spec's entry (`("?",)` if unconstrained), or None.
      label: The axes as messages show them.
    """

    axes: tuple[str, ...]
    semantic_axis: str = ""
    merged: tuple[tuple[str, int], ...] = ()
    literal: tuple[str, ...] | None = None
    label: str = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.merged:
            label = "*".join([axis_label(axis) for axis, _ in self.merged])
        elif len(self.axes) == 1:
            label = axis_label(self.axes[0])
        else:
            label = "+".join([axis_label(axis) for axis in self.axes]) or EMPTY
        meaning = f" ({axis_label(self.semantic_axis)})" if self.semantic_axis else ""
        object.__setattr__(self, "label", label + meaning)

    @property
    def size(self) -> int | None:
        """The size of a merged dim; None for other dims."""
        return MergedDim(self.merged).size if self.merged else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A lowered annotation: its dims, and the mode and role of a layout.

    `unreduced` is the dim that was summed over if the devices have not added the sum yet, else
    None.
    """

    dims: tuple[Dim, ...]
    unreduced: Dim | None = None
    mode: str | int | None = None
    role: Role | None = None


class SizedAnnotation:
    """Base of annotations that know a shape, and that lower and describe themselves."""

    __slots__ = ()

    def lowered(self, shape: Sequence[int] | None) -> Lowered:
        """Return the dims. `shape` is the shape of the annotated array, or None if not known."""
        raise NotImplementedError

    def described(self) -> str:
        """Return the annotation as text for messages."""
        raise NotImplementedError


def lower(annotation: Any, shape: Sequence[int] | None = None) -> Lowered:
    """Lower an annotation to one `Dim` per dim of the array; check it against `shape` if given.

    Raises:
      RankMismatchError: The ranks differ, the size of a merged dim is not the product of its
        members, or a part is larger than its whole.
      StrategyError: A composite contains `EMPTY`, or a head axis together with its head dim; or a
        literal spec is reduced.
    """
    if isinstance(annotation, SizedAnnotation):
        return annotation.lowered(shape)
    if isinstance(annotation, PartitionSpec):
        # Sort the axes, because JAX keeps a set, and all processes must build the same program.
        axes = tuple(sorted(annotation.unreduced))
        unreduced = Dim(axes=(), literal=axes) if axes else None
        return Lowered(dims=_lower_spec(annotation, shape), unreduced=unreduced)
    if is_layout(annotation):
        lowered = _lower_layout(annotation, None if shape is None else len(shape))
    else:
        dims = [_DIMS.get(entry) or _lower_dim(entry, "") for entry in annotation]
        lowered = Lowered(dims=tuple(dims))
        # Single axes form no composite, so only the rank can be wrong.
        if KNOWN_AXES.issuperset(annotation) and (shape is None or len(shape) == len(dims)):
            return lowered
    # Check this first: several annotations that were passed as one also have a wrong rank, and the
    # message about the rank would not name the mistake.
    _check_composites(lowered.dims)
    if shape is not None:
        if len(lowered.dims) != len(shape):
            what = f"{describe(annotation)} has rank {len(lowered.dims)}, and the array has rank "
            what += f"{len(shape)}: shape {tuple(shape)}"
            raise RankMismatchError(what, fix=_rank_fix(annotation, lowered.dims, len(shape)))
        check_merged(lowered.dims, shape)
    return lowered


@functools.lru_cache(maxsize=4096)
def _lower_dim(entry: Any, semantic_axis: str) -> Dim:
    if isinstance(entry, MergedDim):
        # The first member is major: if it is sharded, a shard has whole blocks of later members.
        return Dim(axes=(entry.members[0][0],), merged=entry.members)
    names = entry if isinstance(entry, tuple) else (entry,)
    if entry == EMPTY:
        names = ()
    return Dim(
        axes=tuple(map(canonical_axis, names)),
        semantic_axis="" if semantic_axis == EMPTY else semantic_axis,
    )


# The `Dim` of each axis, ready for use, because most entries of annotations are a single axis.
_DIMS = {axis: Dim(axes=(axis,)) for axis in (*SEMANTIC_AXES, *PARALLELISM_AXES)}


def _lower_layout(annotation: Any, rank: int | None) -> Lowered:
    is_stacked = isinstance(annotation, StackedLayout)
    layout = annotation.layout if is_stacked else annotation
    if isinstance(layout, DynamicShardingAxes):
        dims, mode = layout[0], layout[1]
    else:
        dims, mode = layout.default_axes, layout.default_mode
    # Without a shape the rank is unknown. The spec of no dims, P(), replicates an array of any
    # rank.
    if layout.any_rank:
        return Lowered(dims=(Dim(axes=()),) * (rank or 0), mode=mode, role=layout.role)
    # EMPTY in place of a semantic axis means that the dim has no semantic axis.
    semantic_axes = layout.semantic_axes or (EMPTY,) * len(dims)
    lowered = tuple(_lower_dim(dim, axis) for dim, axis in zip(dims, semantic_axes, strict=True))
    # A weight layout also fits a stack of such weights, as `jax.lax.scan` over layers needs.
    if is_stacked or (layout.role is Role.PARAM and rank == len(dims) + 1):
        lowered = (Dim(axes=(LAYERS,)), *lowered)
    return Lowered(dims=lowered, mode=mode, role=layout.role)


def _lower_spec(spec: PartitionSpec, shape: Sequence[int] | None) -> tuple[Dim, ...]:
    entries = spec_entries(spec)
    if shape is not None and len(entries) > len(shape):
        what = f"the spec {spec} has {len(entries)} entries, and the array has rank {len(shape)}: "
        what += f"shape {tuple(shape)}"
        raise RankMismatchError(what, fix="write at most one entry per dim")
    # As in JAX, a spec may be shorter than the array. The other dims are replicated.
    entries += [None] * (len(shape or ()) - len(entries))
    return tuple(Dim(axes=(), literal=_literal(entry)) for entry in entries)


def spec_entries(spec: PartitionSpec) -> list[Any]:
    """Return the entries of a literal spec.

    Raises:
      StrategyError: The spec is reduced along a mesh axis.
    """
    if spec.reduced:
        names = ", ".join(sorted(spec.reduced))
        what = f"the literal spec is reduced along {names}, which an annotation cannot express"
        fix = (
            "annotate the array with the entries alone; to make it reduced, call jax.reshard with "
        )
        raise StrategyError(what, fix=f"{fix}the spec itself: later annotations keep it reduced")
    return list(spec.partitions)


def _literal(entry: Any) -> tuple[str, ...]:
    if entry is PartitionSpec.UNCONSTRAINED:
        # No mesh axis has this name, because the name has a meaning in rules.
        return (UNCONSTRAINED,)
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def describe(annotation: Any) -> str:
    """Return an annotation as text for messages: `ColumnWise`, `(BATCH, LENGTH)`."""
    if type(annotation) is tuple:
        dims = [_DIMS.get(entry) or _lower_dim(entry, "") for entry in annotation]
        return "(" + ", ".join([dim.label for dim in dims]) + ")"
    if isinstance(annotation, SizedAnnotation):
        return annotation.described()
    if isinstance(annotation, StackedLayout):
        return f"stacked({describe(annotation.layout)})"
    if isinstance(annotation, type):
        return annotation.__name__
    if isinstance(annotation, DynamicShardingAxes):
        axes = "" if annotation.named else describe(annotation[0])
        return type(annotation).__name__ + axes
    return str(annotation)


def spelled(annotation: Any) -> str:
    """Return axes as Python code: `((BATCH, QUERY_LENGTH), EMBED)`."""
    if type(annotation) is not tuple:
        return axis_label(annotation) if isinstance(annotation, str) else describe(annotation)
    entries = ", ".join(map(spelled, annotation))
    return f"({entries},)" if len(annotation) == 1 else f"({entries})"


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of ints; symbolic sizes of `jax.export` stay as they are.

    Raises:
      RankMismatchError: The value is not a shape, or has a negative size.
    """
    try:
        # `operator.index` refuses symbolic sizes. It also refuses floats, which `int` would cut.
        sizes = static = tuple(map(operator.index, shape))
    except TypeError as error:
        try:
            is_symbolic = _jax.is_symbolic
            sizes = tuple(each if is_symbolic(each) else operator.index(each) for each in shape)
        except TypeError:
            raise RankMismatchError(f"{quoted(shape)} is not a shape", fix=_SHAPE_FIX) from error
        # If it is unknown whether a symbolic size is negative, the comparison would raise an error.
        # So check only the static sizes.
        static = tuple(size for size in sizes if type(size) is int)
    if min(static, default=0) < 0:
        raise RankMismatchError(f"{sizes} has a negative size", fix=_SHAPE_FIX)
    return sizes


_SHAPE_FIX = "pass x.shape, or a tuple of sizes such as (8, 128)"


def _rank_fix(annotation: Any, dims: tuple[Dim, ...], rank: int) -> str:
    layout = annotation.layout if isinstance(annotation, StackedLayout) else annotation
    bias = layout.bias if is_layout(layout) else None
    name = describe(layout)
    # Callers often give the bias of a layer the layout of the weight.
    if bias is not None and rank == len(dims) - 1:
        return f"for its bias use {name}.bias; for a bias stacked over layers, stacked({name}.bias)"
    if rank == len(dims) + 1:
        # Python writes a tuple of one axis as (BATCH,).
        axes = name.removesuffix(")") + ",)" if len(dims) == 1 and name.startswith("(") else name
        return f"add the missing dim's axis, or EMPTY; for a stack of layers use stacked({axes})"
    return "write one axis per dim, EMPTY where a dim is not sharded"


def check_merged(dims: tuple[Dim, ...], shape: Sequence[int]) -> None:
    """Check that the size of every merged dim is the product of its members.

    Raises:
      RankMismatchError: A size is not this product.
    """
    for position, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if dim.merged and dim.size != size:
            product = " * ".join(f"{axis_label(axis)} {count}" for axis, count in dim.merged)
            what = f"size {size} is not {product} = {dim.size}"
            fix = "give merged(...) the sizes that were flattened into this dim"
            raise RankMismatchError(what, dim=position, axis=dim.label, size=size, fix=fix)


def _check_composites(dims: tuple[Dim, ...]) -> None:
    """Check that no composite contains `EMPTY`, or a head axis together with its head dim."""
    for position, dim in enumerate(dims):
        if len(dim.axes) <= 1 and dim.axes != (EMPTY,):
            continue
        heads = [axis_label(axis) for axis in dim.axes if axis in _HEAD_DIM_OF]
        head_dims = [axis_label(axis) for axis in dim.axes if axis in _HEAD_DIMS]
        if EMPTY in dim.axes:
            what = "a composite may not contain EMPTY: it is one dim over several axes"
            fix = "write EMPTY for a whole dim, or remove it from the composite; for one "
            fix += "annotation per array of a tuple, pass the arrays as a tuple"
        elif heads and head_dims:
            what = f"a composite of {heads[0]} and {head_dims[0]} could be split within a head"
            fix = f"annotate the flat dim as merged(({heads[0]}, heads), ({head_dims[0]}, head_dim"
            fix += ")); the number of heads must be a multiple of the number of shards"
        else:
            continue
        raise StrategyError(what, dim=position, axis=dim.label, fix=fix)


def mode_of_layout(mode: str | int, shape: Sequence[int] | None) -> str:
    """Return the mode of a layout. An integer d means decode if `shape[d] == 1`, else train.

    Raises:
      ShapeRequiredError: The mode is an integer, and no shape is given.
      RankMismatchError: The shape has no dim d.
    """
    if isinstance(mode, str):
        return mode
    what = f"the size of dim {mode} decides the layout's mode, and "
    if shape is None:
        raise ShapeRequiredError(f"{what}no shape is given", fix="pass mode= or shape=")
    if not -len(shape) <= mode < len(shape):
        raise RankMismatchError(f"{what}the array has shape {tuple(shape)}", fix="pass mode=")
    size = shape[mode]
    try:
        # Do not write `size == 1`: for a symbolic size of unknown value it is False, but `>=` and
        # `<` raise an error.
        return MODE_TRAIN if size >= 2 or size < 1 else MODE_DECODE
    except _jax.Inconclusive as error:
        raise ShapeRequiredError(f"{what}{size} may be 1 or not", fix="pass mode=") from error
