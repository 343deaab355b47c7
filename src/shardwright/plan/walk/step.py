"""One equation of a walk, as the rules see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from shardwright.plan.walk.events import Site
from shardwright.plan.walk.ledger import Ledger
from shardwright.plan.walk.values import Dims, Value, anywhere, replicated


@dataclasses.dataclass(slots=True, kw_only=True)
class Step:
    """An equation, the values that enter it, and what is asked of its results.

    Attributes:
      equation: The equation of the jaxpr.
      values: One value per operand.
      wanted: Per result, the dims that a later constraint asks for, or None.
      site: Where the walk is.
      ledger: Where events are noted.
      settled: Variables of this jaxpr whose sum was added already, and what they became.
      walk: Walks an inner jaxpr: (jaxpr, values, site, wanted, ledger) -> values.
      moved: (variable, dims) of moves that were paid already, and what they became.
      needed_whole: Variables with several uses, one of which needs the sum to be added.
      target: The dims and origins that a constraint asks for.
    """

    equation: Any
    values: list[Value]
    wanted: Sequence[Dims | None]
    site: Site
    ledger: Ledger
    settled: dict[Any, Value]
    asked: dict[Any, Dims]
    walk: Callable[..., list[Value]]
    moved: dict[tuple[Any, ...], Value]
    needed_whole: set[Any]
    target: Callable[[Any], Value | None]

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.equation.primitive.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        return dict(self.equation.params)

    @property
    def avals(self) -> list[Any]:
        """Shape and dtype of each operand."""
        return [variable.aval for variable in self.equation.invars]

    @property
    def results(self) -> list[Any]:
        """Shape and dtype of each result."""
        return [variable.aval for variable in self.equation.outvars]

    def whole(self, at: int) -> Value:
        """Return an operand as a whole value: what its shards owe is added, once per value."""
        variable, value = self.equation.invars[at], self.values[at]
        if isinstance(variable, Literal) or not value.owed:
            return value
        if variable not in self.settled:
            self.settled[variable] = self.ledger.settle(
                value, variable.aval, self.site, wanted=self.asked.get(variable)
            )
        return self.settled[variable]

    def maybe_partial(self, at: int) -> Value:
        """Return an operand as it is, or whole if another use needs it whole."""
        variable = self.equation.invars[at]
        if not isinstance(variable, Literal) and variable in self.needed_whole:
            return self.whole(at)
        return self.values[at]

    def move(self, at: int, dims: Dims, *, use: object = None) -> Value:
        """Bring an operand, whole, to other dims; once per value, dims and use, as XLA merges moves.

        Args:
          at: Position of the operand.
          dims: Where it goes.
          use: What the equation does with the dims that stay sharded. XLA moves a value once for
            products that contract the same dims, and again for others.
        """
        variable, value = self.equation.invars[at], self.whole(at)
        if isinstance(variable, Literal):
            return value
        key = (variable, dims, use)
        if key not in self.moved:
            self.moved[key] = self.ledger.move(
                value, variable.aval, dims, self.site, origins=value.origins
            )
        return self.moved[key]

    def anywhere(self) -> list[Value]:
        """Return results that every device makes by itself."""
        return [anywhere(aval.ndim) for aval in self.results]

    def replicated(self) -> list[Value]:
        """Return results that every device holds whole."""
        return [replicated(aval.ndim) for aval in self.results]


Rule: TypeAlias = Callable[[Step], "Iterable[Value]"]
