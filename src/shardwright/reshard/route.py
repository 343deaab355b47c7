"""Choose how one array moves between two shardings: the way, the pieces and the bytes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from itertools import pairwise

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardwright.reshard.exchange import Send, rounds_of, sends_of, units_of
from shardwright.reshard.grid import DeviceGrid, grid_of, missing_bytes, same_blocks
from shardwright.reshard.pieces import Pieces, cut
from shardwright.reshard.plan import AxesByDim, Move, MoveKind, plan_moves, shard_count
from shardwright.reshard.run import permutation

# The search for collectives visits all specs over the mesh axes in use. With more mesh axes than
# this, the search takes seconds.
_MOST_AXES = 5


_ONE_PIECE = Pieces()


class Way(enum.StrEnum):
    """How an array moves.

    Attributes:
      STAYS: The array has its target sharding. The result is the same object.
      RELABEL: Every device keeps its shard. Only the sharding object is new.
      COLLECTIVES: By collectives over mesh axes, on the devices that hold the array.
      EXCHANGE: By permutes that send each block to the devices that need it.
      TRANSFER: By copies of blocks from device to device, to another set of devices.
      UPLOAD: From the memory of the host.
    """

    STAYS = "stays"
    RELABEL = "relabel"
    COLLECTIVES = "collectives"
    EXCHANGE = "exchange"
    TRANSFER = "transfer"
    UPLOAD = "upload"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommonAxes:
    """One mesh for the source and the target of a move. Its devices have the order of the target.

    Attributes:
      sizes: The axes of this mesh with their sizes, major first. Each axis is an axis of the target
        or a part of one, and has the name of that axis. If there are several parts, the name has a
        number, as in `fsdp.0`.
      source: Axes of each dimension before the move.
      target: Axes of each dimension after the move.
    """

    sizes: tuple[tuple[str, int], ...]
    source: AxesByDim
    target: AxesByDim

    @property
    def used(self) -> int:
        """Number of axes that shard the array before or after the move."""
        return len({name for dims in (self.source, self.target) for axes in dims for name in axes})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How an array moves. Bytes are summed over all devices, copies included.

    Attributes:
      way: The kind of the move.
      shape: Shape of the array.
      dtype: Dtype before the move.
      to_dtype: Dtype after the move.
      source: The block that each device holds before the move. None for an array on the host.
      target: The block that each device holds after the move.
      common: Mesh axes of the steps. None without collectives.
      steps: The collectives of the whole array.
      rounds: Number of permutes of an exchange.
      pieces: How the array is cut into pieces.
      bytes_sent: Bytes that devices send to other devices, or that the host sends.
      least_bytes: Bytes that every possible move has to send.
      source_bytes: Bytes before the move.
      target_bytes: Bytes after the move.
    """

    way: Way
    shape: tuple[int, ...]
    dtype: np.dtype
    to_dtype: np.dtype
    source: DeviceGrid | None
    target: DeviceGrid
    common: CommonAxes | None = None
    steps: tuple[Move, ...] = ()
    rounds: int = 0
    pieces: Pieces = _ONE_PIECE
    bytes_sent: int = 0
    least_bytes: int = 0
    source_bytes: int = 0
    target_bytes: int = 0

    @property
    def moves(self) -> bool:
        """Whether a program runs or bytes are sent."""
        return self.way not in (Way.STAYS, Way.RELABEL)

    @property
    def temporary_bytes(self) -> int:
        """Upper bound of the bytes of temporaries, without source and target, over all devices."""
        # Tests compare this bound with the temporaries of the compiled programs.
        return 3 * self.pieces.bytes if self.moves else 0

    @property
    def wire_dtype(self) -> np.dtype:
        """Dtype that is sent.

        From the host, it is the dtype after the move. Between devices, it is the smaller one of the
        dtypes before and after the move.
        """
        return self.to_dtype if self.casts_first else self.dtype

    @property
    def casts_first(self) -> bool:
        """Whether the array is cast before it is sent.

        It is cast first if it is on the host, or if the cast does not make it larger.
        """
        return self.way is Way.UPLOAD or self.to_dtype.itemsize <= self.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def find_route(
    shape: tuple[int, ...],
    dtype: np.dtype,
    to_dtype: np.dtype,
    source: Sharding | None,
    target: NamedSharding,
    limit: int,
) -> Route:
    """Return how an array moves.

    Args:
      shape: Shape of the array.
      dtype: Dtype before the move.
      to_dtype: Dtype after the move.
      source: Sharding before the move; None for an array on the host.
      target: Sharding after the move.
      limit: Largest number of bytes of a piece, over all devices.

    Raises:
      ShardingError: The source is unreduced, or not cut into equal blocks.
    """
    after = grid_of(target, shape)
    elements = math.prod(shape)
    wire = min(dtype, to_dtype, key=lambda each: each.itemsize)
    base = Route(
        way=Way.UPLOAD,
        shape=shape,
        dtype=dtype,
        to_dtype=to_dtype,
        source=None,
        target=after,
        target_bytes=elements * to_dtype.itemsize * after.copies,
    )
    if source is None:
        # The host sends each copy of a replicated block separately.
        sent = base.target_bytes
        return _with_pieces(base, [after.counts], sent=sent, missing=sent, limit=limit)
    before = grid_of(source, shape)
    base = dataclasses.replace(
        base, source=before, source_bytes=elements * dtype.itemsize * before.copies
    )
    # If each device keeps its block, no program is needed, even if the mesh axes have other names.
    if dtype == to_dtype and same_blocks(before, after):
        # A mesh axis of size 1 may make the shardings unequal, although all shards are equal.
        stays = isinstance(source, NamedSharding) and source.mesh == target.mesh
        stays = stays and before.dims == after.dims
        return dataclasses.replace(base, way=Way.STAYS if stays else Way.RELABEL)
    missing = missing_bytes(before, after, elements * wire.itemsize)
    ends = [before.counts, after.counts]
    # A program of JAX runs on one set of devices, so collectives cannot connect two sets.
    if set(before.devices) != set(after.devices):
        base = dataclasses.replace(base, way=Way.TRANSFER)
        return _with_pieces(base, ends, sent=missing, missing=missing, limit=limit)
    common = common_axes(before, after)
    if common is not None and common.used <= _MOST_AXES and elements:
        steps = _plan_moves(common.source, common.target, shape, wire.itemsize, common.sizes)
        sizes = dict(common.sizes)
        sent = sum(sent_bytes(step, sizes) for step in steps)
        # No step may cut a group of rows, so include the shard counts at every step, not only at
        # the source and the target.
        places = [common.source, *(step.after for step in steps)]
        counts = [[shard_count(axes, sizes) for axes in place] for place in places]
        route = dataclasses.replace(base, way=Way.COLLECTIVES, common=common, steps=steps)
        route = _with_pieces(route, counts, sent=sent, missing=missing, limit=limit)
        # Collectives need fewer steps, so they may send up to 1.5 times the least bytes.
        if 2 * route.bytes_sent <= 3 * missing:
            return route
    # A round of blocks that stay is a local copy, so it does not count as a permute.
    rounds = sum(not sends[0].stays for sends in schedule(before, after))
    base = dataclasses.replace(base, way=Way.EXCHANGE, rounds=rounds)
    return _with_pieces(base, ends, sent=missing, missing=missing, limit=limit)


