"""Pass names between a dim and its slices, as in fused projections and concatenations."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.inference.atoms import Atom, finest, size_of
from shardwright.inference.attention import GROUP
from shardwright.inference.evidence import Evidence
from shardwright.inference.facts import DimSlice
from shardwright.inference.names import Names
from shardwright.vocabulary.axes import (
    EMBED,
    EMPTY,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    LENGTH,
    MLP_INTERMEDIATE,
    VOCAB,
)

# A slice of a dim with one of these names has the same name.
_INHERITED = (EMBED, HEAD_DIM, MLP_INTERMEDIATE, VOCAB)
# Number of rounds. Each round passes names by one level, from a dim to its slices and back.
_ROUNDS = 3

NamedFactors = tuple[tuple[str, int], ...]


def name_slices(names: Names) -> None:
    """Name slices by the dim from which they are cut, and dims by their slices."""
    for _ in range(_ROUNDS):
        for dim_slice in names.facts.slices:
            wholes = finest(dim_slice.whole)
            if len(wholes) == 1 and wholes[0].name in _INHERITED:
                why = Evidence(f"a slice of {wholes[0].name.strip('_')}", dim_slice.location)
                names.give(dim_slice.dim, wholes[0].name, why, guess=wholes[0].guess)
        # A new name may have split a whole dim, so group the slices again.
        by_whole: dict[tuple[Atom, ...], list[DimSlice]] = {}
        for dim_slice in names.facts.slices:
            by_whole.setdefault(tuple(finest(dim_slice.whole)), []).append(dim_slice)
        for slices in by_whole.values():
            _name_whole(names, slices)


def _name_whole(names: Names, slices: Sequence[DimSlice]) -> None:
    """Name a dim by the names of its slices.

    For example, a dim of size `3 * heads * head_dim` is cut into queries, keys and values of HEAD
    times HEAD_DIM. The dim is then HEAD, of size `3 * heads`, times HEAD_DIM.
    """
    whole = finest(slices[0].whole)
    if len(whole) != 1 or whole[0].name:
        return
    atom = whole[0]
    first = min(slices, key=lambda dim_slice: dim_slice.start)
    if [part.name for part in finest(first.dim)] == [LENGTH] and first.start == 0:
        names.give((atom,), LENGTH, Evidence("cut to the length", first.location))
        return
    covering = _covering(slices, atom.size)
    factors = [named_factors(dim_slice.dim) for dim_slice in covering]
    if not factors or any(not part or not part[0][0] for part in factors):
        return
    leads = {part[0][0] for part in factors}
    tails = {part[1:] for part in factors}
    # One weight may hold queries, keys and values, with fewer kv heads than query heads. Its dim
    # then has the heads of all three, with one head dim. The axis of these heads is spelled HEAD.
    if len(tails) != 1 or (len(leads) > 1 and leads != {HEAD, KV_HEAD}):
        why = Evidence("parts of different axes", first.location)
        names.give((atom,), EMPTY, why, guess=True)
        return
    (tail,) = tails
    lead = HEAD if len(leads) > 1 else leads.pop()
    # If the parts are EMBED, the name of the whole dim is a guess, because the parts may be scales
    # and shifts of a normalization.
    guess = lead == EMBED or any(
        part.guess for dim_slice in covering for part in finest(dim_slice.dim)
    )
    why = Evidence(f"{len(covering)} parts that have this name", first.location)
    rest: list[Atom] = [atom]
    # The first factor has the heads of all parts together. The other factors are equal in all
    # parts.
    for size in (sum(part[0][1] for part in factors), *(size for _, size in tail[:-1])):
        last = rest.pop()
        if tail and last.size != size:
            last.split(size)
        rest += last.parts or (last,)
    for part, axis in zip(rest, (lead, *(axis for axis, _ in tail)), strict=True):
        names.give((part,), axis, why, guess=guess)


def _covering(slices: Sequence[DimSlice], size: int) -> list[DimSlice]:
    """Return the slices that cover a whole dim without overlap, or nothing."""
    covering: list[DimSlice] = []
    end = 0
    for dim_slice in sorted(slices, key=lambda dim_slice: dim_slice.start):
        # A program may cut one dim in two ways. Slices that overlap those before them are left out.
        if dim_slice.start == end:
            covering.append(dim_slice)
            end += size_of(finest(dim_slice.dim))
    return covering if end == size and len(covering) > 1 else []


def named_factors(dim: Sequence[Atom]) -> NamedFactors:
    """Return the name and the size of each factor of a dim.

    Neighboring factors of the same axis are one factor. KV_HEAD and GROUP together are HEAD. A
    number of shards is multiplied into the factor after it.
    """
    factors: list[tuple[str, int]] = []
    shards = 1
    for atom in finest(dim):
        if atom.is_shards and not atom.name:
            shards *= atom.size
            continue
        last, size = factors[-1][0] if factors else "", atom.size * shards
        shards = 1
        if factors and {last, atom.name} == {KV_HEAD, GROUP}:
            factors[-1] = (HEAD, factors[-1][1] * size)
        elif factors and last == atom.name and last:
            factors[-1] = (last, factors[-1][1] * size)
        else:
            factors.append((atom.name, size))
    return (*factors, ("", shards)) if shards > 1 else tuple(factors)
