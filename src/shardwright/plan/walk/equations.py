"""Find the live equations of a jaxpr, the sums that must be complete, and the nested jaxprs.

The nested jaxprs are those of the platform that the walk is for. A plan without a topology is for
TPUs. The compiler for TPUs adds copies, pads tiles and all-reduces small arrays in place of a
reduce-scatter. Compilers for GPUs do none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from jax.extend.core import Literal

from shardwright.dims.bodies import Body, Runs, bodies
from shardwright.dims.primitives import CONSTRAINTS
from shardwright.dims.table import correspondence
from shardwright.manager import context

# Names that `jax.lax.platform_dependent` has for GPUs. Each vendor has its own name.
_GPU: Final = ("cuda", "rocm", "gpu")
_GATHERS: Final = CONSTRAINTS | {"all_gather", "all_gather_invariant", "all_gather_reduced"}


def for_gpus() -> bool:
    """Tell whether the walk is for GPUs, as `Trace.platform` says."""
    return bool(context.TARGET.value == "gpu")


def branch_names() -> tuple[str, ...]:
    """Return the platforms whose branch runs, as `jax.lax.platform_dependent` names them."""
    return _GPU if for_gpus() else ("tpu",)


def live_equations(jaxpr: Any) -> Iterator[Any]:
    """Yield, in order, those equations of a jaxpr that have effects or whose results are used."""
    used = {id(variable) for variable in jaxpr.outvars}
    live = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(variable) in used for variable in equation.outvars):
            live.append(equation)
            used.update(map(id, equation.invars))
    yield from reversed(live)


def count_uses(equations: Iterable[Any], results: Iterable[Any]) -> Counter[Any]:
    """Count the uses of each variable: as operands of equations, and as results of the jaxpr."""
    used = [variable for equation in equations for variable in equation.invars]
    return Counter(variable for variable in (*used, *results) if not isinstance(variable, Literal))


def needed_whole(equations: Iterable[Any]) -> set[Any]:
    """Return the variables that have several uses, of which at least one needs the complete sum.

    If such a variable is a partial sum, it is completed once, for all uses. Other partial sums may
    stay partial, for example if they are only added to another partial sum.
    """
    uses: Counter[Any] = Counter()
    needed = set()
    for equation in equations:
        used = [each for each in equation.invars if not isinstance(each, Literal)]
        uses.update(used)
        if not passes_sum_on(equation):
            needed.update(used)
    return {variable for variable in needed if uses[variable] > 1}


def passes_sum_on(equation: Any) -> bool:
    """Tell whether an equation may run on the terms of a partial sum."""
    known = correspondence(equation)
    return known is not None and known.adds


def constants(jaxpr: Any) -> list[Any]:
    """Return the variables of the arrays that a jaxpr, and the jaxprs inside it, close over."""
    found: dict[int, Any] = {id(variable): variable for variable in jaxpr.constvars}
    for equation in jaxpr.eqns:
        for inner in nested_jaxprs(equation):
            found |= {id(variable): variable for variable in constants(inner)}
    return list(found.values())


def holds_primitive(jaxpr: Any, name: str) -> bool:
    """Tell whether a jaxpr, or one inside it, has an equation of a primitive."""
    return any(
        equation.primitive.name == name
        or any(holds_primitive(inner, name) for inner in nested_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def gather_key(equation: Any, equal: Mapping[Any, Any]) -> Any:
    """Return the key of an equation that only constrains or gathers one value, else None.

    Equations with equal keys move the same value to the same sharding.

    Args:
      equation: The equation.
      equal: Result of a gather -> the result of an equal gather before it.
    """
    variable = equation.invars[0] if len(equation.invars) == 1 else None
    if variable is None or isinstance(variable, Literal) or not _only_gathers(equation):
        return None
    inner, parameters = tuple(map(str, nested_jaxprs(equation))), equation.params
    # Leave out other parameters of a call: they contain functions, and no two functions are equal.
    how = (parameters.get("in_specs"), parameters.get("out_specs")) if inner else parameters
    return id(equal.get(variable, variable)), equation.primitive.name, inner, str(how)


def _only_gathers(equation: Any) -> bool:
    inner = list(nested_jaxprs(equation))
    return equation.primitive.name in _GATHERS or (
        bool(inner) and all(_only_gathers(each) for jaxpr in inner for each in jaxpr.eqns)
    )


def called_jaxpr(equation: Any) -> Any | None:
    """Return the jaxpr that a call, such as `jit` or `checkpoint`, runs once, else None."""
    found = run_bodies(equation)
    return found[0].jaxpr if len(found) == 1 and found[0].runs is not Runs.EACH_ROUND else None


def run_bodies(equation: Any) -> Sequence[Body]:
    """Return the jaxprs that an equation may run. A `platform_dependent` runs only one branch."""
    found = bodies(equation)
    platforms = equation.params.get("branches_platforms") if len(found) > 1 else None
    if platforms is None:
        return found
    wanted = set(branch_names())
    named = [at for at, names in enumerate(platforms) if names and wanted.intersection(names)]
    others = [at for at, names in enumerate(platforms) if names is None]
    # A branch without names is the default. If no branch is for the platform, all of them may run.
    return [found[at] for at in [*named, *others][:1]] or found


def nested_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation contains."""
    for value in equation.params.values():
        # The branches of a `cond` are a tuple. A closed jaxpr contains an open one.
        for held in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(held, "jaxpr", held)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr
