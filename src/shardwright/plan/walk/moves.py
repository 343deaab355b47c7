"""The collectives that move a value from one sharding to another, in the order that XLA uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.values import Dims, axes_of, shards


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective of a move.

    Attributes:
      kind: Kind of collective.
      axes: Mesh axes that it runs over.
      dims: Mesh axes of each dim of the array that is counted. For an all-gather this is the
        result, else the operand.
      devices: Devices of one group. If the collective splits a mesh axis in two parts and runs over
        one, a group has fewer devices than `axes`.
    """

    kind: Kind
    axes: frozenset[str]
    dims: Dims
    devices: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueMove:
    """How a value gets from one sharding to another.

    Attributes:
      transfers: Its collectives.
      doubtful: Mesh axes for which XLA may move the value in another way, and send other bytes.
    """

    transfers: tuple[Transfer, ...] = ()
    doubtful: frozenset[str] = frozenset()


# An all-to-all moves a mesh axis from one dim to another: it joins the parts of the first dim, and
# cuts the second.
_PAIR: Final = 2


def find_move(held: Dims, goal: Dims, sizes: Mapping[str, int]) -> ValueMove:
    """Return the collectives that move a value from the sharding `held` to the sharding `goal`.

    Each rule is measured on compiled programs:

    * A new mesh axis needs a slice, which sends nothing.
    * A mesh axis that changes its dim needs an all-to-all. XLA takes the last mesh axes of a dim,
      and appends them to the other dim. If their order is then not that of `goal`, a permute
      follows. If mesh axes change places between three dims, XLA gathers these dims instead.
    * A mesh axis that is removed needs an all-gather. Dims are gathered one by one, the last dim
      first. If the dim keeps a mesh axis that comes after the removed one, a permute comes before
      the all-gather.
    * If a mesh axis of a dim is replaced by another mesh axis, a permute of the smaller shards is
      needed.
    """
    # `PartitionedHlo::ReshardNoCache` of XLA's SPMD partitioner tries a permute, an all-to-all,
    # slices and all-gathers, in this order, and then pairs of these. As a last resort, it gathers
    # the whole array.
    before, after = _places(held), _places(goal)
    gone = before.keys() - after.keys()
    moved = {axis for axis in before.keys() & after.keys() if before[axis] != after[axis]}
    replaced = _replaced(held, goal, sizes) if not moved else None
    if replaced is not None:
        return ValueMove(transfers=tuple(replaced))
    if moved and gone:
        return _with_both(held, goal, sizes, moved, gone)
    # Slices send nothing, so they come first: the collectives after them then send smaller shards.
    current = _sliced(held, goal)
    changed = [at for at, (have, want) in enumerate(zip(held, goal, strict=True)) if have != want]
    left, entered = ({place[axis] for axis in moved} for place in (before, after))
    # If a dim loses one mesh axis and gets another one (`left & entered`), XLA does not gather
    # here. `_exchanged` follows this case below, with a doubt.
    if len(left | entered) > _PAIR and len(moved) > 1 and not left & entered:
        # XLA slices the new dims only after the gathers, so the gathers send shards of `held`.
        return ValueMove(transfers=tuple(_gathered(held, moved, sizes)[0]))
    if moved and len(changed) > _PAIR:  # a third dim gets a new mesh axis
        exchange = _exchanged(held, current, goal, sizes, moved)
        return dataclasses.replace(exchange, doubtful=frozenset(moved))
    if moved:
        return _exchanged(held, current, goal, sizes, moved)
    transfers, current = _gathered(current, gone, sizes)
    reordered = {
        axis for have, want in zip(current, goal, strict=True) if have != want for axis in want
    }
    if reordered and not any(transfer.kind is Kind.PERMUTE for transfer in transfers):
        transfers.append(_transfer(Kind.PERMUTE, reordered, current, sizes))
    return ValueMove(transfers=tuple(transfers))


def _places(dims: Dims) -> dict[str, int]:
    return {axis: at for at, dim in enumerate(dims) for axis in dim}


def _transfer(
    kind: Kind, axes: Iterable[str], dims: Dims, sizes: Mapping[str, int], *, devices: int = 0
) -> Transfer:
    chosen = frozenset(axes)
    return Transfer(kind=kind, axes=chosen, dims=dims, devices=devices or shards(chosen, sizes))


