"""Weights that come in parts: quantised values with their scales, and low-rank pairs beside a weight. Annotated once, by the weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.errors import Problem, RankMismatchError, StrategyError, raise_problems
from shardwright.vocabulary.annotations import ArraySpec, PartOf
from shardwright.vocabulary.axes import EXPERT, LAYERS
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.lowering import as_shape, describe, lower

WHOLE = -1
# What stacks several weights into one.
_STACKS = frozenset({LAYERS, EXPERT})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A weight stored as small integers or floats: `(value - zero_point) * scale`, each scale shared by a block of values.

    A tree node, of `ArraySpec`s or of whatever is made of them.

    Attributes:
      value: of the weight's shape.
      scale: one per block.
      zero_point: one per block, or None.
    """

    value: Any
    scale: Any
    zero_point: Any = None


def quantised(
    spec: ArraySpec,
    blocks: Sequence[int],
    *,
    dtype: Any = jnp.int8,
    scale_dtype: Any = jnp.float32,
    zero_point: Any = None,
    path: str = "",
) -> Quantised:
    """Annotate the parts of a quantised weight: scales and zero points lie over the mesh axes of the values that they scale.

    A block is never split: where the number of blocks does not divide over the mesh axes of the values' dim, placing the scale is
    an `IndivisibleError`. A scale for a whole dim is needed by every shard of it, and so is replicated over that dim's mesh axes.

    Args:
      spec: the weight.
      blocks: for each dim, how many neighbours share a scale: 1 for a scale each, -1 for the whole dim.
      dtype: of the values.
      scale_dtype: of the scales.
      zero_point: dtype of the zero points; absent: there are none.
      path: the weight's path, where a `[[tensors]]` entry may cover it.

    Raises:
      RankMismatchError: not one entry per dim, or a size that is no multiple of its block.
      StrategyError: the weight is no `ArraySpec`.

    >>> from shardwright.vocabulary.axes import EMBED, MLP_INTERMEDIATE
    >>> quantised(ArraySpec((64, 96), jnp.bfloat16, (EMBED, MLP_INTERMEDIATE)), (32, 1)).scale.shape
    (2, 96)
    """
    _require_spec(spec, path)
    counts = _counts(spec, tuple(blocks) if isinstance(blocks, Iterable) else (blocks,), path)
    axes = scale_axes(spec.axes, spec.shape, scale_shape=counts, path=path)
    value = (
        PartOf(annotation=spec.axes, shape=spec.shape, dims=tuple(range(spec.ndim)), path=path)
        if path
        else spec.axes
    )
    return Quantised(
        value=ArraySpec(spec.shape, dtype, value),
        scale=ArraySpec(counts, scale_dtype, axes),
        zero_point=None if zero_point is None else ArraySpec(counts, zero_point, axes),
    )


def _require_spec(spec: Any, path: str) -> None:
    if not isinstance(spec, ArraySpec):
        what = f"the weight is of type {type(spec).__name__}, not an ArraySpec: its parts need its shape"
        raise StrategyError(
            what,
            path=path,
            fix="pass ArraySpec(shape, dtype, axes); of values that exist, annotate the scales by scale_axes",
        )


def _counts(spec: ArraySpec, blocks: tuple[int, ...], path: str) -> tuple[int, ...]:
    if len(blocks) != spec.ndim:
        what = f"{len(blocks)} blocks for {describe(spec)} of {spec.ndim} dims"
        raise RankMismatchError(
            what,
            path=path,
            fix="write one entry per dim: 1 for a scale each, -1 for one scale, or a block size",
        )
    problems = [
        Problem(
            error=RankMismatchError,
            what=f"size {size} is no multiple of its block {block}",
            path=path,
            dim=at,
            size=size,
            fix=fix,
        )
        for at, (size, block) in enumerate(zip(spec.shape, blocks, strict=True))
        if block != WHOLE and (as_integer(block) is None or block < 1 or size % block)
        for fix in ("choose a block size that divides, or -1 for one scale along the dim",)
    ]
    raise_problems(problems)
    return tuple(
        1 if block == WHOLE else size // block
        for size, block in zip(spec.shape, blocks, strict=True)
    )


