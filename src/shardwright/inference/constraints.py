"""Which intermediates of a program get a constraint: residuals, heads, hidden dims and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jax.extend import core

from shardwright.inference.atoms import finest
from shardwright.inference.attention import GROUP
from shardwright.inference.facts import DimSlice, Output
from shardwright.inference.names import LENGTHS
from shardwright.inference.slices import NamedFactors, named_factors
from shardwright.inference.step import ArrayFacts
from shardwright.vocabulary.axes import (
    BATCH,
    EMBED,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
    VOCAB,
)
from shardwright.vocabulary.merged_dims import axis_text, merged

# Axis -> kind of an intermediate. If an intermediate has several of these axes, the one that comes
# first in this dict decides the kind.
KINDS: Final = {
    VOCAB: "logits",
    MLP_INTERMEDIATE: "hidden dim of an MLP",
    HEAD: "heads",
    KV_HEAD: "heads of keys and values",
    EMBED: "residual stream",
}
RESHARD: Final = "reshard"
_JAXPRS: Final = (core.ClosedJaxpr, core.Jaxpr)
_MATMULS: Final = frozenset({"dot_general", "conv_general_dilated"})
_ADDITIONS: Final = frozenset({"add", "add_any"})
_SHARDED: Final = frozenset({HEAD, KV_HEAD, MLP_INTERMEDIATE})
# Axes that only results of matmuls have: heads, hidden dims and logits.
_ENTERED: Final = frozenset({HEAD, GROUP, MLP_INTERMEDIATE, VOCAB})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """An intermediate that `constrained` passes to `shard`.

    Attributes:
      axes: Its annotation.
      shape: Its shape in the trace of inference.
      kind: What it is, such as `residual stream`.
      primitive: Name of the JAX primitive that returns it.
      source: Line of the model, such as `model.py:12`, or empty.
      place: Index of the equation in the program. If the equation is inside loops or calls, the
        indices of these come first.
    """

    axes: tuple[Any, ...]
    shape: tuple[int, ...]
    kind: str
    primitive: str
    source: str
    place: tuple[int, ...]

    def __str__(self) -> str:
        axes = " ".join(axis_text(axis) for axis in self.axes)
        return f"{self.source or '?'}: {axes}: {self.kind} ({self.primitive})"


def choose(
    outputs: Iterable[Output], slices: Iterable[DimSlice]
) -> tuple[tuple[Constraint, ...], Mapping[str, int]]:
    """Return the constraints of a program and, for each reason, how many intermediates get none.

    An intermediate gets a constraint if every dim has a name that is not a guess, one of the dims
    is BATCH, and another dim has an axis of `KINDS`. The result of fused projections gets none: one
    of its dims holds the heads of all projections, and is then cut into slices.
    """
    cut = {
        atom for dim_slice in slices for atom in finest(dim_slice.whole) if atom.name in _SHARDED
    }
    chosen = []
    refused: dict[str, int] = {}
    for output in outputs:
        atoms = [atom for dim in output.dims for atom in finest(dim)]
        rows = [named_factors(dim) for dim in output.dims]
        names = [name for row in rows for name, _ in row]
        reason = ""
        if "" in names:
            reason = "a dim without a name"
        elif any(atom.guess for atom in atoms):
            reason = "a guessed dim"
        elif BATCH not in names:
            reason = "no dim named BATCH"
        elif not cut.isdisjoint(atoms) or any(
            # This merged dim has a factor that is not sharded, such as the 3 of three fused
            # projections.
            len(row) > 1 and any(name in (EMPTY, GROUP) for name, _ in row)
            for row in rows
        ):
            reason = "a fused dim"
        elif kind := _kind(names, output):
            chosen.append(_constraint(output, rows, kind))
        else:
            reason = "other dims"
        if reason:
            refused[reason] = refused.get(reason, 0) + 1
    return tuple(chosen), refused


def is_candidate(primitive: str, operands: Iterable[ArrayFacts]) -> bool:
    """Tell whether the result of a primitive may get a constraint."""
    if primitive in _ADDITIONS:
        # Both summands of a residual addition depend on inputs and on parameters. A bias does not
        # depend on inputs, and a mask does not depend on parameters.
        return sum(operand.data and operand.learned for operand in operands) > 1
    return primitive in _MATMULS or primitive == "gather"


def _kind(names: list[str], output: Output) -> str:
    """Return what an intermediate is, or nothing if it gets no constraint."""
    own = [name for name in names if name not in (BATCH, EMPTY, *LENGTHS)]
    lengths = [name for name in names if name in LENGTHS]
    # Two dims with one axis would claim the same mesh axes, and `_constraint` gives all lengths one
    # name. So scores, which have the lengths of queries and keys, get no constraint.
    if names.count(BATCH) > 1 or len(lengths) > 1 or len({*own}) < len(own):
        return ""
    is_sum = output.primitive in _ADDITIONS or output.primitive == "gather"
    if is_sum and own != [EMBED]:
        return ""
    if output.primitive in _MATMULS and own == [EMBED] and not output.is_lookup:
        return ""  # the sum of this result and the residual stream gets the constraint
    if not set(own) <= {*KINDS, HEAD_DIM, GROUP}:
        return ""
    if GROUP in own:
        return KINDS[HEAD]
    return next((kind for axis, kind in KINDS.items() if axis in own), "")


def _constraint(output: Output, rows: list[NamedFactors], kind: str) -> Constraint:
    """Spell the dims of an intermediate as an annotation.

    Whatever name the seeds give to the dim of the sequence, it is spelled LENGTH in the residual
    stream, KV_LENGTH in keys and values, and QUERY_LENGTH in the other matmuls. KV_HEAD without
    GROUP marks keys and values: queries, and results of scores times values, may have KV_HEAD too,
    but only together with GROUP.
    """
    names = {name for row in rows for name, _ in row}
    if KV_HEAD in names and GROUP not in names:
        other = {**dict.fromkeys(LENGTHS, KV_LENGTH), HEAD_DIM: KV_HEAD_DIM}
    else:
        other = dict.fromkeys(LENGTHS, LENGTH if names.isdisjoint(_ENTERED) else QUERY_LENGTH)
    axes: list[Any] = []
    for row in rows:
        factors = [(other.get(name, name), size) for name, size in row]
        factors = [(EMPTY if name == GROUP else name, size) for name, size in factors]
        if len(factors) > 1:
            axes.append(merged(*factors))
        else:
            axes.append(factors[0][0] if factors else EMPTY)
    return Constraint(
        axes=tuple(axes),
        shape=output.shape,
        kind=kind,
        primitive=output.primitive,
        source=output.location.source,
        place=output.place,
    )


def numbered(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """Yield each equation of a jaxpr with its index. Equations of `reshard` are not counted.

    Under a mesh, JAX adds `reshard` to some programs, such as that of `jnp.where(x, 1, y)`. On Auto
    axes, a `reshard` does nothing. The indices of a program must be the same with and without a
    mesh, so a `reshard` gets the index of the equation after it.
    """
    at = 0
    for equation in jaxpr.eqns:
        yield at, equation
        at += equation.primitive.name != RESHARD


def operations(jaxpr: Any) -> Iterator[str]:
    """Yield each primitive of a program, with the ranks of its results."""
    for _, equation in numbered(jaxpr):
        if equation.primitive.name == RESHARD:
            continue
        # Write ranks, not shapes, so that a call may have another batch size than the trace of
        # inference.
        ranks = [str(len(getattr(v.aval, "shape", ()))) for v in equation.outvars]
        yield f"{equation.primitive.name} {' '.join(ranks)}"
        # Skip the body of a custom VJP. Its values get no constraint, and it may depend on the
        # manager: under a manager, `linear_scan` is a shard_map.
        if equation.primitive.name == "custom_vjp_call":
            continue
        for value in equation.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(each, _JAXPRS):
                    # Brackets mark the body of a loop or a call. Without brackets, an equation
                    # could move out of a loop without a change of the text.
                    yield "("
                    yield from operations(getattr(each, "jaxpr", each))
                    yield ")"
