"""Find the shardings that later constraints require, from the end of a jaxpr to its start.

Two operands of a product may compete for a mesh axis. If a later constraint shards the result over
this axis, the constraint decides which operand keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from shardwright.plan.walk.primitives import CONSTRAINTS, ELEMENTWISE
from shardwright.plan.walk.reshapes import through_reshape
from shardwright.plan.walk.values import Dims

Demands: TypeAlias = dict[Any, Dims]


def demands(
    jaxpr: Any,
    outputs: Sequence[Dims | None],
    *,
    sizes: Mapping[str, int],
    target: Callable[[Any], Dims | None],
) -> Demands:
    """Return the dims (mesh axes of each dim) that later constraints require of each variable.

    Args:
      jaxpr: The equations.
      outputs: Dims that are required of each output, or None.
      sizes: Size of each mesh axis.
      target: Returns the dims that a constraint requires, or None if it requires none.
    """
    demands_by_variable: Demands = {}

    def ask(variable: Any, dims: Dims | None) -> None:
        if dims is None or isinstance(variable, Literal) or variable in demands_by_variable:
            return
        if len(dims) == len(variable.aval.shape):
            demands_by_variable[variable] = dims

    for variable, dims in zip(jaxpr.outvars, outputs, strict=True):
        ask(variable, dims)
    for equation in reversed(jaxpr.eqns):
        if equation.primitive.name in CONSTRAINTS:
            ask(equation.invars[0], target(equation))
        elif (
            equation.outvars and (dims := demands_by_variable.get(equation.outvars[0])) is not None
        ):
            for variable, passed in zip(
                equation.invars, _passed_on(equation, dims, sizes), strict=False
            ):
                ask(variable, passed)
    return demands_by_variable


def _passed_on(equation: Any, dims: Dims, sizes: Mapping[str, int]) -> Sequence[Dims | None]:
    """Return the dims required of each operand, if `dims` are required of the result."""
    name, parameters, result = equation.primitive.name, equation.params, equation.outvars[0].aval
    shapes = [variable.aval.shape for variable in equation.invars]
    if name in ELEMENTWISE:
        return [_unstretched(dims, shape, result.shape) for shape in shapes]
    if name == "transpose":
        permutation = parameters["permutation"]
        return [tuple(dims[permutation.index(dim)] for dim in range(len(dims)))]
    if name == "broadcast_in_dim" and shapes:
        kept = enumerate(parameters["broadcast_dimensions"])
        return [tuple(dims[to] if shapes[0][at] == result.shape[to] else () for at, to in kept)]
    if name == "reshape":
        return [through_reshape(dims, result.shape, shapes[0], sizes)]
    return []


def _unstretched(dims: Dims, shape: Sequence[int], whole: Sequence[int]) -> Dims | None:
    """Return the dims of an operand. Its dims of size 1 are stretched, and have no mesh axes."""
    if len(shape) != len(whole):
        return None
    pairs = zip(dims, shape, whole, strict=True)
    return tuple(axes if size == stretched else () for axes, size, stretched in pairs)
