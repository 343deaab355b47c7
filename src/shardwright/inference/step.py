"""One equation of a jaxpr, with what is known about its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardwright.dims.table import Correspondence
from shardwright.inference.atoms import AtomDim, AtomDims, new_dim, new_dims
from shardwright.inference.evidence import EquationLocation
from shardwright.inference.facts import ActivationOrigin, Facts, new_origin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFacts:
    """What is known about an array.

    Attributes:
      dims: Its dims.
      data: Whether it depends on the inputs.
      learned: Whether it depends on parameters.
      one_hot: The dim along which each row has a single 1, selected by the inputs, or None.
      origin: The origin of the array, or None if the array does not depend on the inputs.
      inputs: Which inputs it depends on, by number.
      loops: Its part in the scans around it, as (scan, part): a "carry", a row of "scanned"
        weights, or a result "made" from both by a matmul.
      leaf: The number of the only parameter that it depends on, or None.
      is_computed: Whether it comes from a matmul of parameters alone, such as queries that are
        computed from learned latents.
    """

    dims: AtomDims
    data: bool = False
    learned: bool = False
    one_hot: AtomDim | None = None
    origin: ActivationOrigin | None = None
    inputs: frozenset[int] = frozenset()
    loops: frozenset[tuple[int, str]] = frozenset()
    leaf: int | None = None
    is_computed: bool = False

    @property
    def is_weight(self) -> bool:
        """Whether it depends on parameters alone."""
        return self.learned and not self.data

    @property
    def is_activation(self) -> bool:
        """Whether it depends on the inputs, or comes from a matmul of parameters."""
        return self.data or self.is_computed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStep:
    """One equation.

    Attributes:
      equation: The equation.
      location: Where it is in the model.
      values: The operands.
      facts: What the walk has recorded.
      walk: `FactWalker.walk`, which walks a jaxpr inside the equation.
      place: Where the equation is in the program. None inside of equations that `constrained` does
        not rebuild.
    """

    equation: Any
    location: EquationLocation
    values: Sequence[ArrayFacts]
    facts: Facts
    walk: Callable[..., list[ArrayFacts]]
    place: tuple[int, ...] | None = None

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

    def same(self, left: AtomDim, right: AtomDim) -> None:
        """Record that two dims are the same."""
        self.facts.same(left, right, self.location)

    def aligned(self, known: Correspondence) -> list[AtomDims]:
        """Record that dims with equal factors are the same. Return the dims of each result.

        Args:
          known: How dims correspond. Each dim has at most one factor.
        """
        dims: dict[int, AtomDim] = {}
        for value, side in zip(self.values, known.operands, strict=True):
            for dim, factors in zip(value.dims, side, strict=True):
                for factor in factors:
                    if factor in dims:
                        self.same(dims[factor], dim)
                    else:
                        dims[factor] = dim
        for factor, size in enumerate(known.sizes):
            if factor not in dims:
                dims[factor] = new_dim(size)
        return [tuple(dims[factor] for (factor,) in side) for side in known.results]

    def result(
        self,
        dims: Iterable[AtomDim],
        one_hot: AtomDim | None = None,
        *,
        origin: ActivationOrigin | None = None,
    ) -> ArrayFacts:
        """Return what is known about a result: it depends on all that the operands depend on.

        Args:
          dims: The dims of the result.
          one_hot: The dim along which each row has a single 1, or None.
          origin: The origin of the result. By default, the origin of the operands, or a new origin
            if the operands have several.
        """
        # One pass without comprehensions: this runs for each equation, and most operands add
        # nothing new.
        first, *others = self.values or (ArrayFacts(dims=()),)
        data, learned, leaf = first.data, first.learned, first.leaf
        inputs, loops = first.inputs, first.loops
        origins = [] if first.origin is None else [first.origin]
        for value in others:
            data |= value.data
            if value.learned:
                # The sum of a weight and a bias depends on two parameters, so it has no leaf.
                leaf = value.leaf if not learned or leaf == value.leaf else None
                learned = True
            if value.inputs != inputs:
                inputs |= value.inputs
            if value.loops:
                loops |= value.loops
            if value.origin is not None and value.origin not in origins:
                origins.append(value.origin)
        if origin is None and data:
            origin = origins[0] if len(origins) == 1 else new_origin(origins)
        return ArrayFacts(
            dims=tuple(dims),
            data=data,
            learned=learned,
            one_hot=one_hot,
            origin=origin,
            inputs=inputs,
            loops=loops,
            leaf=leaf,
            is_computed=not data and any(value.is_computed for value in self.values),
        )

    def new_origin(self, *, is_matmul: bool = False) -> ActivationOrigin | None:
        """Return an origin whose parents are the origins of the operands.

        Return None if no operand depends on the inputs.
        """
        if not any(value.data for value in self.values):
            return None
        origins = [value.origin for value in self.values if value.origin is not None]
        return new_origin(list(dict.fromkeys(origins)), is_matmul=is_matmul)

    def new_results(self) -> list[ArrayFacts]:
        """Return results with dims about which nothing is known."""
        return [self.result(new_dims(shape)) for shape in self.shapes]
