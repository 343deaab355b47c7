"""The rule of `dot_general`, and of primitives that are computed like it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.dims.table import FactorRole, correspondence
from shardwright.plan.walk.events import Idle
from shardwright.plan.walk.step import PlanStep
from shardwright.plan.walk.values import (
    Dims,
    ShardedValue,
    explicit_axes,
    merged_origins,
    shards,
)
from shardwright.trees.tensors import whole_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """One label per dim of a matmul.

    Labels are `b0` for a batch dim, `c0` for a contracted dim, and `l0` or `r0` for a dim that only
    the left or the right operand has. Dims that are multiplied with each other share a label. `s`
    starts the label of a dim that must be whole.

    Attributes:
      operands: Labels of the dims of each operand.
      result: Labels of the dims of the result.
      sizes: Size of each label.
    """

    operands: tuple[tuple[str, ...], tuple[str, ...]]
    result: tuple[str, ...]
    sizes: dict[str, int]

    @staticmethod
    def of(equation: Any) -> Labels:
        """Label the dims of a `dot_general`, or of a ragged one."""
        known = correspondence(equation)
        assert known is not None
        left, right = known.operands[:2]

        def label(factors: tuple[int, ...]) -> str:
            # A matmul neither splits nor joins dims, so each dim is one factor.
            (factor,) = factors
            if known.roles[factor] is FactorRole.PICKED or factors not in (*left, *right):
                return f"s{factor}"
            if known.roles[factor] is FactorRole.SUMMED:
                return f"c{factor}"
            sides = [letter for letter, side in (("l", left), ("r", right)) if factors in side]
            return f"{sides[0] if len(sides) == 1 else 'b'}{factor}"

        lefts, rights = tuple(map(label, left)), tuple(map(label, right))
        # In a ragged matmul, each row is multiplied by one matrix, that of its group. So leave the
        # dim of the groups (`PICKED`) out of `sizes`.
        used = {factor for (factor,) in (*left, *right)}
        used = {factor for factor in used if known.roles[factor] is not FactorRole.PICKED}
        return Labels(
            operands=(lefts, rights),
            result=tuple(map(label, known.results[0])),
            sizes={label((factor,)): known.sizes[factor] for factor in sorted(used)},
        )


def dot_general(step: PlanStep) -> list[ShardedValue]:
    """Follow a `dot_general`."""
    labels = Labels.of(step.equation)
    return follow_matmul(step, [step.whole(0), step.whole(1)], labels)


def ragged_dot(step: PlanStep) -> list[ShardedValue]:
    """Follow a ragged matmul as TPUs compute it: they gather the rows and the groups.

    A CPU keeps rows and groups sharded, so the plan notes doubts about both.
    """
    numbers, labels = step.parameters["ragged_dot_dimension_numbers"], Labels.of(step.equation)
    step.move(2, ((),) * step.avals[2].ndim)
    ragged = {labels.operands[0][dim] for dim in numbers.lhs_ragged_dimensions}
    # If one operand shards a contracted dim, XLA slices the other operand to match. So the result
    # is always summed over this dim, and the sharded operand is never gathered.
    summed: dict[str, tuple[str, ...]] = {}
    whole = [step.whole(0), step.whole(1)]
    for names, value in zip(labels.operands, whole, strict=True):
        for label, axes in zip(names, value.dims, strict=True):
            if axes and label.startswith("c") and label not in ragged:
                summed.setdefault(label, axes)
    values = [
        value.with_dims(
            () if label in ragged or label.startswith("s") else summed.get(label, axes)
            for label, axes in zip(names, value.dims, strict=True)
        )
        for names, value in zip(labels.operands, whole, strict=True)
    ]
    gathered = {
        axis
        for names, value in zip(labels.operands, whole, strict=True)
        for label, axes in zip(names, value.dims, strict=True)
        if label in ragged or label.startswith("s")
        for axis in axes
    }
    step.doubt(gathered, "call it inside shard_map, as layers.moe does: TPUs gather its rows")
    (result,) = follow_matmul(step, values, labels)
    # Each device has the whole result, and keeps its own rows.
    rows = {axis for axes in whole[0].dims for axis in axes} & gathered
    rows -= result.mesh_axes | result.owed
    if rows and result.owed:  # sum whole rows before each device keeps its own rows
        result = step.settle(result)
    sides = {
        label: tuple(axis for axis in axes if axis in rows)
        for label, axes in zip(labels.operands[0], whole[0].dims, strict=True)
        if label in ragged
    }
    pairs = zip(labels.result, result.dims, strict=True)
    return [result.with_dims(sides.get(label, axes) or axes for label, axes in pairs)]


def follow_matmul(
    step: PlanStep, values: Sequence[ShardedValue], labels: Labels
) -> list[ShardedValue]:
    """Follow a matmul.

    A mesh axis shards at most one label. If it shards a contracted label, the result is a partial
    sum.

    Args:
      step: The equation.
      values: Its operands, with the mesh axes that they may keep.
      labels: The labels of their dims.
    """
    places = _places(step, values, labels)
    order = _order(values, labels, places)

    def dims(of: Sequence[str]) -> Dims:
        return tuple(tuple(order.get(label, ())) for label in of)

    for at, names in enumerate(labels.operands):
        step.move(at, dims(names), use=_use(step, at, values[at], names, order))
    _count(step, labels, order)
    owed = frozenset(axis for axis, label in places.items() if label.startswith("c"))
    # XLA adds over the mesh axes of one contracted dim after the other.
    contracted = (label for label in order if label.startswith("c"))
    groups = tuple(frozenset(order[label]) for label in contracted if order[label])
    result = ShardedValue(
        dims=dims(labels.result),
        owed=owed,
        groups=groups,
        origins=merged_origins(values),
        is_matmul=True,
    )
    return [result]


def _use(
    step: PlanStep,
    at: int,
    value: ShardedValue,
    names: Sequence[str],
    order: dict[str, list[str]],
) -> object:
    """Return a key for one use of a value.

    XLA merges the moves for two uses only if their keys are equal.

    Two matmuls that need the same sharding share a gather in three cases: the labels that stay
    sharded are of the same kinds (first letters); the sharding of the value is in its type
    (Explicit mesh axes); or the gathered mesh axes have fewer devices than the mesh axes that stay.
    """
    if explicit_axes(step.avals[at]):
        return None
    sizes = step.ledger.sizes
    kept = {axis for name in names for axis in order.get(name, ())}
    gathered = value.mesh_axes - kept
    if shards(gathered, sizes) < shards(kept, sizes):
        return None
    return tuple(name[0] for name in names if order.get(name)) or None


def _places(step: PlanStep, values: Sequence[ShardedValue], labels: Labels) -> dict[str, str]:
    """Return the label that each mesh axis shards. Operands are gathered over other mesh axes.

    XLA decides in this way, as measured on compiled programs:

    * If a constraint shards a label of the result over the mesh axis, this label is chosen.
    * If both operands shard a contracted label, XLA sums over the mesh axis.
    * If only one operand shards a contracted label, XLA sums if the result is smaller than that
      operand. Else it gathers the operand.
    * If two labels compete, and a constraint on the result shards neither, both are gathered. A
      single label of the result is gathered too, if the mesh axis is Explicit and the type of the
      result does not shard the label over it.
    * XLA may gather or sum instead if a batch label is sharded, and either a constraint shards
      another label of the result or an operand shards a contracted label. The plan marks these
      matmuls.
    * If two labels compete without a constraint, the label of the larger operand is chosen. The
      plan marks this choice.
    """
    places: dict[str, str] = {}
    one_sided: dict[str, tuple[str, int]] = {}
    for axis, claims in _claims(step, values, labels).items():
        wanted = step.wanted_over(axis)
        decided_label = _constrained_label(axis, labels, wanted)
        contracted = [label for label in claims if label.startswith("c")]
        shared = [label for label in contracted if len(claims[label].operands) == 2]
        if decided_label is not None and _is_dispatched(claims, decided_label):
            step.note_choice(axis)
        if decided_label in claims:
            places[axis] = decided_label
        elif shared:
            places[axis] = shared[0]
        elif len(claims) == 1 and contracted and decided_label is not None:
            places[axis] = decided_label
        elif len(claims) == 1 and contracted:
            (label,) = contracted
            one_sided[axis] = label, claims[label].operands[0]
        elif len(claims) == 1:
            if axis not in explicit_axes(step.results[0]):
                places[axis] = next(iter(claims))
        elif wanted is None:
            # If bytes are equal, a dim of the result wins over a contracted one.
            places[axis] = max(
                claims, key=lambda label: (claims[label].bytes, not label.startswith("c"))
            )
            step.note_choice(axis)
    unused = step.ledger.sizes.keys() - places.keys() - one_sided.keys()
    # Decide the axes in `one_sided` last: bytes on one device depend on where all other mesh axes
    # are.
    for axis, (label, side) in one_sided.items():
        if _sum_is_smaller(step, labels, places, side):
            places[axis] = label
            # As measured on CPUs, XLA gathers if another mesh axis repeats the matmul, or if a
            # constraint after a later matmul shards a dim of the result over this mesh axis.
            if unused or _constrained_label(axis, labels, step.suggested) is not None:
                step.note_choice(axis)
    return places


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """The operands (0, 1) that shard a label over a mesh axis, and the bytes of the larger one."""

    operands: tuple[int, ...] = ()
    bytes: int = 0


def _claims(
    step: PlanStep, values: Sequence[ShardedValue], labels: Labels
) -> dict[str, dict[str, _Claim]]:
    """Return, for each mesh axis, the labels that operands shard over it."""
    claims: dict[str, dict[str, _Claim]] = {}
    for side, (value, names) in enumerate(zip(values, labels.operands, strict=True)):
        if value.free:
            continue
        size = _bytes(step.avals[side])
        for label, axes in zip(names, value.dims, strict=True):
            for axis in axes:
                claim = claims.setdefault(axis, {}).get(label, _Claim())
                claims[axis][label] = _Claim(
                    operands=(*claim.operands, side), bytes=max(claim.bytes, size)
                )
    return claims


def _is_dispatched(claims: Mapping[str, _Claim], decided: str) -> bool:
    """Tell whether a mesh axis moves to or from a batch label, as in an MoE that uses one-hots."""
    batch = [label for label in claims if label.startswith("b")]
    if decided not in claims:
        return bool(batch)
    return decided in batch and any(label.startswith("c") for label in claims)


def _sum_is_smaller(step: PlanStep, labels: Labels, places: dict[str, str], side: int) -> bool:
    """Tell whether the result has fewer bytes on one device than the gathered operand."""

    def local_bytes(names: Sequence[str], aval: Any) -> int:
        placed = [axis for axis, label in places.items() if label in names]
        return _bytes(aval) // shards(placed, step.ledger.sizes)

    result = local_bytes(labels.result, step.results[0])
    return result < local_bytes(labels.operands[side], step.avals[side])


def _bytes(aval: Any) -> int:
    return whole_bytes(math.prod(aval.shape), aval.dtype)


def _constrained_label(axis: str, labels: Labels, wanted: Dims | None) -> str | None:
    if wanted is None:
        return None
    pairs = zip(labels.result, wanted, strict=True)
    return next((label for label, axes in pairs if axis in axes), None)


def _order(
    values: Sequence[ShardedValue], labels: Labels, places: dict[str, str]
) -> dict[str, list[str]]:
    """Return the mesh axes of each label, major first."""
    # If both operands shard a label, the left one gives the order, and the right one moves.
    order: dict[str, list[str]] = {}
    for value, names in zip(values, labels.operands, strict=True):
        for label, axes in zip(names, value.dims, strict=True):
            for axis in axes:
                if places.get(axis) == label and axis not in order.setdefault(label, []):
                    order[label].append(axis)
    return order


def _count(step: PlanStep, labels: Labels, order: dict[str, list[str]]) -> None:
    """Count the operations and bytes of a matmul, and note mesh axes whose devices repeat it."""
    ledger = step.ledger
    elements = math.prod(
        # Devices also multiply the padding of a dim that does not divide.
        -(-size // shards(order.get(label, ()), ledger.sizes))
        for label, size in labels.sizes.items()
    )
    operands = [
        ledger.local_bytes(aval, tuple(tuple(order.get(label, ())) for label in names))
        for aval, names in (
            *zip(step.avals, labels.operands, strict=False),
            (step.results[0], labels.result),
        )
    ]
    used = {axis for axes in order.values() for axis in axes}
    idle = tuple(axis for axis in ledger.sizes if axis not in used)
    copies = math.prod(ledger.sizes[axis] for axis in idle)
    dtypes = [aval.dtype for aval in step.avals[:2]]
    flops = ledger.count_matmul(elements, operands, step.location, dtypes=dtypes, copies=copies)
    if idle:
        ledger.idle.append(Idle(mesh_axes=idle, source=step.location.source, flops=flops))
