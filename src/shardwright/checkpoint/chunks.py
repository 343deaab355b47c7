"""Write and read the arrays of a checkpoint with orbax, a bounded number of bytes at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardwright.checkpoint import leaves
from shardwright.checkpoint.leaves import LeafKind, TargetLeaf
from shardwright.reshard.checks import is_wide_enough
from shardwright.reshard.leaf import move_leaf
from shardwright.reshard.route import Route, find_route

# Largest number of bytes of a chunk. A chunk is read as a whole, even if only a part is needed.
CHUNK: Final = 4 * 2**20
# Largest number of bytes that a process reads at the same time. A single shard may be larger.
AT_ONCE: Final = 64 * 2**20
# An array that takes more bytes than this, summed over all devices, is read in pieces of at most
# this size. A piece is in memory up to three times: as it was read, cut for each device, and on the
# devices.
PIECE: Final[int] = 32 * 2**20


def write_request(orbax: Any, arrays: dict[str, Any]) -> Any:
    """Return the request to write a tree of arrays in chunks."""
    chunks = jax.tree.map(lambda _: orbax.SaveArgs(chunk_byte_size=CHUNK), arrays)
    return orbax.args.PyTreeSave(arrays, save_args=chunks)


def read(orbax: Any, folder: str, targets: Sequence[TargetLeaf]) -> dict[str, Any]:
    """Return the arrays of a checkpoint as a tree of dicts, each with the sharding of its target.

    Args:
      orbax: The module `orbax.checkpoint`.
      folder: Folder of the arrays.
      targets: The leaves of the target. Those that are not stored as arrays are skipped.

    Raises:
      KeyError, ValueError, OSError: The files are damaged.
    """
    routes = [_route(leaf) for leaf in targets]
    small = [leaf for leaf, route in zip(targets, routes, strict=True) if route is None]
    arrays = _read_with_orbax(orbax, folder, small)
    for leaf, route in zip(targets, routes, strict=True):
        if route is not None:
            assert isinstance(leaf.sharding, NamedSharding)
            file = open_array(folder, leaf.saved.path)
            array = move_leaf(file, leaf.sharding, route, donate=False, tick=lambda done, of: None)
            leaves.put(arrays, leaf.saved.path, array)
    return arrays


def _route(leaf: TargetLeaf) -> Route | None:
    """Return the route by which a leaf is read in pieces. None if it is read as a whole.

    A leaf is read as a whole if it is small, if its sharding is not on a mesh in device memory, or
    if XLA cannot join its pieces.
    """
    sharding = leaf.sharding
    if leaf.saved.kind is not LeafKind.ARRAY or not isinstance(sharding, NamedSharding):
        return None
    if sharding.memory_kind in ("pinned_host", "unpinned_host"):
        return None
    wanted = leaf.read_as()
    if not is_wide_enough(wanted.dtype):
        return None
    route = find_route(wanted.shape, wanted.dtype, wanted.dtype, None, sharding, PIECE)
    return None if route.pieces.dim is None else route


def _read_with_orbax(orbax: Any, folder: str, targets: Sequence[TargetLeaf]) -> dict[str, Any]:
    """Read several leaves at the same time, each shard as a whole."""
    wanted: dict[str, Any] = {}
    for leaf in targets:
        if (read_as := leaf.read_as()) is not None:
            leaves.put(wanted, leaf.saved.path, read_as)
    if not wanted:
        return {}
    from etils import epath  # a dependency of orbax

    request = orbax.args.PyTreeRestore(
        item=wanted,
        restore_args=orbax.checkpoint_utils.construct_restore_args(wanted),
        # The checkpoint may have more arrays than `wanted`: the target may omit some, and large
        # arrays are read in pieces.
        partial_restore=True,
    )
    path = epath.Path(folder)
    stored = orbax.PyTreeCheckpointHandler().metadata(path).tree
    # orbax refuses a read that is not smaller than the limit.
    largest = max((size for leaf in targets for size in _reads(leaf, stored)), default=0)
    limit = max(AT_ONCE, largest + 1024)
    handler = orbax.PyTreeCheckpointHandler(restore_concurrent_gb=limit / 10**9)
    arrays: dict[str, Any] = handler.restore(path, args=request)
    return arrays


def _reads(leaf: TargetLeaf, stored: dict[str, Any]) -> Iterator[int]:
    """Yield the size of each read of a leaf, in bytes.

    A read covers all chunks that a shard overlaps.
    """
    wanted = leaf.read_as()
    if wanted is None:
        return
    shape, storage = wanted.shape, leaves.get(stored, leaf.saved.path).storage
    chunk = (storage and storage.chunk_shape) or shape
    boxes: list[Any] = [(slice(None),) * len(shape)]
    if leaf.sharding is not None:
        boxes = list(leaf.sharding.addressable_devices_indices_map(shape).values())
    for box in boxes:
        # In each dim, a read starts where the first chunk of the box starts, and ends where the
        # last one ends.
        sides = []
        for cut, size, step in zip(box, shape, chunk, strict=True):
            start, stop, _ = cut.indices(size)
            sides.append((-(-stop // step) - start // step) * step)
        yield math.prod(sides) * wanted.dtype.itemsize


Box = tuple[slice, ...]

# Number of chunks that are read and decoded at the same time.
_AT_ONCE: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """An array in a file. It is an `ArrayInParts` of the package `reshard`.

    Attributes:
      file: The array, as a TensorStore.
    """

    file: Any

    def read(self, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Return parts of the array. Equal parts may share memory.

        A chunk of a file is always read as a whole. If the boxes together fill one larger box, the
        larger box is read, so that no chunk is read twice.
        """
        bounds = [_bounds(box, self.file.shape) for box in boxes]
        hull = tuple(
            (min(low for low, _ in sides), max(high for _, high in sides))
            for sides in zip(*bounds, strict=True)
        )
        # The hull is the smallest box around all boxes. Boxes of a sharding are equal or disjoint,
        # so they fill the hull if their sizes add up to its size.
        if sum(map(_size, set(bounds))) == _size(hull):
            whole = self._read(hull)
            return [whole[_inside(each, hull)] for each in bounds]
        read = {each: self._read(each) for each in dict.fromkeys(bounds)}
        return [read[each] for each in bounds]

    def _read(self, bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        box = tuple(slice(low, high) for low, high in bounds)
        return np.asarray(self.file[box].read().result())


def open_array(folder: str, path: tuple[str, ...]) -> StoredArray:
    """Open an array of a checkpoint.

    Args:
      folder: Folder of the arrays.
      path: Path of the leaf.

    Raises:
      ValueError: The files are damaged.
    """
    import tensorstore  # a dependency of orbax

    base = folder if "://" in folder else f"file://{folder}"
    spec: Mapping[str, Any] = {
        # With this driver, TensorStore detects whether the files are zarr or zarr3. orbax puts all
        # arrays of a state into one OCDBT store.
        "driver": "auto",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"{base}/",
            "path": f"{leaves.file_name(path)}/",
        },
        "context": {
            "file_io_concurrency": {"limit": _AT_ONCE},
            "data_copy_concurrency": {"limit": _AT_ONCE},
            "cache_pool": {"total_bytes_limit": 0},
        },
    }
    return StoredArray(tensorstore.open(spec, open=True).result())


def _bounds(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(cut.indices(size)[:2] for cut, size in zip(box, shape, strict=True))


def _size(bounds: Sequence[tuple[int, int]]) -> int:
    return math.prod(high - low for low, high in bounds)


def _inside(part: Sequence[tuple[int, int]], whole: Sequence[tuple[int, int]]) -> Box:
    """Return the slices that cut the box `part` out of the array of the box `whole`."""
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(part, whole, strict=True)
    )
