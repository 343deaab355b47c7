"""Tensors of safetensors files, which are read piece by piece, and put on their devices.

Headers are read first, then slices of tensors. If a file changes in between, a read raises an
error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from shardwright.errors import CheckpointError, MeshSpecError, Problem, raise_problems
from shardwright.interop.hf.config import MOST_PROBLEMS, fault
from shardwright.interop.logical_rules import library
from shardwright.strategy.foreign_files import read_json

_PLAIN: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_AGAIN: Final = "download the checkpoint again"
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# safetensors 0.8 cannot make NumPy arrays of these dtypes, so their bytes are read by offset.
_BY_OFFSET: Final = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
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
    """Tensors of one shape, such as the experts of a layer, which are read as one stacked tensor.

    Attributes:
      name: Name of the stack.
      parts: The tensors.
      dtype: Dtype that `read` returns. The stored dtypes of the parts may differ.
    """

    name: str
    parts: tuple[Source, ...]
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape: the number of parts, then the shape of one part."""
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
        # The index in the leading dim is the number of a part. Read the other dims from each part.
        (first, last), *rest = bounds
        shape = (last - first, *(stop - start for start, stop in rest))
        piece = np.empty(shape, self.dtype)
        for at in range(first, last):
            part = self.parts[at]
            piece[at - first] = cast(part.name, part.read(tuple(rest)), self.dtype)
        return piece


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSource:
    """A tensor in a file, read with other dims than in the file.

    Subclasses define `shape` and `read`.
    """

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
    """A tensor whose dims are padded with zeros at their ends.

    Attributes:
      source: The tensor in a file.
      shape: The shape with padding.
    """

    shape: tuple[int, ...]

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read the part of a piece that the file has; the rest is zeros."""
        stored = tuple(
            (start, min(stop, size))
            for (start, stop), size in zip(bounds, self.source.shape, strict=True)
        )
        if stored == bounds:
            return self.source.read(bounds)
        piece = np.zeros([stop - start for start, stop in bounds], self.dtype)
        # A shard may lie completely in the padding.
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
    # A value that does not fit becomes infinite. The code below looks for such values.
    with np.errstate(over="ignore"):
        result = piece.astype(dtype, order="C")
    flat = result.reshape(-1)
    # Check a few values at a time, because a mask of the whole piece takes memory too.
    is_infinite = any(
        np.isinf(flat[start : start + _CHUNK]).any() for start in range(0, flat.size, _CHUNK)
    )
    if is_infinite and (overflowed := np.isinf(result) & ~np.isinf(piece)).any():
        largest = np.abs(piece[overflowed].astype(np.float64)).max()
        what = f"the value {largest:.4g} does not fit {np.dtype(dtype).name}"
        raise CheckpointError(what, path=name, fix="pass dtype=jnp.bfloat16, or jnp.float32")
    return result


def place(name: str, source: Source, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Return a tensor as an array with the given sharding.

    A piece that several devices hold is read once. The piece is released before the next
    piece is read.

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
        # For a whole dim, JAX's slice has None as start and stop.
        ranges = (part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(tuple(ranges), []).append(device)
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
    """Put a piece on a device. A CPU device may use the memory of the piece instead of a copy."""
    array: jax.Array = jax.device_put(piece, target)
    return array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsTensor:
    """A tensor of a safetensors file.

    Attributes:
      name: Its name in the file.
      path: The file.
      handle: The opened file, of the package safetensors.
      kind: Its dtype, as the file spells it.
      shape: Its shape.
      offset: Where its bytes start in the file.
      content: The bytes of the file, mapped into memory.
      version: The file as it was when its header was read.
    """

    name: str
    path: Path
    handle: Any
    kind: str
    shape: tuple[int, ...]
    offset: int
    content: Any
    version: FileVersion

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return _DTYPES[self.kind]

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.path.name

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece.

        Raises:
          CheckpointError: The file has changed since its header was read.
        """
        self.version.check()
        index = tuple(slice(*bound) for bound in bounds)
        try:
            if self.kind in _BY_OFFSET:
                # An element of these dtypes takes one byte.
                end = self.offset + math.prod(self.shape)
                whole = self.content[self.offset : end].view(self.dtype).reshape(self.shape)
                # Return a copy, because a view would read the file later, when it may have changed.
                return np.array(whole[index])
            return np.asarray(self.handle.get_slice(self.name)[index])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {error}", path=self.name, fix=_AGAIN) from error


