"""What an annotation is, and its one lowered form: a tuple of `Dim`s.

An annotation is a layout, an `ArraySpec`, or a tuple of axis strings, `EMPTY`, composites and `merged(...)` dims;
`()` for scalars. A literal `PartitionSpec` may stand for one where the spec is already known, a `PartOf` where an array
lies as another one does.
`is_annotation` is the `is_leaf` wherever a tree of them is walked.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.errors import (
    AxisConflictError,
    RankMismatchError,
    ShapeRequiredError,
    StrategyError,
)
from shardwright.vocabulary.axes import (
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    LAYERS,
    UNCONSTRAINED,
    Role,
    axis_label,
    canonical_axis,
)
from shardwright.vocabulary.integers import as_integer, read_integer
from shardwright.vocabulary.layouts import DynamicShardingAxes
from shardwright.vocabulary.modes import MODE_DECODE, MODE_TRAIN

Initializer = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class MergedDim:
    """Axes flattened into one dim, major first, each with its own size; made by `merged`."""

    members: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of elements of the flattened dim."""
        return functools.reduce(lambda product, member: product * member[1], self.members, 1)


def merged(*members: tuple[str, int]) -> MergedDim:
    """Annotate one dim that flattens several axes; only the first may be sharded and its own size must divide.

    A flat `[embed, kv_heads * head_dim]` projection must not split a head:

    >>> from shardwright.vocabulary.axes import EMBED, KV_HEAD, KV_HEAD_DIM
    >>> kernel_axes = (EMBED, merged((KV_HEAD, 8), (KV_HEAD_DIM, 128)))

    Raises:
      StrategyError: no members, or a member that is not (axis, positive size).
    """
    for member in members:
        good = (
            isinstance(member, tuple)
            and len(member) == 2
            and isinstance(member[0], str)
            and as_integer(member[1]) is not None
        )
        if not good or member[1] < 1:
            what = "has no positive size" if good else "is not (axis, size)"
            raise StrategyError(
                f"merged: {member!r} {what}", fix="merged((KV_HEAD, 8), (KV_HEAD_DIM, 128))"
            )
    if not members:
        raise StrategyError(
            "merged needs at least one (axis, size)", fix="merged((KV_HEAD, 8), (KV_HEAD_DIM, 128))"
        )
    return MergedDim(tuple((canonical_axis(axis), operator.index(size)) for axis, size in members))


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of whole numbers, and of symbolic sizes of `jax.export` as they are.

    Raises:
      RankMismatchError: it is something else, or has a negative size.
    """
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError as error:
        try:
            sizes = tuple(
                size if _jax.is_symbolic(size) else operator.index(size) for size in shape
            )
        except TypeError:
            raise RankMismatchError(
                f"{_short(shape)} is not a shape",
                fix="pass x.shape, or a tuple of sizes such as (8, 128)",
            ) from error
    if any(type(size) is int and size < 0 for size in sizes):
        raise RankMismatchError(
            f"{sizes} has a negative size", fix="pass x.shape, or a tuple of sizes such as (8, 128)"
        )
    return sizes


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array that does not exist yet: what `jax.ShapeDtypeStruct` is, plus its axes and its initialiser.

    Attributes:
      shape: global shape.
      dtype: anything `jax.numpy.dtype` takes.
      axes: its annotation: a layout or a tuple of axes.
      init: called as `init(key, shape, dtype)`, like `jax.nn.initializers`; None if it is never initialised.

    Raises:
      RankMismatchError: the shape is none, or the axes do not fit its rank.
      StrategyError: the dtype is none.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: Any
    init: Initializer | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape))
        try:
            jax.ShapeDtypeStruct(self.shape, self.dtype)
        except TypeError as error:
            raise StrategyError(
                f"{_short(self.dtype)} is not a dtype", fix="write one such as jnp.float32"
            ) from error
        object.__setattr__(self, "axes", as_annotation(self.axes))
        lower(self.axes, self.shape)

    @property
    def ndim(self) -> int:
        """Rank."""
        return len(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StackedLayout:
    """A layout with `LAYERS` in front; made by `stacked`."""

    layout: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartOf:
    """An array that lies as some dims of another one do: a moment, a scale, one half of a low-rank pair.

    It stands wherever an annotation may. The whole array is resolved first, under its own path; its dims' mesh axes are then
    taken over as they are, so that both always fit together.

    Attributes:
      annotation: the whole array's annotation.
      shape: the whole array's shape.
      dims: for each dim of the part, the dim of the whole that it follows; None for a dim that is not sharded. A dim may be
        shorter than the one it follows, as the number of blocks is, never longer.
      path: the whole array's path.

    Raises:
      RankMismatchError: the annotation does not fit the shape, or has no such dim.
    """

    annotation: Any
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    path: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "annotation", as_annotation(self.annotation))
        object.__setattr__(self, "shape", as_shape(self.shape))
        lower(self.annotation, self.shape)
        if isinstance(self.dims, list):
            object.__setattr__(self, "dims", tuple(self.dims))
        is_tuple = isinstance(self.dims, tuple)
        given = [dim for dim in self.dims if dim is not None] if is_tuple else []
        followed = [dim for value in given if (dim := as_integer(value)) is not None]
        in_range = all(0 <= dim < len(self.shape) for dim in followed)
        if not is_tuple or not in_range or len(set(followed)) != len(given):
            raise RankMismatchError(
                f"dims {_short(self.dims)} of {describe(self.annotation)}, which has {len(self.shape)}",
                path=self.path,
                fix="name each dim of the whole array at most once, None for a dim that is not sharded",
            )
        dims = tuple(None if dim is None else as_integer(dim) for dim in self.dims)
        object.__setattr__(self, "dims", dims)


def is_layout(value: object) -> bool:
    """Tell whether a value is a layout class or instance, or a stacked one."""
    return isinstance(value, (DynamicShardingAxes, StackedLayout)) or (
        isinstance(value, type) and issubclass(value, DynamicShardingAxes)
    )


def _is_dim(entry: object) -> bool:
    return isinstance(entry, (str, MergedDim)) or (
        type(entry) is tuple and all(isinstance(axis, str) for axis in entry)
    )


def is_annotation(value: object) -> TypeGuard[Any]:
    """Tell whether a value is an annotation; the `is_leaf` of every tree of annotations.

    >>> is_annotation(("__BATCH__", "_")), is_annotation(()), is_annotation(["__BATCH__"])
    (True, True, False)
    """
    if type(value) is tuple:
        for entry in value:  # noqa: SIM110  a plain loop is twice as quick, and this runs once per leaf of every tree
            if type(entry) is not str and not _is_dim(entry):
                return False
        return True
    return isinstance(value, (ArraySpec, PartitionSpec, PartOf)) or is_layout(value)


def is_tuple_of_annotations(value: object) -> bool:
    """Tell whether a tuple may be one annotation of composites, and a tuple of annotations too.

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


