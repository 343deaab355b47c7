"""Tensors in files, which are read piece by piece."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

# Start and stop of each dim.
Bounds = tuple[tuple[int, int], ...]


class Source(Protocol):
    """A tensor in a file."""

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
class Stack:
    """Tensors of one shape as one tensor with a leading dim, such as the experts of a layer."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape: the number of parts, then the shape of one."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of every part."""
        return self.parts[0].dtype

    @property
    def file(self) -> str:
        """Name of the file of the first part."""
        return self.parts[0].file

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read the parts of a piece one by one."""
        (first, last), *rest = bounds
        shape = (last - first, *(stop - start for start, stop in rest))
        piece = np.empty(shape, self.dtype)
        for at in range(first, last):
            piece[at - first] = self.parts[at].read(tuple(rest))
        return piece
