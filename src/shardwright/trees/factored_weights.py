"""Annotate weights that are stored as several arrays.

Such weights are quantized values with their scales, or low-rank pairs. The annotations of these
arrays are derived from the annotation of the whole weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import Problem, RankMismatchError, StrategyError
from shardwright.vocabulary.annotations import ArraySpec, PartOf
from shardwright.vocabulary.axes import EMPTY, EXPERT, LAYERS
from shardwright.vocabulary.integers import as_integer
from shardwright.vocabulary.lowering import as_shape, describe, lower
from shardwright.vocabulary.read import refuse

# A block of this size covers its whole dim.
WHOLE = -1
# Axes of dims that stack several weights into one array.
_STACKS = frozenset({LAYERS, EXPERT})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A quantized weight, `(value - zero_point) * scale`. Each scale belongs to a block of values.

    The weight is a pytree node whose children are `ArraySpec`s, arrays, shardings and so on.

    Attributes:
      value: Values, in the weight's shape.
      scale: One scale per block.
      zero_point: One zero point per block, or None.
    """

    value: Any
    scale: Any
    zero_point: Any = None


def quantized(
    spec: ArraySpec,
    blocks: Sequence[int],
    *,
    dtype: Any = jnp.int8,
    scale_dtype: Any = jnp.float32,
    zero_point: Any = None,
    path: str = "",
) -> Quantized:
    """Annotate a quantized weight: scales and zero points are sharded like their values.

    A block is never split. If the number of blocks does not divide over the mesh axes of the dim,
    the policy applies; by default, resolving the scale raises `IndivisibleError`. A scale of a
    whole dim is replicated over the mesh axes of that dim, because every shard needs it.

    Args:
      spec: The weight.
      blocks: Block size of each dim: 1 gives every value its own scale, -1 gives the whole dim one
        scale.
      dtype: Dtype of the values.
      scale_dtype: Dtype of the scales.
      zero_point: Dtype of the zero points. Defaults to no zero points.
      path: Path of the weight. Required if a `[[tensors]]` entry may match it.

    Raises:
      RankMismatchError: There is not one block size per dim, or a size is not a multiple of its
        block.
      StrategyError: The weight is not an `ArraySpec`.

    >>> from shardwright.vocabulary.axes import EMBED, MLP_INTERMEDIATE
    >>> quantized(ArraySpec((64, 96), jnp.bfloat16, (EMBED, MLP_INTERMEDIATE)), (32, 1)).scale.shape
    (2, 96)
    """
    _require_spec(spec, path)
    counts = _block_counts(spec, tuple(blocks) if isinstance(blocks, Iterable) else (blocks,), path)
    axes = scale_axes(spec.axes, spec.shape, scale_shape=counts, path=path)
    value = (
        # In the tree, the values are at `path/value`, but `[[tensors]]` entries match the path of
        # the weight. So store this path in a `PartOf`.
        PartOf(annotation=spec.axes, shape=spec.shape, dims=tuple(range(spec.ndim)), path=path)
        if path
        else spec.axes
    )
    return Quantized(
        value=ArraySpec(spec.shape, dtype, value),
        scale=ArraySpec(counts, scale_dtype, axes),
        zero_point=None if zero_point is None else ArraySpec(counts, zero_point, axes),
    )


def _require_spec(spec: Any, path: str) -> None:
    if not isinstance(spec, ArraySpec):
        what = f"the weight is a {type(spec).__name__}, not an ArraySpec: its parts need its shape"
        fix = "pass ArraySpec(shape, dtype, axes), or annotate existing values with scale_axes"
        raise StrategyError(what, path=path, fix=fix)