def spelled(annotation: Any) -> str:
    """Return axes as code has them: `((BATCH, QUERY_LENGTH), EMBED)`."""
    if type(annotation) is not tuple:
        return axis_label(annotation) if isinstance(annotation, str) else describe(annotation)
    inner = ", ".join(map(spelled, annotation))
    return f"({inner},)" if len(annotation) == 1 else f"({inner})"


def as_annotation(value: Any) -> Any:
    """Return the one annotation that a value is, lists included (other code writes lists).

    Raises:
      StrategyError: it is none.
    """
    if type(value) is tuple and is_annotation(value):
        return value
    if isinstance(value, (list, tuple)) and not is_layout(value):
        frozen = tuple(
            tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in value
        )
        for position, entry in enumerate(frozen):
            if not _is_dim(entry):
                raise StrategyError(
                    f"{_short(value)} is not an annotation: its entry {_short(entry)} is not an axis, a tuple of axes or merged(...)",
                    dim=position,
                    fix="write EMPTY for a dim that is not sharded"
                    if entry is None
                    else "use axis strings such as BATCH, or EMPTY",
                )
        return frozen
    if is_annotation(value):
        return value
    raise StrategyError(
        f"{_short(value)} is not an annotation",
        fix="of a tree ask shardings, or each leaf by itself"
        if isinstance(value, dict)
        else "write a tuple of axes such as (BATCH, LENGTH, EMBED), a layout such as ColumnWise, or an ArraySpec",
    )


