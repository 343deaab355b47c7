"""Elementwise equations, whose operands and results have one shape, and reductions."""

from __future__ import annotations

import dataclasses
from typing import Final

from shardwright.inference.atoms import Dim, finest, new_dim
from shardwright.inference.step import Step, Value

# Activation functions are made of these. Normalization (rsqrt, square) is not among them.
_NONLINEAR: Final = frozenset({"erf", "erfc", "exp", "exp2", "expm1", "logistic", "max", "tanh"})
_ADDITIONS: Final = frozenset({"add", "add_any"})


def elementwise(step: Step) -> list[Value] | None:
    """Align the dims of operands that broadcast to the result. Return None if no operand does.

    A dim of size 1 is broadcast, so it is not aligned. Scalars are ignored.
    """
    shapes = step.shapes
    shape = shapes[0] if shapes else ()
    full = [
        (value, own)
        for value, own in zip(step.values, step.operand_shapes, strict=True)
        if own == shape or _broadcasts(own, shape)
    ]
    if not shape or not full or any(other != shape for other in shapes[1:]):
        return None
    operands = [value for value, _ in full]
    dims = []
    for at, size in enumerate(shape):
        candidates = [value.dims[at] for value, own in full if own[at] == size]
        dims.append(candidates[0] if candidates else new_dim(size))
        for other in candidates[1:]:
            step.same(candidates[0], other)
    _mark(step, operands, dims)
    result = step.result(dims, _one_hot(step, operands))
    origins = _origins(operands)
    if len(origins) == 1:
        result = dataclasses.replace(result, origin=origins[0])
    return [result] * len(step.shapes)


def _origins(operands: list[Value]) -> list[Value]:
    """Return the different values that operands come from by elementwise operations alone."""
    origins: dict[int, Value] = {}
    for value in operands:
        origin = value.origin or value
        origins[id(origin)] = origin
    return list(origins.values())


def _broadcasts(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(own) == len(shape) and all(
        size in (1, n) for size, n in zip(own, shape, strict=True)
    )


def _mark(step: Step, operands: list[Value], dims: list[Dim]) -> None:
    """Mark the atoms of an activation function, or of an addition of two activations."""
    name = step.equation.primitive.name
    if name in _NONLINEAR:
        for dim in dims:
            for atom in finest(dim):
                atom.nonlinear = True
    elif (
        name in _ADDITIONS
        and sum(value.data and value.learned for value in operands) > 1
        # An activation function such as gelu adds a value and its cube.
        and len(_origins(operands)) > 1
    ):
        for dim in dims:
            for atom in finest(dim):
                atom.residual = True


def _one_hot(step: Step, operands: list[Value]) -> Dim | None:
    """Return the dim along which each row of a result is one-hot, or None."""
    if len(operands) == 1:
        return operands[0].one_hot
    if step.equation.primitive.name != "eq" or len(operands) != 2:
        return None
    counts = [value for value in operands if not value.data and not value.learned]
    selects = [value for value in operands if value.data]
    if len(counts) != 1 or len(selects) != 1:
        return None
    counted = [
        dim for dim in counts[0].dims if finest(dim) and all(atom.counts for atom in finest(dim))
    ]
    return counted[0] if len(counted) == 1 else None


def reduction(step: Step) -> list[Value]:
    """Drop the dims that are reduced."""
    axes = step.parameters["axes"]
    others = [dim for at, dim in enumerate(step.values[0].dims) if at not in axes]
    return [step.result(others)] * len(step.shapes)
