"""Convert between the mesh axes of dims and of factors. A factor is a part of a dim."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeAlias

from shardwright.dims.table import Correspondence, FactorRole, FactorsByDim
from shardwright.plan.walk.values import Dims, shards

# Index of a factor (a part of a dim, see `dims.table`) -> the mesh axes that shard the factor.
AxesByFactor: TypeAlias = Mapping[int, tuple[str, ...]]


def placed(
    known: Correspondence, side: FactorsByDim, dims: Dims, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return the mesh axes of each factor, given the mesh axes of each dim.

    The major factor comes first. A factor gets as many of its dim's mesh axes as divide the
    factor's size. If these have one device for each element of the factor, the next factor gets
    the other mesh axes. If the mesh axes do not fit in this way, no factor of the dim gets any.
    """
    order: dict[int, tuple[str, ...]] = {}
    for factors, axes in zip(side, dims, strict=True):
        if len(factors) == 1 and axes:  # a dim that does not divide is padded
            order[factors[0]] = axes
        elif axes:
            rest, own = axes, dict[int, tuple[str, ...]]()
            for factor in factors:
                count = 0
                size = known.sizes[factor]
                while count < len(rest) and size % shards(rest[: count + 1], sizes) == 0:
                    count += 1
                own[factor], rest = rest[:count], rest[count:]
                if not rest:
                    order |= {held: taken for held, taken in own.items() if taken}
                if not rest or shards(own[factor], sizes) != size:
                    break
    return order


def spread(
    known: Correspondence, side: FactorsByDim, order: AxesByFactor, sizes: Mapping[str, int]
) -> Dims:
    """Return the mesh axes of each dim of an array, given the mesh axes of each factor."""
    dims = []
    for factors in side:
        axes: tuple[str, ...] = ()
        for factor in factors:
            axes += order.get(factor, ())
            # If a device has several elements of a factor, shards of the next factor would be
            # scattered over the dim. A spec cannot express that.
            if shards(order.get(factor, ()), sizes) != known.sizes[factor]:
                break
        dims.append(axes)
    return tuple(dims)


def fitting(known: Correspondence, order: AxesByFactor, sizes: Mapping[str, int]) -> AxesByFactor:
    """Return the mesh axes of those factors that may stay sharded.

    A minor factor of a dim may stay sharded if the factors before it have a device for each
    element. A spec cannot express other shardings of minor factors.
    """
    if order.keys() <= known.shardable:
        return order
    kept = {f: axes for f, axes in order.items() if known.roles[f] is not FactorRole.CHANGED}
    while True:
        # Repeat until stable: a dropped factor may be the major one in a dim of another array.
        fixed = dict(kept)
        for side in (*known.operands, *known.results):
            for factors in side:
                for before, factor in itertools.pairwise(factors):
                    if shards(kept.get(before, ()), sizes) != known.sizes[before]:
                        kept.pop(factor, None)
        if kept == fixed:
            return kept
