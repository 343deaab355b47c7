"""What counts as an annotation, and the annotations that carry a shape: `ArraySpec` and `PartOf`.

An annotation is one of these:

- a tuple with one entry per dim: an axis string, `EMPTY`, a composite (a tuple of axes) or
  `merged(...)`; `()` for scalars;
- a layout, such as `ColumnWise`;
- an `ArraySpec`: shape, dtype and axes of an array that does not exist yet;
- a `PartOf`: the array is sharded like some dims of another array;
- an `Unreduced`: a sum over shards that the devices have not added yet;
- a literal `PartitionSpec`, if the spec is already known.

Pass `is_annotation` as `is_leaf` wherever a tree of annotations is walked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
from jax.sharding import PartitionSpec

from shardwright.errors import AxisConflictError, RankMismatchError, StrategyError
from shardwright.vocabulary.axes import EMPTY, LAYERS, Role, axis_label
from shardwright.vocabulary.integers import as_integer, quoted, read_integer
from shardwright.vocabulary.layouts import StackedLayout, is_layout

# `mode_of_layout` and `merged` stay importable from here for one release.
from shardwright.vocabulary.lowering import (
    Dim,
    Lowered,
    SizedAnnotation,
    as_shape,
    describe,
    lower,
    mode_of_layout,  # noqa: F401
    spec_entries,
)
from shardwright.vocabulary.merged_dims import (
    MergedDim,
    merged,
)

Initializer = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec(SizedAnnotation):
    """An array that does not exist yet: a `jax.ShapeDtypeStruct` with its axes and its initializer.

    Attributes:
      shape: Global shape.
      dtype: Anything that `jax.numpy.dtype` takes.
      axes: Annotation of the array, such as a layout or a tuple of axes.
      init: Function `init(key, shape, dtype)`, as in `jax.nn.initializers`, or None if the array is
        never initialized.

    Raises:
      RankMismatchError: `shape` is not a tuple of sizes, or the axes do not fit its rank.
      StrategyError: `dtype` is not a dtype of JAX.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: Any
    init: Initializer | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape))
        try:
            # JAX decides what is a dtype. `jnp.dtype` would refuse the dtypes of PRNG keys.
            jax.ShapeDtypeStruct(self.shape, self.dtype)
        except TypeError as error:
            fix = "write one such as jnp.float32"
            raise StrategyError(f"{quoted(self.dtype)} is not a dtype", fix=fix) from error
        object.__setattr__(self, "axes", as_annotation(self.axes))
        lower(self.axes, self.shape)

    @property
    def ndim(self) -> int:
        """Rank."""
        return len(self.shape)

    def lowered(self, shape: Sequence[int] | None) -> Lowered:
        """Check that `shape` is the shape of this `ArraySpec`, and return the dims of its axes."""
        if shape is not None and tuple(shape) != self.shape:
            what = f"the array has shape {tuple(shape)}, its ArraySpec has {self.shape}"
            raise RankMismatchError(what, fix="give the array and its ArraySpec the same shape")
        return lower(self.axes, self.shape)

    def described(self) -> str:
        """Return the axes as text for messages."""
        return describe(self.axes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartOf(SizedAnnotation):
    """An annotation that shards an array (the part) like some dims of another array (the whole).

    A part is, for example, a moment, a scale or one matrix of a low-rank pair. The whole array is
    resolved first, under its own path. Each dim of the part then has the mesh axes of the dim that
    it follows, so the two shardings always agree.

    Attributes:
      annotation: The whole array's annotation.
      shape: The whole array's shape.
      dims: For each dim of the part, the dim of the whole that it follows; None for a dim that is
        not sharded. A dim of the part may be shorter than the dim that it follows (a number of
        blocks, for instance), but never longer.
      path: The whole array's path.

    Raises:
      RankMismatchError: The annotation does not fit the shape, or `dims` names a dim twice, or one
        that the whole does not have.
    """

    annotation: Any
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "annotation", as_annotation(self.annotation))
        object.__setattr__(self, "shape", as_shape(self.shape))
        lower(self.annotation, self.shape)
        is_sequence = isinstance(self.dims, (tuple, list))
        entries = [dim for dim in self.dims if dim is not None] if is_sequence else []
        followed = [dim for value in entries if (dim := as_integer(value)) is not None]
        in_range = all(0 <= dim < len(self.shape) for dim in followed)
        if not is_sequence or not in_range or len(set(followed)) != len(entries):
            what = f"dims={quoted(self.dims)} is not valid for {describe(self.annotation)} of rank "
            fix = "name each dim of the whole array at most once, and write None for a dim that "
            fix += "is not sharded"
            raise RankMismatchError(f"{what}{len(self.shape)}", path=self.path, fix=fix)
        dims = tuple(None if dim is None else as_integer(dim) for dim in self.dims)
        object.__setattr__(self, "dims", dims)

    def lowered(self, shape: Sequence[int] | None) -> Lowered:
        """Check the part's shape, and return the dims of the whole that the part follows."""
        whole = lower(self.annotation, self.shape)
        dims = tuple(Dim(axes=()) if of is None else whole.dims[of] for of in self.dims)
        if shape is not None and len(shape) != len(self.dims):
            what = f"{self.described()} has rank {len(self.dims)}, and the array has rank "
            what += f"{len(shape)}: shape {tuple(shape)}"
            fix = "write one entry per dim, None for a dim that is not sharded"
            raise RankMismatchError(what, fix=fix)
        for at, (of, size) in enumerate(zip(self.dims, shape or (), strict=False)):
            if of is not None and size > self.shape[of]:
                what = f"the part has size {size}, but dim {of} of {describe(self.annotation)}, "
                what += f"which it follows, has size {self.shape[of]}"
                fix = "pass the whole array's shape, or None for a dim that is not sharded: a "
                fix += "part is never larger than the whole"
                raise RankMismatchError(what, path=self.path, dim=at, size=size, fix=fix)
        return Lowered(dims=dims, mode=whole.mode, role=Role.PARAM)

    def described(self) -> str:
        """Return the annotation of the whole as text. If the part does not follow all dims of the
        whole in order, add the dims that it follows.
        """
        whole = describe(self.annotation)
        if self.dims == tuple(range(len(self.shape))):
            return whole
        dims = ", ".join("-" if of is None else str(of) for of in self.dims)
        return f"dims ({dims}) of {whole}"


