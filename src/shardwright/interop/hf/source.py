"""Tensors in files, which are read piece by piece, and put on their devices."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from shardwright.errors import CheckpointError, MeshSpecError

# Number of values that are checked at once.
_CHUNK: Final = 1 << 18
# Start and stop of each dim.
Bounds = tuple[tuple[int, int], ...]


class Source(Protocol):
    """A tensor in a file."""

    @property
    def name(self) -> str:
        """Name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of what `read` returns."""
        ...

    @property
    def file(self) -> str:
        """Name of the file."""
        ...

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece, with not much more memory than the piece itself."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedSource:
    """Tensors of one shape as one tensor with a leading dim, such as the experts of a layer.

    Attributes:
      name: Its name.
      parts: The tensors.
      dtype: Dtype of what `read` returns. The stored dtypes of the parts may differ.
    """

    name: str
    parts: tuple[Source, ...]
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape: the number of parts, then the shape of one."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def file(self) -> str:
        """Name of the file of the first part."""
        return self.parts[0].file

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read the parts of a piece one by one.

        Raises:
          CheckpointError: A value does not fit the dtype.
        """
        # The leading dim counts the parts, and each part is read for the other dims.
        (first, last), *rest = bounds
        shape = (last - first, *(stop - start for start, stop in rest))
        piece = np.empty(shape, self.dtype)
        for at in range(first, last):
            part = self.parts[at]
            piece[at - first] = cast(part.name, part.read(tuple(rest)), self.dtype)
        return piece


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSource:
    """A tensor in a file with other dims. A subclass has `shape` and `read`."""

    source: Source

    @property
    def name(self) -> str:
        """Name in the file."""
        return self.source.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of what `read` returns."""
        return self.source.dtype

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.source.file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSource(ChangedSource):
    """A tensor with zeros after its last elements.

    Attributes:
      source: The tensor in a file.
      shape: The shape with padding.
    """

    shape: tuple[int, ...]

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read what the file has of a piece; the rest is zeros."""
        stored = tuple(
            (start, min(stop, size))
            for (start, stop), size in zip(bounds, self.source.shape, strict=True)
        )
        if stored == bounds:
            return self.source.read(bounds)
        piece = np.zeros([stop - start for start, stop in bounds], self.dtype)
        # A shard may lie in the padding alone.
        if all(start < stop for start, stop in stored):
            inner = tuple(slice(stop - start) for start, stop in stored)
            piece[inner] = self.source.read(stored)
        return piece


def cast(name: str, piece: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Return a piece of a tensor in another dtype.

    Raises:
      CheckpointError: A value does not fit the dtype.
    """
    if piece.dtype == dtype:
        return piece
    if jnp.issubdtype(dtype, jnp.integer):
        limits = np.iinfo(dtype)
        if piece.size and not (limits.min <= piece.min() and piece.max() <= limits.max):
            what = f"values from {piece.min()} to {piece.max()} do not fit {np.dtype(dtype).name}"
            fix = 'call jax.config.update("jax_enable_x64", True) first'
            raise CheckpointError(what, path=name, fix=fix)
        return piece.astype(dtype)
    # A value that does not fit becomes infinite, which is looked for below.
    with np.errstate(over="ignore"):
        result = piece.astype(dtype, order="C")
    flat = result.reshape(-1)
    # Look at some values at a time, because a mask of the whole piece takes memory too.
    is_infinite = any(
        np.isinf(flat[start : start + _CHUNK]).any() for start in range(0, flat.size, _CHUNK)
    )
    if is_infinite and (overflowed := np.isinf(result) & ~np.isinf(piece)).any():
        largest = np.abs(piece[overflowed].astype(np.float64)).max()
        what = f"the value {largest:.4g} does not fit {np.dtype(dtype).name}"
        raise CheckpointError(what, path=name, fix="pass dtype=jnp.bfloat16, or jnp.float32")
    return result


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
