"""Read the pieces of one tensor and put each on its devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from shardwright.errors import MeshSpecError
from shardwright.interop.hf.source import Bounds, Source, cast


def place(name: str, source: Source, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Return a tensor as an array of this sharding.

    A piece that several devices hold is read once. It is released before the next one is read.

    Raises:
      MeshSpecError: The mesh is abstract.
      CheckpointError: A value does not fit the dtype.
    """
    if isinstance(sharding.mesh, AbstractMesh):
        what = "an abstract mesh has no devices to load onto"
        raise MeshSpecError(what, fix='pass mesh=create_mesh("fsdp:8") to the manager')
    shape = source.shape
    holders: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(_bounds(index, shape), []).append(device)
    pieces: dict[Any, jax.Array] = {}
    for bounds, devices in holders.items():
        piece = cast(name, source.read(bounds), dtype)
        for device in devices:
            target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            pieces[device] = put(piece, target)
        # The copies to devices run in the background. Wait for them before the piece is released.
        jax.block_until_ready([pieces[device] for device in devices])
        del piece
    arrays = [pieces[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def put(piece: np.ndarray[Any, Any], target: SingleDeviceSharding) -> jax.Array:
    """Put a piece on a device. A CPU device may keep it instead of copying it."""
    array: jax.Array = jax.device_put(piece, target)
    return array


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    """Return start and stop of each dim. For a whole dim, JAX's slice has None for both."""
    return tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
