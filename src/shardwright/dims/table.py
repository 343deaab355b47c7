"""How the dims of the operands and results of an equation correspond."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from shardwright.dims.primitives import (
    ADDITIONS,
    CUMULATIVE,
    ELEMENTWISE,
    KEEPS_SUM,
    REDUCTIONS,
    SCATTERS,
)

DimSizes: TypeAlias = tuple[int, ...]
# For each dim, the numbers of its factors, major first. `Correspondence` says what a factor is. A
# dim without a counterpart has no factors.
FactorsByDim: TypeAlias = tuple[tuple[int, ...], ...]


class FactorRole(enum.Enum):
    """What a primitive does along a factor."""

    KEPT = "kept"
    SUMMED = "summed"  # shards of the operand give partial sums
    # Shards of the operand give partial results, which are combined, but not by a sum.
    COMBINED = "combined"  # for example by a maximum
    # Each index selects along the factor, so each device has some of the selected elements.
    PICKED = "picked"
    CHANGED = "changed"  # elements of the result need elements of other shards


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Correspondence:
    """How the dims of operands and results correspond.

    A dim is the product of its factors, and dims that share a factor are sharded alike along it.
    Equal numbers mean the same factor. For example, a reshape of `(12, 8)` to `(12, 2, 4)` has
    factors 0, 1 and 2, of sizes 12, 2 and 4. The second dim of the operand has the factors `(1,
    2)`.

    Attributes:
      sizes: Size of each factor.
      roles: What the primitive does along each factor.
      operands: Factors of the dims of each operand.
      results: Factors of the dims of each result.
      shardable: The factors that may stay sharded: those that are not `CHANGED` and are the major
        factor of each of their dims. A minor factor is not listed, but may stay sharded if each
        factor before it in its dim is sharded into single elements.
      adds: Whether the primitive may run on the terms of a sum, before they are added.
    """

    sizes: tuple[int, ...]
    roles: tuple[FactorRole, ...]
    operands: tuple[FactorsByDim, ...]
    results: tuple[FactorsByDim, ...]
    shardable: frozenset[int]
    adds: bool = False


def correspondence(equation: Any) -> Correspondence | None:
    """Return how the dims of an equation correspond, or None if its primitive has no rule."""
    rule = _RULES.get(equation.primitive.name)
    if rule is None:
        return None
    operands = tuple([variable.aval.shape for variable in equation.invars])
    results = tuple([variable.aval.shape for variable in equation.outvars])
    return rule(operands, results, equation.params)


# The rules below are cached, because a program has many equations of the same shapes.
@functools.lru_cache(maxsize=4096)
def elementwise(
    operands: tuple[DimSizes, ...], results: tuple[DimSizes, ...], *, adds: bool = False
) -> Correspondence | None:
    """Return how dims correspond if operands are broadcast to one shape, which all results have.

    A dim of size 1 that is broadcast has no factor, and a scalar has none either. Return None if
    the results have several shapes, or if no operand has their rank.
    """
    if len({*results}) != 1:
        return None
    shape = results[0]
    fits = [broadcasts(own, shape) for own in operands]
    if not any(fits):
        return None
    sides = [
        [(dim,) if size == shape[dim] else () for dim, size in enumerate(own)]
        if full
        else [()] * len(own)
        for own, full in zip(operands, fits, strict=True)
    ]
    every = [(dim,) for dim in range(len(shape))]
    return _made(shape, sides, [every] * len(results), adds=adds)


def broadcasts(own: DimSizes, shape: DimSizes) -> bool:
    """Return whether an array has a result's rank, and in each dim the result's size or 1."""
    return len(own) == len(shape) and all(
        size in (1, whole) for size, whole in zip(own, shape, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def transpose(shape: DimSizes, permutation: tuple[int, ...]) -> Correspondence:
    """Return how the dims of a transpose correspond."""
    every = [(dim,) for dim in range(len(shape))]
    return _made(shape, [every], [[every[dim] for dim in permutation]], adds=True)


@functools.lru_cache(maxsize=4096)
def broadcast(old: DimSizes, new: DimSizes, places: tuple[int, ...]) -> Correspondence:
    """Return how the dims of a `broadcast_in_dim` correspond, given the new place of each dim."""
    operand = [(to,) if old[dim] == new[to] else () for dim, to in enumerate(places)]
    adds = math.prod(old) == math.prod(new)  # then the broadcast only adds dims of size 1
    return _made(new, [operand], [[(dim,) for dim in range(len(new))]], adds=adds)


def equal_products(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of groups of neighboring dims, one group of each shape.

    The sizes of both groups have the same product. The groups are as small as possible.

    >>> list(equal_products((5, 4, 6), (5, 3, 8)))
    [([0], [0]), ([1, 2], [1, 2])]
    """
    at_old = at_new = 0
    while at_old < len(old) or at_new < len(new):
        before, after = [], []
        product_old = product_new = 1
        if at_old < len(old):
            before, product_old, at_old = [at_old], old[at_old], at_old + 1
        if at_new < len(new):
            after, product_new, at_new = [at_new], new[at_new], at_new + 1
        while product_old != product_new:
            if product_old < product_new and at_old < len(old):
                before.append(at_old)
                product_old, at_old = product_old * old[at_old], at_old + 1
            elif at_new < len(new):
                after.append(at_new)
                product_new, at_new = product_new * new[at_new], at_new + 1
            else:
                break
        yield before, after