def one_annotation(axes: tuple[Any, ...]) -> Any:
    """Return the annotation that `*axes` is: axis strings, composites and merged dims, or one annotation."""
    return as_annotation(asked_annotation(axes))


def asked_annotation(axes: tuple[Any, ...]) -> Any:
    """Return what `*axes` gives as an annotation, not yet checked to be one."""
    return axes[0] if len(axes) == 1 and not isinstance(axes[0], (str, MergedDim)) else axes


def tree_of_annotations(axes: tuple[Any, ...]) -> Any:
    """Return the tree of annotations that `*axes` is for a tree of arrays; axis strings are one annotation for all."""
    if not axes:
        return None
    if len(axes) == 1 and not isinstance(axes[0], (str, MergedDim)):
        return as_annotation(axes[0]) if is_axes_list(axes[0]) else axes[0]
    return as_annotation(axes)


def is_axes_list(value: object) -> bool:
    """Tell whether a list is one annotation, as other code writes them, and no list of annotations."""
    return isinstance(value, list) and any(isinstance(entry, (str, MergedDim)) for entry in value)


def _short(value: object) -> str:
    return textwrap.shorten(repr(value), 80)


def stacked(annotation: Any, layers: int | None = None) -> Any:
    """Put `LAYERS` in front of an annotation; of an `ArraySpec`, also the number of layers and one key per layer.

    >>> from shardwright.vocabulary.axes import EMBED
    >>> stacked((EMBED, "_"))
    ('__LAYERS__', '__EMBED__', '_')

    A literal `PartitionSpec` names mesh axes, not axes: its stack is not sharded over layers.

    Raises:
      StrategyError: an `ArraySpec` without `layers`, or anything else with it; a number of layers that is none; a literal spec
        that leaves its array unreduced.
      AxisConflictError: a layout that is stacked already.
    """
    one = as_annotation(annotation)
    if isinstance(one, (ArraySpec, PartOf)) != (layers is not None):
        raise StrategyError(
            "layers= goes with an ArraySpec, and only with one",
            fix="stacked(spec, layers=32), or stacked(axes)",
        )
    if isinstance(one, PartOf):
        dims = (0, *(None if of is None else of + 1 for of in one.dims))
        return PartOf(
            annotation=stacked(one.annotation),
            shape=(_count(layers), *one.shape),
            dims=dims,
            path=one.path,
        )
    if isinstance(one, ArraySpec):
        init = None if one.init is None else _StackedInit(one.init)
        axes = stacked(one.axes, layers if isinstance(one.axes, PartOf) else None)
        return ArraySpec((_count(layers), *one.shape), one.dtype, axes, init)
    if isinstance(one, PartitionSpec):
        return PartitionSpec(None, *_entries(one))
    if isinstance(one, StackedLayout):
        raise AxisConflictError(
            f"{describe(one)} has LAYERS in front already",
            axis=axis_label(LAYERS),
            fix="for a stack of stacks write its axes out, with an axis of your own in front, declared in the strategy under [axes]",
        )
    return StackedLayout(one) if is_layout(one) else (LAYERS, *one)


def _count(layers: Any) -> int:
    fix = "pass the number of layers, as in stacked(spec, layers=32)"
    return read_integer("layers", layers, error=StrategyError, fix=fix)


