"""Show the tensors of a checkpoint of Hugging Face."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from jax.sharding import NamedSharding, PartitionSpec

from shardwright.interop.hf.checkpoint import Checkpoint
from shardwright.show.tables import remarked_table, table
from shardwright.trees.tensors import whole_bytes
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.lowering import describe
from shardwright.vocabulary.shown import text_of
from shardwright.vocabulary.units import bytes_text

# A number between two dots, such as 12 in `layers.12.mlp`. Digits in `w1` or `conv1d` do not match.
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@text_of.register(Checkpoint)
def checkpoint_text(
    checkpoint: Checkpoint, *, shardings: Mapping[str, NamedSharding] | None = None
) -> str:
    """Return a line per kind of tensor, and a line of totals.

    Args:
      checkpoint: The checkpoint.
      shardings: The sharding of each tensor. If given, the spec and the bytes per device of each
        tensor are shown. By default, the dtypes and the notes are shown instead.
    """
    specs = checkpoint.specs
    axes = {name: describe(spec.axes) for name, spec in specs.items()}
    total = bytes_text(sum(_bytes(spec, spec.shape) for spec in specs.values()))
    if shardings is None:
        head: tuple[str, ...] = ("tensor", "count", "dtype", "shape", "axes")
        rows = _kinds(
            {name: (str(spec.dtype), _shape(spec), axes[name]) for name, spec in specs.items()}
        )
        counted = f"{checkpoint.config.get('model_type')}: {len(specs)} tensors, {total}"
        notes = [f"  note  {note}" for note in checkpoint.notes]
        return "\n".join([*table([head, *rows]), counted, *notes])
    held = {
        name: _bytes(spec, shardings[name].shard_shape(spec.shape)) for name, spec in specs.items()
    }
    head = ("tensor", "count", "shape", "sharded over", "per device", "axes")
    rows = _kinds(
        {
            name: (_shape(spec), _spec(shardings[name].spec), bytes_text(held[name]), axes[name])
            for name, spec in specs.items()
        }
    )
    counted = f"per device: {bytes_text(sum(held.values()))} of {total}"
    return "\n".join([*remarked_table([head, *rows]), counted])


def _kinds(cells_by_name: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return one row for each group of tensors that differ only in the numbers in their names."""
    counts: dict[tuple[str, ...], int] = {}
    for name, cells in cells_by_name.items():
        row = (_NUMBER.sub("*", name), *cells)
        counts[row] = counts.get(row, 0) + 1
    return [(row[0], str(count), *row[1:]) for row, count in counts.items()]


def _shape(spec: ArraySpec) -> str:
    return ",".join(map(str, spec.shape)) or "()"


def _spec(spec: PartitionSpec) -> str:
    """Return the mesh axes of each dim: `fsdp, tp`."""
    entries = ["+".join([entry] if isinstance(entry, str) else entry or ()) for entry in spec]
    return ", ".join(entry or "-" for entry in entries) or "-"


def _bytes(spec: ArraySpec, shape: Sequence[int]) -> int:
    return whole_bytes(math.prod(shape), spec.dtype)
