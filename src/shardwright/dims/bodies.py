"""The jaxprs that an equation runs: of a loop, of branches, or of a call."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Final

from shardwright import _jax


class Runs(enum.Enum):
    """How often an equation runs a jaxpr."""

    ONCE = "once"  # a call, or one of several branches
    EACH_ROUND = "each round"
    BEFORE_EACH_ROUND = "before each round"  # the condition of a `while`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A jaxpr that an equation runs.

    Inputs of a loop's body are, in this order: values that stay the same, carries, and rows of the
    operands that a scan cuts along their first dim. Outputs of the body are the next carries, and
    rows of the results.

    Attributes:
      jaxpr: The open jaxpr.
      operands: For each input, the index of its operand in the equation.
      runs: How often the equation runs the jaxpr.
      fixed: Number of inputs of a loop that stay the same.
      carried: Number of carries of a loop.
      rounds: Number of rounds of a loop, or None if it is not known.
    """

    jaxpr: Any
    operands: Sequence[int]
    runs: Runs = Runs.ONCE
    fixed: int = 0
    carried: int = 0
    rounds: int | None = None

    def of_operands(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of the inputs, given one value for each operand of the equation."""
        return [values[at] for at in self.operands]


# Primitives that run a jaxpr once, unchanged. Other primitives have a jaxpr for another purpose:
# `reduce` has the jaxpr of its scalar step, and a kernel has that of its program.
_CALLS: Final = frozenset(
    {
        *("jit", "pjit", "checkpoint", "remat", "remat2", "composite", "compute_on"),
        *("call", "core_call", "closed_call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    }
)
_HELD_AS: Final = ("jaxpr", "call_jaxpr", "call")


def bodies(equation: Any) -> tuple[Body, ...]:
    """Return the jaxprs that an equation runs. Its primitive decides which parameters hold them.

    A `while` has its body and its condition, and a `cond` has all branches. The jaxpr of a
    `shard_map` is left out, because its shapes are those of shards.
    """
    name, parameters, count = equation.primitive.name, equation.params, len(equation.invars)
    if name in _CALLS:
        jaxpr = _open(next(parameters[key] for key in _HELD_AS if key in parameters))
        return (Body(jaxpr=jaxpr, operands=range(count - len(jaxpr.invars), count)),)
    if name == "scan":
        fixed, carried, jaxpr = _jax.scan_parts(parameters)
        scanned = Body(
            jaxpr=jaxpr,
            operands=range(count),
            runs=Runs.EACH_ROUND,
            fixed=fixed,
            carried=carried,
            rounds=parameters["length"],
        )
        return (scanned,)
    if name == "while":
        return _of_while(parameters, count)
    if name == "cond":
        # The first operand is the index of the branch.
        return tuple(
            Body(jaxpr=_open(branch), operands=range(1, count)) for branch in parameters["branches"]
        )
    return ()


def _of_while(parameters: Any, count: int) -> tuple[Body, Body]:
    # Operands are the constants of the condition, the constants of the body, and the carry.
    start = parameters["cond_nconsts"]
    fixed = parameters["body_nconsts"]
    body = Body(
        jaxpr=_open(parameters["body_jaxpr"]),
        operands=range(start, count),
        runs=Runs.EACH_ROUND,
        fixed=fixed,
        carried=count - start - fixed,
    )
    condition = Body(
        jaxpr=_open(parameters["cond_jaxpr"]),
        operands=(*range(start), *range(start + fixed, count)),
        runs=Runs.BEFORE_EACH_ROUND,
    )
    return body, condition


def _open(jaxpr: Any) -> Any:
    """Return the open jaxpr of a closed one. Return an open jaxpr unchanged."""
    return getattr(jaxpr, "jaxpr", jaxpr)
