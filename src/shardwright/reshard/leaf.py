"""Move one array along its route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardwright.errors import Problem, ShardingError
from shardwright.reshard.exchange import sends_of, units_of
from shardwright.reshard.programs import (
    flat_mesh,
    flat_shape,
    flat_sharding,
    join_program,
    move_program,
    split_program,
    wire_view,
    zeros_program,
)
from shardwright.reshard.route import Route, Way

# Called with the number of pieces that have moved, and the total number of pieces.
Tick = Callable[[int, int], None]
ShardIndex = tuple[slice, ...]


@runtime_checkable
class ArrayInParts(Protocol):
    """An array that is not in memory, such as an array in a file."""

    def read(self, boxes: Sequence[ShardIndex]) -> list[np.ndarray]:
        """Return the part of the array in each of the boxes."""


def check_processes(path: str, value: Any, target: NamedSharding, route: Route) -> list[Problem]:
    """Return a problem if a move needs direct copies between devices of different processes."""
    if route.way is not Way.TRANSFER:
        return []
    if value.is_fully_addressable and target.is_fully_addressable:
        return []
    problem = Problem(
        error=ShardingError,
        what="blocks would go directly between the devices of different processes",
        path=path,
        fix="move between meshes of the same devices, or through a checkpoint",
    )
    return [problem]


def move_leaf(
    value: Any, target: NamedSharding, route: Route, *, donate: bool, tick: Tick
) -> jax.Array:
    """Return the array with the target sharding. The source is not deleted.

    Args:
      value: JAX array, array on the host, number, or `ArrayInParts`.
      target: Sharding after the move.
      route: How the array moves.
      donate: Whether the caller deletes the source after the move. The result then does not share
        memory with the source.
      tick: Called after each piece.
    """
    if route.way is Way.STAYS:
        unchanged: jax.Array = value
        return unchanged
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with jax.set_mesh(flat_mesh(list(target.mesh.devices.flat))):
            data = jax.random.key_data(value)
        moved = _move(data, target, route, donate=donate, tick=tick)
        with jax.set_mesh(flat_mesh(list(target.mesh.devices.flat))):
            keys: jax.Array = jax.random.wrap_key_data(moved, impl=jax.random.key_impl(value))
        return keys
    return _move(value, target, route, donate=donate, tick=tick)


def _move(
    value: Any, target: NamedSharding, route: Route, *, donate: bool, tick: Tick
) -> jax.Array:
    if route.way is Way.RELABEL:
        return _assemble(_shards(value), target, route.shape)
    if route.way in (Way.COLLECTIVES, Way.EXCHANGE):
        flat = _run_pieces(value, target, route, tick)
    elif route.way is Way.TRANSFER:
        flat = _transfer(value, target, route, donate=donate, tick=tick)
    else:
        flat = _upload(value, target, route, tick)
    return _assemble(_shards(flat), target, route.shape)


def _shards(x: jax.Array) -> dict[jax.Device, jax.Array]:
    """Return the shard of each device of this process, without a copy."""
    return {shard.device: shard.data for shard in x.addressable_shards}


def _assemble(
    shards: dict[jax.Device, jax.Array], sharding: NamedSharding, shape: Sequence[int]
) -> jax.Array:
    """Return shards as one array, without a copy."""
    own = [device for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, [shards[device] for device in own]
    )


def _flat(shards: dict[jax.Device, jax.Array], mesh: Mesh) -> jax.Array:
    """Return shards as one flat array, which is the input of a program."""
    local = next(iter(shards.values())).shape
    return _assemble(shards, flat_sharding(mesh, len(local)), flat_shape(local, mesh))


def _mesh_of(devices: Sequence[jax.Device], route: Route) -> Mesh:
    return flat_mesh(devices, route.common.sizes if route.common else None)


def _run_pieces(value: jax.Array, target: NamedSharding, route: Route, tick: Tick) -> jax.Array:
    """Move an array by programs that run on the devices that hold it."""
    mesh = _mesh_of(list(target.mesh.devices.flat), route)
    program, source = move_program(mesh, route), _flat(_shards(value), mesh)
    if route.pieces.dim is None:
        moved: jax.Array = jax.block_until_ready(program(source))
        tick(1, 1)
        return moved
    result = _zeros(mesh, route)
    for number in range(route.pieces.count):
        start = np.int32(route.pieces.start(number))
        # Wait for each piece, so that the temporaries of two pieces never exist at the same time.
        result = jax.block_until_ready(program(source, result, start))
        tick(number + 1, route.pieces.count)
    return result


def _zeros(mesh: Mesh, route: Route) -> jax.Array:
    local = route.target.local_shape(route.shape)
    zeros: jax.Array = zeros_program(mesh, local, route.to_dtype)()
    return zeros


def _transfer(
    value: jax.Array, target: NamedSharding, route: Route, *, donate: bool, tick: Tick
) -> jax.Array:
    """Move blocks from device to device: split each piece, copy the blocks, and join them."""
    assert route.source is not None
    own: Any = value.sharding.device_set
    by_id = {device.id: device for device in own}
    senders = [by_id[number] for number in route.source.devices]
    receivers = list(target.mesh.devices.flat)
    source_mesh, target_mesh = flat_mesh(senders), flat_mesh(receivers)
    sends = sends_of(route.source, route.target)
    units = len(sends) // len(receivers)
    per_shard = np.floor_divide(units_of(route.source, route.target), route.source.counts)
    # Map: start of a unit in a source shard -> number of the unit. `split_program` returns units in
    # the same order, from np.ndindex over the same counts.
    per_sender = {index: number for number, index in enumerate(np.ndindex(*per_shard))}
    # If each target shard is one whole source shard, no split or join is needed.
    whole = len(per_sender) == units == 1 and route.dtype == route.to_dtype
    whole = whole and route.pieces.dim is None
    source = _flat(_shards(value), source_mesh)
    result = None if route.pieces.dim is None else _zeros(target_mesh, route)
    for number in range(route.pieces.count):
        start = np.int32(route.pieces.start(number))
        parts = (source,) if whole else split_program(source_mesh, route)(source, start)
        blocks = [_shards(part) for part in parts]
        chosen = [blocks[per_sender[send.source_offset]][senders[send.sender]] for send in sends]
        goals = [receivers[send.receiver] for send in sends]
        moving = [at for at, send in enumerate(sends) if not send.stays]
        sent = send_blocks([chosen[at] for at in moving], [goals[at] for at in moving])
        copies = list(chosen)
        for at, block in zip(moving, sent, strict=True):
            copies[at] = block
        # device_put of an array to its own device aliases the buffer, unless may_alias is False.
        if whole and donate:
            # The caller deletes the source, so copy the shards that stay on their device.
            copies = [
                jax.device_put(copy, goal, may_alias=False) if send.stays else copy
                for copy, goal, send in zip(copies, goals, sends, strict=True)
            ]
        # Sends are sorted by receiver, then by unit. Each argument of a program has one block per
        # device, so the k-th flat array consists of unit k of each receiver.
        columns = [copies[unit::units] for unit in range(units)]
        arrived = [
            _flat(dict(zip(receivers, column, strict=True)), target_mesh) for column in columns
        ]
        result = _join(result, arrived, route, target_mesh, start, whole=whole)
        tick(number + 1, route.pieces.count)
    assert result is not None
    return result


def _join(
    result: jax.Array | None,
    arrived: Sequence[jax.Array],
    route: Route,
    mesh: Mesh,
    start: np.int32,
    *,
    whole: bool,
) -> jax.Array:
    """Write blocks that have arrived into the target, and wait until they are written."""
    if whole:
        shards: jax.Array = jax.block_until_ready(arrived[0])
        return shards
    unit = arrived[0].sharding.shard_shape(arrived[0].shape)
    program = join_program(mesh, route, tuple(unit))
    arguments = arrived if result is None else (result, *arrived, start)
    joined: jax.Array = jax.block_until_ready(program(*arguments))
    return joined


def _upload(value: Any, target: NamedSharding, route: Route, tick: Tick) -> jax.Array:
    """Move an array from the memory of the host, each shard to its device."""
    mesh = flat_mesh(list(target.mesh.devices.flat))
    boxes: dict[jax.Device, Any] = dict(target.addressable_devices_indices_map(route.shape))
    whole = route.pieces.dim is None
    result = None if whole else _zeros(mesh, route)
    for number in range(route.pieces.count):
        start = route.pieces.start(number)
        # Each process reads and sends only the boxes of its own devices.
        blocks = host_blocks(value, list(boxes.values()), route, start)
        sent = send_blocks(blocks, list(boxes))
        arrived = [_flat(dict(zip(boxes, sent, strict=True)), mesh)]
        result = _join(result, arrived, route, mesh, np.int32(start), whole=whole)
        tick(number + 1, route.pieces.count)
    assert result is not None
    return result


def send_blocks(blocks: Sequence[Any], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Copy each block to a device.

    Args:
      blocks: Arrays, each on one device or on the host.
      devices: Target device of each block. Callers leave out blocks that are already there.
    """
    sent: list[jax.Array] = jax.device_put(list(blocks), list(devices))
    return sent