def _block_counts(spec: ArraySpec, blocks: tuple[int, ...], path: str) -> tuple[int, ...]:
    sizes = tuple(map(as_integer, blocks))
    if len(blocks) == spec.ndim:
        divides = [
            block == WHOLE or (block is not None and block > 0 and size % block == 0)
            for size, block in zip(spec.shape, sizes, strict=True)
        ]
        if all(divides):
            pairs = zip(spec.shape, sizes, strict=True)
            return tuple(1 if block == WHOLE else size // (block or 1) for size, block in pairs)
    what = f"blocks {blocks} do not divide {describe(spec)} of shape {spec.shape}"
    fix = "write one block size per dim: a divisor of the dim, or -1 for a block of the whole dim"
    raise RankMismatchError(what, path=path, fix=fix)


def scale_axes(
    axes: Any, shape: Sequence[int], *, scale_shape: Sequence[int], path: str = ""
) -> PartOf:
    """Annotate the scales of quantized values that already exist, from the shapes of both.

    Args:
      axes: Annotation of the values.
      shape: Shape of the values.
      scale_shape: Shape of the scales, of the same rank. The size is 1 for a dim with one scale.
      path: Path of the weight. Required if a `[[tensors]]` entry may match it.

    Raises:
      RankMismatchError: The ranks differ, or a size of the values is not a multiple of the scales'
        size.
    """
    values, scales = as_shape(shape), as_shape(scale_shape)
    fits = len(values) == len(scales) and all(
        scale and value % scale == 0 for value, scale in zip(values, scales, strict=False)
    )
    if not fits:
        what = f"scales of shape {scales} for values of shape {values}"
        fix = "keep a dim of size 1 for a single scale (keepdims=True); "
        fix += "every other size is the number of blocks"
        raise RankMismatchError(what, path=path, fix=fix)
    # If a dim has only one scale, every shard of the values needs it, so it is replicated.
    dims = tuple(None if scale == 1 else at for at, scale in enumerate(scales))
    return PartOf(annotation=axes, shape=values, dims=dims, path=path)


def annotate_parts(
    value: Any, axes_of: Callable[[tuple[int, ...]], Any], path: str, problems: list[Problem]
) -> list[Any]:
    """Return the annotation of each array in a value, if one set of names is given for all of them.

    A value without arrays, such as a masked parameter, has no annotations. If there are several
    arrays, as in a quantized weight, the names belong to the largest array. Another array with
    the same number of dims is taken as a scale: it has one element per block of the largest array.
    A scalar has no axes. Any other array is a problem at `path`, because its dims have no names.

    Args:
      value: An array, or a tree of arrays.
      axes_of: Function of a shape that returns the axes which the names give to an array of this
        shape.
      path: Path of the names, for problems.
      problems: List to which problems are added.
    """
    shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(value)]
    if not shapes:
        return []
    whole = max(shapes, key=lambda shape: (len(shape), math.prod(shape)))
    axes = axes_of(whole)
    found: list[Any] = []
    for shape in shapes:
        if shape in (whole, ()):
            found.append(axes if shape == whole else ())
            continue
        try:
            found.append(scale_axes(axes, whole, scale_shape=shape))
        except RankMismatchError:
            what = (
                f"an array of shape {shape} beside one of shape {whole}, under one set of names: "
                "its dims have no names"
            )
            fix = "give each array names of its own, or annotate the arrays by their paths"
            problems.append(Problem(error=RankMismatchError, what=what, path=path, fix=fix))
            # The caller raises the problem. Until then, each array needs some annotation.
            found.append((EMPTY,) * len(shape))
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A low-rank pair of a weight: `x @ a @ b` is added to `x @ weight` (LoRA, Hu et al. 2021).

    The pair is a pytree node.

    Attributes:
      a: Matrix from the weight's inputs to the rank.
      b: Matrix from the rank to the weight's outputs.
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
    """Annotate a low-rank pair by its weight.

    `a` is sharded like the weight's inputs, `b` like its outputs, and the rank is not sharded. `a`
    is initialized from a normal distribution of variance 1 / inputs and `b` with zeros, so that the
    pair adds nothing at first.

    Args:
      spec: The weight. Its dims are leading dims, then inputs, then outputs.
      rank: Size of the dim between `a` and `b`.
      inputs: Number of input dims: 1 for (EMBED, HEAD, HEAD_DIM), 2 for (HEAD, HEAD_DIM, EMBED).
      leading: Number of leading dims that `a` and `b` both have, such as LAYERS or EXPERT.
      dtype: Dtype of `a` and `b`. Defaults to the weight's.
      path: Path of the weight. Required if a `[[tensors]]` entry may match it.

    Raises:
      RankMismatchError: The weight would have no input dims or no output dims.
      StrategyError: The weight is not an `ArraySpec`; it is a stack of layers or experts and
        `leading` does not include that dim; the rank is below 1; or the dtype is not a float.
    """
    _require_spec(spec, path)
    outputs_start = leading + inputs
    if leading < 0 or inputs < 1 or outputs_start >= spec.ndim:
        what = f"{describe(spec)} has {spec.ndim} dims: "
        what += f"{leading} leading and {inputs} inputs leave no outputs"
        fix = "inputs=2 is for a weight such as (HEAD, HEAD_DIM, EMBED)"
        raise RankMismatchError(what, path=path, fix=fix)
    dims = lower(spec.axes, spec.shape).dims[:outputs_start]
    stacks = [
        at
        for at, dim in enumerate(dims)
        if at >= leading and _STACKS & {*dim.axes, dim.semantic_axis}
    ]
    last = max(stacks, default=0)
    pair_dtype = jnp.dtype(spec.dtype if dtype is None else dtype)
    stack = f"{describe(spec)} is a stack of layers or experts along dim {last}"
    refuse(
        StrategyError,
        (
            rank < 1,
            path,
            f"the rank of a pair must be positive, got {rank}",
            "choose one such as 8",
        ),
        (
            stacks,
            path,
            f"{stack}, which is not an input",
            f"pass leading={last + 1}: then each layer or expert has its own pair",
        ),
        (
            not jnp.issubdtype(pair_dtype, jnp.floating),
            path,
            f"a pair of dtype {pair_dtype} cannot be trained",
            "pass dtype=jnp.bfloat16, or another float",
        ),
    )
    lead = tuple(range(leading))
    ins = tuple(range(leading, outputs_start))
    outs = tuple(range(outputs_start, spec.ndim))

    def part(dims: tuple[int | None, ...], init: Any) -> ArraySpec:
        shape = tuple(rank if dim is None else spec.shape[dim] for dim in dims)
        axes = PartOf(annotation=spec.axes, shape=spec.shape, dims=dims, path=path)
        return ArraySpec(shape, pair_dtype, axes, init)

    # Hu et al. 2021, section 4.1: one matrix is Gaussian and the other is zero. Leading dims stack
    # several weights, and do not count as inputs.
    normal = jax.nn.initializers.variance_scaling(
        1.0, "fan_in", "normal", in_axis=ins, out_axis=-1, batch_axis=lead
    )
    return LowRank(
        a=part((*lead, *ins, None), normal), b=part((*lead, None, *outs), jax.nn.initializers.zeros)
    )
