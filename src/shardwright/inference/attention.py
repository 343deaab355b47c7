"""Name the dims of attention: heads, head dims, and groups of heads that share keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from shardwright.inference.atoms import Atom, Dim, finest
from shardwright.inference.evidence import Evidence, Site
from shardwright.inference.facts import Product
from shardwright.inference.names import LENGTHS, Names
from shardwright.vocabulary.axes import EMBED, HEAD, HEAD_DIM, KV_HEAD, LENGTH

# The query heads that share one kv head. GROUP is not an axis: (KV_HEAD, GROUP) is spelled HEAD.
GROUP: Final = "__GROUP__"
_HEADS: Final = frozenset({HEAD, KV_HEAD, GROUP})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A product of queries and keys.

    Attributes:
      batch: The factors of its batch dims.
      contracted: The factors that are summed over: the head dim.
      sequence: Free factors that are positions.
      groups: Free factors of the queries that the keys do not have.
      site: The equation.
    """

    batch: list[Atom]
    contracted: list[Atom]
    sequence: set[Atom]
    groups: list[Atom]
    site: Site | None


def name_attention(names: Names) -> None:
    """Find products of queries and keys, and products of scores and values; name their dims."""
    all_scores: list[Scores] = []
    stacked, states = _stacked(names.facts.projections), set[Atom]()
    for product in names.facts.activations:
        states |= _state(product)
        scores = _scores(product)
        if scores is None:
            _name_values(names, product, all_scores)
        elif states.isdisjoint(scores.groups):
            _name_scores(names, scores, stacked)
            all_scores.append(scores)
        else:
            _name_linear(names, scores)


def _stacked(projections: Iterable[Product]) -> set[Atom]:
    """Return the batch dims of products of the residual stream with weights. They are no heads.

    They are the dims of experts, or of models that `jax.vmap` runs side by side.
    """
    return {
        atom
        for product in projections
        if any(atom.name == EMBED for atom in _factors(product.contracted))
        for atom in _factors(product.batch)
    }


def _state(product: Product) -> set[Atom]:
    """Return the free dims of a product of keys and values over positions, as in linear attention.

    A product of scores and values has positions among its free dims.
    """
    free = _factors((*product.left, *product.right))
    summed = _factors(product.contracted)
    is_state = bool(summed) and not any(atom.learned for atom in summed)
    is_state &= all(_has_learned(side) for side in (product.left, product.right))
    return set(free) if is_state and all(atom.learned for atom in free) else set()


def _has_learned(dims: Iterable[Dim]) -> bool:
    return any(atom.learned for atom in _factors(dims))


def _name_linear(names: Names, scores: Scores) -> None:
    """Guess the dims of attention without scores: queries times a state of keys and values."""
    why = Evidence("queries times a sum over keys and values", scores.site)
    for axis, atoms in (
        (HEAD, [atom for atom in scores.batch if atom.learned]),
        (HEAD_DIM, [*scores.contracted, *scores.groups]),
    ):
        for atom in atoms:
            names.give((atom,), axis, why, guess=True)


def _factors(dims: Iterable[Dim]) -> list[Atom]:
    return [atom for dim in dims for atom in finest(dim)]


def _scores(product: Product) -> Scores | None:
    """Return a product as queries times keys, or None if it is another product.

    Queries and keys both have positions, and the product sums over a dim that comes from a weight.
    """
    left, right = _factors(product.left), _factors(product.right)
    contracted = _factors(product.contracted)
    if not contracted or any(
        not atom.learned or atom.name not in ("", HEAD_DIM) for atom in contracted
    ):
        return None
    shared = set(left) & set(right)

    def is_position(atom: Atom) -> bool:
        # If the model has a table of positions, the length is a dim of a parameter too.
        return not atom.learned or atom.name in LENGTHS or atom in shared

    positions = [any(map(is_position, side)) for side in (left, right)]
    heads = [atom for atom in _factors(product.batch) if atom.learned and not atom.name]
    # In decode there is one query per sequence, so queries have no dim of positions. They may have
    # groups.
    is_decode = any(positions) and bool(heads)
    if not all(positions) and not is_decode:
        return None
    groups = [
        [atom for atom in side if not is_position(atom) and atom.name in ("", *_HEADS)]
        for side in (left, right)
    ]
    if all(groups):
        return None
    return Scores(
        batch=_factors(product.batch),
        contracted=contracted,
        sequence={atom for atom in (*left, *right) if is_position(atom)},
        groups=groups[0] or groups[1],
        site=product.site,
    )


def _name_scores(names: Names, scores: Scores, stacked: set[Atom]) -> None:
    site = scores.site
    heads = [
        atom
        for atom in scores.batch
        if atom.learned and atom.name in ("", *_HEADS) and atom not in stacked
    ]
    heads = _with_shards(heads, names.facts.shards)
    # Without heads, this may be another product of two activations.
    guess = not heads and not scores.groups
    why = Evidence("queries times keys: summed over", site)
    names.give(scores.contracted, HEAD_DIM, why, guess=guess)
    for atom in scores.sequence:
        if atom.learned:
            names.give((atom,), LENGTH, Evidence("queries times keys: a position", site))
    shared = Evidence("queries times keys: heads that share keys", site)
    batch = Evidence("queries times keys: a batch dim", site)
    kv_heads, copies = _grouped(heads)
    if scores.groups and heads:
        kv_heads, copies = heads, scores.groups
    elif scores.groups:
        heads = scores.groups
    if copies:
        names.give(kv_heads, KV_HEAD, batch)
        names.give(copies, GROUP, shared)
    else:
        names.give(heads, HEAD, batch)


def _with_shards(heads: list[Atom], shards: Iterable[tuple[Dim, Dim]]) -> list[Atom]:
    """Inside a `shard_map`, return heads with the factor of their shards in front."""
    for major, part in shards:
        extra = [atom for atom in finest(major) if not atom.name and atom not in heads]
        if heads and finest(part)[:1] == heads[:1]:
            heads = [*extra, *heads]
    return heads


def _grouped(heads: list[Atom]) -> tuple[list[Atom], list[Atom]]:
    """Return heads as (kv heads, query heads per kv head).

    The second factor is in fewer parameters, because keys and values do not have it. If there are
    not two such factors, return (heads, nothing).
    """
    most = max((len(atom.params) for atom in heads), default=0)
    kv_heads = [atom for atom in heads if len(atom.params) == most]
    copies = [atom for atom in heads if len(atom.params) < most]
    return (kv_heads, copies) if len(heads) == 2 and copies else (heads, [])


def _name_values(names: Names, product: Product, all_scores: Iterable[Scores]) -> None:
    """Name the head dim of values, if a product sums over the positions of scores."""
    contracted = set(_factors(product.contracted))
    batch = set(_factors(product.batch))
    free = _factors((*product.left, *product.right))
    has_heads = any(atom.name in _HEADS for atom in (*batch, *free))
    is_values = any(
        contracted and contracted <= scores.sequence and (has_heads or batch == set(scores.batch))
        for scores in all_scores
    )
    if not is_values:
        return
    why = Evidence("scores times values: a dim of a weight", product.site)
    for atom in free:
        if atom.learned:
            names.give((atom,), HEAD_DIM, why, guess=not has_heads)
