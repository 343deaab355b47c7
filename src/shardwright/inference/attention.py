"""Name the dims of attention: heads, head dims, and groups of heads that share keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from shardwright.inference.atoms import Atom, AtomDim, finest
from shardwright.inference.evidence import EquationLocation, Evidence
from shardwright.inference.facts import ActivationOrigin, Facts, Matmul, nearest_matmuls
from shardwright.inference.names import LENGTHS, Names, outputs_of, summed_over, with_slices
from shardwright.vocabulary.axes import HEAD, HEAD_DIM, KV_HEAD, LENGTH

# The dim of the query heads is a product of two factors, (KV_HEAD, GROUP). The size of GROUP is the
# number of query heads that share one kv head. GROUP is only a name inside inference, and not an
# axis: annotations spell (KV_HEAD, GROUP) as HEAD.
GROUP: Final = "__GROUP__"
_HEADS: Final = frozenset({HEAD, KV_HEAD, GROUP})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A matmul of queries and keys.

    Attributes:
      batch: The factors of its batch dims.
      contracted: The factors that are summed over: the head dim.
      sequence: The position factors of the queries and of the keys.
      groups: Factors of the queries that the keys do not have: query heads that share a kv head.
      is_confirmed: Whether another matmul sums over the positions of the keys.
      location: The equation.
    """

    batch: list[Atom]
    contracted: list[Atom]
    sequence: set[Atom]
    groups: list[Atom]
    is_confirmed: bool
    location: EquationLocation | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """How matmuls use factors.

    Attributes:
      made: Factors of matmul results that come from a weight, and slices of these factors.
      summed: Factors that matmuls with weights sum over.
      stacked: Factors along which weights are stacked: batch dims of matmuls with weights.
      next: Origin of the result of a matmul -> the matmuls of activations that use this result.
    """

    made: set[Atom]
    summed: set[Atom]
    stacked: set[Atom]
    next: dict[ActivationOrigin, list[Matmul]]


def name_attention(names: Names) -> None:
    """Find the matmuls of queries and keys, and of scores and values. Name the dims of both."""
    all_scores: list[Scores] = []
    uses = _uses(names.facts)
    # Visit the matmuls in program order, so scores are known before their matmul with values.
    for matmul in names.facts.activations:
        following = [] if matmul.origin is None else uses.next.get(matmul.origin, [])
        scores = _scores(matmul, uses, following)
        if scores is not None:
            _name_scores(names, scores, uses)
            all_scores.append(scores)
        elif not _name_states(names, matmul, uses, following):
            _name_values(names, matmul, all_scores, uses)


def _uses(facts: Facts) -> Uses:
    following: dict[ActivationOrigin, list[Matmul]] = {}
    for matmul in facts.activations:
        for origin in set().union(*map(nearest_matmuls, matmul.operands)):
            following.setdefault(origin, []).append(matmul)
    made = set(with_slices(outputs_of(facts.projections), facts.slices))
    # If a part of a dim comes from a weight, the whole dim counts as made by weights.
    for dim_slice in facts.slices:
        if made.issuperset(finest(dim_slice.dim)):
            made.update(finest(dim_slice.whole))
    batch = {atom for each in facts.projections for atom in _factors(each.batch)}
    return Uses(made=made, summed=summed_over(facts.projections), stacked=batch, next=following)


def _factors(dims: Iterable[AtomDim]) -> list[Atom]:
    return [atom for dim in dims for atom in finest(dim)]


def _scores(matmul: Matmul, uses: Uses, following: Iterable[Matmul]) -> Scores | None:
    """Return the `Scores` of a matmul of queries and keys, or None for another matmul.

    Queries and keys both have positions, and the matmul sums over a dim that comes from a weight.
    If only queries or only keys have positions, another matmul must sum over these positions.
    """
    left, right = _factors(matmul.left), _factors(matmul.right)
    contracted = _factors(matmul.contracted)
    # A head dim comes from a weight. A matmul of scores and values sums over positions, which do
    # not come from a weight, so return here for such a matmul.
    if not contracted or any(
        not atom.learned or atom.name not in ("", HEAD_DIM) for atom in contracted
    ):
        return None
    shared = set(left) & set(right)

    def is_position(atom: Atom) -> bool:
        # `learned` does not help here: in a model with a table of positions, the length is a dim of
        # a parameter too.
        return atom not in uses.made or atom.name in LENGTHS or atom in shared

    positions = [any(map(is_position, side)) for side in (left, right)]
    heads = [atom for atom in _factors(matmul.batch) if atom.learned and not atom.name]
    # In decode, each sequence has one query, so the queries have no dim of positions. But the
    # queries may have dims of groups.
    sequence = {atom for atom in (*left, *right) if is_position(atom)}
    is_confirmed = any(not sequence.isdisjoint(_factors(each.contracted)) for each in following)
    is_decode = any(positions) and bool(heads) and is_confirmed
    if not all(positions) and not is_decode:
        return None
    groups = [
        [atom for atom in side if not is_position(atom) and atom.name in ("", *_HEADS)]
        for side in (left, right)
    ]
    # Keys have no groups. If both sides have dims that are not positions, this is not a matmul of
    # queries and keys.
    if all(groups):
        return None
    return Scores(
        batch=_factors(matmul.batch),
        contracted=contracted,
        sequence=sequence,
        groups=groups[0] or groups[1],
        is_confirmed=is_confirmed,
        location=matmul.location,
    )


