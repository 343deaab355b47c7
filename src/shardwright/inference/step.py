"""One equation of a jaxpr, with what is known about its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.inference.atoms import Dim, Dims, new_dims
from shardwright.inference.evidence import Site
from shardwright.inference.facts import Facts

if TYPE_CHECKING:
    from shardwright.inference.walk import Walker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is known about an array.

    Attributes:
      dims: Its dims.
      data: Whether it depends on the inputs.
      learned: Whether it depends on parameters.
      one_hot: The dim along which each row has a single 1, selected by the inputs, or None.
      origin: The value that it comes from by elementwise operations alone, or None for itself.
      carries: The scans whose carry it comes from.
    """

    dims: Dims
    data: bool = False
    learned: bool = False
    one_hot: Dim | None = None
    origin: Value | None = None
    carries: frozenset[int] = frozenset()

    @property
    def is_weight(self) -> bool:
        """Whether it depends on parameters alone."""
        return self.learned and not self.data


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One equation.

    Attributes:
      equation: The equation.
      site: Where it is in the model.
      values: The operands.
      walker: Walks the jaxprs that the equation contains.
      place: Its place in the program, or None inside of equations that `constrained` does not
        rebuild.
    """

    equation: Any
    site: Site
    values: Sequence[Value]
    walker: Walker
    place: tuple[int, ...] | None = None

    @property
    def facts(self) -> Facts:
        """What the walk has recorded."""
        return self.walker.facts

    @property
    def parameters(self) -> Any:
        """The parameters of the primitive."""
        return self.equation.params

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the operands."""
        return [getattr(variable.aval, "shape", ()) for variable in self.equation.invars]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results."""
        return [getattr(variable.aval, "shape", ()) for variable in self.equation.outvars]

    def same(self, left: Dim, right: Dim) -> None:
        """Record that two dims are the same."""
        self.facts.same(left, right, self.site)

    def result(self, dims: Iterable[Dim], one_hot: Dim | None = None) -> Value:
        """Return a result that depends on all that the operands depend on."""
        data = learned = has_weight = False
        carries: frozenset[int] = frozenset()
        for value in self.values:
            data |= value.data
            learned |= value.learned
            if value.carries:
                carries |= value.carries
            has_weight |= value.is_weight and bool(value.dims)
        if carries and has_weight:
            self.facts.stacked |= carries
        return Value(dims=tuple(dims), data=data, learned=learned, one_hot=one_hot, carries=carries)

    def new_results(self) -> list[Value]:
        """Return results with dims about which nothing is known."""
        return [self.result(new_dims(shape)) for shape in self.shapes]
