"""Write and read the arrays of a checkpoint with orbax, a bounded number of bytes at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
from jax.sharding import NamedSharding

from shardwright.checkpoint import leaves
from shardwright.checkpoint.leaves import LeafKind, TargetLeaf
from shardwright.checkpoint.stored import open_array
from shardwright.reshard.checks import is_wide_enough
from shardwright.reshard.leaf import move_leaf
from shardwright.reshard.route import Route, find_route

# Largest number of bytes of a chunk. A chunk is read as a whole, even if only a part is needed.
CHUNK: Final = 4 * 2**20
# Largest number of bytes that a process reads at the same time. A single shard may be larger.
AT_ONCE: Final = 64 * 2**20
# An array that takes more bytes than this on all devices is read in pieces of at most this size. A
# piece is in memory up to three times: as it was read, cut for each device, and on the devices.
PIECE: Final[int] = 32 * 2**20


def write_request(orbax: Any, arrays: dict[str, Any]) -> Any:
    """Return the request to write a tree of arrays in chunks."""
    chunks = jax.tree.map(lambda _: orbax.SaveArgs(chunk_byte_size=CHUNK), arrays)
    return orbax.args.PyTreeSave(arrays, save_args=chunks)


def read(orbax: Any, folder: str, targets: Sequence[TargetLeaf]) -> dict[str, Any]:
    """Return the arrays of a checkpoint as a tree of dicts, each with the sharding of its target.

    Args:
      orbax: The module.
      folder: Folder of the arrays.
      targets: The leaves to read. Leaves that are not arrays are left out.

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

    That is the case if it is small, if its sharding is not on a mesh in device memory, or if XLA
    cannot join its pieces.
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
        # The target may leave out leaves, and those that are read in pieces are not among these.
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
    """Yield the bytes of each read of a leaf. A read covers all chunks that a shard overlaps."""
    wanted = leaf.read_as()
    if wanted is None:
        return
    shape, storage = wanted.shape, leaves.get(stored, leaf.saved.path).storage
    chunk = (storage and storage.chunk_shape) or shape
    boxes: list[Any] = [(slice(None),) * len(shape)]
    if leaf.sharding is not None:
        boxes = list(leaf.sharding.addressable_devices_indices_map(shape).values())
    for box in boxes:
        # In each dim, from the border of the first chunk that the box touches to that of the last
        # one.
        sides = []
        for cut, size, step in zip(box, shape, chunk, strict=True):
            start, stop, _ = cut.indices(size)
            sides.append((-(-stop // step) - start // step) * step)
        yield math.prod(sides) * wanted.dtype.itemsize