def _name_scores(names: Names, scores: Scores, uses: Uses) -> None:
    location = scores.location
    heads, guess = _heads(scores.batch, uses)
    heads = _with_shards(heads, names.facts.shards)
    # Without heads, or without a matmul with values, this may be a matmul of two other activations.
    # Then the names are guesses.
    guess |= (not heads and not scores.groups) or (bool(scores.groups) and not scores.is_confirmed)
    why = Evidence("queries times keys: summed over", location)
    names.give(scores.contracted, HEAD_DIM, why, guess=guess)
    for atom in scores.sequence:
        if atom.learned:
            # If the dim comes only from a parameter, its elements may be learned latents, so the
            # name is a guess.
            why = Evidence("queries times keys: a position", location)
            names.give((atom,), LENGTH, why, guess=not (atom.resized or atom.given))
    shared = Evidence("queries times keys: heads that share keys", location)
    batch = Evidence("queries times keys: a batch dim", location)
    kv_heads, copies = _grouped(heads)
    if scores.groups and heads:
        kv_heads, copies = heads, scores.groups
    elif scores.groups:
        heads = scores.groups
    if copies:
        names.give(kv_heads, KV_HEAD, batch, guess=guess)
        names.give(copies, GROUP, shared, guess=guess)
    else:
        names.give(heads, HEAD, batch, guess=guess)


def _heads(batch: Iterable[Atom], uses: Uses) -> tuple[list[Atom], bool]:
    """Return the heads among the factors of batch dims, and whether this is a guess.

    After attention, a matmul with a weight usually sums over the heads. If there is no such matmul,
    the heads are the dims along which no weights are stacked. If weights are stacked along all
    dims, the heads are a guess: such a dim may also count models or stages.
    """
    heads = [atom for atom in batch if atom.learned and atom.name in ("", *_HEADS)]
    read = [atom for atom in heads if atom in uses.summed]
    if read:
        return read, False
    plain = [atom for atom in heads if atom not in uses.stacked]
    return (plain, False) if plain else (heads, bool(heads))


def _with_shards(heads: list[Atom], shards: Iterable[tuple[AtomDim, AtomDim]]) -> list[Atom]:
    """Inside a `shard_map`, put the factor that counts the shards of the heads before the heads."""
    for major, part in shards:
        extra = [atom for atom in finest(major) if not atom.name and atom not in heads]
        if heads and finest(part)[:1] == heads[:1]:
            heads = [*extra, *heads]
    return heads


def _grouped(heads: list[Atom]) -> tuple[list[Atom], list[Atom]]:
    """Return heads as (kv heads, query heads per kv head).

    The parameters of queries have both factors, and those of keys and values only the first one. So
    the second factor is the one in fewer parameters. If there are not two such factors, return
    (heads, []).
    """
    most = max((len(atom.params) for atom in heads), default=0)
    kv_heads = [atom for atom in heads if len(atom.params) == most]
    copies = [atom for atom in heads if len(atom.params) < most]
    return (kv_heads, copies) if len(heads) == 2 and copies else (heads, [])


def _name_states(names: Names, matmul: Matmul, uses: Uses, following: Iterable[Matmul]) -> bool:
    """Name the dims of the two matmuls of linear attention.

    The first matmul, keys times values, sums over positions and gives a state. The second matmul,
    queries times this state, sums over the head dim of the keys.
    """
    sides = [_factors(matmul.left), _factors(matmul.right)]
    contracted = _factors(matmul.contracted)
    if not contracted or any(atom in uses.made for atom in contracted):
        return False
    if not all(side and uses.made >= set(side) for side in sides):
        return False
    if any(atom.name not in ("", HEAD_DIM) for side in sides for atom in side):
        return False
    is_read = any(
        _factors(each.contracted) == side and set(other) <= set(_factors((*each.left, *each.right)))
        for each in following
        for side, other in (sides, reversed(sides))
    )
    if not is_read:
        return False
    heads, guess = _heads(_factors(matmul.batch), uses)
    why = Evidence("keys times values, which queries read: a batch dim", matmul.location)
    names.give(heads, HEAD, why, guess=guess)
    why = Evidence("keys times values, which queries read", matmul.location)
    for side in sides:
        names.give(side, HEAD_DIM, why, guess=guess or not heads)
    return True


def _name_values(names: Names, matmul: Matmul, all_scores: Iterable[Scores], uses: Uses) -> None:
    """Name the head dim of values if the matmul multiplies scores by values.

    Such a matmul sums over positions of the scores.
    """
    contracted = set(_factors(matmul.contracted))
    batch = set(_factors(matmul.batch))
    free = _factors((*matmul.left, *matmul.right))
    # Without heads, only equal batch dims show that this matmul multiplies the scores by values.
    has_heads = any(atom.name in _HEADS for atom in (*batch, *free))
    is_values = any(
        contracted and contracted <= scores.sequence and (has_heads or batch == set(scores.batch))
        for scores in all_scores
    )
    if not is_values:
        return
    why = Evidence("scores times values: a dim of a weight", matmul.location)
    for atom in free:
        if atom in uses.made:
            names.give((atom,), HEAD_DIM, why, guess=not has_heads)
