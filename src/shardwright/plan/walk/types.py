"""Shardings in the types of values. JAX writes the Explicit mesh axes of a value into its type.

JAX lowers the type of each result to a constraint. So after each equation, the walk moves the
results to the shardings of their types. A type does not say which collectives the move needs; the
rules of the primitives do. Types have no Auto mesh axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwright.plan.walk.demands import Demands
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import ShardedValue, explicit_axes, typed_dims


def add_typed_demands(demands: Demands, variables: Iterable[Any], sizes: Mapping[str, int]) -> None:
    """Add the sharding of each variable's type to the sharding that constraints require."""
    for variable in variables:
        explicit = explicit_axes(variable.aval)
        # If the mesh has Auto mesh axes and no constraint requires a sharding, propagation decides
        # over these mesh axes: add nothing.
        if variable in demands or (explicit and explicit >= sizes.keys()):
            dims = demands.get(variable, ((),) * variable.aval.ndim)
            demands[variable] = typed_dims(variable.aval, dims, sizes)


def _unreduced(avals: Iterable[Any]) -> frozenset[str]:
    """Return the mesh axes that types mark as unreduced: over them, the values are partial sums."""
    return frozenset().union(
        *(aval.sharding.spec.unreduced for aval in avals if explicit_axes(aval))
    )


def with_owed(step: PlanStep) -> PlanStep:
    """Mark operands as partial sums if the equation completes these sums. Return the step.

    The equation completes the sums over mesh axes that are unreduced in the types of its operands,
    but not in the types of its results. While a type is unreduced, equations run on the terms of
    the sum. A reshard to a reduced type adds up the terms.
    """
    paid = _unreduced(step.avals) - _unreduced(step.results)
    if not paid:
        return step
    values = [
        value if value.free else dataclasses.replace(value, owed=value.owed | mine, groups=())
        for value, aval in zip(step.values, step.avals, strict=True)
        for mine in [paid & _unreduced([aval])]
    ]
    return dataclasses.replace(step, values=values)


def with_typed_constants(step: PlanStep) -> PlanStep:
    """Return the step, with each constant operand in the sharding of its type.

    JAX lowers these types to constraints. XLA follows the constraints in two places: at a matmul,
    and after a reshard to Auto mesh axes, which JAX puts before each gather and scatter. At all
    other equations, XLA folds the constants.
    """
    left = explicit_axes(step.results[0])
    values = []
    for value, aval in zip(step.values, step.avals, strict=True):
        dims = typed_dims(aval, value.dims, step.ledger.sizes) if value.free else ()
        folded = not any(dims) or (step.name == "reshard" and explicit_axes(aval) <= left)
        values.append(value if folded else dataclasses.replace(value, dims=dims, free=False))
    return dataclasses.replace(step, values=values)


def as_typed(step: PlanStep, results: Sequence[ShardedValue]) -> list[ShardedValue]:
    """Move results to the shardings of their types."""
    typed = []
    for value, aval in zip(results, step.results, strict=True):
        if not explicit_axes(aval) or value.free:
            typed.append(value)
            continue
        unreduced = frozenset(aval.sharding.spec.unreduced)
        groups = tuple(group - unreduced for group in value.groups)
        partial = dataclasses.replace(value, owed=value.owed - unreduced, groups=groups)
        dims = typed_dims(aval, value.dims, step.ledger.sizes)
        if dims != value.dims:
            partial = step.ledger.move(partial, aval, dims, step.location, origins=value.origins)
        typed.append(partial)
    return typed