def _with_pieces(
    base: Route, counts: Sequence[Sequence[int]], *, sent: int, missing: int, limit: int
) -> Route:
    devices = max(len(base.target.devices), len(base.source.devices) if base.source else 1)
    itemsize = max(base.dtype.itemsize, base.to_dtype.itemsize)
    elements = math.prod(base.shape)
    # The shards are largest where the array has the fewest of them, such as after an all-gather.
    largest = max(elements // math.prod(each) for each in counts) * devices * itemsize
    pieces = cut(base.shape, counts, largest=largest, limit=limit) if elements else _ONE_PIECE
    return dataclasses.replace(
        base, pieces=pieces, bytes_sent=pieces.of_all(sent), least_bytes=missing
    )


# The key of the cache has no device ids and no dtype, so all layers of a model share one search.
@functools.lru_cache(maxsize=4096)
def _plan_moves(
    source: AxesByDim,
    target: AxesByDim,
    shape: tuple[int, ...],
    itemsize: int,
    sizes: tuple[tuple[str, int], ...],
) -> tuple[Move, ...]:
    return plan_moves(source, target, shape=shape, itemsize=itemsize, mesh=dict(sizes))


def sent_bytes(step: Move, sizes: dict[str, int]) -> int:
    """Return the bytes that all devices of a mesh send in a step.

    In a permute, a device that sends to itself sends nothing.
    """
    devices = math.prod(sizes.values())
    if step.kind is not MoveKind.PERMUTE:
        return step.bytes * devices
    # `permutation` returns the pairs of one group of devices. There is one such group for each
    # index along the other mesh axes, and all groups have equal pairs.
    pairs = permutation(step, sizes)
    groups = devices // len(pairs)
    return step.bytes * groups * sum(sender != receiver for sender, receiver in pairs)


@functools.lru_cache(maxsize=1024)
def schedule(source: DeviceGrid, target: DeviceGrid) -> tuple[tuple[Send, ...], ...]:
    """Return the rounds of an exchange. The first rounds copy blocks that stay on their device."""
    return rounds_of(sends_of(source, target), len(target.devices))


def unit_shape(shape: Sequence[int], source: DeviceGrid, target: DeviceGrid) -> tuple[int, ...]:
    """Return the shape of the blocks that an exchange or a transfer sends."""
    return tuple(size // units for size, units in zip(shape, units_of(source, target), strict=True))


def local_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that a NumPy array has in JAX. Without x64, it has at most 32 bits."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


# The functions below find one mesh that can express the specs of two meshes of the same devices.
# For example, the meshes `fsdp:2,tp:4` and `fsdp:4,tp:2` may have the same eight devices. A mesh
# `2,2,2` of these devices can express the specs of both meshes. So a move from one mesh to the
# other is a sequence of collectives over parts of mesh axes.


def common_axes(source: DeviceGrid, target: DeviceGrid) -> CommonAxes | None:
    """Return the axes of a mesh that expresses both specs, or None if there is none.

    No such mesh exists in these cases:

    - The source or the target is not on a mesh.
    - The meshes have different devices.
    - Their sizes, such as `2,3` and `3,2`, have no common factorization.
    - The device order of the source is not a transposition of that of the target.
    """
    if not source.axes or set(source.devices) != set(target.devices):
        return None
    target_strides = _own_strides(target.axes)
    source_strides = _strides_in(source, target.devices)
    if source_strides is None:
        return None
    spans = [*_spans(source.axes, source_strides), *_spans(target.axes, target_strides)]
    # `cuts` are the strides at which an axis begins or ends. If each stride divides the next one,
    # they are the prefix products of a common factorization. Strides 1,3,6 and 1,2,6 fail: 2 does
    # not divide 3.
    cuts = sorted({1, len(target.devices), *(cut for span in spans for cut in span)})
    if any(upper % lower for lower, upper in pairwise(cuts)):
        return None
    # `parts` are (stride, stride of the next larger axis), the major axis first.
    parts = [(lower, upper) for lower, upper in pairwise(cuts)][::-1]
    names = _names(target, target_strides, parts)
    return CommonAxes(
        sizes=tuple((names[part], part[1] // part[0]) for part in parts),
        source=_split(source, source_strides, parts, names),
        target=_split(target, target_strides, parts, names),
    )


def _own_strides(axes: Sequence[tuple[str, int]]) -> dict[str, int]:
    strides, stride = {}, 1
    for name, size in reversed(axes):
        strides[name] = stride
        stride *= size
    return strides


def _strides_in(grid: DeviceGrid, devices: Sequence[int]) -> dict[str, int] | None:
    """Return each axis's stride in a list of devices, or None if an axis has no fixed stride."""
    place = {device: at for at, device in enumerate(devices)}
    own = _own_strides(grid.axes)
    first = place[grid.devices[0]]
    # The device at an axis's own stride is the neighbor of the first device along this axis.
    strides = {
        name: place[grid.devices[own[name]]] - first if size > 1 else 1 for name, size in grid.axes
    }
    # Checking only the neighbors of the first device is not enough: a ring order may swap later
    # devices.
    for at, device in enumerate(grid.devices):
        expected = sum(at // own[name] % size * strides[name] for name, size in grid.axes)
        if place[device] != expected:
            return None
    return strides


def _spans(axes: Sequence[tuple[str, int]], strides: dict[str, int]) -> list[tuple[int, int]]:
    return [(strides[name], strides[name] * size) for name, size in axes if size > 1]


def _names(
    target: DeviceGrid, strides: dict[str, int], parts: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    names = {}
    for name, size in target.axes:
        inside = _inside(strides[name], size, parts)
        for number, part in enumerate(inside):
            names[part] = name if len(inside) == 1 else f"{name}.{number}"
    return names


def _inside(stride: int, size: int, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts that make up an axis, major first."""
    return [(lower, upper) for lower, upper in parts if stride <= lower and upper <= stride * size]


def _split(
    grid: DeviceGrid,
    strides: dict[str, int],
    parts: Sequence[tuple[int, int]],
    names: dict[tuple[int, int], str],
) -> AxesByDim:
    sizes = dict(grid.axes)
    return tuple(
        tuple(names[part] for name in axes for part in _inside(strides[name], sizes[name], parts))
        for axes in grid.dims
    )
