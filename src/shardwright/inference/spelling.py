"""Spell the dims of a parameter as an annotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from shardwright.inference.atoms import AtomDim, AtomDims, finest
from shardwright.inference.attention import GROUP
from shardwright.inference.evidence import Evidence
from shardwright.inference.facts import Facts
from shardwright.inference.slices import named_factors
from shardwright.vocabulary.axes import (
    EMBED,
    EMPTY,
    EXPERT,
    EXPERT_GATE,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    LAYERS,
    MLP_INTERMEDIATE,
    NORM,
    VOCAB,
)
from shardwright.vocabulary.merged_dims import MergedDim, merged

# Axes that every preset with tensor parallelism shards over one mesh axis.
_TENSOR: Final = frozenset({HEAD, KV_HEAD, MLP_INTERMEDIATE, VOCAB})


@dataclasses.dataclass(frozen=True, slots=True)
class Spelled:
    """One dim of a parameter.

    Attributes:
      axis: Axis or merged axes. EMPTY if no rule names the dim.
      evidence: Why it has this axis.
      guess: Whether a default rule chose the axis.
      is_open: Whether no rule names the dim.
    """

    axis: Any
    evidence: Evidence
    guess: bool = False
    is_open: bool = False


def routers(facts: Facts) -> frozenset[int]:
    """Return the numbers of the parameters that are weights of routers.

    In the matmul of a router, EXPERT is the only dim that comes from the weight alone.
    """
    return frozenset(
        matmul.leaf
        for matmul in facts.projections
        if matmul.leaf is not None
        and _names(matmul.right) == {EXPERT}
        and EXPERT not in _names((*matmul.batch, *matmul.contracted))
    )


def _names(dims: AtomDims) -> set[str]:
    return {atom.name for dim in dims for atom in finest(dim)}


def spell(dims: AtomDims, *, is_router: bool = False) -> list[Spelled]:
    """Return the annotation of a parameter, as one entry per dim.

    The entry of a dim depends on the other dims: a head dim beside KV_HEAD is KV_HEAD_DIM, and a
    vector along EMBED is NORM.

    Args:
      dims: The dims of a parameter.
      is_router: Whether it is the weight of a router.
    """
    row = [_spell_dim(dim) for dim in dims]
    row = _without_repeats(row)
    axes = [entry.axis for entry in row]
    # Strategies have one rule for HEAD_DIM and one for KV_HEAD_DIM. The walk does not distinguish
    # these two axes.
    if any(KV_HEAD in _members(axis) for axis in axes):
        row = [_renamed(entry, HEAD_DIM, KV_HEAD_DIM) for entry in row]
    others = [axis for axis in axes if axis != LAYERS]
    if others == [EMBED]:
        row = [_renamed(entry, EMBED, NORM) for entry in row]
    if is_router or others in ([EXPERT], [EMBED, EXPERT]):
        # This is the weight or the bias of a router. EXPERT is for the weights of experts.
        row = [_renamed(entry, EXPERT, EXPERT_GATE) for entry in row]
    return row


def _spell_dim(dim: AtomDim) -> Spelled:
    atoms = finest(dim)
    if not atoms:
        return Spelled(EMPTY, Evidence("size 1"))
    named = named_factors(dim)
    if not all(name for name, _ in named):
        return Spelled(EMPTY, Evidence("no rule names it"), is_open=True)
    # An EMPTY factor is merged with its neighbor, so the evidence of the neighbor is shown.
    explaining = [atom for atom in atoms if atom.name != EMPTY] or atoms
    evidence = next(atom.evidence for atom in explaining if atom.evidence is not None)
    axes = {name for name, _ in named}
    is_fused = axes == {EMPTY, EMBED}  # several parts, such as scales and shifts
    guess = is_fused or any(atom.guess for atom in atoms)
    factors = [(EMPTY if name == GROUP else name, size) for name, size in named]
    return Spelled(_entry(factors), evidence, guess=guess)


def _entry(factors: Sequence[tuple[str, int]]) -> Any:
    """Return factors as one entry. A factor that is not sharded joins its neighbor."""
    members: list[tuple[str, int]] = []
    for name, size in factors:
        if members and EMPTY in (name, members[-1][0]):
            last, count = members[-1]
            members[-1] = (name if last == EMPTY else last, count * size)
        else:
            members.append((name, size))
    return members[0][0] if len(members) == 1 else merged(*members)


def _members(axis: Any) -> tuple[str, ...]:
    if isinstance(axis, MergedDim):
        return tuple(name for name, _ in axis.members)
    return (axis,)


def _renamed(entry: Spelled, old: str, new: str) -> Spelled:
    if isinstance(entry.axis, MergedDim):
        members = [(new if name == old else name, size) for name, size in entry.axis.members]
        return dataclasses.replace(entry, axis=merged(*members))
    return dataclasses.replace(entry, axis=new) if entry.axis == old else entry


def _without_repeats(row: Sequence[Spelled]) -> list[Spelled]:
    """Replicate a dim if another dim has its axis, because both would claim the same mesh axes.

    A dim with a guessed axis of tensor parallelism is also replicated if another dim has an axis of
    tensor parallelism, because every preset shards both over `tp`. An example is a weight from the
    features of an MLP to image classes. A dim whose axis is certain keeps it. If no axis is
    certain, the first dim keeps its axis.
    """
    seen: set[str] = set()
    entries = list(row)
    # False sorts before True, so certain dims take their axis first, and guesses after them.
    for at in sorted(range(len(row)), key=lambda at: row[at].guess):
        entry = row[at]
        names = {name for name in _members(entry.axis) if name != EMPTY}
        if entry.guess and names & _TENSOR and seen & _TENSOR and not names & seen:
            beside = "/".join(sorted(name.strip("_") for name in seen & _TENSOR))
            evidence = Evidence(
                f"beside {beside}, over the same mesh axis", entry.evidence.location
            )
            entries[at] = Spelled(EMPTY, evidence, guess=True)
            continue
        if names & seen:
            reason = f"{'/'.join(sorted(name.strip('_') for name in names & seen))} a second time"
            evidence = Evidence(reason, entry.evidence.location)
            entries[at] = Spelled(EMPTY, evidence, guess=True)
        seen |= names
    return entries
