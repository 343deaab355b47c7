"""What was decided for each tensor, as tables."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from jax.sharding import PartitionSpec

from shardwright.resolution.tables import remarked_table, table
from shardwright.trees.tensors import whole_bytes
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.lowering import describe

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")


def checkpoint_text(
    config: Mapping[str, Any], specs: Mapping[str, ArraySpec], notes: Sequence[str]
) -> str:
    """Return a line per kind of tensor, with its axes, and a line of totals."""
    lines = [(name, (_dtype(spec), _shape(spec), _axes(spec))) for name, spec in specs.items()]
    rows = [("tensor", "count", "dtype", "shape", "axes"), *_kinds(lines)]
    total = _size(sum(_bytes(spec, spec.shape) for spec in specs.values()))
    counted = f"{config.get('model_type')}: {len(specs)} tensors, {total}"
    return "\n".join([*table(rows), counted, *(f"  note  {note}" for note in notes)])


def shardings_text(specs: Mapping[str, ArraySpec], pm: PartitionManager, mode: str | None) -> str:
    """Return a line per kind of tensor, with its spec and the bytes of each device."""
    shardings = pm.shardings(dict(specs), mode=mode)
    held = {
        name: _bytes(spec, shardings[name].shard_shape(spec.shape)) for name, spec in specs.items()
    }
    lines = [
        (name, (_shape(spec), _spec(shardings[name].spec), _size(held[name]), _axes(spec)))
        for name, spec in specs.items()
    ]
    rows = [("tensor", "count", "shape", "sharded over", "per device", "axes"), *_kinds(lines)]
    total = _size(sum(_bytes(spec, spec.shape) for spec in specs.values()))
    return "\n".join([*remarked_table(rows), f"per device: {_size(sum(held.values()))} of {total}"])


def _kinds(lines: Sequence[tuple[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Return one row for all tensors that differ only in the numbers of their names."""
    counts: dict[tuple[str, ...], int] = {}
    for name, cells in lines:
        row = (_NUMBER.sub("*", name), *cells)
        counts[row] = counts.get(row, 0) + 1
    return [(row[0], str(count), *row[1:]) for row, count in counts.items()]


def _dtype(spec: ArraySpec) -> str:
    return str(spec.dtype)


def _shape(spec: ArraySpec) -> str:
    return ",".join(map(str, spec.shape)) or "()"


def _axes(spec: ArraySpec) -> str:
    return describe(spec.axes)


def _spec(spec: PartitionSpec) -> str:
    """Return the mesh axes of each dim: `fsdp, tp`."""
    entries = ["+".join([entry] if isinstance(entry, str) else entry or ()) for entry in spec]
    return ", ".join(entry or "-" for entry in entries) or "-"


def _bytes(spec: ArraySpec, shape: Sequence[int]) -> int:
    return whole_bytes(math.prod(shape), spec.dtype)


def _size(count: float) -> str:
    """Return bytes as people read them: `1.5 MiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    powers = itertools.count(1)
    unit, power = next(
        (unit, power)
        for unit, power in zip(_UNITS, powers, strict=False)
        if count < 1024 ** (power + 1) or unit == _UNITS[-1]
    )
    return f"{count / 1024**power:.1f} {unit}"
