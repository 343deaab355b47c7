"""Plan the steps that reshard an array with the fewest bytes sent: a shortest path between specs.

XLA's partitioner plans one collective at a time. If one is not enough, it gathers the whole array
("involuntary full rematerialization"). Here a plan is a sequence of steps. There are these
kinds of steps:

- an all-to-all moves the last mesh axes of one dimension to the end of another dimension's axes;
- an all-gather removes the last mesh axes of a dimension;
- a slice adds a mesh axis to a dimension, and sends nothing;
- a permute exchanges shards of the same shape between devices.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from shardwright.resolution.partition_specs import spec_of, spec_text

# The mesh axes of every dimension.
AxesByDim = tuple[tuple[str, ...], ...]


class MoveKind(enum.StrEnum):
    """The collective of a step; SLICE is local."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    SLICE = "slice"
    PERMUTE = "permute"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One step of a plan.

    Attributes:
      kind: The collective.
      mesh_axes: Mesh axes of the step, major first. For a permute, all mesh axes that shard the
        array, in mesh order.
      source: Dimension that the mesh axes shard before the step, or None.
      target: Dimension that the mesh axes shard after the step, or None.
      before: Mesh axes of every dimension before the step.
      after: Mesh axes of every dimension after the step.
      bytes: Bytes that each device sends, if a collective runs on a ring.
    """

    kind: MoveKind
    mesh_axes: tuple[str, ...]
    source: int | None = None
    target: int | None = None
    before: AxesByDim
    after: AxesByDim
    bytes: int = 0

    def __str__(self) -> str:
        over = "+".join(self.mesh_axes)
        where = {
            MoveKind.ALL_TO_ALL: f"dim {self.source} -> {self.target}",
            MoveKind.ALL_GATHER: f"dim {self.source} -> -",
            MoveKind.SLICE: f"- -> dim {self.target}",
            MoveKind.PERMUTE: "shards change devices",
        }[self.kind]
        return (
            f"{self.kind} {over}, {where}, {self.bytes:,} B sent, {spec_text(spec_of(*self.after))}"
        )


def plan_moves(
    source: AxesByDim,
    target: AxesByDim,
    *,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mapping[str, int],
) -> tuple[Move, ...]:
    """Return the steps that send the fewest bytes.

    If several plans send equally few bytes, return one with the fewest steps. The search is
    Dijkstra's algorithm over all specs that divide the shape.

    Args:
      source: Mesh axes of every dimension before the move, the major axis first.
      target: Mesh axes of every dimension after the move. Both specs divide the shape.
      shape: Shape of the global array.
      itemsize: Bytes of an element.
      mesh: Sizes of the mesh axes.
    """
    # A mesh axis that neither spec has can only replicate, so leave it out of the search.
    usable = [name for name in mesh if any(name in axes for axes in (*source, *target))]
    total = math.prod(shape) * itemsize
    best: dict[AxesByDim, tuple[int, int]] = {source: (0, 0)}
    last_move: dict[AxesByDim, Move] = {}
    # Of plans with equal costs, take the first that is found. The order of the search is the same
    # on every host.
    queue: list[tuple[int, int, int, AxesByDim]] = [(0, 0, 0, source)]
    discovered = 0
    while queue:
        sent, count, _, place = heapq.heappop(queue)
        if place == target:
            moves: list[Move] = []
            while place != source:
                moves.append(last_move[place])
                place = moves[-1].before
            return tuple(reversed(moves))
        # heapq cannot decrease a key, so the queue keeps an entry after a cheaper path is found.
        if (sent, count) > best[place]:
            continue
        local = total // math.prod(shard_count(axes, mesh) for axes in place)
        for move in _next_moves(place, target, shape=shape, local=local, mesh=mesh, usable=usable):
            cost = (sent + move.bytes, count + 1)
            if move.after not in best or cost < best[move.after]:
                best[move.after], last_move[move.after] = cost, move
                discovered += 1
                heapq.heappush(queue, (*cost, discovered, move.after))
    # This line is unreachable, because to gather everything and then slice is always a plan.
    raise AssertionError(f"no plan from {source} to {target}")


def shard_count(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    """Return the number of shards of a dimension that is sharded over mesh axes."""
    return math.prod(mesh[name] for name in axes)


def _next_moves(
    place: AxesByDim,
    target: AxesByDim,
    *,
    shape: Sequence[int],
    local: int,
    mesh: Mapping[str, int],
    usable: Sequence[str],
) -> Iterator[Move]:
    """Yield every step from a sharding.

    `local` is the number of bytes of one shard under this sharding.
    """
    for dim, axes in enumerate(place):
        # Only the minor axes can leave a dimension: the blocks that a tiled all-gather over them
        # joins are adjacent in the array. The blocks over a major axis are not adjacent.
        for count in range(1, len(axes) + 1):
            last = axes[-count:]
            parts = shard_count(last, mesh)
            rest = _with_axes(place, dim, axes[:-count])
            yield Move(
                kind=MoveKind.ALL_GATHER,
                mesh_axes=last,
                source=dim,
                before=place,
                after=rest,
                # In a ring, each device passes on every block of its group but one.
                bytes=local * (parts - 1),
            )
            for to in range(len(place)):
                after = _with_axes(rest, to, rest[to] + last)
                if to != dim and _divides(after[to], shape[to], mesh):
                    yield Move(
                        kind=MoveKind.ALL_TO_ALL,
                        mesh_axes=last,
                        source=dim,
                        target=to,
                        before=place,
                        after=after,
                        # Each device keeps one of its `parts` blocks.
                        bytes=local // parts * (parts - 1),
                    )
    used = [name for axes in place for name in axes]
    for name in usable:
        for to in range(len(place)) if name not in used else ():
            after = _with_axes(place, to, (*place[to], name))
            if _divides(after[to], shape[to], mesh):
                yield Move(
                    kind=MoveKind.SLICE, mesh_axes=(name,), target=to, before=place, after=after
                )
    # JAX requires the axes of a permute in the order of the mesh.
    permuting = tuple(name for name in usable if name in used)
    for after in _permuted(place, target, mesh, usable):
        yield Move(
            kind=MoveKind.PERMUTE, mesh_axes=permuting, before=place, after=after, bytes=local
        )


def _permuted(
    place: AxesByDim, target: AxesByDim, mesh: Mapping[str, int], usable: Sequence[str]
) -> Iterator[AxesByDim]:
    """Yield the shardings that have the same shards, but on other devices.

    There are two kinds of such shardings. The first kind has the mesh axes of one dimension in
    another order. In the second kind, each mesh axis shards the dimension that it shards in the
    target. Mesh axes that the target does not use become the minor axes of one dimension.
    """
    used = {name for axes in place for name in axes}
    as_target = tuple(tuple(name for name in axes if name in used) for axes in target)
    rest = [name for name in usable if name in used and not any(name in axes for axes in as_target)]
    candidates = [
        _with_axes(place, dim, order)
        for dim, axes in enumerate(place)
        for order in itertools.permutations(axes)
    ]
    if rest:
        candidates += [
            _with_axes(as_target, dim, (*axes, *rest)) for dim, axes in enumerate(as_target)
        ]
    else:
        candidates.append(as_target)
    for after in candidates:
        # A permute sends whole shards, so the shards before and after must have one shape.
        same_shape = all(
            shard_count(a, mesh) == shard_count(b, mesh) for a, b in zip(place, after, strict=True)
        )
        if after != place and same_shape:
            yield after


def _with_axes(place: AxesByDim, dim: int, axes: tuple[str, ...]) -> AxesByDim:
    return (*place[:dim], axes, *place[dim + 1 :])


def _divides(axes: Sequence[str], size: int, mesh: Mapping[str, int]) -> bool:
    return size % shard_count(axes, mesh) == 0
