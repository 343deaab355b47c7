"""Find masks that a program computes twice, and the sharding that the uses of both require.

A mask is the result of a comparison, such as `index == iota`. One-hots are made of masks. A TPU's
compiler computes equal masks once, before it chooses shardings. So a mask may get the sharding
that the uses of an equal mask require. The mask's own uses then have to gather it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from jax.extend.core import Literal

from shardwright.dims.bodies import bodies
from shardwright.plan.walk.demands import demands
from shardwright.plan.walk.equations import called_jaxpr
from shardwright.plan.walk.values import Dims, Origin, ShardedValue

# Place of an equation: the ids of the equations that contain its jaxpr, and its own id.
EquationIds: TypeAlias = tuple[int, ...]
_COMPARISONS: Final = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_SHAPES: Final = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})


def equal_masks(jaxpr: Any) -> list[list[EquationIds]]:
    """Return the groups of comparisons that compute the same mask, two or more in each."""
    groups: dict[Any, list[EquationIds]] = {}
    given = {variable: ("input", at) for at, variable in enumerate(jaxpr.invars)}
    for key, place in _masks(jaxpr, given, ()):
        groups.setdefault(key, []).append(place)
    return [places for places in groups.values() if len(places) > 1]


def _masks(
    jaxpr: Any, given: Mapping[Any, Any], at: EquationIds
) -> Iterator[tuple[Any, EquationIds]]:
    """Yield the key and the place of each mask. Equal masks have equal keys.

    Args:
      jaxpr: The equations.
      given: Input of the jaxpr -> its key.
      at: The ids of the equations that contain the jaxpr.
    """
    keys = dict(given)

    def key_of(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return "literal", str(variable.aval), repr(variable.val)
        return keys.setdefault(variable, ("variable", at, id(variable)))

    for equation in jaxpr.eqns:
        place = (*at, id(equation))
        body = called_jaxpr(equation)
        if body is not None:
            operands = equation.invars[len(equation.invars) - len(body.invars) :]
            inner = dict(zip(body.invars, map(key_of, operands), strict=True))
            yield from _masks(body, inner, place)
        elif equation.primitive.name == "scan":
            # XLA merges only values of one computation, so inputs of a loop's body get new keys.
            yield from _masks(bodies(equation)[0].jaxpr, {}, place)
        elif (key := _key(equation, key_of)) is not None:
            keys[equation.outvars[0]] = key
            if equation.primitive.name in _COMPARISONS and equation.outvars[0].aval.ndim:
                yield key, place


def _key(equation: Any, key_of: Callable[[Any], Any]) -> Any:
    """Return the key of an equation that computes a mask or its operands, else None."""
    if not equation.outvars:  # a call for its effect, such as `jax.debug.print`
        return None
    name, parameters, result = equation.primitive.name, equation.params, equation.outvars[0].aval
    if name == "iota":
        length = result.shape[parameters["dimension"]]
        # If only one dim is longer than 1, this iota equals a reshaped iota of one dim. Programs
        # write both forms.
        if length == result.size:
            return "shape", result.shape, ("iota", str(result.dtype), length)
        return name, str(result), parameters["dimension"]
    if name in _COMPARISONS or name == "convert_element_type":
        return name, str(result), *map(key_of, equation.invars)
    if name in _SHAPES and len(equation.invars) == 1:
        operand = key_of(equation.invars[0])
        if _long(result.shape) == _long(equation.invars[0].aval.shape):
            return "shape", result.shape, operand[2] if operand[0] == "shape" else operand
        return name, result.shape, parameters.get("broadcast_dimensions"), operand
    return None


def _long(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of a shape that are not 1."""
    return tuple(size for size in shape if size != 1)


def required_dims(
    jaxpr: Any,
    groups: Sequence[Sequence[EquationIds]],
    outputs: Sequence[Dims | None],
    *,
    sizes: Mapping[str, int],
    target: Callable[[Any], Dims | None],
) -> dict[EquationIds, Dims]:
    """Return, for each mask, the sharding that constraints require of it or of an equal mask.

    Args:
      jaxpr: The program.
      groups: The result of `equal_masks`.
      outputs: The sharding that is required of each output, or None.
      sizes: Size of each mesh axis.
      target: Returns the sharding that a constraint requires, or None if it requires none.
    """
    if not groups:
        return {}
    required: dict[EquationIds, Dims] = {}
    # The masks, and the equations whose jaxprs contain them. No other jaxpr is read.
    holders = {place[:end] for group in groups for place in group for end in range(len(place) + 1)}

    def read(inner: Any, goals: Sequence[Dims | None], at: EquationIds) -> None:
        asked = demands(inner, goals, sizes=sizes, target=target)
        for equation in inner.eqns:
            place = (*at, id(equation))
            if place not in holders:
                continue
            goals = [asked.get(variable) for variable in equation.outvars]
            if (body := called_jaxpr(equation)) is not None:
                read(body, goals, place)
            elif equation.primitive.name == "scan":
                body = bodies(equation)[0].jaxpr
                read(body, [None] * len(body.outvars), place)
            elif goals[0] is not None:
                required[place] = goals[0]

    read(jaxpr, outputs, ())
    merged: dict[EquationIds, Dims] = {}
    for group in groups:
        found = [required[place] for place in group if place in required]
        if found:
            dims = found[0]
            for other in found[1:]:
                dims = _filled(dims, other)
            merged |= dict.fromkeys(group, dims)
    return merged


def _filled(dims: Dims, other: Dims) -> Dims:
    """Return `dims`. A dim without mesh axes gets the mesh axes of the same dim in `other`."""
    used = {axis for axes in dims for axis in axes}
    filled = []
    for axes, more in zip(dims, other, strict=True):
        take = not axes and not used & {*more}
        used |= {*more} if take else set()
        filled.append(more if take else axes)
    return tuple(filled)


def shared_mask(value: ShardedValue, dims: Dims, origins: Mapping[str, Origin]) -> ShardedValue:
    """Return a mask, sharded as the uses of an equal mask require.

    Args:
      value: The mask with the sharding of its operands.
      dims: The result of `required_dims` for this mask.
      origins: Mesh axis -> an origin that explains it.
    """
    if value.free:
        return value
    filled = _filled(value.dims, dims)
    return dataclasses.replace(value, dims=filled, origins={**origins, **value.origins}).pruned()
