"""Named layouts: `DynamicShardingAxes` and the subclasses that models use by name.

A layout is a tuple of dims and a mode. The class and its instances have the same attributes:
`ColumnWise.axes` and `ColumnWise().axes` are both `[[FSDP, SP], TP]`. The dims of a weight are
`[in, out]`. The dims of an expert weight are `[experts, hidden, intermediate]` if it is
column-wise, and `[experts, intermediate, hidden]` if it is row-wise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

from shardwright.errors import StrategyError
from shardwright.vocabulary.axes import (
    BATCH,
    DP,
    EMBED,
    EMPTY,
    EMPTY_VAL,
    EP,
    EXPERT,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    MLP_INTERMEDIATE,
    NOT_GIVEN,
    QUERY_LENGTH,
    SP,
    TP,
    Role,
    axis_label,
)
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.modes import MODE_TRAIN, parse_mode

LayoutDim = str | tuple[str, ...]


class _Fields(NamedTuple):
    axes: Any
    mode: str | int


class _Axes:
    """The attribute `axes` of a layout class and of its instances, read as a new list."""

    def __get__(self, instance: Any, owner: type[DynamicShardingAxes]) -> list[str | list[str]]:
        # Read the axes by position, because `instance.axes` would call this descriptor again.
        # Return a new list at each read, so that a caller who changes the list does not change the
        # layout, which is a key of caches.
        dims = owner.default_axes if instance is None else instance[0]
        return [list(dim) if isinstance(dim, tuple) else dim for dim in dims]

    def __set__(self, instance: Any, value: object) -> None:
        raise AttributeError(
            "a layout is frozen: create a new one, DynamicShardingAxes(axes, mode)"
        )


class _Mode:
    """The attribute `mode` of a layout class and of its instances."""

    def __get__(self, instance: Any, owner: type[DynamicShardingAxes]) -> str | int:
        return owner.default_mode if instance is None else instance[1]

    def __set__(self, instance: Any, value: object) -> None:
        raise AttributeError(
            "a layout is frozen: create a new one, such as ColumnWise(mode='train')"
        )


class DynamicShardingAxes(_Fields):
    """The axes of an array, and the mode that applies if a call does not pass one.

    Define a layout of your own in one of two ways:

    >>> class Scores(DynamicShardingAxes):
    ...     axes = [BATCH, HEAD, QUERY_LENGTH, EMPTY]
    ...     mode = "train"
    >>> DynamicShardingAxes([BATCH, EMBED], mode=1).axes
    ['__BATCH__', '__EMBED__']

    Attributes:
      axes: One entry per dim: an axis, `EMPTY` or None (not sharded), or a list of axes (a
        composite).
      mode: A runtime mode, or the index of a dim whose size decides the mode: decode if the size is
        1, else train.
      role: `Role.PARAM` for weight layouts, None if the call decides.
      semantic_axes: For weight layouts, the semantic axes that the parallelism axes stand for. In
        the role `param`, a dim follows the rule of its semantic axis, unless the strategy has a
        rule for the parallelism axis itself.

    Raises:
      StrategyError: The mode is unknown, or `axes` differs from the axes that the class defines.
    """

    default_axes: ClassVar[tuple[LayoutDim, ...]] = ()
    default_mode: ClassVar[str | int] = MODE_TRAIN
    role: ClassVar[Role | None] = None
    semantic_axes: ClassVar[tuple[str, ...]] = ()
    any_rank: ClassVar[bool] = False
    bias: ClassVar[type[DynamicShardingAxes] | None] = None
    named: ClassVar[bool] = False

    axes: Any = _Axes()
    mode: Any = _Mode()

    def __init_subclass__(cls, *, role: Role | str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if role is not None:
            cls.role = Role(role)
        if "axes" in cls.__dict__:
            cls.default_axes = _freeze_dims(cls.__dict__["axes"])
            cls.named = True
            # The body of the class has replaced the descriptor by a value, so restore the
            # descriptor.
            cls.axes = _Axes()
            # Inherited semantic axes belong to the axes of the base class, and would not fit the
            # axes of this class.
            if "semantic_axes" not in cls.__dict__:
                cls.semantic_axes = ()
        if "mode" in cls.__dict__:
            cls.default_mode = _freeze_mode(cls.__dict__["mode"])
            cls.mode = _Mode()

    def __new__(cls, axes: Any = NOT_GIVEN, mode: Any = NOT_GIVEN) -> Self:
        """Create an instance. If the class defines axes, refuse other axes."""
        dims = cls.default_axes if isinstance(axes, EMPTY_VAL) else _freeze_dims(axes)
        if cls.named and dims != cls.default_axes:
            what = f"{cls.__name__} has the axes {_spell(cls.default_axes)}, not {_spell(dims)}"
            raise StrategyError(
                what, fix="for axes of your own write DynamicShardingAxes(axes, mode)"
            )
        if not cls.named and isinstance(axes, EMPTY_VAL):
            fix = "DynamicShardingAxes([BATCH, EMBED], mode='train')"
            raise StrategyError("DynamicShardingAxes needs axes", fix=fix)
        return super().__new__(
            cls, dims, cls.default_mode if isinstance(mode, EMPTY_VAL) else _freeze_mode(mode)
        )

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        """Create an instance from axes and a mode, with the checks of the constructor.

        `_replace` calls this method too.

        Raises:
          StrategyError: The constructor refuses the axes or the mode.
        """
        # The `_make` of a named tuple calls `tuple.__new__`, which would skip the checks.
        axes, mode = iterable
        return cls(axes, mode)

    # A named tuple equals every tuple with the same entries. So two layouts of different classes
    # with equal axes would be equal, and share an entry in caches.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and tuple(self) == tuple(other)

    # `tuple` has a `__ne__` of its own, which does not call `__eq__`.
    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), *self))


def _spell(dims: tuple[LayoutDim, ...]) -> str:
    return ", ".join(
        "+".join(map(axis_label, (dim,) if isinstance(dim, str) else dim)) for dim in dims
    )


def _freeze_dims(axes: Any) -> tuple[LayoutDim, ...]:
    fix = "write one entry per dim: an axis, EMPTY, None or a list of axes"
    if not isinstance(axes, (list, tuple)):  # a set, for instance, has no order
        raise StrategyError(f"the axes of a layout are {axes!r}, not a list", fix=fix)
    entries = [EMPTY if dim is None else dim for dim in axes]
    dims = tuple(tuple(dim) if isinstance(dim, (list, tuple)) else dim for dim in entries)
    for dim in dims:
        if not all(isinstance(axis, str) for axis in (dim if isinstance(dim, tuple) else (dim,))):
            raise StrategyError(f"{dim!r} is not a dim of a layout", fix=fix)
        if isinstance(dim, tuple) and EMPTY in dim:
            what = "a composite may not contain EMPTY: it is one dim over several axes"
            fix = "write EMPTY for a whole dim, or remove it from the composite"
            raise StrategyError(f"{_spell((dim,))}: {what}", fix=fix)
    return dims


def _freeze_mode(mode: Any) -> str | int:
    dim = as_integer(mode)
    return parse_mode(mode) if dim is None else dim


class HiddenStateSharding(DynamicShardingAxes):
    """Hidden states `[batch, q_length, embed]`."""

    axes = (BATCH, QUERY_LENGTH, EMBED)
    # Dim 1 has one query in decode, and a sequence in the other modes.
    mode = 1


class AttnQSharding(DynamicShardingAxes):
    """Queries `[batch, q_length, heads, head_dim]`."""

    axes = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
    mode = 1


class AttnKVSharding(DynamicShardingAxes):
    """Keys and values that attention reads, `[batch, kv_length, kv_heads, head_dim]`."""

    axes = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
    mode = 1


class Replicated(DynamicShardingAxes):
    """An array of any rank that is not sharded."""

    axes = (EMPTY,)
    any_rank = True


class ColumnWiseBias(DynamicShardingAxes, role=Role.PARAM):
    """Bias `[out]` of a `ColumnWise` weight."""

    axes = (TP,)
    semantic_axes = (MLP_INTERMEDIATE,)


class RowWiseBias(DynamicShardingAxes, role=Role.PARAM):
    """Bias `[out]` of a `RowWise` weight."""

    # The outputs of a row-wise weight are summed over tp, so all devices have the whole outputs,
    # and the whole bias.
    axes = (EMPTY,)


class ExpertColumnWiseBias(DynamicShardingAxes, role=Role.PARAM):
    """Bias `[experts, intermediate]`."""

    axes = (EP, TP)
    semantic_axes = (EXPERT, MLP_INTERMEDIATE)


class ExpertRowWiseBias(DynamicShardingAxes, role=Role.PARAM):
    """Bias `[experts, hidden]`."""

    axes = (EP, EMPTY)
    semantic_axes = (EXPERT, EMPTY)


class ColumnWise(DynamicShardingAxes, role=Role.PARAM):
    """Weight `[in, out]` whose output is sharded: the first weight of a pair."""

    # `ColumnWise` and `RowWise` are the pair of Megatron-LM (arXiv:1909.08053, section 3): outputs
    # of the first weight and inputs of the second are split alike, so only the second needs a sum
    # over tp.
    axes = ((FSDP, SP), TP)
    semantic_axes = (EMBED, MLP_INTERMEDIATE)
    bias = ColumnWiseBias


class RowWise(DynamicShardingAxes, role=Role.PARAM):
    """Weight `[in, out]` whose input is sharded: the second weight of a pair."""

    axes = (TP, (FSDP, SP))
    semantic_axes = (MLP_INTERMEDIATE, EMBED)
    bias = RowWiseBias


class SRowWise(DynamicShardingAxes, role=Role.PARAM):
    """Parameter of rank 1, sharded over tp."""

    axes = (TP,)


class SColumnWise(DynamicShardingAxes, role=Role.PARAM):
    """Parameter of rank 1, sharded over fsdp and sp."""

    axes = ((FSDP, SP),)


class ExpertColumnWise(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, hidden, intermediate]`."""

    axes = (EP, FSDP, TP)
    bias = ExpertColumnWiseBias


