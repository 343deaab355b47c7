"""Describe any sharding as a grid: the block of the array that each device holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardwright.errors import ShardingError
from shardwright.reshard.plan import AxesByDim, shard_count
from shardwright.resolution.partition_specs import entry_names

Block = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrid:
    """An array cut into equal blocks, and the block of each device.

    Attributes:
      devices: Ids of the devices, in mesh order. The devices of an abstract mesh are numbered from
        0.
      counts: Number of blocks along each dimension.
      blocks: For each device, the index of its block along each dimension.
      axes: Mesh axes with their sizes, major first; empty if the array is not on a mesh.
      dims: Mesh axes of each dimension; all empty if the array is not on a mesh.
    """

    devices: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: tuple[Block, ...]
    axes: tuple[tuple[str, int], ...] = ()
    dims: AxesByDim = ()

    @property
    def copies(self) -> int:
        """Number of devices that hold the same block."""
        return len(self.devices) // math.prod(self.counts)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a block of an array."""
        return tuple(size // count for size, count in zip(shape, self.counts, strict=True))


def same_blocks(a: DeviceGrid, b: DeviceGrid) -> bool:
    """Tell whether each device holds the same block in both grids."""
    if a.counts != b.counts:
        return False
    return dict(zip(a.devices, a.blocks, strict=True)) == dict(
        zip(b.devices, b.blocks, strict=True)
    )


def grid_of(sharding: Sharding, shape: Sequence[int]) -> DeviceGrid:
    """Return the grid of a sharding, which may be on an abstract mesh.

    Raises:
      ShardingError: The spec is unreduced, or devices hold blocks of different sizes.
    """
    if isinstance(sharding, NamedSharding):
        if sharding.spec.unreduced:
            raise ShardingError(
                f"{sharding.spec} is unreduced: its shards are parts of a sum",
                fix="sum the array before the move, with jax.reshard",
            )
        dims = tuple(entry_names(entry) for entry in sharding.spec.partitions)
        return mesh_grid(sharding.mesh, dims + ((),) * (len(shape) - len(dims)))
    return _grid_of_slices(sharding, shape)


def mesh_grid(mesh: Mesh | AbstractMesh, dims: AxesByDim) -> DeviceGrid:
    """Return the grid of an array whose dimensions are sharded over mesh axes."""
    sizes = dict(mesh.shape)
    ids = (
        tuple(device.id for device in mesh.devices.flat)
        if isinstance(mesh, Mesh)
        else tuple(range(math.prod(sizes.values())))
    )
    return DeviceGrid(
        devices=ids,
        counts=tuple(shard_count(axes, sizes) for axes in dims),
        blocks=blocks_of(dims, sizes),
        axes=tuple(sizes.items()),
        dims=dims,
    )


def blocks_of(dims: AxesByDim, sizes: dict[str, int]) -> tuple[Block, ...]:
    """Return the block of each device of a mesh, in mesh order."""
    strides = {}
    stride = 1
    # Devices of a mesh are in row-major order: the last axis has stride 1.
    for name in reversed(sizes):
        strides[name] = stride
        stride *= sizes[name]
    blocks = []
    for device in range(stride):
        block = []
        for axes in dims:
            number = 0
            # The first mesh axis of a dim is its major axis.
            for name in axes:
                number = number * sizes[name] + device // strides[name] % sizes[name]
            block.append(number)
        blocks.append(tuple(block))
    return tuple(blocks)


def _grid_of_slices(sharding: Sharding, shape: Sequence[int]) -> DeviceGrid:
    """Return the grid of a sharding without mesh axes, such as that of a single device."""
    slices: dict[Any, Any] = dict(sharding.devices_indices_map(tuple(shape)))
    local = sharding.shard_shape(tuple(shape))
    # A dim of size 0 has empty shards, and one block.
    counts = tuple(size // part if part else 1 for size, part in zip(shape, local, strict=True))
    blocks = tuple(
        tuple(
            (cut.start or 0) // part if part else 0 for cut, part in zip(cuts, local, strict=True)
        )
        for cuts in slices.values()
    )
    # For a NamedSharding, JAX refuses unequal shards. For some other shardings it accepts them.
    if any(size != part * count for size, part, count in zip(shape, local, counts, strict=True)):
        raise ShardingError(
            f"{sharding} cuts the shape {tuple(shape)} into unequal blocks",
            fix="move the array with jax.device_put first",
        )
    return DeviceGrid(
        devices=tuple(device.id for device in slices),
        counts=counts,
        blocks=blocks,
        dims=((),) * len(shape),
    )


def missing_bytes(source: DeviceGrid, target: DeviceGrid, bytes_of_array: int) -> int:
    """Return the bytes of the target that devices do not hold yet, summed over all devices.

    No move sends fewer bytes.
    """
    own = dict(zip(source.devices, source.blocks, strict=True))
    whole = bytes_of_array // math.prod(target.counts)
    total = 0
    for device, block in zip(target.devices, target.blocks, strict=True):
        # A fraction of integers stays exact; a float would lose bytes of arrays above 2**53 bytes.
        held = shared_part(own.get(device), source.counts, block, target.counts)
        total += whole - bytes_of_array * held[0] // held[1]
    return total


def shared_part(
    a: Block | None, a_counts: Sequence[int], b: Block, b_counts: Sequence[int]
) -> tuple[int, int]:
    """Return the part of the array that two blocks share, as a fraction (numerator, denominator).

    If `a` is None, there is no first block, and the fraction is 0.
    """
    numerator, denominator = 1, 1
    if a is None:
        return 0, 1
    for i, m, j, n in zip(a, a_counts, b, b_counts, strict=True):
        # If a dim is cut into lcm(m, n) units, both blocks are intervals of whole units.
        units = math.lcm(m, n)
        start = max(i * (units // m), j * (units // n))
        stop = min((i + 1) * (units // m), (j + 1) * (units // n))
        numerator *= max(0, stop - start)
        denominator *= units
    return numerator, denominator