@functools.lru_cache(maxsize=4096)
def reshape(old: DimSizes, new: DimSizes) -> Correspondence:
    """Return how the dims of a reshape correspond: by the largest factors that both shapes have.

    If two dims have no common factor, everything up to the end of their group (see
    `equal_products`) is `CHANGED`.
    """
    sizes: list[int] = []
    roles: dict[int, FactorRole] = {}
    sides: tuple[list[list[int]], list[list[int]]] = ([[] for _ in old], [[] for _ in new])
    for group in equal_products(old, new):
        left, right = (
            [(dim, shape[dim]) for dim in dims if shape[dim] != 1]
            for dims, shape in zip(group, (old, new), strict=True)
        )
        while left and right:
            (dim, size), (to, other) = left.pop(0), right.pop(0)
            common = math.gcd(size, other)
            if common == 1:  # nothing is known about the rest of the group
                rest = ((0, [(dim, size), *left]), (1, [(to, other), *right]))
                for side, pairs in rest:
                    for at, opaque in pairs:
                        roles[len(sizes)] = FactorRole.CHANGED
                        sides[side][at].append(len(sizes))
                        sizes.append(opaque)
                break
            sides[0][dim].append(len(sizes))
            sides[1][to].append(len(sizes))
            sizes.append(common)
            # The rest of a dim is its minor part. It is compared with the next dim of the other
            # side.
            left[:0] = [(dim, size // common)] if size > common else []
            right[:0] = [(to, other // common)] if other > common else []
    return _made(sizes, [sides[0]], [sides[1]], roles=roles, adds=True)


@functools.lru_cache(maxsize=4096)
def reduction(
    operands: tuple[DimSizes, ...], results: int, gone: tuple[int, ...], role: FactorRole
) -> Correspondence:
    """Return how the dims of a reduction correspond. Operands of other ranks are scalars."""
    every = [(dim,) for dim in range(len(operands[0]))]
    sides: list[Sequence[tuple[int, ...]]] = [
        every if len(own) == len(every) else [()] * len(own) for own in operands
    ]
    kept = [factor for dim, factor in enumerate(every) if dim not in gone]
    roles = dict.fromkeys(gone, role)
    # A sum over dims of size 1 only removes these dims.
    adds = role is FactorRole.SUMMED and all(operands[0][dim] == 1 for dim in gone)
    return _made(operands[0], sides, [kept] * results, roles=roles, adds=adds)


@functools.lru_cache(maxsize=4096)
def along(shapes: tuple[DimSizes, ...], results: int, dims: tuple[int, ...]) -> Correspondence:
    """Return how dims correspond if shapes stay, but results need all shards of some dims."""
    every = [(dim,) for dim in range(len(shapes[0]))]
    roles = dict.fromkeys(dims, FactorRole.CHANGED)
    return _made(shapes[0], [every] * len(shapes), [every] * results, roles=roles)


@functools.lru_cache(maxsize=4096)
def cut(
    operands: tuple[DimSizes, ...], results: tuple[DimSizes, ...], dims: tuple[int, ...] = ()
) -> Correspondence:
    """Return how dims correspond if arrays are cut, joined or padded along some dims.

    Args:
      operands: Shapes. Operands of another rank than the results are scalars.
      results: Shapes.
      dims: Dims that are `CHANGED` even if no size differs.
    """
    rank = len(results[0])
    arrays = [shape for shape in (*operands, *results) if len(shape) == rank]
    changed = {dim for dim in range(rank) if len({shape[dim] for shape in arrays}) > 1}
    changed |= {*dims}
    sizes = list(results[0])
    roles = dict.fromkeys(changed, FactorRole.CHANGED)

    def side(shape: DimSizes) -> list[tuple[int, ...]]:
        if len(shape) != rank:
            return [()] * len(shape)
        own: list[tuple[int, ...]] = []
        for dim, size in enumerate(shape):
            # Shards of a changed dim do not correspond, so each array has its own factor.
            own.append((len(sizes),) if dim in changed else (dim,))
            if dim in changed:
                roles[len(sizes)] = FactorRole.CHANGED
                sizes.append(size)
        return own

    return _made(sizes, list(map(side, operands)), list(map(side, results)), roles=roles)


@functools.lru_cache(maxsize=4096)
def stack(count: int, shape: DimSizes, axis: int) -> Correspondence:
    """Return how dims correspond if arrays are stacked along a new dim."""
    every = [(dim,) for dim in range(len(shape))]
    return _made(shape, [every[:axis] + every[axis + 1 :]] * count, [every])


@functools.lru_cache(maxsize=4096)
def unstack(shape: DimSizes, axis: int) -> Correspondence:
    """Return how dims correspond if an array is split into one array per index of a dim.

    This needs the whole dim.
    """
    every = [(dim,) for dim in range(len(shape))]
    rows = [every[:axis] + every[axis + 1 :]] * shape[axis]
    return _made(shape, [every], rows, roles={axis: FactorRole.CHANGED})


@functools.lru_cache(maxsize=4096)
def dot_general(left: DimSizes, right: DimSizes, numbers: Any) -> Correspondence:
    """Return how the dims of a matmul correspond. Contracted dims are summed."""
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    lefts = [(dim,) for dim in range(len(left))]
    rights = [(len(left) + dim,) for dim in range(len(right))]
    for dim, other in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        rights[other] = lefts[dim]
    # The result of a `dot_general` has the batch dims, then the free dims of left and right.
    result = [lefts[dim] for dim in left_batch]
    result += [own for dim, own in enumerate(lefts) if dim not in (*left_sum, *left_batch)]
    result += [own for dim, own in enumerate(rights) if dim not in (*right_sum, *right_batch)]
    roles = dict.fromkeys(left_sum, FactorRole.SUMMED)
    return _made((*left, *right), [lefts, rights], [result], roles=roles)


@functools.lru_cache(maxsize=4096)
def ragged_dot(
    left: DimSizes, right: DimSizes, groups: DimSizes, result: DimSizes, numbers: Any
) -> Correspondence:
    """Return how the dims of a ragged matmul correspond.

    Each row picks the matrix of its group. If rows are contracted, as in the gradient of the
    matrices, no row picks a matrix, and the result has a leading dim of groups.
    """
    plain = dot_general(left, right, numbers.dot_dimension_numbers)
    lefts, rights = plain.operands
    picked = [rights[dim] for dim in numbers.rhs_group_dimensions]
    results = [factors for factors in plain.results[0] if factors not in picked]
    if len(results) < len(result):
        results.insert(0, (len(plain.sizes),))
    roles = dict(enumerate(plain.roles)) | {factor: FactorRole.PICKED for (factor,) in picked}
    sizes = (*plain.sizes, result[0])
    # Group sizes have no factors: every device needs all of them to know which rows pick which
    # matrix.
    return _made(sizes, [lefts, rights, [()] * len(groups)], [results], roles=roles)


@functools.lru_cache(maxsize=4096)
def gather(
    table: DimSizes, index: DimSizes, result: DimSizes, numbers: Any, slices: tuple[int, ...]
) -> Correspondence:
    """Return how the dims of a gather correspond.

    A dim of the result comes from the operand (`table`) or from the indices.
    """
    sizes = [*table, *index, *result]
    tables = [(dim,) for dim in range(len(table))]
    indices = [(len(table) + dim,) for dim in range(len(index))]
    batching = numbers.operand_batching_dims
    for dim, other in zip(batching, numbers.start_indices_batching_dims, strict=True):
        tables[dim] = indices[other]
    gone = (*numbers.collapsed_slice_dims, *batching)
    windows = [dim for dim in range(len(table)) if dim not in gone]
    sources = dict(zip(numbers.offset_dims, windows, strict=True))
    # Result dims outside of windows are the dims of the indices, in order, without the last dim.
    rows = iter(indices)
    results = [
        (len(table) + len(index) + dim,) if dim in sources else next(rows)
        for dim in range(len(result))
    ]
    # The last dim of the indices has the coordinates of one row.
    roles = dict.fromkeys((*numbers.collapsed_slice_dims, *indices[-1]), FactorRole.PICKED)
    for dim, source in sources.items():
        if slices[source] == table[source]:
            results[dim] = tables[source]
        else:
            roles |= dict.fromkeys((*tables[source], *results[dim]), FactorRole.CHANGED)
    return _made(sizes, [tables, indices], [results], roles=roles)


@functools.lru_cache(maxsize=4096)
def scatter(
    table: DimSizes, index: DimSizes, update: DimSizes, numbers: Any, role: FactorRole
) -> Correspondence:
    """Return how the dims of a scatter correspond.

    A dim of the updates comes from the operand (`table`) or from the indices.

    Args:
      table: Shape of the operand.
      index: Shape of the indices.
      update: Shape of the updates.
      numbers: Parameter `dimension_numbers`.
      role: What the scatter does along the dims of the indices that the operand does not have.
    """
    sizes = [*table, *index, *update]
    tables = [(dim,) for dim in range(len(table))]
    indices = [(len(table) + dim,) for dim in range(len(index))]
    updates = [(len(table) + len(index) + dim,) for dim in range(len(update))]
    batching = numbers.operand_batching_dims
    # The last dim of the indices has the coordinates of one row.
    picked = (*numbers.scatter_dims_to_operand_dims, *indices[-1])
    roles = dict.fromkeys(picked, FactorRole.PICKED)
    for dim, other in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        tables[dim] = indices[other]
    gone = (*numbers.inserted_window_dims, *batching)
    windows = [dim for dim in range(len(table)) if dim not in gone]
    for dim, written in zip(windows, numbers.update_window_dims, strict=True):
        if table[dim] == update[written]:
            updates[written] = tables[dim]
        else:
            roles |= dict.fromkeys((*tables[dim], *updates[written]), FactorRole.CHANGED)
    rows = [dim for dim in range(len(update)) if dim not in numbers.update_window_dims]
    for dim, own in zip(rows, indices, strict=False):
        updates[dim] = own
        # A batching dim keeps its role: each row is written into its own part of the table.
        if own not in tables:
            roles |= dict.fromkeys(own, role)
    return _made(sizes, [tables, indices, updates], [tables], roles=roles)


def _made(
    sizes: Iterable[int],
    operands: Iterable[Iterable[Iterable[int]]],
    results: Iterable[Iterable[Iterable[int]]],
    *,
    roles: Mapping[int, FactorRole] = MappingProxyType({}),
    adds: bool = False,
) -> Correspondence:
    known = tuple(sizes)
    before, after = (
        tuple(tuple(map(tuple, side)) for side in sides) for sides in (operands, results)
    )
    minor = {factor for side in (*before, *after) for factors in side for factor in factors[1:]}
    changed = {factor for factor, role in roles.items() if role is FactorRole.CHANGED}
    return Correspondence(
        sizes=known,
        roles=tuple(roles.get(factor, FactorRole.KEPT) for factor in range(len(known))),
        operands=before,
        results=after,
        shardable=frozenset(range(len(known))) - minor - changed,
        adds=adds,
    )


_CorrespondenceRule: TypeAlias = Callable[
    [tuple[DimSizes, ...], tuple[DimSizes, ...], Mapping[str, Any]], Correspondence | None
]


def _reduced(role: FactorRole) -> _CorrespondenceRule:
    def rule(
        operands: tuple[DimSizes, ...], results: tuple[DimSizes, ...], parameters: Mapping[str, Any]
    ) -> Correspondence:
        gone = parameters.get("axes", parameters.get("dimensions", ()))
        return reduction(operands, len(results), tuple(gone), role)

    return rule


def _scattered(role: FactorRole) -> _CorrespondenceRule:
    def rule(
        operands: tuple[DimSizes, ...], results: tuple[DimSizes, ...], parameters: Mapping[str, Any]
    ) -> Correspondence:
        del results
        return scatter(operands[0], operands[1], operands[2], parameters["dimension_numbers"], role)

    return rule


_RULES: Final[Mapping[str, _CorrespondenceRule]] = {
    **dict.fromkeys(ELEMENTWISE, lambda old, new, _: elementwise(old, new)),
    "bitcast_convert_type": lambda old, new, _: elementwise(old, new),
    **dict.fromkeys(KEEPS_SUM | ADDITIONS, lambda old, new, _: elementwise(old, new, adds=True)),
    **dict.fromkeys((*REDUCTIONS, "reduce"), _reduced(FactorRole.COMBINED)),
    "reduce_sum": _reduced(FactorRole.SUMMED),
    **dict.fromkeys(CUMULATIVE, lambda old, new, p: along(old, len(new), (p["axis"],))),
    "sort": lambda old, new, p: along(old, len(new), (p["dimension"] % len(old[0]),)),
    "rev": lambda old, new, p: along(old, len(new), tuple(p["dimensions"])),
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims"), lambda old, new, _: reshape(old[0], new[0])
    ),
    **dict.fromkeys(
        ("slice", "dynamic_slice", "split", "dynamic_update_slice"),
        lambda old, new, _: cut(old, new),
    ),
    "stack": lambda old, new, p: stack(len(old), new[0], p["axis"] % len(new[0])),
    "unstack": lambda old, _, p: unstack(old[0], p["axis"] % len(old[0])),
    "pad": lambda old, new, p: cut(
        old, new, tuple(dim for dim, edges in enumerate(p["padding_config"]) if any(edges))
    ),
    "concatenate": lambda old, new, p: cut(old, new, (p["dimension"],)),
    "top_k": lambda old, new, p: cut(old, new, (p.get("axis", -1) % len(old[0]),)),
    "tile": lambda old, new, p: cut(
        old, new, tuple(dim for dim, times in enumerate(p["reps"]) if times > 1)
    ),
    "dot_general": lambda old, _, p: dot_general(old[0], old[1], p["dimension_numbers"]),
    "ragged_dot_general": lambda old, new, p: ragged_dot(
        *old[:3], new[0], p["ragged_dot_dimension_numbers"]
    ),
    "gather": lambda old, new, p: gather(
        old[0], old[1], new[0], p["dimension_numbers"], tuple(p["slice_sizes"])
    ),
    **dict.fromkeys(SCATTERS, _scattered(FactorRole.COMBINED)),
    **dict.fromkeys(("scatter-add", "scatter_add", "scatter-sub"), _scattered(FactorRole.SUMMED)),
    "transpose": lambda old, _, p: transpose(old[0], tuple(p["permutation"])),
    "broadcast_in_dim": lambda old, new, p: broadcast(
        old[0] if old else (), new[0], tuple(p["broadcast_dimensions"])
    ),
}