def scale_axes(
    axes: Any, shape: Sequence[int], *, scale_shape: Sequence[int], path: str = ""
) -> PartOf:
    """Annotate the scales of values that exist already, from both shapes.

    Args:
      axes: annotation of the values.
      shape: shape of the values.
      scale_shape: shape of the scales, with a dim for each of the values': 1 where one scale serves the whole dim.
      path: the weight's path, where a `[[tensors]]` entry may cover it.

    Raises:
      RankMismatchError: the ranks differ, or a size of the values is no multiple of the scales'.
    """
    values, scales = as_shape(shape), as_shape(scale_shape)
    fits = len(values) == len(scales) and all(
        scale and value % scale == 0 for value, scale in zip(values, scales, strict=False)
    )
    if not fits:
        raise RankMismatchError(
            f"scales of shape {scales} for values of shape {values}",
            path=path,
            fix="keep a dim of 1 where one scale serves the whole dim (keepdims=True); each other size is the number of blocks",
        )
    dims = tuple(None if scale == 1 else at for at, scale in enumerate(scales))
    return PartOf(annotation=axes, shape=values, dims=dims, path=path)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A low-rank pair beside a weight: `x @ a @ b` is added to `x @ weight` (LoRA, Hu et al. 2021). A tree node.

    Attributes:
      a: from the weight's inputs to the rank.
      b: from the rank to the weight's outputs.
    """

    a: Any
    b: Any


def low_rank(
    spec: ArraySpec,
    rank: int,
    *,
    inputs: int = 1,
    leading: int = 0,
    dtype: Any = None,
    path: str = "",
) -> LowRank:
    """Annotate a low-rank pair by its weight: `a` lies as the weight's inputs do, `b` as its outputs, the rank is not sharded.

    `a` is drawn from a normal distribution of variance 1 / inputs, `b` is zero, so the pair adds nothing at first.

    Args:
      spec: the weight: leading dims, then inputs, then outputs.
      rank: size of the dim between the two.
      inputs: number of input dims; (EMBED, HEAD, HEAD_DIM) has one, (HEAD, HEAD_DIM, EMBED) two.
      leading: number of dims in front that both have, such as LAYERS or EXPERT.
      dtype: of both; absent: the weight's.
      path: the weight's path, where a `[[tensors]]` entry may cover it.

    Raises:
      RankMismatchError: the weight has no inputs or no outputs left.
      StrategyError: the weight is no `ArraySpec`, or is a stack of layers or experts and `leading` does not say so; a rank below 1;
        a dtype that is no float.
    """
    _require_spec(spec, path)
    ends = leading + inputs
    if leading < 0 or inputs < 1 or ends >= spec.ndim:
        what = f"{describe(spec)} has {spec.ndim} dims: {leading} leading and {inputs} inputs leave no outputs"
        raise RankMismatchError(
            what, path=path, fix="inputs=2 is for a weight such as (HEAD, HEAD_DIM, EMBED)"
        )
    if rank < 1:
        raise StrategyError(
            f"a pair of rank {rank}", path=path, fix="choose a positive rank, such as 8"
        )
    stacks = [
        at
        for at, dim in enumerate(lower(spec.axes, spec.shape).dims[:ends])
        if at >= leading and _STACKS & {*dim.axes, dim.means}
    ]
    if stacks:
        what = f"{describe(spec)} is a stack of layers or experts along dim {stacks[-1]}, which is no input"
        raise StrategyError(
            what, path=path, fix=f"pass leading={stacks[-1] + 1}: each has a pair of its own"
        )
    made = jnp.dtype(spec.dtype if dtype is None else dtype)
    if not jnp.issubdtype(made, jnp.floating):
        raise StrategyError(
            f"a pair of {made} cannot be trained",
            path=path,
            fix="pass dtype=jnp.bfloat16, or another float",
        )
    lead, ins, outs = (
        tuple(range(leading)),
        tuple(range(leading, ends)),
        tuple(range(ends, spec.ndim)),
    )

    def part(dims: tuple[int | None, ...], init: Any) -> ArraySpec:
        shape = tuple(rank if dim is None else spec.shape[dim] for dim in dims)
        axes = PartOf(annotation=spec.axes, shape=spec.shape, dims=dims, path=path)
        return ArraySpec(shape, made, axes, init)

    normal = jax.nn.initializers.variance_scaling(
        1.0, "fan_in", "normal", in_axis=ins, out_axis=-1, batch_axis=lead
    )
    return LowRank(
        a=part((*lead, *ins, None), normal), b=part((*lead, None, *outs), jax.nn.initializers.zeros)
    )
