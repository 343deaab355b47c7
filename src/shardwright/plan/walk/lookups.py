"""Partition a gather or a scatter whose table and rows are sharded over the same mesh axes.

XLA splits such an operation over groups of devices, one level after the other. At each level it
chooses one of three methods, named here by the dims that stay sharded:

* `columns`: the dims of the table that each row spans completely. The indices are all-gathered, and
  the rows move to the sharding of the columns.
* `entries`: the dims that the indices select from. Each device looks up its own entries. For a
  gather, the rows are then summed over the devices.
* `tokens`: the dims of the indices. For a gather, the table is all-gathered. For a scatter, the
  tables of the devices are summed.

XLA chooses the method whose largest operation needs the least memory on one device and, of several
such methods, the one that sends the least (`spmd/gather_scatter_handler.cc`). So the gradient of an
embedding moves rows by an all-to-all, unless a device has more tokens than the table has rows: then
XLA sums the tables of the devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

from shardwright import _jax
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.moves import find_move
from shardwright.plan.walk.values import Dims, axes_of, shards

Name: TypeAlias = Literal["table", "index", "rows"]
_NAMES: Final[tuple[Name, ...]] = ("table", "index", "rows")
# Largest number of mesh axes with which XLA was measured.
_PAIR: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A gather or a scatter.

    Attributes:
      shapes: Shapes of the table, the indices and the rows. The rows are the results of a gather,
        or the updates of a scatter.
      itemsizes: Bytes of an element of each of these arrays.
      columns: Dim of the table -> dim of the rows, for dims that each row spans completely.
      entries: Dims of the table that indices select from.
      tokens: Dim of the indices -> dim of the rows.
      adds: Whether rows are added to the table. If not, they are read from it.
      sizes: Size of each mesh axis.
    """

    shapes: Mapping[Name, tuple[int, ...]]
    itemsizes: Mapping[Name, int]
    columns: Mapping[int, int]
    entries: tuple[int, ...]
    tokens: Mapping[int, int]
    adds: bool
    sizes: Mapping[str, int]

    def bytes(self, name: Name, dims: Dims) -> int:
        """Return the bytes of one of the arrays on one device."""
        pairs = zip(self.shapes[name], dims, strict=True)
        elements = math.prod(-(-size // shards(axes, self.sizes)) for size, axes in pairs)
        return elements * self.itemsizes[name]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LookupMove:
    """A move of the table, the indices or the rows to another sharding.

    If the array is the result of the lookup, a sum over devices may come before the move.

    Attributes:
      name: The array.
      held: Mesh axes of each dim before the move.
      goal: Mesh axes of each dim after the move.
      summed: Mesh axes over which the array is a partial sum before the move.
    """

    name: Name
    held: Dims
    goal: Dims
    summed: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Shardings of the three arrays at one level. `free`: mesh axes not yet used for groups."""

    dims: Mapping[Name, Dims]
    free: frozenset[str]

    def inner(self, name: Name) -> Dims:
        """Return an array's sharding, without the mesh axes by which devices are grouped."""
        return tuple(tuple(a for a in axes if a in self.free) for axes in self.dims[name])

    def outer(self, name: Name) -> Dims:
        """Return an array's sharding, with only the mesh axes by which devices are grouped."""
        return tuple(tuple(a for a in axes if a not in self.free) for axes in self.dims[name])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One method at one level: the mesh axes by which it groups devices, and the level after it."""

    group: frozenset[str]
    after: _Level
    summed: bool
    sure: bool


def partition(lookup: Lookup, dims: Mapping[Name, Dims]) -> tuple[list[LookupMove], bool]:
    """Return the moves of a lookup, in order, and whether XLA is known to make these moves.

    Args:
      lookup: The gather or scatter.
      dims: Mesh axes of each dim of the three arrays. For the result, these are the mesh axes that
        its uses require.
    """
    moves: list[LookupMove] = []
    sure = _partition(lookup, _Level(dims=dims, free=frozenset(lookup.sizes)), moves)
    # With more mesh axes than `known` allows, XLA divides the devices of a group in ways that the
    # walk does not follow.
    used = axes_of(tuple(axes for name in _NAMES for axes in dims[name]))
    shared, tokens = shared_axes(lookup, dims), _token_axes(lookup, dims)
    known = len(shared) == 1 and (lookup.adds or tokens == shared)
    known &= len(used) == 1 or (len(used) <= _PAIR and _jax.moves_rows_alone())
    return [move for move in moves if move.held != move.goal or move.summed], sure and known


def _partition(lookup: Lookup, level: _Level, moves: list[LookupMove]) -> bool:
    options = [option for option in _options(lookup, level) if option is not None]
    operands: tuple[Name, ...] = ("index", "rows") if lookup.adds else ("table", "index")
    result: Name = "table" if lookup.adds else "rows"
    if not options:
        whole = {name: level.outer(name) for name in _NAMES}
        moves += [each for n in operands for each in _route(n, level.dims[n], whole[n])]
        moves.append(LookupMove(name=result, held=whole[result], goal=level.dims[result]))
        return True
    # XLA takes the cheapest option (`GatherPartitionMethodsOrderedByCost`, and a function like it
    # for scatters). If several options have this cost, `min` keeps the first one in XLA's order.
    chosen = min(options, key=lambda option: _cost(lookup, level, option))
    after = chosen.after
    changed = [name for name in _NAMES if name != result]
    moves += [each for n in changed for each in _route(n, level.dims[n], after.dims[n])]
    sure = _partition(lookup, after, moves) and chosen.sure
    summed = chosen.group if chosen.summed else frozenset()
    held, goal = after.dims[result], level.dims[result]
    moves.append(LookupMove(name=result, held=held, goal=goal, summed=summed))
    return sure


def _options(lookup: Lookup, level: _Level) -> Iterator[_Option | None]:
    """Yield the options in XLA's order; None for a method that has no mesh axes to group by."""
    table, index, rows = (level.inner(name) for name in _NAMES)
    yield _by_columns(lookup, level, axes_of(tuple(table[at] for at in lookup.columns)))
    yield _by_entries(lookup, level, axes_of(tuple(table[at] for at in lookup.entries)))
    # Indices that are not sharded get the sharding of the rows.
    used = axes_of(index)
    merged = list(index)
    for at, to in lookup.tokens.items():
        if not index[at] and not used & {*rows[to]}:
            merged[at] = rows[to]
    yield _by_tokens(lookup, level, tuple(merged))


def _by_columns(lookup: Lookup, level: _Level, group: frozenset[str]) -> _Option | None:
    if not group:
        return None
    table, rows = level.inner("table"), level.inner("rows")
    tokens = axes_of(tuple(rows[to] for to in lookup.tokens.values()))
    kept = rows if not tokens & group else ((),) * len(rows)
    moved = list(kept)
    for at, to in lookup.columns.items():
        moved[to] = table[at]
    index, sure = _freed(lookup, level, "index", group)
    return _option(level, group, {"index": index, "rows": tuple(moved)}, sure=sure)


def _by_entries(lookup: Lookup, level: _Level, group: frozenset[str]) -> _Option | None:
    if not group:
        return None
    index, sure = _freed(lookup, level, "index", group)
    rows, also = _freed(lookup, level, "rows", group)
    # The indices and the rows on one device must belong to the same tokens. If only one of the two
    # arrays is still sharded, the other one gets the same sharding.
    pairs = lookup.tokens.items()
    if any(index) and not any(rows):
        where = {to: index[at] for at, to in pairs}
        rows = tuple(where.get(at, ()) for at in range(len(rows)))
    elif any(rows) and not any(index):
        index = tuple(
            rows[lookup.tokens[at]] if at in lookup.tokens else () for at in range(len(index))
        )
    changed: dict[Name, Dims] = {"index": index, "rows": rows}
    return _option(level, group, changed, summed=not lookup.adds, sure=sure and also)


def _by_tokens(lookup: Lookup, level: _Level, index: Dims) -> _Option | None:
    group = axes_of(tuple(index[at] for at in lookup.tokens))
    if not group:
        return None
    rows = level.inner("rows")
    columns = {to: rows[to] for to in lookup.columns.values() if not group & {*rows[to]}}
    tokens = {to: index[at] for at, to in lookup.tokens.items()}
    moved = tuple({**columns, **tokens}.get(at, ()) for at in range(len(rows)))
    table, sure = _freed(lookup, level, "table", group)
    changed: dict[Name, Dims] = {"table": table, "index": index, "rows": moved}
    return _option(level, group, changed, summed=lookup.adds, sure=sure)


def _option(
    level: _Level,
    group: frozenset[str],
    inner: Mapping[Name, Dims],
    *,
    summed: bool = False,
    sure: bool,
) -> _Option:
    def joined(name: Name) -> Dims:
        if name not in inner:
            return level.dims[name]
        return tuple(
            (*outer, *new) for outer, new in zip(level.outer(name), inner[name], strict=True)
        )

    after = _Level(dims={name: joined(name) for name in _NAMES}, free=level.free - group)
    return _Option(group=group, after=after, summed=summed, sure=sure)


def _freed(lookup: Lookup, level: _Level, name: Name, group: frozenset[str]) -> tuple[Dims, bool]:
    """Return how XLA shards an array without the mesh axes of `group`, and whether that is certain.

    All groups need the same data of the array. So XLA replicates dims, as little as possible: first
    entries or tokens, then columns. Shards that remain are spread over the devices inside a group.
    """
    dims, sizes = level.inner(name), lookup.sizes
    if not axes_of(dims) & group:
        return dims, True
    # XLA replicates the dims that come first, as in `GatherOperandDimsByPriority`.
    order: Iterable[int]
    if name == "table":
        order = (*lookup.entries, *lookup.columns)
    elif name == "index":
        order = tuple(lookup.tokens)
    else:
        order = (*lookup.tokens.values(), *lookup.columns.values())
    # Count shards, as XLA's `GroupShardingOnReplicatedDim` does: it may replicate a dim over only a
    # part of a mesh axis.
    left = [shards(axes, sizes) for axes in dims]
    copies, needed = shards(level.free, sizes) // math.prod(left), shards(group, sizes)
    for at in order:
        share = math.gcd(left[at], max(needed // math.gcd(copies, needed), 1))
        left[at], copies = left[at] // share, copies * share
    kept = tuple(tuple(axis for axis in axes if axis not in group) for axes in dims)
    if [shards(axes, sizes) for axes in kept] == left:
        return kept, True
    rest = tuple(axis for axis in sizes if axis in level.free - group)
    wide = [at for at, count in enumerate(left) if count > 1]
    if len(wide) == 1 and shards(rest, sizes) == left[wide[0]]:
        return tuple(rest if at == wide[0] else () for at in range(len(dims))), True
    return tuple(() if count == 1 else axes for axes, count in zip(kept, left, strict=True)), False


def _cost(lookup: Lookup, level: _Level, option: _Option) -> tuple[float, float]:
    """Return the bytes of the largest operation of a method, and the bytes that the method sends.

    XLA estimates both as if every array were replicated among the devices of a group.
    """
    result: Name = "table" if lookup.adds else "rows"
    whole = {name: option.after.outer(name) for name in _NAMES}
    # Like XLA's `EvaluatePartitionCost`, count only the lookup itself and the collectives.
    memory = [sum(lookup.bytes(name, whole[name]) for name in _NAMES)]
    sent = 0
    pairs: list[tuple[Name, Dims, Dims]] = []
    for name in _NAMES:
        if lookup.adds or name != result:
            pairs += [(name, level.dims[name], option.after.dims[name])]
            pairs += [(name, option.after.dims[name], whole[name])]
    if not lookup.adds:
        pairs.append((result, option.after.dims[result], level.dims[result]))
    if option.summed:
        memory.append(lookup.bytes(result, whole[result]))
        # An all-reduce sends twice the bytes of its operand.
        sent += 2 * lookup.bytes(result, whole[result])
    for name, held, goal in pairs:
        for move in _route(name, held, goal):
            for each in find_move(move.held, move.goal, lookup.sizes).transfers:
                size = lookup.bytes(name, each.dims)
                # Operand and result are in memory. For an all-gather, `size` is the size of the
                # result.
                read = size // each.devices if each.kind is Kind.ALL_GATHER else size
                memory.append(size + read)
                sent += size
    return max(memory), sent


def _route(name: Name, held: Dims, goal: Dims) -> list[LookupMove]:
    """Return the one or two moves of an array from one sharding to another.

    If a dim has a mesh axis that moves to another dim, and a mesh axis that is removed, XLA first
    gathers the dim.
    """
    kept = {axis for have, want in zip(held, goal, strict=True) for axis in {*have} & {*want}}
    moved = (axes_of(held) & axes_of(goal)) - kept
    gone = axes_of(held) - axes_of(goal)
    if not any({*axes} & moved and {*axes} & gone for axes in held):
        return [LookupMove(name=name, held=held, goal=goal)]
    middle = tuple(tuple(axis for axis in axes if axis in kept) for axes in held)
    return [
        LookupMove(name=name, held=held, goal=middle),
        LookupMove(name=name, held=middle, goal=goal),
    ]


def shared_axes(lookup: Lookup, dims: Mapping[Name, Dims]) -> frozenset[str]:
    """Return the mesh axes that shard both the table and the tokens."""
    return _token_axes(lookup, dims) & axes_of(dims["table"])


def _token_axes(lookup: Lookup, dims: Mapping[Name, Dims]) -> frozenset[str]:
    tokens = [dims["index"][at] for at in lookup.tokens]
    tokens += [dims["rows"][at] for at in lookup.tokens.values()]
    return axes_of(tuple(tokens))
