"""Find the live equations of a jaxpr, the sums that must be complete, and the nested jaxprs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from jax.extend.core import Literal

from shardwright.plan.walk.primitives import ADDITIONS, KEEPS_SUM

_PASS_SUMS_ON: Final = KEEPS_SUM | ADDITIONS | {"transpose", "reshape", "squeeze", "expand_dims"}


def live_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr whose results are used or that have effects, in order."""
    used = {id(variable) for variable in jaxpr.outvars}
    live = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(variable) in used for variable in equation.outvars):
            live.append(equation)
            used.update(map(id, equation.invars))
    yield from reversed(live)


def count_uses(equations: Iterable[Any], results: Iterable[Any]) -> Counter[Any]:
    """Count the uses of each variable by equations and as a result of the jaxpr."""
    used = [variable for equation in equations for variable in equation.invars]
    return Counter(variable for variable in (*used, *results) if not isinstance(variable, Literal))


def needed_whole(equations: Iterable[Any]) -> set[Any]:
    """Return the variables with several uses where at least one use needs the complete sum.

    If such a variable is a partial sum, it is completed once, for all uses. Other partial sums may
    stay partial, for example if they are only added to another one.
    """
    uses: Counter[Any] = Counter()
    needed = set()
    for equation in equations:
        for variable in equation.invars:
            if isinstance(variable, Literal):
                continue
            uses[variable] += 1
            if equation.primitive.name not in _PASS_SUMS_ON:
                needed.add(variable)
    return {variable for variable in needed if uses[variable] > 1}


def holds_shard_map(jaxpr: Any) -> bool:
    """Tell whether a jaxpr, or one inside it, has a `shard_map`."""
    return any(
        equation.primitive.name == "shard_map" or any(map(holds_shard_map, nested_jaxprs(equation)))
        for equation in jaxpr.eqns
    )


def nested_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation holds."""
    for value in equation.params.values():
        for held in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(held, "jaxpr", held)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