@dataclasses.dataclass(frozen=True, slots=True)
class Unreduced(SizedAnnotation):
    """An annotation of a sum over shards that the devices have not added yet.

    Each device holds its own term of the sum. The next annotation of the value that is not an
    `Unreduced` adds the terms. So one all-reduce can add several sums. Only Explicit mesh axes can
    hold such a sum, because there the type of the value says that it is unreduced.

    >>> from shardwright.vocabulary.axes import BATCH, EMBED, MLP_INTERMEDIATE
    >>> Unreduced((BATCH, EMBED), over=MLP_INTERMEDIATE).described()
    '(BATCH, EMBED) unreduced over MLP_INTERMEDIATE'

    Attributes:
      axes: Annotation of the value: a tuple of axes, or a layout.
      over: The axis that was summed over, or a composite, or `merged` with its size. The sum stays
        unreduced over the mesh axes that this axis is sharded over.

    Raises:
      StrategyError: `axes` is neither a tuple nor a layout, or `over` is not an axis.
    """

    axes: Any
    over: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", as_annotation(self.axes))
        if isinstance(self.axes, (SizedAnnotation, PartitionSpec)):
            fix = "write axes, such as (BATCH, EMBED); P(..., unreduced={...}) for a literal spec"
            raise StrategyError(f"{describe(self.axes)} cannot be unreduced", path="axes", fix=fix)
        if not _is_dim(self.over):
            fix = "write the axis that was summed over, such as MLP_INTERMEDIATE"
            raise StrategyError(f"{quoted(self.over)} is not an axis", path="over", fix=fix)

    def lowered(self, shape: Sequence[int] | None) -> Lowered:
        """Return the dims of the value, and the dim that was summed over."""
        (over,) = lower((self.over,)).dims
        return dataclasses.replace(lower(self.axes, shape), unreduced=over)

    def described(self) -> str:
        """Return the axes, and the axis that was summed over, as text for messages."""
        return f"{describe(self.axes)} unreduced over {lower((self.over,)).dims[0].label}"


