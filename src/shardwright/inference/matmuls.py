"""Matmuls: `dot_general`, `ragged_dot_general` and convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwright.dims.table import correspondence
from shardwright.inference.atoms import AtomDim, AtomDims, finest
from shardwright.inference.facts import Matmul, TableLookup, Use
from shardwright.inference.shapes import windowed
from shardwright.inference.step import ArrayFacts, InferenceStep


def dot_general(step: InferenceStep) -> list[ArrayFacts]:
    """Align contracted and batch dims. The result has the batch dims and the free dims."""
    left, right = step.values
    (left_sum, right_sum), (left_batch, right_batch) = step.parameters["dimension_numbers"]
    known = correspondence(step.equation)
    assert known is not None
    (dims,) = step.aligned(known)
    left_free = _others(left.dims, [*left_sum, *left_batch])
    right_free = _others(right.dims, [*right_sum, *right_batch])
    batch = tuple(left.dims[i] for i in left_batch)
    contracted = tuple(left.dims[i] for i in left_sum)
    result = _result(step, dims)
    _record(step, result, batch, contracted, (left_free, right_free))
    return [result]


def _result(step: InferenceStep, dims: Sequence[AtomDim]) -> ArrayFacts:
    """Return the result of a matmul of the first two operands."""
    left, right = step.values[:2]
    result = step.result(dims, origin=step.new_origin(is_matmul=True))
    # In a scan over layers, each layer multiplies the carry by a row of the scanned weights.
    made = {
        (loop, "made")
        for first, second in ((left, right), (right, left))
        for loop, part in first.loops
        if part == "carry" and second.is_weight and (loop, "scanned") in second.loops
    }
    return dataclasses.replace(
        result,
        loops=result.loops | made,
        is_computed=not result.data and left.is_weight and right.is_weight,
    )


def _others(dims: AtomDims, excluded: Sequence[int]) -> AtomDims:
    return tuple(dim for at, dim in enumerate(dims) if at not in excluded)


def _record(
    step: InferenceStep,
    result: ArrayFacts,
    batch: AtomDims,
    contracted: AtomDims,
    free: tuple[AtomDims, AtomDims],
) -> None:
    """Record a matmul of two activations, or of an activation and a weight."""
    left, right = step.values[:2]
    if left.is_activation and right.is_activation:
        matmul = Matmul(
            batch=batch,
            contracted=contracted,
            left=free[0],
            right=free[1],
            operands=(left.origin, right.origin),
            origin=result.origin,
            location=step.location,
        )
        step.facts.activations.append(matmul)
        return
    # The rules expect the weight on the right. In `w.T @ x`, the weight is the left operand, so
    # swap the operands.
    if left.is_weight:
        left, right, free = right, left, (free[1], free[0])
    if not (left.data and right.is_weight):
        return
    # A matmul of one-hot rows with a table selects rows of the table, as a gather does.
    if left.one_hot is not None and [finest(dim) for dim in contracted] == [finest(left.one_hot)]:
        step.facts.lookups.append(
            TableLookup(
                key=contracted[0],
                row=free[1],
                index=free[0],
                depends_on="both" if left.learned else "inputs",
                of_data=False,
                inputs=left.inputs,
                location=step.location,
            )
        )
        return
    matmul = Matmul(
        batch=batch,
        contracted=contracted,
        left=free[0],
        right=free[1],
        # An activation that depends on no parameter is an input, such as features. A model that
        # reads features may have tables whose indices are not tokens.
        reads_inputs=not left.learned,
        leaf=right.leaf,
        location=step.location,
    )
    step.facts.projections.append(matmul)


def ragged_dot(step: InferenceStep) -> list[ArrayFacts]:
    """Align the contracted dims. Each group of rows is multiplied by its own matrix."""
    numbers, known = step.parameters["ragged_dot_dimension_numbers"], correspondence(step.equation)
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    left, right = step.values[:2]
    assert known is not None
    (dims,) = step.aligned(known)
    groups = tuple(numbers.rhs_group_dimensions)
    if not groups:
        # Here the ragged dim is a batch dim, or is contracted, as in the gradient of the weights.
        return step.new_results()
    left_free = _others(left.dims, [*left_sum, *left_batch])
    right_free = _others(right.dims, [*right_sum, *right_batch, *groups])
    if left.data and right.is_weight:
        matmul = Matmul(
            batch=tuple(right.dims[i] for i in groups),
            contracted=tuple(left.dims[i] for i in left_sum),
            left=left_free,
            right=right_free,
            groups=True,
            reads_inputs=not left.learned,
            location=step.location,
        )
        step.facts.projections.append(matmul)
    return [_result(step, dims)]


def convolution(step: InferenceStep) -> list[ArrayFacts]:
    """Align batch and channels, and record the window dims of the kernel, which are replicated.

    In a grouped convolution, the kernel has the input channels of one group. These channels are
    replicated too.
    """
    numbers, groups = step.parameters["dimension_numbers"], step.parameters["feature_group_count"]
    # Batch groups occur in the gradient of a grouped convolution.
    if step.parameters["batch_group_count"] > 1:
        return step.new_results()
    image, kernel = step.values
    batch, channels, *_ = (image.dims[at] for at in numbers.lhs_spec)
    outputs, inputs, *window = (kernel.dims[at] for at in numbers.rhs_spec)
    is_depthwise = 1 < groups == step.operand_shapes[1][numbers.rhs_spec[0]]
    if groups == 1:
        step.same(channels, inputs)
    elif is_depthwise:
        step.same(channels, outputs)  # each channel has a window of its own
    if kernel.is_weight:
        step.facts.windows += [Use(dim=dim, location=step.location) for dim in window]
        if groups > 1:
            step.facts.windows.append(Use(dim=inputs, location=step.location))
        if image.data and not is_depthwise:
            matmul = Matmul(
                batch=(),
                contracted=(channels,),
                left=(batch,),
                right=(outputs,),
                reads_inputs=not image.learned,
                location=step.location,
            )
            step.facts.projections.append(matmul)
    dims = dict(zip(numbers.out_spec[:2], (batch, outputs), strict=True))
    for at, old in zip(numbers.out_spec[2:], numbers.lhs_spec[2:], strict=True):
        dims[at] = windowed(step, image.dims[old], step.shapes[0][at])
    return [_result(step, [dims[at] for at in range(len(dims))])]