class ExpertColumnWiseAlt(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, hidden, intermediate]`, stored over fsdp and sp."""

    axes = (EP, (FSDP, SP), TP)
    semantic_axes = (EXPERT, EMBED, MLP_INTERMEDIATE)
    bias = ExpertColumnWiseBias


class ExpertRowWise(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, intermediate, hidden]`."""

    axes = (EP, TP, FSDP)
    bias = ExpertRowWiseBias


class ExpertRowWiseAlt(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, intermediate, hidden]`, stored over fsdp and sp."""

    axes = (EP, TP, (FSDP, SP))
    semantic_axes = (EXPERT, MLP_INTERMEDIATE, EMBED)
    bias = ExpertRowWiseBias


class UnifiedExpertColumnWise(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, hidden, intermediate]`. Experts are sharded over fsdp, sp and ep,
    and never gathered.
    """

    axes = ((FSDP, SP, EP), EMPTY, TP)


class UnifiedExpertRowWise(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, intermediate, hidden]`. Experts are sharded over fsdp, sp and ep,
    and never gathered.
    """

    axes = ((FSDP, SP, EP), TP, EMPTY)


class ExpertActivations(DynamicShardingAxes):
    """Expert activations `[batch, seq, experts, hidden]`."""

    axes = (DP, SP, EP, TP)


class ExpertActivationsAlt(DynamicShardingAxes):
    """Expert activations after routing `[batch, seq, hidden]`."""

    axes = (DP, SP, (TP, FSDP))


class ExpertTensorParallel(DynamicShardingAxes, role=Role.PARAM):
    """Expert weight `[experts, in, out]`, with the experts sharded over tp."""

    axes = (TP, EMPTY, EMPTY)


@dataclasses.dataclass(frozen=True, slots=True)
class StackedLayout:
    """A layout with `LAYERS` in front. Build it with `stacked`."""

    layout: Any


def is_layout(value: object) -> bool:
    """Tell whether a value is a layout class, an instance of one, or a stacked layout."""
    return isinstance(value, (DynamicShardingAxes, StackedLayout)) or (
        isinstance(value, type) and issubclass(value, DynamicShardingAxes)
    )


LAYOUTS: dict[str, type[DynamicShardingAxes]] = {
    layout.__name__: layout
    for layout in DynamicShardingAxes.__subclasses__()
    if layout.__module__ == __name__
}