def _is_dim(entry: object) -> bool:
    return isinstance(entry, (str, MergedDim)) or (
        type(entry) is tuple and all(isinstance(axis, str) for axis in entry)
    )


def is_annotation(value: object) -> TypeGuard[Any]:
    """Tell whether a value is an annotation.

    Pass this function as `is_leaf` for every tree of annotations.

    >>> is_annotation(("__BATCH__", "_")), is_annotation(()), is_annotation(["__BATCH__"])
    (True, True, False)
    """
    if type(value) is tuple:
        # A plain loop is twice as fast as `all`, and this runs once per leaf of every tree.
        for entry in value:  # noqa: SIM110
            if type(entry) is not str and not _is_dim(entry):
                return False
        return True
    return isinstance(value, (SizedAnnotation, PartitionSpec)) or is_layout(value)


def is_tuple_of_annotations(value: object) -> bool:
    """Tell whether a tuple has two readings: one annotation of composites, or several annotations.

    >>> (
    ...     is_tuple_of_annotations((("__BATCH__", "__EMBED__"), ("__EMBED__",))),
    ...     is_tuple_of_annotations(("__BATCH__", "__EMBED__")),
    ... )
    (True, False)
    """
    return (
        type(value) is tuple
        and bool(value)
        and all(type(entry) is tuple and _is_dim(entry) for entry in value)
    )


def as_annotation(value: Any) -> Any:
    """Return a value as an annotation. A list becomes a tuple, because other libraries write lists.

    Raises:
      StrategyError: The value is not an annotation.
    """
    if type(value) is tuple and is_annotation(value):
        return value
    # An instance of a layout is a tuple too, and stays as it is.
    if isinstance(value, (list, tuple)) and not is_layout(value):
        return _frozen(value)
    if is_annotation(value):
        return value
    fix = "write a tuple of axes such as (BATCH, LENGTH, EMBED), a layout such as ColumnWise, or "
    fix += "an ArraySpec"
    if isinstance(value, dict):
        fix = "for a tree call shardings, or annotate each leaf by itself"
    raise StrategyError(f"{quoted(value)} is not an annotation", fix=fix)


