"""The compiled programs of a move.

A program takes the shards of an array as one flat array, whose first dimension is sharded over all
devices. JAX makes a flat array of shards without a copy. So a program does not depend on the axis
types or the names of the user's meshes. A program sends only the bytes that the plan counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.reshard.exchange import Send
from shardwright.reshard.pieces import Pieces
from shardwright.reshard.route import Route, Way, schedule, unit_shape
from shardwright.reshard.run import run_moves

# Number of programs to keep: enough for a large model that moves between a few strategies.
_PROGRAMS = 1024


def flat_mesh(devices: Sequence[jax.Device], axes: Sequence[tuple[str, int]] | None = None) -> Mesh:
    """Return a mesh of devices in the given order, with Auto axes. By default it has one axis."""
    axes = axes or (("devices", len(devices)),)
    grid = np.array(devices, dtype=object).reshape([size for _, size in axes])
    return Mesh(grid, [name for name, _ in axes], axis_types=(AxisType.Auto,) * len(axes))


def flat_sharding(mesh: Mesh, rank: int) -> NamedSharding:
    """Return the sharding of a flat array. Shards of rank 0 are replicated."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names) if rank else PartitionSpec())


def flat_shape(local: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the flat array of shards, given the shape of one shard."""
    return (local[0] * mesh.size, *local[1:]) if local else ()


class MoveProgram:
    """A program that is compiled only once, at its first call, whatever mesh or manager is ambient.

    A jitted function would be compiled again under each manager, and raise an error under another
    mesh.
    """

    def __init__(self, mesh: Mesh, jitted: Any) -> None:
        self.mesh = mesh
        self.compiled: Any = None
        self._jitted = jitted

    def __call__(self, *arguments: Any) -> Any:
        """Run the program on flat arrays."""
        # A program that JAX 0.10 compiles ahead of time refuses int4 arrays, due to their layout.
        if any(_bits(argument.dtype) < 8 for argument in arguments):
            with jax.set_mesh(self.mesh):
                return self._jitted(*arguments)
        if self.compiled is None:
            # The mesh of the context is part of the trace, and must be that of the shard_map.
            with jax.set_mesh(self.mesh):
                self.compiled = self._jitted.lower(*arguments).compile()
        return self.compiled(*arguments)


@functools.lru_cache(maxsize=_PROGRAMS)
def zeros_program(mesh: Mesh, local: tuple[int, ...], dtype: np.dtype) -> MoveProgram:
    """Return the program that creates the target as zeros, one shard per device."""
    sharding = flat_sharding(mesh, len(local))
    shape = flat_shape(local, mesh)
    return MoveProgram(mesh, jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding))


@functools.lru_cache(maxsize=_PROGRAMS)
def move_program(mesh: Mesh, route: Route) -> MoveProgram:
    """Return the program that moves one piece, on the devices that hold the array.

    The program maps (source, target, start) to the target, which it changes in place. If the leaf
    is one piece, it maps the source to the target.
    """
    move = _exchange(route, mesh) if route.way is Way.EXCHANGE else None
    sizes = dict(mesh.shape)

    def one(source: jax.Array) -> jax.Array:
        piece = _enter(source, route)
        return _leave(run_moves(piece, route.steps, sizes) if move is None else move(piece), route)

    def next_piece(source: jax.Array, target: jax.Array, start: jax.Array) -> jax.Array:
        piece = one(_take(source, route.pieces, start))
        return _put(target, piece, route.pieces, start, carrier)

    carrier = _write_carrier(route, mesh)
    if route.pieces.dim is None:
        return _on_shards(one, mesh, len(route.shape), arguments=1)
    return _on_shards(next_piece, mesh, len(route.shape), arguments=2, start=True, donate=1)


@functools.lru_cache(maxsize=_PROGRAMS)
def split_program(mesh: Mesh, route: Route) -> MoveProgram:
    """Return the program that splits a piece into units, on the devices of the source."""
    assert route.source is not None
    unit = _piece_unit(route)
    counts = _units(route.pieces.shape(route.source.local_shape(route.shape)), unit)

    def split(source: jax.Array, start: jax.Array) -> tuple[jax.Array, ...]:
        piece = _enter(_take(source, route.pieces, start), route)
        return tuple(
            jax.lax.slice(piece, low, [at + size for at, size in zip(low, unit, strict=True)])
            for low in _corners(counts, unit)
        )

    return _on_shards(split, mesh, len(route.shape), arguments=1, start=True)


@functools.lru_cache(maxsize=_PROGRAMS)
def join_program(mesh: Mesh, route: Route, unit: tuple[int, ...]) -> MoveProgram:
    """Return the program that writes units into the target, on the devices of the target.

    The program maps (target, *units, start) to the target, which it changes in place. If the leaf
    is one piece, it maps the units to the target.
    """
    local = route.pieces.shape(route.target.local_shape(route.shape))
    corners = _corners(_units(local, unit), unit)

    def join(units: Sequence[jax.Array]) -> jax.Array:
        if len(units) == 1:
            return _leave(units[0], route)
        piece = jnp.zeros(local, units[0].dtype)
        for corner, part in zip(corners, units, strict=True):
            piece = jax.lax.dynamic_update_slice(piece, part, corner)
        return _leave(piece, route)

    def one(*units: jax.Array) -> jax.Array:
        return join(units)

    def next_piece(target: jax.Array, *units_and_start: jax.Array) -> jax.Array:
        *units, start = units_and_start
        return _put(target, join(units), route.pieces, start, carrier)

    carrier = _write_carrier(route, mesh)

    rank, count = len(route.shape), len(corners)
    if route.pieces.dim is None:
        return _on_shards(one, mesh, rank, arguments=count)
    return _on_shards(next_piece, mesh, rank, arguments=1 + count, start=True, donate=0)


def _on_shards(
    f: Callable[..., Any],
    mesh: Mesh,
    rank: int,
    *,
    arguments: int,
    start: bool = False,
    donate: int | None = None,
) -> MoveProgram:
    """Return a program that runs a function on the shards of flat arrays."""
    spec = flat_sharding(mesh, rank).spec
    mapped = _jax.call_shard_map(
        f,
        mesh=mesh,
        in_specs=(*(spec,) * arguments, *(PartitionSpec(),) * start),
        out_specs=spec,
        check_vma=False,
    )
    return MoveProgram(mesh, jax.jit(mapped, donate_argnums=() if donate is None else donate))


def _enter(piece: jax.Array, route: Route) -> jax.Array:
    """Cast a piece if the cast does not make it larger, and view narrow floats as integers.

    Some backends send narrow floats as wider ones, and may change the bits of a NaN.
    """
    if route.casts_first:
        piece = piece.astype(route.to_dtype)
    carrier = _carrier(route.wire_dtype)
    return piece if carrier is None else jax.lax.bitcast_convert_type(piece, carrier)


def _leave(piece: jax.Array, route: Route) -> jax.Array:
    """View integers as floats again, and cast to the target dtype."""
    if _carrier(route.wire_dtype) is not None:
        piece = jax.lax.bitcast_convert_type(piece, route.wire_dtype)
    return piece.astype(route.to_dtype)


def _carrier(dtype: np.dtype) -> Any:
    """Return the integer dtype that carries floats of one or two bytes; None for other dtypes."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    return {8: jnp.uint8, 16: jnp.uint16}.get(_bits(dtype))


def _bits(dtype: np.dtype) -> int:
    """Return the bits per element. `itemsize` is not enough: an int4 takes a byte on the host."""
    first = re.search(r"\d+", dtype.name)
    return int(first[0]) if first and int(first[0]) < 8 else 8 * dtype.itemsize


def wire_view(block: np.ndarray, route: Route) -> np.ndarray:
    """View a block on the host as the integers that `_leave` expects, if it expects integers."""
    carrier = _carrier(route.wire_dtype)
    return block if carrier is None else block.view(carrier)


def _take(shard: jax.Array, pieces: Pieces, start: jax.Array) -> jax.Array:
    """Return one piece of a shard: the same rows of each group."""
    dim = pieces.dim
    if dim is None:
        return shard
    grouped = shard.reshape(grouped_shape(shard.shape, dim, pieces.rows))
    piece = jax.lax.dynamic_slice_in_dim(grouped, start, pieces.size, dim + 1)
    return piece.reshape(pieces.shape(shard.shape))


def _write_carrier(route: Route, mesh: Mesh) -> Any:
    """Return the integer dtype that carries floats while a piece is written, or None.

    The CPU backend updates a slice of narrow floats in a wider copy of the whole array.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return _carrier(route.to_dtype) if on_cpu else None


def _put(
    shard: jax.Array, piece: jax.Array, pieces: Pieces, start: jax.Array, carrier: Any
) -> jax.Array:
    """Write one piece into a shard."""
    dim = pieces.dim
    assert dim is not None
    if carrier is not None:
        return _put_carried(shard, piece, pieces, start, carrier)
    grouped = shard.reshape(grouped_shape(shard.shape, dim, pieces.rows))
    part = piece.reshape(grouped_shape(piece.shape, dim, pieces.size))
    written = jax.lax.dynamic_update_slice_in_dim(grouped, part, start, dim + 1)
    return written.reshape(shard.shape)


def _put_carried(
    shard: jax.Array, piece: jax.Array, pieces: Pieces, start: jax.Array, carrier: Any
) -> jax.Array:
    """Write one piece group by group. On the CPU, only this form updates in place (jaxlib 0.10)."""
    dim = pieces.dim
    assert dim is not None
    carried = jax.lax.bitcast_convert_type(piece, carrier)

    def put_group(group: Any, whole: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(carried, group * pieces.size, pieces.size, dim)
        written = jax.lax.dynamic_update_slice_in_dim(
            jax.lax.bitcast_convert_type(whole, carrier), part, group * pieces.rows + start, dim
        )
        return jax.lax.bitcast_convert_type(written, whole.dtype)

    written: jax.Array = jax.lax.fori_loop(0, shard.shape[dim] // pieces.rows, put_group, shard)
    return written


def grouped_shape(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return a shape with a dimension split into groups of rows."""
    return (*shape[:dim], shape[dim] // rows, rows, *shape[dim + 1 :])


def _piece_unit(route: Route) -> tuple[int, ...]:
    assert route.source is not None
    return unit_shape(route.pieces.shape(route.shape), route.source, route.target)


def _units(local: Sequence[int], unit: Sequence[int]) -> list[int]:
    return [size // part if part else 1 for size, part in zip(local, unit, strict=True)]


def _corners(counts: Sequence[int], unit: Sequence[int]) -> list[tuple[int, ...]]:
    """Return where each unit of a shard begins. The last dimension varies fastest."""
    return [
        tuple(number * size for number, size in zip(index, unit, strict=True))
        for index in np.ndindex(*counts)
    ]


def _exchange(route: Route, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return a function that sends each unit of a piece to the devices that need the unit."""
    assert route.source is not None
    unit = _piece_unit(route)
    local = route.pieces.shape(route.target.local_shape(route.shape))
    # The mesh has the device order of the target. Senders are numbered in the device order of the
    # source, so `place` translates their numbers.
    order = {device: at for at, device in enumerate(route.target.devices)}
    place = [order[device] for device in route.source.devices]
    rounds = schedule(route.source, route.target)

    def exchange(piece: jax.Array) -> jax.Array:
        # The index over all axes, in mesh order, is the position of this device in the list of
        # receivers.
        own = jax.lax.axis_index(mesh.axis_names)
        result = jnp.zeros(local, piece.dtype)
        for sends in rounds:
            result = _send(piece, result, sends, own)
        return result

    def _send(
        piece: jax.Array, result: jax.Array, sends: Sequence[Send], own: jax.Array
    ) -> jax.Array:
        # All devices run one program, so each device looks up in a table of constants where its
        # blocks begin.
        source_corners = np.zeros((mesh.size, len(unit)), np.int32)
        target_corners, receives = source_corners.copy(), np.zeros(mesh.size, bool)
        for send in sends:
            source_corners[place[send.sender]] = np.multiply(send.source_offset, unit)
            target_corners[send.receiver] = np.multiply(send.target_offset, unit)
            receives[send.receiver] = True
        block = jax.lax.dynamic_slice(piece, list(jnp.asarray(source_corners)[own]), unit)
        if not sends[0].stays:
            pairs = [(place[send.sender], send.receiver) for send in sends]
            block = jax.lax.ppermute(block, mesh.axis_names, pairs)
        corner = list(jnp.asarray(target_corners)[own])
        # A device that receives nothing writes the block that is already there.
        if not receives.all():
            old_block = jax.lax.dynamic_slice(result, corner, unit)
            block = jnp.where(jnp.asarray(receives)[own], block, old_block)
        return jax.lax.dynamic_update_slice(result, block, corner)

    return exchange
