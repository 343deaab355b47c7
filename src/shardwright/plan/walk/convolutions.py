"""Convolutions, as matmuls over features, and poolings.

If a spatial dim is sharded, each device needs the rows of its neighbors that its windows reach. XLA
sends these rows by permutes. If windows reach beyond the neighbors, the walk gathers the dim and
notes a doubt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from shardwright.dims.windows import windows_of
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.matmuls import Labels, follow_matmul
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import ShardedValue, axes_of, merged_origins, shards
from shardwright.trees.tensors import whole_bytes

_GATHER: Final = "gather the dim with shard(...) before this {}"


def convolution(step: PlanStep) -> list[ShardedValue]:
    """Follow a convolution. A sharded dim that is divided into several groups is gathered first."""
    numbers, sizes = step.parameters["dimension_numbers"], step.ledger.sizes
    whole = [step.whole(0), step.whole(1)]
    # `names`: spatial dim -> its labels in the two operands and in the result. `reaches`: dim of
    # the image -> the rows before and after a shard that the windows of the shard reach.
    names: dict[int, tuple[str, str, str]] = {}
    reaches: dict[int, tuple[int, int, int]] = {}
    # The mesh axes of the spatial dims along which the window has several elements.
    windowed: set[str] = set()
    spatial = tuple(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    )
    for at, (window, (left, right, out)) in enumerate(
        zip(windows_of(step.equation), spatial, strict=True)
    ):
        axes, own = whole[0].dims[left], whole[1].dims[right]
        size, kernel = (step.avals[side].shape[dim] for side, dim in ((0, left), (1, right)))
        result, reach = step.results[0].shape[out], None
        names[at] = f"s-image{at}", f"s-kernel{at}", f"s-result{at}"
        # In the gradient of a kernel, the result is as large as the window.
        windowed.update(axes if (result if axes == own else kernel) > 1 else ())
        if axes and axes == own:
            # The gradient of a kernel: a sum over the rows of both operands.
            reach = window.swapped(result).reach(size, kernel, shards(axes, sizes))
            labels = f"c-rows{at}", f"c-rows{at}", f"s-result{at}"
        elif axes and not own:
            reach = window.reach(size, result, shards(axes, sizes))
            labels = f"l-rows{at}", f"s-kernel{at}", f"l-rows{at}"
        if reach is not None:
            names[at], reaches[left] = labels, reach
    labels_of = _labels(step, names)
    values = [
        value.with_dims(
            () if label.startswith("s") else axes
            for label, axes in zip(of, value.dims, strict=True)
        )
        for value, of in zip(whole, labels_of.operands, strict=True)
    ]
    unsharded = {
        axis
        for before, after in zip(whole, values, strict=True)
        for axis in before.mesh_axes - after.mesh_axes
    }
    channels = whole[1].dims[numbers.rhs_spec[0]]
    if channels and windowed:
        # With JAX 0.10.2 and 0.12 on CPUs, XLA multiplies the result by the number of channel
        # shards, or returns a wrong gradient. Result and gradient are right if the kernel is whole
        # or the window has one element.
        step.doubt(
            windowed,
            f"store the kernel whole over {'+'.join(channels)}: where the image is sharded along "
            f"the window over {'+'.join(sorted(windowed))} and the kernel's channels over "
            f"{'+'.join(channels)}, XLA may compute this convolution or its gradient wrongly "
            "(spatial_and_channel)",
        )
        unsharded -= windowed
    if unsharded:
        step.doubt(unsharded, _GATHER.format("convolution"))
    (result,) = follow_matmul(step, values, labels_of)
    # A kernel's gradient is a sum over the spatial dims and the batch. XLA makes two sums: one over
    # all spatial dims, and one over the batch. If the batch has groups, one sum covers both.
    rows = frozenset(
        axis
        for label, axes in zip(labels_of.operands[0], values[0].dims, strict=True)
        if label.startswith("c-rows") or step.parameters["batch_group_count"] > 1
        for axis in axes
        if axis in result.owed
    )
    groups = tuple(group for group in (rows, result.owed - rows) if group)
    result = dataclasses.replace(result, groups=groups)
    used = result.mesh_axes | result.owed
    image = values[0].with_dims(
        tuple(axis for axis in axes if axis in used) for axes in values[0].dims
    )
    _exchange(step, 0, image, reaches)
    step.ledger.doubt_kernel(result.owed, step.location)
    return [result]


def pool(step: PlanStep) -> list[ShardedValue]:
    """Follow a pooling, or the gradient of a pooling that selects elements.

    The gradient is followed if no element is in two windows. If an element is in two windows, the
    plan cannot tell which rows XLA sends, and notes a doubt for a sharded dim along the window.
    """
    values = [step.whole(at) for at in range(len(step.values))]
    held = [value for value in values if not value.free]
    if not held:
        return step.anywhere()
    sizes, windows = step.ledger.sizes, windows_of(step.equation)
    chosen = max(held, key=lambda value: shards(value.mesh_axes, sizes))
    is_gradient = len(values) > 1
    # The last operand is the array before pooling, also in the gradient.
    shape, result = step.avals[-1].shape, step.avals[0 if is_gradient else -1].shape
    if not is_gradient:
        result = step.results[0].shape
    reaches: dict[int, tuple[int, int, int]] = {}
    for at, axes in enumerate(chosen.dims):
        if not axes:
            continue
        reach = windows[at].reach(shape[at], result[at], shards(axes, sizes))
        if reach is not None and (windows[at].is_apart or not is_gradient):
            reaches[at] = reach
    dims = tuple(axes if at in reaches else () for at, axes in enumerate(chosen.dims))
    step.doubt(chosen.mesh_axes - axes_of(dims), _GATHER.format(step.name))
    moved = [step.move(at, dims) for at in range(len(values))]
    _exchange(step, len(values) - 1, moved[-1].with_dims(dims), reaches)
    return [ShardedValue(dims=dims, origins=merged_origins(held))]


def _exchange(
    step: PlanStep, at: int, value: ShardedValue, reaches: Mapping[int, tuple[int, int, int]]
) -> None:
    """Note the permutes of the rows that each device needs from its two neighbors."""
    aval, sizes = step.avals[at], step.ledger.sizes
    local = [
        -(-size // shards(axes, sizes)) for size, axes in zip(aval.shape, value.dims, strict=True)
    ]
    for dim, reach in reaches.items():
        others = math.prod(size for place, size in enumerate(local) if place != dim)
        before, after, span = reach
        for rows in (before, after):
            step.ledger.note(
                Kind.PERMUTE,
                value.dims[dim],
                whole_bytes(rows * others, aval.dtype),
                step.location,
                dtype=str(aval.dtype),
                origins=value.origins,
            )
        # The exchange of the next dim also sends the rows that were received along this dim.
        local[dim] = span if value.dims[dim] else local[dim]


def _labels(step: PlanStep, names: Mapping[int, tuple[str, str, str]]) -> Labels:
    """Label the dims as those of a matmul. Labels with `s` are for dims that must be whole."""
    numbers = step.parameters["dimension_numbers"]
    groups = step.parameters["feature_group_count"] > 1
    batch_groups = step.parameters["batch_group_count"] > 1
    batch = ("s-examples", "s-batch") if batch_groups else ("l0", "l0")
    inner = ("s-features", "s-inner") if groups else ("c0", "c0")
    outer = ("s-kernels", "s-outer") if groups or batch_groups else ("r0", "r0")
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    pairs = ((batch[0], inner[0]), (outer[0], inner[1]), (batch[1], outer[1]))
    # In a spec, the two dims that are not spatial come before the spatial dims.
    left, right, result = (
        tuple(name for _, name in sorted(zip(spec, (*two, *rest), strict=True)))
        for spec, two, rest in zip(specs, pairs, zip(*names.values(), strict=True), strict=True)
    )
    # The number of multiplications is the size of the result, times the sizes of the kernel's dims
    # that are not in the result.
    sizes: dict[Any, int] = dict(zip(right, step.avals[1].shape, strict=True))
    sizes.pop(outer[0])
    sizes |= dict(zip(result, step.results[0].shape, strict=True))
    # A dilation of 2 puts a zero after each element: 1 of every 2 elements is not zero.
    for at, dilation in enumerate(step.parameters["lhs_dilation"]):
        sizes[names[at][2]] = -(-sizes[names[at][2]] // dilation)
    return Labels(operands=(left, right), result=result, sizes=sizes)
