"""Find the arguments that a traced program annotates as weights, for instance with `gather`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jax.extend.core import Literal

from shardwright import _jax
from shardwright.dims.bodies import Runs, bodies
from shardwright.plan.annotate import Annotation, annotate_axes_p
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import Role

# Primitives whose result has the dims of its operand. They include constraints, because on an
# Explicit mesh `gather` constrains the weight before it annotates it.
_SAME: Final = frozenset({"convert_element_type", "sharding_constraint", "reshard"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentAsWeight:
    """A place in the program that annotates an argument with the role param.

    Attributes:
      argument: Position of the array among all arrays of the arguments.
      cut: Number of leading dims that scans remove before the array is annotated.
      request: The annotation, with the role param.
      source: Line of the annotation.
    """

    argument: int
    cut: int
    request: ShardingRequest
    source: str


# The fields `argument` and `cut` for a value, or None if the value is computed.
_Known = tuple[int, int] | None


def arguments_as_weights(jaxpr: Any) -> tuple[ArgumentAsWeight, ...]:
    """Return the places that annotate arguments with the role param, at most one per array."""
    found: dict[int, ArgumentAsWeight] = {}
    _follow(jaxpr, [(at, 0) for at in range(len(jaxpr.invars))], found)
    return tuple(found.values())


def _follow(
    jaxpr: Any, inputs: Sequence[_Known], found: dict[int, ArgumentAsWeight], outer: str = ""
) -> list[_Known]:
    """Add the annotations of a jaxpr to `found`. Return which argument each result is, or None.

    An equation inside of `gather` has no line in the user's code. For such an equation, take the
    line of the call, `outer`.
    """
    known: dict[Any, _Known] = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        operands = [_of(variable, known) for variable in equation.invars]
        if not any(operands):
            continue
        source = _jax.source_line(equation) or outer
        if equation.primitive.name in _SAME:
            known[equation.outvars[0]] = operands[0]
        elif equation.primitive is annotate_axes_p and operands[0] is not None:
            annotation: Annotation = equation.params["annotation"]
            argument, cut = operands[0]
            # Skip annotations under `vmap`, which adds a dim that the annotation does not have.
            is_weight = annotation.request.role in (Role.PARAM, Role.USE)
            if is_weight and not equation.params["added"] and argument not in found:
                found[argument] = ArgumentAsWeight(
                    argument=argument,
                    cut=cut,
                    request=annotation.request._replace(role=Role.PARAM),
                    source=source,
                )
        for body in bodies(equation):
            own = body.of_operands(operands)
            if body.runs is not Runs.ONCE:
                # Carries change, so no carry is a weight. A scan removes the first dim of the
                # operands after the carries.
                rows = body.fixed + body.carried
                cut_rows = [each and (each[0], each[1] + 1) for each in own[rows:]]
                own = [*own[: body.fixed], *[None] * body.carried, *cut_rows]
            results = _follow(body.jaxpr, own, found, source)
            if body.runs is Runs.ONCE:
                known.update(zip(equation.outvars, results, strict=True))
    return [_of(variable, known) for variable in jaxpr.outvars]


def _of(variable: Any, known: Mapping[Any, _Known]) -> _Known:
    return None if isinstance(variable, Literal) else known.get(variable)
