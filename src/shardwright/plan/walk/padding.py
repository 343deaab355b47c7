"""Padded copies that compilers for TPUs may make of arrays into which a program writes rows.

A TPU keeps an array in tiles of 128 elements of its last dim. An argument whose last dim is
shorter gets another order of dims, which is not padded. A write of rows at computed positions needs
the padded order, so the compiler copies the array. This was measured for caches with head dims of
32 to 96 (libtpu 0.0.42.1):

* In a decode step of a model with several query heads per KV head, the copies of one layer are in
  memory.
* With one query head per KV head, and in prefill, the copies of all layers may be in memory until
  the end.
* If there is only one KV head on a device, the compiler makes two copies, or pads two dims.

The lower end of a plan's memory does not count these copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from shardwright.dims.primitives import SCATTERS
from shardwright.plan.walk.entries import TEMPORARY, Buffer, Padded
from shardwright.plan.walk.equations import for_gpus
from shardwright.plan.walk.fusion import roots
from shardwright.plan.walk.liveness import Timeline

# A tile of a TPU has 8 sublanes by 128 lanes, of 32 bits each.
_LANES: Final = 128
# Measured: a sum is not cut if the number of its tiles has a larger prime factor.
_LARGEST_FACTOR: Final = 113
_SUBLANES: Final = 8
_MATRIX: Final = 2


def is_cut(shape: Sequence[int]) -> bool:
    """Tell whether a compiler for TPUs can cut the last dim of a sum into equal blocks of tiles.

    It cannot if the number of tiles has a large prime factor.
    """
    tiles, factor = -(-shape[-1] // _LANES), 2
    while factor * factor <= tiles:
        if tiles % factor:
            factor += 1
        else:
            tiles //= factor
    return tiles <= _LARGEST_FACTOR


def padded_copies(
    equation: Any, births: Iterable[Buffer | None], timeline: Timeline
) -> list[Buffer]:
    """Return the padded copies of the arrays that an equation writes; add the copies to a timeline.

    Args:
      equation: An equation.
      births: The buffers of its results.
      timeline: The timeline to which the equation is added.
    """
    if equation.primitive.name not in SCATTERS or for_gpus():
        return []
    array, _, update = (variable.aval for variable in equation.invars)
    windows = equation.params["dimension_numbers"].update_window_dims
    written = math.prod(size for at, size in enumerate(update.shape) if at not in windows)
    copies = []
    for birth in births:
        if birth is None or array.ndim < 3 or not birth.shape[-1] % _LANES:
            continue
        *_, heads, last = birth.shape
        padded = birth.size // last * -(-last // _LANES) * _LANES
        copy = Buffer(
            # The compiler may make two copies of an array with one head, but one if it has several.
            size=2 * padded if heads == 1 else padded,
            kind=TEMPORARY,
            dtype=birth.dtype,
            shape=birth.shape,
            source=birth.source,
        )
        # The copy may stay until the end (`late`) if a slot gets several rows, as in prefill. A
        # decode step writes only one row into each slot.
        timeline.padded[birth] = Padded(buffer=copy, late=written > array.shape[0])
        copies.append(copy)
    return copies


def is_across(buffer: Buffer) -> bool:
    """Tell whether a matrix has its first dim along the lanes, because its last dim is short."""
    if len(buffer.shape) != _MATRIX or for_gpus():
        return False
    rows, columns = buffer.shape
    return bool(columns < _LANES <= rows and rows % _LANES == 0)


def turned_copies(name: str, births: Iterable[Buffer | None]) -> list[Buffer]:
    """Return the copies for a transpose of an array in which each dim has fewer than 128 elements.

    The patches of an image are such an array. The compiler pads the operand of the transpose, its
    result or both to tiles of 8 by 128.
    """
    if name != "transpose" or for_gpus():
        return []
    short = [
        birth for birth in births if birth is not None and max(birth.shape, default=0) < _LANES
    ]
    sizes = []
    for birth in short:
        dims = sorted(size for size in birth.shape[1:] if size >= _SUBLANES)
        if len(birth.shape) > _MATRIX and len(dims) >= _MATRIX:
            # The shortest dim is along the lanes, the second shortest along the sublanes.
            lanes, rows = dims[:2]
            tiles = _LANES * -(-rows // _SUBLANES) * _SUBLANES
            sizes.append(birth.size // (lanes * rows) * tiles)
    return [
        Buffer(size=size, kind=TEMPORARY, min_bytes=least)
        for size in sizes
        if size
        for least in (size, 0)
    ]


def keep_copies(read: Iterable[Buffer | None], timeline: Timeline) -> None:
    """Keep in memory, until the end, the padded copies of arrays that a one-row matmul reads."""
    for each in read:
        for root in () if each is None else roots(each):
            padded = timeline.padded.get(root)
            if padded is not None:
                padded.late = True


def with_one_row(equation: Any, read: Sequence[set[int]]) -> list[set[int]]:
    """Return the items of `read` for the operands that a matmul multiplies by only one row.

    Args:
      equation: A matmul.
      read: For each operand, the positions of the inputs that it is computed from.
    """
    rows = [
        math.prod(
            size for at, size in enumerate(variable.aval.shape) if at not in (*contracted, *batch)
        )
        for variable, contracted, batch in zip(
            equation.invars, *equation.params["dimension_numbers"], strict=True
        )
    ]
    return [each for each, other in zip(read, reversed(rows), strict=True) if other == 1]
