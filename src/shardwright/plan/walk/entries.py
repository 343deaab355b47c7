"""Buffers, the equations that make and read them, and the peak of their memory, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

LOOPS: Final = "loops"
CONSTANTS: Final = "constants"
TEMPORARY: Final = "temporary"
RESULTS: Final = "results"


# Buffers are keys of dicts. They are compared by identity, because two buffers with equal fields
# are different memory.
@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Buffer:
    """The memory of one value on one device.

    Attributes:
      size: Bytes.
      kind: Its kind: a category of arguments, `loops`, `temporary` or `results`.
      operands: If a compiler may fuse the value: the buffers from which each use computes the
        value. None if a compiler may not fuse it.
      cheap: Whether it is fused even if it has several uses, as conversions and reshapes are.
      min_bytes: Fewest bytes of it that must be in memory at one time: less than `size` if a
        compiler may send or sum the value part by part.
      costly: Whether computing it again needs an exponential, a logarithm or a similar function.
      reduced: Whether a reduction reads it.
      row: If it is the result of a matmul: bytes of the operand that has the last dim of the
        result. Every row needs this operand.
      weight: Elements of that operand, in plans for TPUs. Otherwise 0.
      turned: Whether it is the result of a matmul, and a transpose moves its last dim.
      across: Whether its first dim is along the lanes of a TPU, because its last dim is short.
      dtype: Element type, or "" if it is not known.
      shape: Shape on one device.
      source: Line of the model that makes it, `model.py:12`, or "".
      host: Bytes in the memory of the host. Then `size` is 0.
    """

    size: int
    kind: str
    operands: tuple[Buffer, ...] | None = None
    cheap: bool = False
    min_bytes: int = 0
    costly: bool = False
    reduced: bool = False
    row: int = 0
    weight: int = 0
    turned: bool = False
    across: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    source: str = ""
    host: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Values of one kind, shape and line that are in memory at the time of the peak.

    Attributes:
      kind: Their kind, as in `Buffer`.
      dtype: Element type, or "" for operands that a collective moves.
      shape: Shape on one device.
      source: Line of the model that makes them, `model.py:12`, or "".
      size: Bytes of all of them.
      count: Number of them.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    size: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes that are in memory at one time, as a range from `low` to `high`.

    Attributes:
      sure: Bytes of the values that every compiler keeps.
      low: Bytes if the compiler is at its best.
      high: Bytes if the compiler fuses only what it always fuses.
      kinds: Kind -> bytes at the time of `high`.
      live: The values in memory at the time of `high`, the largest first.
      host: The most bytes that are in the memory of the host at one time, for each device.
      recomputes: Whether a matmul is rematerialized, here or in the body of a loop.
    """

    sure: int = 0
    low: int = 0
    high: int = 0
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    live: tuple[Live, ...] = dataclasses.field(default=(), compare=False)
    host: int = 0
    recomputes: bool = False

    @staticmethod
    def most(peaks: Iterable[Peak]) -> Peak:
        """Return the peak of several programs that run one at a time."""
        peaks = list(peaks)
        if not peaks:
            return Peak()
        highest = max(peaks, key=lambda peak: peak.high)
        low = max(peak.low for peak in peaks)
        sure = max(peak.sure for peak in peaks)
        host = max(peak.host for peak in peaks)
        # The low and the high end may belong to different programs. `kinds` and `live` belong to
        # `high`.
        return dataclasses.replace(highest, sure=sure, low=low, host=host)


@dataclasses.dataclass(slots=True, kw_only=True)
class Padded:
    """A copy, in a padded layout, of an array that is written. Only the peak's high end counts it.

    Attributes:
      buffer: The copy.
      late: Whether the copy may be in memory until the end, and not only until the last use of the
        array.
    """

    buffer: Buffer
    late: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One equation.

    Attributes:
      uses: Buffers that it reads.
      births: Buffers of its results.
      in_place: Buffers that it reads and may overwrite.
      inner: Peak of the jaxpr that it runs.
      loop: Whether it is a loop. Operands are not fused into loops.
      matmul: Whether it is a matmul.
      moved: Bytes, after the move, of the operands that it first moves to another sharding.
      parts: If it is a collective matmul: the fewest bytes of its result's parts that are in
        memory.
      early: Whether the upper end of the peak assumes that its results are made at the start of
        the program. The lower end assumes that they are made right before their first reader.
      carries: Those of `births` whose memory is counted in `inner` while the equation runs.
    """

    uses: tuple[Buffer, ...]
    births: tuple[Buffer, ...]
    in_place: tuple[Buffer, ...]
    inner: Peak
    loop: bool
    matmul: bool
    moved: int
    parts: int
    early: bool
    carries: tuple[Buffer, ...] = ()
