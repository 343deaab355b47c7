"""Pad the vocabulary of a checkpoint with rows of zeros, so that it divides over mesh axes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.errors import CheckpointError
from shardwright.interop.hf.source import Bounds, Source
from shardwright.vocabulary.axes import VOCAB
from shardwright.vocabulary.integers import read_integer

if TYPE_CHECKING:
    from shardwright.interop.hf.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSource:
    """A tensor with zeros after its last elements.

    Attributes:
      source: The tensor in a file.
      shape: The shape with padding.
    """

    source: Source
    shape: tuple[int, ...]

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

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read what the file has of a piece; the rest is zeros."""
        stored = tuple(
            (start, min(stop, size))
            for (start, stop), size in zip(bounds, self.source.shape, strict=True)
        )
        if stored == bounds:
            return self.source.read(bounds)
        piece = np.zeros([stop - start for start, stop in bounds], self.dtype)
        if all(start < stop for start, stop in stored):
            inner = tuple(slice(stop - start) for start, stop in stored)
            piece[inner] = self.source.read(stored)
        return piece


def pad_vocabulary(checkpoint: Checkpoint, multiple: int | None) -> Checkpoint:
    """Return a checkpoint whose dims VOCAB are the next multiple of a number.

    Raises:
      CheckpointError: The number is not a positive integer, or dims VOCAB have several sizes.
    """
    if multiple is None:
        return checkpoint
    fix = "pass pad_vocab=128, a multiple of the devices that shard VOCAB"
    read_integer("pad_vocab", multiple, error=CheckpointError, fix=fix)
    dims = {name: _dims(spec.axes) for name, spec in checkpoint.specs.items()}
    sizes = {checkpoint.specs[name].shape[dim]: name for name, own in dims.items() for dim in own}
    if len(sizes) > 1:
        what = " and ".join(f"{size} in {name}" for size, name in sizes.items())
        raise CheckpointError(f"VOCAB has several sizes: {what}", fix="load it without pad_vocab")
    vocab = next(iter(sizes), 0)
    more = -vocab % multiple
    if not more:
        return checkpoint
    specs, sources, unpadded = dict(checkpoint.specs), dict(checkpoint.sources), {}
    for name, own in dims.items():
        if own:
            unpadded[name] = specs[name].shape
            shape = tuple(size + more * (dim in own) for dim, size in enumerate(unpadded[name]))
            specs[name] = dataclasses.replace(specs[name], shape=shape)
            sources[name] = PaddedSource(source=sources[name], shape=shape)
    note = f"the vocabulary of {vocab} is padded by {more} rows of zeros to {vocab + more}"
    notes = (*checkpoint.notes, note)
    return dataclasses.replace(
        checkpoint, specs=specs, sources=sources, notes=notes, unpadded=unpadded
    )


def _dims(axes: Any) -> tuple[int, ...]:
    return tuple(dim for dim, entry in enumerate(axes) if entry == VOCAB)
