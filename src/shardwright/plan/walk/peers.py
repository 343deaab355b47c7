"""Find the sharding that later elementwise equations give a value.

A scatter into zeros may have any sharding. Compilers give it the sharding of the values to which it
is added, even if these are computed later. For example, the gradient of `take_along_axis` has the
sharding of the logits, because the gradient of the softmax is added to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from jax.extend.core import Literal

from shardwright.dims.primitives import ELEMENTWISE, SCATTERS
from shardwright.plan.walk.equations import called_jaxpr
from shardwright.plan.walk.values import Dims, ShardedValue

# Largest number of elementwise equations to follow until a value has a sharding.
_DEPTH: Final = 16


class Peers:
    """The equations of one jaxpr, by the variables that they return and use."""

    def __init__(self, equations: Sequence[Any]) -> None:
        self._equations = equations
        self._makers: dict[Any, Any] = {}
        self._users: dict[Any, list[Any]] = {}
        # Several paths may lead to one value. Remember the values for which nothing was found, so
        # that each is looked up only once.
        self._seen: set[Any] = set()

    def ask(self, variable: Any, asked: dict[Any, Dims], held: Mapping[Any, ShardedValue]) -> None:
        """Add the sharding that `dims` finds for a variable to `asked`, unless `asked` has one.

        Args:
          variable: The result of a scatter.
          asked: Variable -> the mesh axes of each dim that later equations require. This dict is
            changed in place.
          held: The values that are already computed.
        """
        if variable not in asked and (dims := self.dims(variable, held)) is not None:
            asked[variable] = dims

    def dims(
        self, variable: Any, held: Mapping[Any, ShardedValue], *, depth: int = _DEPTH
    ) -> Dims | None:
        """Return the sharding of a value that an elementwise equation combines with a variable.

        Args:
          variable: The result of a scatter.
          held: The values that are already computed.
          depth: Largest number of equations that are followed.
        """
        if not self._makers:
            # Most jaxprs have no scatter, so the index is made at the first scatter.
            self._index()
        self._seen = set()
        return self._of_users(variable, held, depth)

    def _index(self) -> None:
        for equation in self._equations:
            self._makers.update(dict.fromkeys(equation.outvars, equation))
            for used in _variables(equation.invars):
                self._users.setdefault(used, []).append(equation)

    def _of_users(self, variable: Any, held: Mapping[Any, ShardedValue], depth: int) -> Dims | None:
        for equation in self._users.get(variable, ()):
            if not depth:
                return None
            body = called_jaxpr(equation)
            dims = None if body is None else _inside(equation, body, variable, held, depth - 1)
            if dims is not None:
                return dims
            if equation.primitive.name not in ELEMENTWISE:
                continue
            others = [each for each in _variables(equation.invars) if each is not variable]
            for other in _alike(others, variable):
                if (dims := self._of(other, held, depth - 1)) is not None:
                    return dims
            for result in _alike(equation.outvars, variable):
                if (dims := self._of_users(result, held, depth - 1)) is not None:
                    return dims
        return None

    def _of(self, variable: Any, held: Mapping[Any, ShardedValue], depth: int) -> Dims | None:
        value = held.get(variable)
        if value is not None:
            return value.dims if any(value.dims) else None
        if variable in self._seen:
            return None
        self._seen.add(variable)
        maker = self._makers.get(variable)
        if maker is None or maker.primitive.name not in ELEMENTWISE or not depth:
            return None
        for operand in _alike(_variables(maker.invars), variable):
            if (dims := self._of(operand, held, depth - 1)) is not None:
                return dims
        return None


def _inside(
    equation: Any, body: Any, variable: Any, held: Mapping[Any, ShardedValue], depth: int
) -> Dims | None:
    """Return the sharding of a value that a called jaxpr combines with its operand `variable`."""
    # A `cond` that chooses by platform has one operand more than its branches: the index of the
    # branch.
    given = equation.invars[len(equation.invars) - len(body.invars) :]
    pairs = list(zip(body.invars, given, strict=True))
    known = {
        inner: held[outer]
        for inner, outer in pairs
        if not isinstance(outer, Literal) and outer in held
    }
    peers = Peers(body.eqns)
    found = (peers.dims(inner, known, depth=depth) for inner, outer in pairs if outer is variable)
    return next((dims for dims in found if dims is not None), None)


def is_scattered(equation: Any) -> bool:
    """Tell whether an equation, or the jaxpr that it calls, returns the result of a scatter."""
    if equation.primitive.name in SCATTERS:
        return True
    body = called_jaxpr(equation)
    if body is None:
        return False
    returned = set(_variables(body.outvars))
    return any(
        inner.outvars and inner.outvars[0] in returned and is_scattered(inner)
        for inner in body.eqns
    )


def _variables(operands: Iterable[Any]) -> list[Any]:
    return [operand for operand in operands if not isinstance(operand, Literal)]


def _alike(variables: Iterable[Any], like: Any) -> list[Any]:
    """Return the variables that have the shape of a given variable."""
    return [each for each in variables if each.aval.shape == like.aval.shape]
