"""Read parts of the arrays in the files of a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shardwright.checkpoint import leaves

Box = tuple[slice, ...]

# Number of chunks that are read and decoded at the same time.
_AT_ONCE: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """An array in a file. It is an `ArrayInParts` of the room `reshard`.

    Attributes:
      file: The array, as a TensorStore.
    """

    file: Any

    def read(self, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Return parts of the array. Equal parts may share memory.

        A chunk of a file is always read as a whole. If the boxes together fill one larger box, that
        box is read, so that no chunk is read twice.
        """
        bounds = [_bounds(box, self.file.shape) for box in boxes]
        hull = tuple(
            (min(low for low, _ in sides), max(high for _, high in sides))
            for sides in zip(*bounds, strict=True)
        )
        # Boxes of a sharding are equal or apart, so their sizes add up to the hull if they fill it.
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
        # TensorStore reads from the files whether they are zarr or zarr3. orbax puts all arrays of
        # a state into one OCDBT store.
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
    """Return a part of a box as slices of that box."""
    return tuple(
        slice(low - start, high - start)
        for (low, high), (start, _) in zip(part, whole, strict=True)
    )