def safetensors_of(folder: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of a folder, or of one file, in the order of their names.

    Raises:
      CheckpointError: There are no safetensors files, a file is truncated, or the index does not
        fit the files. All problems of a folder are reported at once.
    """
    index = folder / _INDEX
    if folder.is_file():
        return _tensors_of(folder)
    if index.is_file():
        fix = f'{_INDEX} has {{"weight_map": {{"tensor": "file", ...}}}}'
        content = read_json(index, error=CheckpointError, fix=fix)
        weights = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weights, dict) or not all(isinstance(f, str) for f in weights.values()):
            raise CheckpointError(f"{index} is not an index of tensors", fix=fix)
        return _indexed(folder, weights)
    files = sorted(folder.glob("*.safetensors"))
    # Files beside model.safetensors are variants, such as model.fp16.safetensors, or adapters.
    if (plain := folder / _PLAIN) in files:
        return _tensors_of(plain)
    if len(files) == 1:
        return _tensors_of(files[0])
    if files:
        what = f"{folder} has {len(files)} safetensors files and no {_INDEX}"
        raise CheckpointError(what, fix=f"add {_INDEX}, or pass the path of one file")
    fix = "pass a folder that has config.json and safetensors files"
    if list(folder.glob("*.bin")):
        fix = "write it again with save_pretrained(..., safe_serialization=True)"
    raise CheckpointError(f"{folder} has no safetensors file", fix=fix)


def _indexed(folder: Path, weights: Mapping[str, str]) -> dict[str, SafetensorsTensor]:
    """Return the tensors of several files, after comparing them with the index."""
    problems: list[Problem] = []
    found: dict[str, SafetensorsTensor] = {}
    for file in sorted(set(weights.values())):
        # The index may name only files of this folder.
        if file in ("", "..") or Path(file).name != file:
            what = f"{_INDEX} names {file!r}, which is not the name of a file in its folder"
            problems.append(fault(what, "", _AGAIN))
            continue
        try:
            tensors = _tensors_of(folder / file)
        except CheckpointError as error:
            # Continue, so that one error reports the problems of all files.
            problems += error.problems
            continue
        listed = [name for name, of in weights.items() if of == file]
        problems += [
            fault(f"{file} lacks this tensor, but {_INDEX} lists it", name, _AGAIN)
            for name in listed
            if name not in tensors
        ]
        problems += [
            fault(f"{file} has this tensor, but {_INDEX} does not list it", name, _AGAIN)
            for name in tensors
            if weights.get(name) != file
        ]
        found |= tensors
    raise_problems(problems)
    return dict(sorted(found.items()))


def _tensors_of(path: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of one file.

    Raises:
      CheckpointError: The file is absent, truncated or not safetensors, or has an unknown dtype.
    """
    safetensors = library("safetensors")
    version = FileVersion.of(path, fix=_AGAIN)
    try:
        # Opening checks that the header is valid, and that the file has all the bytes that the
        # header names.
        handle = safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        what = f"{path} is truncated or is not a safetensors file: {error}"
        raise CheckpointError(what, fix=_AGAIN) from error
    with path.open("rb") as file:
        # The format: 8 bytes with the length of the header, the header as JSON, then all tensors.
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    # Map the file instead of reading it: a page is loaded when a piece of it is read.
    content = np.memmap(path, np.uint8, mode="r")
    version.check()
    header.pop("__metadata__", None)
    unknown = [name for name, entry in header.items() if entry["dtype"] not in _DTYPES]
    fix = f"convert the checkpoint to one of {', '.join(_DTYPES)}"
    raise_problems(
        [
            fault(f"{path.name}: the dtype {header[name]['dtype']} cannot be read", name, fix)
            for name in unknown[:MOST_PROBLEMS]
        ]
    )
    return {
        name: SafetensorsTensor(
            name=name,
            path=path,
            handle=handle,
            kind=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + size + entry["data_offsets"][0],
            content=content,
            version=version,
        )
        for name, entry in sorted(header.items())
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """One version of a file: the file as it was at one time.

    Attributes:
      path: The file.
      state: Its device, inode, size and time of the last change.
    """

    path: Path
    state: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, *, fix: str) -> FileVersion:
        """Return the present version of a file.

        Raises:
          CheckpointError: The file does not exist, or cannot be read.
        """
        try:
            return cls(path=path, state=_state(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist", fix=fix) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", fix=fix) from error

    def check(self) -> None:
        """Check that the file is still this version.

        Check before each read: a read past the end of a mapped file would kill the process.

        Raises:
          CheckpointError: The file was replaced, changed or removed.
        """
        try:
            is_same = _state(self.path) == self.state
        except OSError:
            is_same = False
        if not is_same:
            what = f"{self.path} has changed since its header was read"
            raise CheckpointError(
                what, fix="wait until no program writes the file, and call hf.read again"
            )


def _state(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
