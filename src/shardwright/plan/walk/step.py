"""One equation of a walk: what a rule reads and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from shardwright.plan.walk.events import CompilerChoice, WalkLocation
from shardwright.plan.walk.ledger import Ledger
from shardwright.plan.walk.masks import EquationIds
from shardwright.plan.walk.values import (
    Dims,
    Origin,
    ShardedValue,
    anywhere,
    explicit_axes,
    most_runs,
    replicated,
    typed_dims,
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Scope:
    """The state that the equations of one jaxpr share.

    Attributes:
      ledger: Where events are noted.
      asked: Variable -> the mesh axes of each dim that a later constraint requires.
      suggested: Variable -> the mesh axes of each dim that a constraint after a later matmul
        suggests.
      uses: Variable -> number of uses, results of the jaxpr included.
      needed_whole: Variables that have several uses, of which at least one needs the complete sum.
      target: Returns the sharding and origins that a constraint equation requires.
      follow: Walks an inner jaxpr; see `ShardingWalker.run`.
      known: Names of the primitives that have a rule.
      settled: Variable -> its complete sum, for partial sums that were already completed.
      moved: (variable, dims, use) -> the moved value, for moves that were already noted.
      masks: Mask that the program computes twice -> the sharding that the uses of both require.
      mask_origins: Mesh axis -> the `Origin` to give for this mesh axis if it shards a mask.
    """

    ledger: Ledger
    asked: dict[Any, Dims]
    suggested: Mapping[Any, Dims]
    uses: Mapping[Any, int]
    needed_whole: set[Any]
    target: Callable[[Any], ShardedValue | None]
    follow: Callable[..., list[ShardedValue]]
    known: Container[str]
    masks: Mapping[EquationIds, Dims]
    mask_origins: Mapping[str, Origin]
    settled: dict[Any, ShardedValue] = dataclasses.field(default_factory=dict)
    moved: dict[tuple[Any, ...], ShardedValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """One equation and the values of its operands.

    Attributes:
      equation: The equation of the jaxpr.
      values: One value per operand.
      location: The place of the equation in the program.
      scope: The state that the equations of its jaxpr share.
    """

    equation: Any
    values: list[ShardedValue]
    location: WalkLocation
    scope: Scope

    @property
    def ledger(self) -> Ledger:
        """Where events are noted."""
        return self.scope.ledger

    @property
    def wanted(self) -> list[Dims | None]:
        """Per result, the sharding that a later constraint requires, or None."""
        return [self.scope.asked.get(variable) for variable in self.equation.outvars]

    def wanted_over(self, axis: str) -> Dims | None:
        """Return the sharding that decides which dim of the first result a mesh axis shards.

        Over an Explicit mesh axis, this is the sharding of the result's type. Over an Auto mesh
        axis, it is the sharding that a later constraint requires, or None.
        """
        result = self.results[0]
        if axis in explicit_axes(result):
            return typed_dims(result, ((),) * result.ndim, self.ledger.sizes)
        return self.wanted[0]

    @property
    def suggested(self) -> Dims | None:
        """The sharding that a constraint after a later matmul suggests for the first result."""
        return self.scope.suggested.get(self.equation.outvars[0])

    def walk(
        self,
        jaxpr: Any,
        values: Sequence[ShardedValue],
        *,
        location: WalkLocation | None = None,
        wanted: Sequence[Dims | None] | None = None,
        ledger: Ledger | None = None,
    ) -> list[ShardedValue]:
        """Walk a jaxpr of the equation. The location defaults to that of the equation."""
        inner = dataclasses.replace(location or self.location, calls=self.place)
        return self.scope.follow(
            jaxpr, values, location=inner, wanted=wanted, ledger=ledger or self.ledger
        )

    @property
    def place(self) -> EquationIds:
        """Where the equation is: the ids of the equations that contain it, and its own id."""
        # JAX shares a jaxpr between equal calls, so several equations may have one id.
        return (*self.location.calls, id(self.equation))

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.equation.primitive.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of the primitive."""
        parameters: dict[str, Any] = self.equation.params
        return parameters

    @property
    def avals(self) -> list[Any]:
        """Shape and dtype of each operand."""
        return [variable.aval for variable in self.equation.invars]

    @property
    def results(self) -> list[Any]:
        """Shape and dtype of each result."""
        return [variable.aval for variable in self.equation.outvars]

    def whole(self, at: int) -> ShardedValue:
        """Return an operand as a complete sum. A partial sum is completed once per variable."""
        variable, value = self.equation.invars[at], self.values[at]
        if isinstance(variable, Literal) or not value.owed:
            return value
        if variable not in self.scope.settled:
            self.scope.settled[variable] = self.ledger.settle(
                value, variable.aval, self.location, wanted=self.scope.asked.get(variable)
            )
        return self.scope.settled[variable]

    def settle(self, result: ShardedValue, *, wanted: Dims | None = None) -> ShardedValue:
        """Complete a partial sum that the equation returns.

        The sum runs as often as the equation.
        """
        value = dataclasses.replace(result, runs=most_runs(self.values))
        settled = self.ledger.settle(value, self.results[0], self.location, wanted=wanted)
        # XLA cannot merge this collective with an equal one. Two maxima, for example, cannot be
        # added before they are sent.
        return dataclasses.replace(settled, summed=())

    def maybe_partial(self, at: int) -> ShardedValue:
        """Return an operand as it is, or as a complete sum if another use needs that."""
        variable = self.equation.invars[at]
        if not isinstance(variable, Literal) and variable in self.scope.needed_whole:
            return self.whole(at)
        return self.values[at]

    def move(self, at: int, dims: Dims, *, use: object = None) -> ShardedValue:
        """Move an operand to another sharding.

        As in XLA, two moves of a variable become one if they have the same sharding and use.

        Args:
          at: Position of the operand.
          dims: Mesh axes of each dim after the move.
          use: Key of the use of the value. XLA moves a value again for a use with another key.
        """
        variable, value = self.equation.invars[at], self.whole(at)
        if isinstance(variable, Literal):
            return value
        # XLA's `reshard_cache` holds one result per value and sharding.
        key = (variable, dims, use)
        if key not in self.scope.moved:
            self.scope.moved[key] = self.ledger.move(
                value, variable.aval, dims, self.location, origins=value.origins
            )
        return self.scope.moved[key]

    def note_choice(self, mesh_axis: str) -> None:
        """Note that dims compete for a mesh axis, and that no constraint decides between them."""
        choice = CompilerChoice(
            mesh_axis=mesh_axis,
            source=self.location.source,
            fix=f"annotate the result of this {self.name} with shard(...)",
        )
        self.ledger.choices[choice] = None

    def doubt(self, mesh_axes: Iterable[str], fix: str) -> None:
        """Record that a compiler may handle mesh axes in another way, unless `fix` is applied."""
        self.ledger.doubt(mesh_axes, self.location, fix)

    def anywhere(self) -> list[ShardedValue]:
        """Return results that every device can compute by itself."""
        return [anywhere(aval.ndim) for aval in self.results]

    def replicated(self) -> list[ShardedValue]:
        """Return results that are replicated."""
        return [replicated(aval.ndim) for aval in self.results]


PlanRule: TypeAlias = Callable[[PlanStep], "Iterable[ShardedValue]"]