def _sliced(held: Dims, goal: Dims) -> Dims:
    """Return the mesh axes of each dim after slices over the mesh axes that only `goal` has."""
    used = axes_of(held)
    return tuple(
        (*have, *(axis for axis in want if axis not in used))
        for have, want in zip(held, goal, strict=True)
    )


def _replaced(held: Dims, goal: Dims, sizes: Mapping[str, int]) -> list[Transfer] | None:
    """Return the permute if only one dim changes, and all mesh axes of this dim are replaced."""
    changed = [at for at, (have, want) in enumerate(zip(held, goal, strict=True)) if have != want]
    if len(changed) != 1:
        return None
    (at,) = changed
    have, want = held[at], goal[at]
    if not have or not want or set(have) & set(want):
        return None
    old, new = shards(have, sizes), shards(want, sizes)
    axes = {*have, *want}
    # A shard is cut to its final size before it travels.
    if new % old == 0:
        return [_transfer(Kind.PERMUTE, axes, goal, sizes)]
    # The permute brings parts of one final shard next to each other. Groups of `old // new` devices
    # then join them.
    if old % new == 0:
        return [
            _transfer(Kind.PERMUTE, axes, held, sizes),
            _transfer(Kind.ALL_GATHER, have, goal, sizes, devices=old // new),
        ]
    return None


def _gathered(
    current: Dims, gone: Iterable[str], sizes: Mapping[str, int]
) -> tuple[list[Transfer], Dims]:
    """Return the gathers over removed mesh axes, and the mesh axes of each dim after them."""
    going = set(gone)
    dims = list(current)
    transfers = []
    for at in reversed(range(len(dims))):
        kept = tuple(axis for axis in dims[at] if axis not in going)
        if kept == dims[at]:
            continue
        # An all-gather joins neighboring blocks. The blocks of a major mesh axis are not neighbors
        # while a minor one stays, so a permute comes first.
        if dims[at][: len(kept)] != kept:
            transfers.append(_transfer(Kind.PERMUTE, dims[at], tuple(dims), sizes))
        gathered = set(dims[at]) - set(kept)
        dims[at] = kept
        transfers.append(_transfer(Kind.ALL_GATHER, gathered, tuple(dims), sizes))
    return transfers, tuple(dims)


def _exchanged(
    held: Dims, current: Dims, goal: Dims, sizes: Mapping[str, int], moved: set[str]
) -> ValueMove:
    """Return the move if some mesh axes change their dims, and every mesh axis stays in a dim."""
    changed = [
        at for at, (have, want) in enumerate(zip(held, goal, strict=True)) if moved & {*have, *want}
    ]
    entered = _entered(held, goal, moved, changed)
    if entered is not None:
        return _traded(*entered, held, current, sizes)
    ends = list(current)
    for axis in [each for dim in current for each in dim if each in moved]:
        at, to = _places(current)[axis], _places(goal)[axis]
        ends[at] = tuple(each for each in ends[at] if each != axis)
        ends[to] = (*ends[to], axis)
    # XLA moves the last mesh axes of a dim, so the collective may run over other axes than `moved`.
    cut = frozenset(axis for at in changed for axis in _last(current[at], moved, sizes))
    # The mesh axes in `cut` may have more devices than those in `moved`, so take the size of a
    # group from `moved`.
    devices = shards(moved, sizes)
    transfers = [_transfer(Kind.ALL_TO_ALL, cut, current, sizes, devices=devices)]
    if tuple(ends) != goal or cut != moved:
        axes = {axis for at in changed for axis in (*current[at], *goal[at])}
        transfers.append(_transfer(Kind.PERMUTE, axes, current, sizes))
    # If a dim loses mesh axes and gets others, XLA moves parts of mesh axes: note a doubt.
    both = [at for at in changed if moved & set(held[at]) and moved & set(goal[at])]
    return ValueMove(transfers=tuple(transfers), doubtful=frozenset(moved if both else ()))


def _last(dim: Sequence[str], moved: set[str], sizes: Mapping[str, int]) -> list[str]:
    """Return the last mesh axes of a dim, with as many devices as the mesh axes that leave it."""
    leaving = [axis for axis in dim if axis in moved]
    taken: list[str] = []
    for axis in reversed(dim):
        if shards(taken, sizes) >= shards(leaving, sizes):
            break
        taken.append(axis)
    return taken


def _entered(
    held: Dims, goal: Dims, moved: set[str], changed: Sequence[int]
) -> tuple[str, str] | None:
    """If a mesh axis replaces another mesh axis in a dim, return (removed axis, new axis)."""
    pairs = []
    for at in changed:
        have, want = held[at], goal[at]
        if len(have) > 1 or len(want) > 1:
            return None
        if have and want:
            pairs.append((have[0], want[0]))
    if len(pairs) == 2 and pairs[0] == pairs[1][::-1]:
        return pairs[0]
    # The other case: one mesh axis moves to another dim, and a new mesh axis takes its place.
    return pairs[0] if len(pairs) == 1 == len(moved) and len(changed) == 2 else None


def _traded(
    left: str, entered: str, held: Dims, current: Dims, sizes: Mapping[str, int]
) -> ValueMove:
    """Return the move if the mesh axis `entered` replaces the mesh axis `left` in a dim."""
    both = {left, entered}
    permute = _transfer(Kind.PERMUTE, both, current, sizes)
    swapped = entered in axes_of(held)
    # A permute is enough if, after slices, each dim has as many shards as in the goal: see
    # `CanReshardWithCollectivePermute` of XLA.
    if sizes[left] == sizes[entered] or (not swapped and sizes[left] < sizes[entered]):
        return ValueMove(transfers=(permute,))
    smaller, larger = sorted(both, key=sizes.__getitem__)
    # XLA splits the larger mesh axis in two: the part of `ratio` devices needs the all-to-all, and
    # the other part trades places with the smaller mesh axis.
    ratio, rest = divmod(sizes[larger], sizes[smaller])
    exchange = _transfer(Kind.ALL_TO_ALL, [larger], current, sizes, devices=ratio)
    doubt = rest or not swapped
    return ValueMove(transfers=(exchange, permute), doubtful=frozenset(both if doubt else ()))


def _with_both(
    held: Dims, goal: Dims, sizes: Mapping[str, int], moved: set[str], gone: set[str]
) -> ValueMove:
    """Return the move if some mesh axes change their dims, and others are removed."""
    current = _sliced(held, goal)
    before, after = _places(held), _places(goal)
    origins = {before[axis] for axis in moved}
    ends = {after[axis] for axis in moved}
    losing = {before[axis] for axis in gone}
    if any(
        axis in moved and gone.intersection(dim[at + 1 :])
        for dim in held
        for at, axis in enumerate(dim)
    ):
        # A mesh axis moves out of a dim, and an axis after it in this dim is removed. XLA gathers
        # the whole dim, and slices it again.
        transfers, _ = _gathered(held, {*gone, *moved}, sizes)
        return ValueMove(transfers=tuple(transfers))
    doubtful = frozenset(moved | gone)
    if losing & ends and shards(gone, sizes) == shards(moved, sizes):
        # XLA permutes the devices, as if the two mesh axes were one.
        permute = _transfer(Kind.PERMUTE, moved | gone, current, sizes)
        gather = _transfer(Kind.ALL_GATHER, gone, goal, sizes)
        alone = all(len(dim) < 2 for dim in (*current, *goal))
        return ValueMove(transfers=(permute, gather), doubtful=frozenset() if alone else doubtful)
    if losing & ends:
        # The dim that a mesh axis enters also loses a mesh axis. XLA gathers the dim before the
        # exchange.
        transfers, kept = _gathered(current, gone, sizes)
        smaller = shards(gone, sizes) <= shards(moved, sizes)
        rest = _exchanged(kept, kept, goal, sizes, moved)
        # The move is known exactly if the removed mesh axes have no more devices than the moved
        # mesh axes, and are not in dims that the moved mesh axes leave.
        doubt = doubtful if not smaller or losing & origins else rest.doubtful
        return ValueMove(transfers=(*transfers, *rest.transfers), doubtful=doubt)
    # The exchange comes first: the array is still cut over `gone`, so fewer bytes move.
    middle = tuple(
        (*(axis for axis in have if axis in gone), *want)
        for have, want in zip(current, goal, strict=True)
    )
    first = _exchanged(held, current, middle, sizes, moved)
    transfers, _ = _gathered(middle, gone, sizes)
    return ValueMove(transfers=(*first.transfers, *transfers), doubtful=first.doubtful)
