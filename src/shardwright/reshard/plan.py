"""From one spec to another by the steps that send least: a shortest path over the specs in between.

The partitioner plans one collective at a time, and where none will do it gathers the whole array ("involuntary full
rematerialization"). Here every step moves the last mesh axes of one dim behind those of another, by one all-to-all, or
drops them, by an all-gather, or adds one, by cutting what is there already, or changes who has which shard, by a permute.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax

from shardwright.resolution.partition_specs import spec_of, spec_text

Dims = tuple[tuple[str, ...], ...]


class MoveKind(enum.StrEnum):
    """What a step is."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    SLICE = "slice"
    PERMUTE = "permute"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One step.

    Attributes:
      kind: what it is.
      mesh_axes: of the step, the major first; of a permute all that shard the array.
      source: dim that they shard before, or None.
      target: dim that they shard after, or None.
      before: mesh axes by dim before the step.
      after: mesh axes by dim after it.
      bytes: that a device sends, on a ring.
    """

    kind: MoveKind
    mesh_axes: tuple[str, ...]
    source: int | None = None
    target: int | None = None
    before: Dims
    after: Dims
    bytes: int = 0

    def __str__(self) -> str:
        over = "+".join(self.mesh_axes)
        where = {
            MoveKind.ALL_TO_ALL: f"dim {self.source} -> {self.target}",
            MoveKind.ALL_GATHER: f"dim {self.source} -> -",
            MoveKind.SLICE: f"- -> dim {self.target}",
            MoveKind.PERMUTE: "who has what",
        }[self.kind]
        return (
            f"{self.kind} {over}, {where}, {self.bytes:,} B sent, {spec_text(spec_of(*self.after))}"
        )


def find_moves(
    source: Dims, target: Dims, *, shape: Sequence[int], itemsize: int, mesh: Mapping[str, int]
) -> tuple[Move, ...]:
    """Return the steps from one place to another that send the fewest bytes; among those, the fewest steps.

    Args:
      source: mesh axes of every dim, the major first.
      target: likewise; both divide the shape.
      shape: of the global array.
      itemsize: bytes of an element.
      mesh: sizes of the mesh axes.
    """
    known = [
        name for name in mesh if any(name in dims for place in (source, target) for dims in place)
    ]
    total = math.prod(shape) * itemsize
    best: dict[Dims, tuple[int, int]] = {source: (0, 0)}
    came: dict[Dims, Move] = {}
    # Ties go by the order in which places were found, which is the same on every host.
    queue: list[tuple[int, int, int, Dims]] = [(0, 0, 0, source)]
    found = 0
    while queue:
        sent, count, _, place = heapq.heappop(queue)
        if place == target:
            return _path(came, source, target)
        if (sent, count) > best[place]:
            continue
        local = total // _shards(place, mesh)
        for move in _next(place, target, shape=shape, local=local, mesh=mesh, known=known):
            cost = (sent + move.bytes, count + 1)
            if move.after not in best or cost < best[move.after]:
                best[move.after], came[move.after] = cost, move
                found += 1
                heapq.heappush(queue, (*cost, found, move.after))
    raise AssertionError(
        f"no way from {source} to {target}"
    )  # gathering everything and cutting it is one


def _path(came: Mapping[Dims, Move], source: Dims, target: Dims) -> tuple[Move, ...]:
    moves: list[Move] = []
    while target != source:
        moves.append(came[target])
        target = moves[-1].before
    return tuple(reversed(moves))


def _next(
    place: Dims,
    target: Dims,
    *,
    shape: Sequence[int],
    local: int,
    mesh: Mapping[str, int],
    known: Sequence[str],
) -> Iterator[Move]:
    for dim, axes in enumerate(place):
        for count in range(1, len(axes) + 1):
            last, parts = axes[-count:], math.prod(mesh[name] for name in axes[-count:])
            rest = _with(place, dim, axes[:-count])
            yield Move(
                kind=MoveKind.ALL_GATHER,
                mesh_axes=last,
                source=dim,
                before=place,
                after=rest,
                bytes=local * (parts - 1),
            )
            for to in range(len(place)):
                after = _with(rest, to, rest[to] + last)
                if to != dim and _divides(after[to], shape[to], mesh):
                    sent = local // parts * (parts - 1)
                    yield Move(
                        kind=MoveKind.ALL_TO_ALL,
                        mesh_axes=last,
                        source=dim,
                        target=to,
                        before=place,
                        after=after,
                        bytes=sent,
                    )
    used = [name for axes in place for name in axes]
    for name in known:
        for to in range(len(place)) if name not in used else ():
            after = _with(place, to, (*place[to], name))
            if _divides(after[to], shape[to], mesh):
                yield Move(
                    kind=MoveKind.SLICE, mesh_axes=(name,), target=to, before=place, after=after
                )
    for after in _permuted(place, target, mesh, known):
        yield Move(
            kind=MoveKind.PERMUTE, mesh_axes=tuple(used), before=place, after=after, bytes=local
        )


def _permuted(
    place: Dims, target: Dims, mesh: Mapping[str, int], known: Sequence[str]
) -> Iterator[Dims]:
    """Yield places with the same shards on other devices: a dim's axes in another order, or those of the target, the rest behind."""
    used = {name for axes in place for name in axes}
    ahead = tuple(tuple(name for name in axes if name in used) for axes in target)
    rest = [name for name in known if name in used and not any(name in axes for axes in ahead)]
    candidates = [
        _with(place, dim, order)
        for dim, axes in enumerate(place)
        for order in itertools.permutations(axes)
    ]
    candidates += (
        [ahead]
        if not rest
        else [_with(ahead, dim, (*ahead[dim], *rest)) for dim in range(len(ahead))]
    )
    for after in candidates:
        same = all(_size(a, mesh) == _size(b, mesh) for a, b in zip(place, after, strict=True))
        if after != place and same:
            yield after