def host_blocks(
    value: Any, boxes: Sequence[ShardIndex], route: Route, start: int
) -> list[np.ndarray]:
    """Copy one piece of each block into a contiguous array of the target dtype.

    Args:
      value: NumPy array, number, JAX array in host memory, or array that is read in parts.
      boxes: The blocks, as slices of the whole array.
      route: How the array moves.
      start: First row of the piece, in each block.
    """
    dim, cut = route.pieces.dim, list(boxes)
    if dim is not None:
        # A move from the host has only the sharding of the target, so a block is one group of rows.
        firsts = [(box[dim].start or 0) + start for box in boxes]
        cut = [
            (*box[:dim], slice(first, first + route.pieces.size), *box[dim + 1 :])
            for box, first in zip(boxes, firsts, strict=True)
        ]
    if isinstance(value, ArrayInParts):
        parts = value.read(cut)
    else:
        parts = [_read(value, box) for box in cut]
    # Copy, because JAX on the CPU may use NumPy's memory directly.
    blocks = [np.array(part, dtype=route.to_dtype, order="C") for part in parts]
    # `wire_view` turns floats into integers. Without pieces, no program would turn these back into
    # floats.
    return blocks if dim is None else [wire_view(block, route) for block in blocks]


def _read(value: Any, box: ShardIndex) -> np.ndarray:
    if not isinstance(value, jax.Array):
        return np.asarray(value)[box]
    parts = [(_overlap(shard.index, box, value.shape), shard) for shard in value.addressable_shards]
    shape = tuple(stop - start for start, stop in _bounds(box, value.shape))
    # Fast path: one shard covers the box, so no second buffer of that size is needed.
    for overlap, shard in parts:
        if overlap is not None and overlap[0] == tuple(slice(0, size) for size in shape):
            return np.asarray(shard.data)[overlap[1]]
    block = np.empty(shape, value.dtype)
    filled = np.zeros(shape, bool) if parts else None
    for overlap, shard in parts:
        if overlap is not None and filled is not None:
            block[overlap[0]] = np.asarray(shard.data)[overlap[1]]
            filled[overlap[0]] = True
    if filled is None or not filled.all():
        raise ShardingError(
            "a part of the array is in the memory of another process",
            fix="move the array to device memory with jax.device_put first",
        )
    return block


def _bounds(box: ShardIndex, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(size)[:2] for cut, size in zip(box, shape, strict=True)]


def _overlap(
    own: ShardIndex, box: ShardIndex, shape: tuple[int, ...]
) -> tuple[ShardIndex, ShardIndex] | None:
    """Return where a shard and a block overlap, as slices of the block and of the shard."""
    in_block, in_shard = [], []
    for (low, high), (start, stop) in zip(_bounds(own, shape), _bounds(box, shape), strict=True):
        first, last = max(low, start), min(high, stop)
        if first >= last:
            return None
        in_block.append(slice(first - start, last - start))
        in_shard.append(slice(first - low, last - low))
    return tuple(in_block), tuple(in_shard)
