"""What the walk records about a program, for the rules that name dims.

The origin of an activation tells which activations it is computed from. The rules use origins to
find residual sums, and matmuls whose results are operands of other matmuls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardwright.inference.atoms import Atom, AtomDim, AtomDims, unify
from shardwright.inference.evidence import EquationLocation, Evidence


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ActivationOrigin:
    """The origin of an activation.

    A value that is computed elementwise from the activation has the same origin.

    Attributes:
      parents: The origins of the operands that the activation is computed from.
      is_matmul: Whether a matmul returns the activation.
      depth: Number of origins on the longest path to an input.
    """

    parents: tuple[ActivationOrigin, ...] = ()
    is_matmul: bool = False
    depth: int = 0


def new_origin(parents: Sequence[ActivationOrigin], *, is_matmul: bool = False) -> ActivationOrigin:
    """Return the origin of a value that is computed from other values."""
    depth = 1 + max((parent.depth for parent in parents), default=0)
    return ActivationOrigin(tuple(parents), is_matmul, depth)


def is_residual(first: ActivationOrigin | None, second: ActivationOrigin | None) -> bool:
    """Tell whether one of two summands is computed from the other by more than elementwise ops."""
    if first is None or second is None or first is second:
        return False
    older, younger = (first, second) if first.depth < second.depth else (second, first)
    seen, waiting = {younger}, [younger]
    while waiting:
        for parent in waiting.pop().parents:
            if parent is older:
                return True
            # A child is deeper than its parents, so an origin that is at most as deep as `older`
            # does not come from `older`.
            if parent.depth > older.depth and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return False


def nearest_matmuls(origin: ActivationOrigin | None) -> set[ActivationOrigin]:
    """Return the matmuls that a value is computed from without another matmul in between."""
    found: set[ActivationOrigin] = set()
    seen, waiting = set(), [] if origin is None else [origin]
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.is_matmul:
            found.add(each)
        else:
            waiting.extend(each.parents)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableLookup:
    """A lookup: indices, or a one-hot array, select rows of a table.

    Attributes:
      key: The dim of the table along which the indices select.
      row: The dims of a row of the table.
      index: The dims of the indices.
      depends_on: What the indices depend on: "inputs", "both" (inputs and parameters), or
        "neither".
      of_data: Whether the table itself depends on the inputs.
      inputs: Which inputs the indices depend on, by number.
      location: The equation of the lookup.
    """

    key: AtomDim
    row: AtomDims
    index: AtomDims
    depends_on: str
    of_data: bool
    inputs: frozenset[int] = frozenset()
    location: EquationLocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """A matmul: of two activations, or of an activation (left) and a weight (right).

    Attributes:
      batch: Dims that both operands and the result have.
      contracted: Dims that are summed over.
      left: The other dims of the left operand.
      right: The other dims of the right operand.
      groups: Whether the batch dims are the groups of a ragged matmul.
      reads_inputs: Whether the activation is computed from inputs alone, without parameters.
      leaf: The number of the parameter that is the weight, or None.
      operands: The origins of the operands.
      origin: The origin of the result.
      location: The equation.
    """

    batch: AtomDims
    contracted: AtomDims
    left: AtomDims
    right: AtomDims
    groups: bool = False
    reads_inputs: bool = False
    leaf: int | None = None
    operands: tuple[ActivationOrigin | None, ...] = ()
    origin: ActivationOrigin | None = None
    location: EquationLocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DimSlice:
    """A dim that is a part of a larger dim `whole`.

    It is a slice of `whole`, or the dim of one operand of the concatenation that returns `whole`.
    """

    whole: AtomDim
    start: int
    dim: AtomDim
    location: EquationLocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A dim, and the equation that uses it."""

    dim: AtomDim
    location: EquationLocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """A scan over parameters.

    Attributes:
      dim: The dim that the scan runs along.
      is_of_layers: Whether its weights multiply the carry, and the result becomes the next carry.
      is_routed: Whether it also runs over an activation that depends on parameters.
      location: The equation.
    """

    dim: AtomDim
    is_of_layers: bool
    is_routed: bool
    location: EquationLocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The result of an equation. `constrained` may give this result a constraint.

    Attributes:
      place: Indices of the loops and calls around the equation, then the index of the equation.
      dims: The dims of the result.
      shape: The shape of the result.
      is_lookup: Whether an operand is one-hot. A matmul with this operand is a lookup in a table.
      location: The equation.
    """

    place: tuple[int, ...]
    dims: AtomDims
    shape: tuple[int, ...]
    is_lookup: bool
    location: EquationLocation

    @property
    def primitive(self) -> str:
        """Name of the JAX primitive."""
        return self.location.primitive


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AtomConflict:
    """Two operations that name one dim differently.

    Attributes:
      params: The affected dims, as pairs (number of a parameter, number of its dim).
      first: One of the names, and the evidence for it.
      second: The other name, and the evidence for it.
      meeting: The operation that uses two dims with these names as one dim. None if a single dim
        got both names.
    """

    params: frozenset[tuple[int, int]]
    first: tuple[str, Evidence]
    second: tuple[str, Evidence]
    meeting: Evidence | None


@dataclasses.dataclass(slots=True, kw_only=True)
class Facts:
    """What the walk records: how dims are used, and names that contradict each other.

    `activations` has the matmuls of two activations, and `projections` those of an activation and a
    weight. For each dim that a `shard_map` shards, `shards` has a pair: the factor that counts the
    shards, and the local part. `largest` has the dims along which an argmax or argmin chooses.
    `rows` has the dims along which single elements are taken. `loops` is the number of scans.
    """

    lookups: list[TableLookup] = dataclasses.field(default_factory=list)
    activations: list[Matmul] = dataclasses.field(default_factory=list)
    projections: list[Matmul] = dataclasses.field(default_factory=list)
    slices: list[DimSlice] = dataclasses.field(default_factory=list)
    top_k: list[Use] = dataclasses.field(default_factory=list)
    largest: list[Use] = dataclasses.field(default_factory=list)
    scans: list[Scan] = dataclasses.field(default_factory=list)
    rows: list[Use] = dataclasses.field(default_factory=list)
    windows: list[Use] = dataclasses.field(default_factory=list)
    outputs: list[Output] = dataclasses.field(default_factory=list)
    shards: list[tuple[AtomDim, AtomDim]] = dataclasses.field(default_factory=list)
    conflicts: list[AtomConflict] = dataclasses.field(default_factory=list)
    unknown: dict[str, Evidence] = dataclasses.field(default_factory=dict)
    loops: int = 0

    def same(self, left: AtomDim, right: AtomDim, location: EquationLocation) -> None:
        """Record that an equation makes two dims the same."""

        def add_conflict(first: Atom, second: Atom) -> None:
            assert first.evidence is not None
            assert second.evidence is not None
            meeting = Evidence("used as one dim", location)
            self.conflicts.append(
                AtomConflict(
                    params=first.params | second.params,
                    first=(first.name, first.evidence),
                    second=(second.name, second.evidence),
                    meeting=meeting,
                )
            )

        unify(left, right, add_conflict)