def _frozen(entries: list[Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the entries of an annotation as a tuple."""
    frozen = tuple(map(_frozen_entry, entries))
    for position, entry in enumerate(frozen):
        if not _is_dim(entry):
            what = f"{quoted(entries)} is not an annotation: its entry {quoted(entry)} "
            fix = "use axis strings such as BATCH, or EMPTY"
            if entry is None:
                fix = "write EMPTY for a dim that is not sharded"
            what += "is not an axis, a tuple of axes or merged(...)"
            raise StrategyError(what, dim=position, fix=fix)
    return frozen


def _frozen_entry(entry: Any) -> Any:
    """Return one entry of an annotation, with a tuple in place of a list.

    A list of pairs, such as `[["HEAD", 8], …]` in TOML, becomes a merged dim.
    """
    if not isinstance(entry, (list, tuple)):
        return entry
    if entry and all(isinstance(member, list) and len(member) == 2 for member in entry):
        return merged(*(tuple(member) for member in entry))
    return tuple(entry)


def read_annotation(axes: tuple[Any, ...]) -> Any:
    """Return `*axes` as one annotation.

    The arguments are either the entries of the annotation, or one complete annotation.
    """
    return as_annotation(join_axes(axes))


def join_axes(axes: tuple[Any, ...]) -> Any:
    """Return `*axes` as one annotation, without the checks of `read_annotation`."""
    return axes[0] if len(axes) == 1 and not isinstance(axes[0], (str, MergedDim)) else axes


def tree_of_annotations(axes: tuple[Any, ...]) -> Any:
    """Return `*axes` as a tree of annotations.

    Several axes are one annotation, which applies to every leaf. A single value is the tree itself.
    """
    if not axes:
        return None
    if len(axes) == 1 and not isinstance(axes[0], (str, MergedDim)):
        return as_annotation(axes[0]) if is_axes_list(axes[0]) else axes[0]
    return as_annotation(axes)


def is_axes_list(value: object) -> bool:
    """Tell whether a list is one annotation written as a list, and not a list of annotations."""
    return isinstance(value, list) and any(isinstance(entry, (str, MergedDim)) for entry in value)


def stacked(annotation: Any, layers: int | None = None, *, axis: str = LAYERS) -> Any:
    """Put `LAYERS`, or another axis, in front of an annotation.

    For an `ArraySpec`, `layers` also becomes the first size of the shape, and each layer is
    initialized with a key of its own. A literal `PartitionSpec` gets an entry None for the layers.

    >>> from shardwright.vocabulary.axes import EMBED
    >>> stacked((EMBED, "_"))
    ('__LAYERS__', '__EMBED__', '_')

    Args:
      annotation: Annotation of one layer.
      layers: Number of layers. Required for an `ArraySpec` or a `PartOf`, not allowed for other
        annotations.
      axis: Axis of the new dim. With `EMPTY`, the new dim is not sharded, and the annotation may
        already be a stack of layers, for instance of the adapters of one user.

    Raises:
      StrategyError: `layers` is missing, not allowed or not a positive integer; a literal spec is
        reduced; or a layout is stacked along an axis of your own.
      AxisConflictError: The annotation is a stack of layers already.
    """
    single = as_annotation(annotation)
    if isinstance(single, SizedAnnotation) != (layers is not None):
        what = "layers= is required for an ArraySpec or a PartOf, and not allowed for other "
        fix = "write stacked(spec, layers=32), or stacked(axes)"
        raise StrategyError(f"{what}annotations", fix=fix)
    if isinstance(single, ArraySpec):
        init = None if single.init is None else _StackedInit(single.init)
        axes = single.axes
        if is_layout(axes) and axis == EMPTY:
            # A layout cannot state that the first dim has no axis. A `PartOf` can.
            axes = PartOf(annotation=axes, shape=single.shape, dims=(*range(single.ndim),))
        axes = stacked(axes, layers if isinstance(axes, PartOf) else None, axis=axis)
        return ArraySpec((_count(layers), *single.shape), single.dtype, axes, init)
    if isinstance(single, PartOf) and axis == EMPTY:
        _count(layers)
        return dataclasses.replace(single, dims=(None, *single.dims))
    if isinstance(single, PartOf):
        # The whole array is stacked too, so each of its dims moves by one.
        dims = (0, *(None if of is None else of + 1 for of in single.dims))
        shape = (_count(layers), *single.shape)
        whole = stacked(single.annotation, axis=axis)
        return PartOf(annotation=whole, shape=shape, dims=dims, path=single.path)
    if isinstance(single, PartitionSpec):
        return PartitionSpec(None, *spec_entries(single), unreduced=single.unreduced)
    is_stack = isinstance(single, StackedLayout) or (
        type(single) is tuple and single[:1] == (LAYERS,)
    )
    if is_stack and axis == LAYERS:
        what = f"{describe(single)} already starts with LAYERS"
        fix = "for a stack of stacks, pass axis=EMPTY, or an axis of your own"
        raise AxisConflictError(what, axis=axis_label(LAYERS), fix=fix)
    if type(single) is not tuple and axis != LAYERS:
        what = f"{describe(single)} cannot be stacked along {axis_label(axis)}"
        fix = "write all axes as a tuple that starts with it, or stack an ArraySpec along EMPTY"
        raise StrategyError(what, fix=fix)
    return StackedLayout(single) if is_layout(single) else (axis, *single)


def _count(layers: Any) -> int:
    fix = "pass the number of layers, as in stacked(spec, layers=32)"
    return read_integer("layers", layers, error=StrategyError, fix=fix)


@dataclasses.dataclass(frozen=True, slots=True)
class _StackedInit:
    """Initialize every layer of a stack with a key of its own."""

    # A class and not a closure, so that equal specs have equal initializers: `pm.init` compares
    # specs before it compiles again.
    init: Initializer

    def __call__(self, key: Any, shape: Sequence[int], dtype: Any) -> Any:
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda layer_key: self.init(layer_key, tuple(shape[1:]), dtype))(keys)