def _with(place: Dims, dim: int, axes: tuple[str, ...]) -> Dims:
    return (*place[:dim], axes, *place[dim + 1 :])


def _size(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[name] for name in axes)


def _shards(place: Dims, mesh: Mapping[str, int]) -> int:
    return math.prod(_size(axes, mesh) for axes in place)


def _divides(axes: Sequence[str], size: int, mesh: Mapping[str, int]) -> bool:
    return size % _size(axes, mesh) == 0


def run_moves(x: jax.Array, moves: Sequence[Move], mesh: Mapping[str, int]) -> jax.Array:
    """Run steps on a shard, inside `shard_map`."""
    for move in moves:
        x = _run(x, move, mesh)
    return x


def _run(x: jax.Array, move: Move, mesh: Mapping[str, int]) -> jax.Array:
    if move.kind is MoveKind.ALL_TO_ALL:
        assert move.source is not None
        assert move.target is not None
        swapped: jax.Array = jax.lax.all_to_all(
            x, move.mesh_axes, move.target, move.source, tiled=True
        )
        return swapped
    if move.kind is MoveKind.ALL_GATHER:
        assert move.source is not None
        whole: jax.Array = jax.lax.all_gather(
            x, move.mesh_axes, axis=move.source, tiled=True, to="invarying"
        )
        return whole
    if move.kind is MoveKind.SLICE:
        assert move.target is not None
        size = x.shape[move.target] // _size(move.mesh_axes, mesh)
        return jax.lax.dynamic_slice_in_dim(
            x, jax.lax.axis_index(move.mesh_axes) * size, size, move.target
        )

    sent: jax.Array = jax.lax.ppermute(x, move.mesh_axes, _pairs(move, mesh))
    return sent


def _pairs(move: Move, mesh: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return which device sends to which, counted over the step's mesh axes."""
    sizes = [mesh[name] for name in move.mesh_axes]

    def blocks(dims: Dims) -> dict[tuple[int, ...], int]:
        found = {}
        for device in range(math.prod(sizes)):
            at, rest = {}, device
            for name, size in zip(reversed(move.mesh_axes), reversed(sizes), strict=True):
                rest, at[name] = divmod(rest, size)
            block = []
            for axes in dims:
                number = 0
                for name in axes:
                    number = number * mesh[name] + at[name]
                block.append(number)
            found[tuple(block)] = device
        return found

    before, after = blocks(move.before), blocks(move.after)
    return [(device, after[block]) for block, device in before.items()]
