"""Mesh axes of the factors of an equation, and of the dims that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from shardwright.dims.table import Correspondence, Factors
from shardwright.plan.walk.values import Dims, shards

# The mesh axes of each factor that is sharded.
Order: TypeAlias = Mapping[int, tuple[str, ...]]


def placed(
    known: Correspondence, side: Factors, dims: Dims, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]]:
    """Return the factor that the mesh axes of each dim shard: the major one, if they divide it."""
    order = {}
    for factors, axes in zip(side, dims, strict=True):
        if not axes or not factors:
            continue
        if len(factors) == 1 or known.sizes[factors[0]] % shards(axes, sizes) == 0:
            order[factors[0]] = axes
    return order


def spread(side: Factors, order: Order) -> Dims:
    """Return the dims of an array whose factors are sharded so."""
    return tuple(order.get(factors[0], ()) if factors else () for factors in side)
