"""Elementwise equations, whose operands and results have one shape, and reductions."""

from __future__ import annotations

import dataclasses
from typing import Final

from shardwright.dims import table
from shardwright.inference.atoms import AtomDim, AtomDims, finest
from shardwright.inference.facts import TableLookup, is_residual
from shardwright.inference.step import ArrayFacts, InferenceStep

# Activation functions are made of these primitives. Normalization uses others: rsqrt and square.
_NONLINEAR: Final = frozenset({"erf", "erfc", "exp", "exp2", "expm1", "logistic", "max", "tanh"})
_ADDITIONS: Final = frozenset({"add", "add_any"})


def elementwise(step: InferenceStep) -> list[ArrayFacts] | None:
    """Align the dims of operands that broadcast to the result.

    A dim of size 1 is broadcast, so it is not aligned. Operands that are scalars are ignored.
    Return None if the result is a scalar, or if the equation is not elementwise.
    """
    shapes = step.shapes
    known = table.elementwise(tuple(step.operand_shapes), tuple(shapes))
    if known is None or not shapes[0]:
        return None
    pairs = zip(step.values, step.operand_shapes, strict=True)
    operands = [value for value, own in pairs if table.broadcasts(own, shapes[0])]
    # Some queries are computed from parameters alone, by a matmul with learned latents. They have
    # `is_computed`, also after a bias or a scale is applied. If a whole matrix of parameters is
    # added, the sum counts as a parameter again.
    is_computed = any(value.is_computed for value in operands) and not any(
        value.is_weight
        and not value.is_computed
        and all(atom.learned for dim in value.dims for atom in finest(dim))
        for value in operands
    )
    dims = step.aligned(known)[0]
    _mark(step, operands, dims)
    _record_selection(step, operands)
    result = step.result(dims, _one_hot(step, operands))
    if result.is_computed and not is_computed:
        result = dataclasses.replace(result, is_computed=False)
    return [result] * len(shapes)


def _mark(step: InferenceStep, operands: list[ArrayFacts], dims: AtomDims) -> None:
    """Mark the dims of an activation function, or of a residual addition."""
    name = step.equation.primitive.name
    if name in _NONLINEAR:
        for dim in dims:
            for atom in finest(dim):
                atom.nonlinear = True
    elif name in _ADDITIONS and len(operands) == 2:
        first, second = operands
        is_learned = first.learned and second.learned
        if is_learned and is_residual(first.origin, second.origin):
            for dim in dims:
                for atom in finest(dim):
                    atom.residual = True


def _record_selection(step: InferenceStep, operands: list[ArrayFacts]) -> None:
    """Record a product of one-hot labels and activations, as the loss of logits computes it.

    The labels select from the activations.
    """
    if step.equation.primitive.name != "mul" or len(operands) != 2:
        return
    for labels, logits in (operands, reversed(operands)):
        if labels.one_hot is not None and not labels.learned and logits.data and logits.learned:
            selection = TableLookup(
                key=labels.one_hot,
                row=(),
                index=tuple(dim for dim in labels.dims if dim is not labels.one_hot),
                depends_on="inputs",
                of_data=True,
                inputs=labels.inputs,
                location=step.location,
            )
            step.facts.lookups.append(selection)


def _one_hot(step: InferenceStep, operands: list[ArrayFacts]) -> AtomDim | None:
    """Return the dim along which each row of a result is one-hot, or None."""
    if len(operands) == 1:
        return operands[0].one_hot
    if step.equation.primitive.name != "eq" or len(operands) != 2:
        return None
    # `jax.nn.one_hot` compares indices with an iota, which depends on neither inputs nor
    # parameters.
    counts = [value for value in operands if not value.data and not value.learned]
    selects = [value for value in operands if value.data]
    if len(counts) != 1 or len(selects) != 1:
        return None
    counted = [
        dim for dim in counts[0].dims if finest(dim) and all(atom.counts for atom in finest(dim))
    ]
    if len(counted) != 1:
        return None
    for atom in finest(counted[0]):
        atom.routed |= selects[0].learned
    return counted[0]


def reduction(step: InferenceStep) -> list[ArrayFacts]:
    """Drop the dims that are reduced."""
    known = table.correspondence(step.equation)
    assert known is not None
    return [step.result(step.aligned(known)[0])] * len(step.shapes)