@dataclasses.dataclass(frozen=True, slots=True)
class _StackedInit:
    init: Initializer

    def __call__(self, key: Any, shape: Sequence[int], dtype: Any) -> Any:
        return jax.vmap(lambda one: self.init(one, tuple(shape[1:]), dtype))(
            jax.random.split(key, shape[0])
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One dim of a lowered annotation.

    Attributes:
      axes: canonical axes, more than one for a composite, none for `EMPTY`.
      means: the semantic axis that a weight layout's parallelism axes stand for, or empty.
      merged: the members of a merged dim, or empty.
      literal: the mesh axes of a literal spec's entry (`("?",)` for unconstrained), or None.
      label: the dim's axes as people read them.
    """

    axes: tuple[str, ...]
    means: str = ""
    merged: tuple[tuple[str, int], ...] = ()
    literal: tuple[str, ...] | None = None
    label: str = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.merged:
            joined = "*".join([axis_label(axis) for axis, _ in self.merged])
        elif len(self.axes) == 1:
            joined = axis_label(self.axes[0])
        else:
            joined = "+".join([axis_label(axis) for axis in self.axes]) or EMPTY
        object.__setattr__(
            self, "label", f"{joined} ({axis_label(self.means)})" if self.means else joined
        )

    @property
    def size(self) -> int | None:
        """The size that a merged dim brings along."""
        return MergedDim(self.merged).size if self.merged else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """An annotation, lowered: its dims, and the mode and role that it asks for by itself."""

    dims: tuple[Dim, ...]
    mode: str | int | None = None
    role: Role | None = None


@functools.lru_cache(maxsize=4096)
def _lower_dim(entry: Any, means: str) -> Dim:
    if isinstance(entry, MergedDim):
        return Dim(axes=(entry.members[0][0],), merged=entry.members)
    names = entry if isinstance(entry, tuple) else () if entry == EMPTY else (entry,)
    return Dim(axes=tuple(map(canonical_axis, names)), means="" if means == EMPTY else means)


def lower(annotation: Any, shape: Sequence[int] | None = None) -> Lowered:
    """Lower an annotation to one `Dim` per array dimension, checking its rank against `shape` where given.

    Raises:
      RankMismatchError: the ranks differ, a merged dim is not its members' product, or a part is longer than its whole.
      AxisConflictError: the same axis stands twice.
      StrategyError: a composite that has `EMPTY`, or a head beside its dim; a literal spec that leaves its array unreduced.
    """
    if isinstance(annotation, ArraySpec):
        if shape is not None and tuple(shape) != annotation.shape:
            raise RankMismatchError(
                f"the array has shape {tuple(shape)}, its ArraySpec {annotation.shape}",
                fix="make them agree",
            )
        return lower(annotation.axes, annotation.shape)
    if isinstance(annotation, PartitionSpec):
        return Lowered(dims=_lower_spec(annotation, shape))
    if isinstance(annotation, PartOf):
        return _lower_part(annotation, shape)
    if is_layout(annotation):
        lowered = _lower_layout(annotation, None if shape is None else len(shape))
    else:
        lowered = Lowered(dims=tuple([_lower_dim(entry, "") for entry in annotation]))
    _check_composites(lowered.dims)
    _check_rank(annotation, lowered.dims, shape)
    _check_repeats(lowered.dims)
    return lowered


def _lower_part(part: PartOf, shape: Sequence[int] | None) -> Lowered:
    whole = lower(part.annotation, part.shape)
    lowered = Lowered(
        dims=tuple(Dim(axes=()) if of is None else whole.dims[of] for of in part.dims),
        mode=whole.mode,
        role=Role.PARAM,
    )
    if shape is not None and len(shape) != len(part.dims):
        raise RankMismatchError(
            f"{describe(part)} has {len(part.dims)} dims, the array has {len(shape)}: shape {tuple(shape)}",
            fix="write one entry per dim, None for a dim that is not sharded",
        )
    for at, (of, size) in enumerate(zip(part.dims, shape or (), strict=False)):
        if of is not None and size > part.shape[of]:
            raise RankMismatchError(
                f"size {size} is more than the {part.shape[of]} of dim {of} of {describe(part.annotation)}, which it follows",
                path=part.path,
                dim=at,
                size=size,
                fix="a part has as many as the whole or fewer: pass the whole array's shape, or None for a dim that is not sharded",
            )
    return lowered


def _lower_spec(spec: PartitionSpec, shape: Sequence[int] | None) -> tuple[Dim, ...]:
    entries = _entries(spec)
    if shape is not None and len(entries) > len(shape):
        raise RankMismatchError(
            f"the spec {spec} has {len(entries)} entries, the array has {len(shape)} dims: shape {tuple(shape)}",
            fix="write at most one entry per dim",
        )
    entries += [None] * (len(shape or ()) - len(entries))
    return tuple(Dim(axes=(), literal=_literal(entry)) for entry in entries)


def _entries(spec: PartitionSpec) -> list[Any]:
    """Return the entries of a literal spec, which is nothing beyond them."""
    if spec.unreduced or spec.reduced:
        kind = "unreduced" if spec.unreduced else "reduced"
        names = ", ".join(sorted(spec.unreduced or spec.reduced))
        raise StrategyError(
            f"the literal spec is {kind} along {names}, which no annotation can say",
            fix="annotate the array with its entries alone, and let JAX carry what is unreduced: jax.reshard takes such a spec as it is",
        )
    return list(spec.partitions)


def _literal(entry: Any) -> tuple[str, ...]:
    if entry is PartitionSpec.UNCONSTRAINED:
        return (UNCONSTRAINED,)
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _lower_layout(annotation: Any, rank: int | None) -> Lowered:
    front = isinstance(annotation, StackedLayout)
    layout = annotation.layout if front else annotation
    dims, mode = (
        (layout[0], layout[1])
        if isinstance(layout, DynamicShardingAxes)
        else (layout.default_axes, layout.default_mode)
    )
    if layout.any_rank:
        return Lowered(dims=(Dim(axes=()),) * (rank or 0), mode=mode, role=layout.role)
    means = layout.means or (EMPTY,) * len(dims)
    lowered = tuple(_lower_dim(dim, mean) for dim, mean in zip(dims, means, strict=True))
    if front or (layout.role is Role.PARAM and rank == len(dims) + 1):
        lowered = (Dim(axes=(LAYERS,)), *lowered)
    return Lowered(dims=lowered, mode=mode, role=layout.role)


def describe(annotation: Any) -> str:
    """Return an annotation as people write it: `ColumnWise`, `(BATCH, LENGTH)`."""
    if type(annotation) is tuple:
        return "(" + ", ".join([_lower_dim(entry, "").label for entry in annotation]) + ")"
    if isinstance(annotation, StackedLayout):
        return f"stacked({describe(annotation.layout)})"
    if isinstance(annotation, DynamicShardingAxes) or (
        isinstance(annotation, type) and issubclass(annotation, DynamicShardingAxes)
    ):
        cls: type[DynamicShardingAxes] = (
            annotation if isinstance(annotation, type) else type(annotation)
        )
        return (
            cls.__name__
            if cls.named or isinstance(annotation, type)
            else cls.__name__ + describe(annotation[0])
        )
    if isinstance(annotation, ArraySpec):
        return describe(annotation.axes)
    if isinstance(annotation, PartitionSpec):
        return str(annotation)
    whole = describe(annotation.annotation)
    if annotation.dims == tuple(range(len(annotation.shape))):
        return whole
    return (
        f"dims ({', '.join('-' if of is None else str(of) for of in annotation.dims)}) of {whole}"
    )


def _check_rank(annotation: Any, dims: tuple[Dim, ...], shape: Sequence[int] | None) -> None:
    if shape is None:
        return
    if len(dims) != len(shape):
        raise RankMismatchError(
            f"{describe(annotation)} has {len(dims)} dims, the array has {len(shape)}: shape {tuple(shape)}",
            fix=_rank_fix(annotation, len(dims), len(shape)),
        )
    check_merged(dims, shape)


def check_merged(dims: tuple[Dim, ...], shape: Sequence[int]) -> None:
    """Check that every merged dim is its members' product.

    Raises:
      RankMismatchError: one is not.
    """
    for position, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        if dim.merged and dim.size != size:
            product = " * ".join(f"{axis_label(axis)} {count}" for axis, count in dim.merged)
            raise RankMismatchError(
                f"size {size} is not {product} = {dim.size}",
                dim=position,
                axis=dim.label,
                size=size,
                fix="give merged(...) the sizes that were flattened into this dim",
            )


def _rank_fix(annotation: Any, dims: int, rank: int) -> str:
    layout = annotation.layout if isinstance(annotation, StackedLayout) else annotation
    bias = layout.bias if is_layout(layout) else None
    name = describe(layout)
    if bias is not None and rank == dims - 1:
        return f"for its bias use {name}.bias; for a bias stacked over layers, stacked({name}.bias)"
    if rank == dims + 1:
        one = name.removesuffix(")") + ",)" if dims == 1 and name.startswith("(") else name
        return f"add the missing dim's axis, or EMPTY; for a stack of layers use stacked({one})"
    return "write one axis per dim, EMPTY where a dim is not sharded"


_HEADS = {HEAD: HEAD_DIM, KV_HEAD: KV_HEAD_DIM}
_HEAD_DIMS = frozenset(_HEADS.values())


def _check_composites(dims: tuple[Dim, ...]) -> None:
    """Check that no composite has `EMPTY`, or may cut within a head."""
    for position, dim in enumerate(dims):
        if EMPTY in dim.axes:
            raise StrategyError(
                "a composite may not contain EMPTY: it is one dim over several axes",
                dim=position,
                axis=dim.label,
                fix="write EMPTY for a whole dim, or leave it out of the composite; for one annotation per array of a "
                "tuple, pass the arrays as a tuple",
            )
        heads = [axis for axis in dim.axes if axis in _HEADS]
        if heads and not _HEAD_DIMS.isdisjoint(dim.axes):
            head, width = (
                axis_label(heads[0]),
                next(axis_label(axis) for axis in dim.axes if axis in _HEAD_DIMS),
            )
            raise StrategyError(
                f"a composite of {head} and {width} may split a head: its parts need not be whole heads",
                dim=position,
                axis=dim.label,
                fix=f"annotate the flat dim as merged(({head}, heads), ({width}, head_dim)): the heads must then divide",
            )


def _check_repeats(dims: tuple[Dim, ...]) -> None:
    seen: dict[str, int] = {}
    for position, dim in enumerate(dims):
        for axis in (axis for axis, _ in dim.merged) if dim.merged else dim.axes:
            if axis in seen:
                raise AxisConflictError(
                    f"the axis stands twice in one annotation, at dim {seen[axis]} and dim {position}",
                    dim=position,
                    axis=axis_label(axis),
                    fix="give each dim its own axis, or EMPTY: scores, for instance, are (BATCH, HEAD, QUERY_LENGTH, BIAS_KV_SEQ)",
                )
            seen[axis] = position


def mode_of_layout(mode: str | int, shape: Sequence[int] | None) -> str:
    """Return a layout's own mode; an integer d means decode if `shape[d] == 1`, else train.

    Raises:
      ShapeRequiredError: an integer mode without a shape.
      RankMismatchError: there is no dim d.
    """
    if isinstance(mode, str):
        return mode
    if shape is None:
        raise ShapeRequiredError(
            f"the layout's mode is dim {mode}: its size picks the mode", fix="pass mode= or shape="
        )
    if not -len(shape) <= mode < len(shape):
        raise RankMismatchError(
            f"the layout's mode is dim {mode}, the array has shape {tuple(shape)}", fix="pass mode="
        )
    size = shape[mode]
    try:
        return MODE_TRAIN if size >= 2 or size < 1 else MODE_DECODE
    except _jax.Inconclusive as error:
        what = f"the layout's mode is dim {mode}, and whether its size {size} is 1 is not known"
        raise ShapeRequiredError(what, fix="pass mode=") from error
