"""Find the shardings that later constraints require, from the end of a jaxpr to its start.

Two operands of a matmul may compete for a mesh axis. If a later constraint shards the result over
this axis, the constraint decides which operand keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from jax.extend.core import Literal

from shardwright.dims.primitives import CONSTRAINTS, ELEMENTWISE
from shardwright.dims.table import correspondence
from shardwright.plan.walk.factors import fitting, placed, spread
from shardwright.plan.walk.values import Dims

Demands: TypeAlias = dict[Any, Dims]
# If demands were passed through more primitives, plans would differ from XLA's programs.
_PASSED_ON: Final = ELEMENTWISE | {"transpose", "broadcast_in_dim", "reshape"}


def demands(
    jaxpr: Any,
    outputs: Sequence[Dims | None],
    *,
    sizes: Mapping[str, int],
    target: Callable[[Any], Dims | None],
) -> Demands:
    """Return the sharding (mesh axes of each dim) that later constraints require of each variable.

    Args:
      jaxpr: The equations.
      outputs: The sharding that is required of each output, or None.
      sizes: Size of each mesh axis.
      target: Returns the sharding that a constraint requires, or None if it requires none.
    """
    demands_by_variable: Demands = {}

    def ask(variable: Any, dims: Dims | None) -> None:
        # Equations are read from the end. If several uses of a variable have a demand, keep that of
        # the last use.
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
            for variable, wanted in zip(
                equation.invars, _demands_of_operands(equation, dims, sizes), strict=False
            ):
                ask(variable, wanted)
    return demands_by_variable


def far_demands(jaxpr: Any, near: Demands, sizes: Mapping[str, int]) -> Demands:
    """Return the sharding that constraints after a later matmul suggest for each variable.

    Only variables without a demand are in the result.

    XLA's sharding propagation carries a sharding back through a matmul, if nothing else decides
    first. The plan does not follow this propagation, and only marks the matmuls where it may
    matter.

    Args:
      jaxpr: The equations.
      near: The result of `demands`.
      sizes: Size of each mesh axis.
    """
    far: Demands = {}
    for equation in reversed(jaxpr.eqns):
        # Propagation ends at a constraint. What the constraint requires of its operand is in
        # `near`.
        if equation.primitive.name in CONSTRAINTS or not equation.outvars:
            continue
        result = equation.outvars[0]
        dims = far.get(result, near.get(result))
        if dims is None:
            continue
        passed = _demands_of_operands(equation, dims, sizes)
        if equation.primitive.name == "dot_general" and any(dims):
            known = correspondence(equation)
            assert known is not None
            order = placed(known, known.results[0], dims, sizes)
            passed = [spread(known, side, order, sizes) for side in known.operands]
        for variable, goal in zip(equation.invars, passed, strict=False):
            if goal is None or not any(goal) or isinstance(variable, Literal):
                continue
            if variable not in near and len(goal) == len(variable.aval.shape):
                far.setdefault(variable, goal)
    return far


def _demands_of_operands(
    equation: Any, dims: Dims, sizes: Mapping[str, int]
) -> Sequence[Dims | None]:
    """Return the sharding required of each operand, if `dims` is required of the result."""
    name = equation.primitive.name
    known = correspondence(equation) if name in _PASSED_ON else None
    if known is None:
        return []
    order = placed(known, known.results[0], dims, sizes)
    fits = spread(known, known.results[0], fitting(known, order, sizes), sizes) == dims
    if name == "reshape" and not fits:
        return []
    sides = [spread(known, side, order, sizes) for side in known.operands]
    if name in ELEMENTWISE:  # a scalar operand has no dims to shard
        return [side if len(side) == len(dims) else None for side in sides]
    # Further operands of `broadcast_in_dim` are the sizes of a dynamic shape.
    return sides[:1]
