"""Which values of a program are in memory at the same time, per device.

The order is that of the program. The result is a range, since a compiler decides what it keeps:

* The upper end holds every value that a compiler cannot fuse into its use: products, collectives,
  loops, and elementwise values with several uses. A fused value keeps its operands alive instead.
* The lower end holds what no schedule can avoid: the arguments, the results, and what a loop stacks
  for later.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

LOOPS: Final = "loops"
TEMPORARY: Final = "temporary"
RESULTS: Final = "results"


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Buffer:
    """The memory of one value on one device.

    Attributes:
      size: Bytes.
      kind: What it is for: a category of arguments, `loops`, `temporary` or `results`.
      operands: What it is computed from, if a compiler may fuse it into its uses, else None.
      cheap: Whether it is fused also into several uses (a conversion, a reshape).
    """

    size: int
    kind: str
    operands: tuple[Buffer, ...] | None = None
    cheap: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes that are in memory at one time.

    Attributes:
      low: Bytes that every schedule needs.
      high: Bytes if a compiler fuses only elementwise values with a single use.
      kinds: Kind -> bytes at the time of `high`.
    """

    low: int = 0
    high: int = 0
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def most(peaks: Iterable[Peak]) -> Peak:
        """Return the peak of several programs, if only one of them runs at a time."""
        peaks = list(peaks)
        if not peaks:
            return Peak()
        highest = max(peaks, key=lambda peak: peak.high)
        low = max(peak.low for peak in peaks)
        return Peak(low=low, high=highest.high, kinds=highest.kinds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One equation.

    Attributes:
      uses: Buffers that it reads.
      births: Buffers of its results.
      in_place: Buffers that it reads and may overwrite.
      inner: The peak of the program that it runs.
      loop: Whether it is a loop, into which nothing is fused.
      moved: Bytes of its operands that are moved to another sharding first.
    """

    uses: tuple[Buffer, ...]
    births: tuple[Buffer, ...]
    in_place: tuple[Buffer, ...]
    inner: Peak
    loop: bool
    moved: int


class Timeline:
    """The equations of one program, in order; a program inside a loop has its own."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def add(
        self,
        uses: Iterable[Buffer] = (),
        births: Iterable[Buffer] = (),
        *,
        in_place: Iterable[Buffer] = (),
        inner: Peak | None = None,
        loop: bool = False,
        moved: int = 0,
    ) -> None:
        """Add an equation."""
        self._entries.append(
            _Entry(
                uses=tuple(uses),
                births=tuple(births),
                in_place=tuple(in_place),
                inner=inner or Peak(),
                loop=loop,
                moved=moved,
            )
        )

    def peak(
        self, results: Sequence[Buffer], *, kept: Sequence[Buffer] = (), within: bool = False
    ) -> Peak:
        """Return the peak.

        Args:
          results: What is alive at the end.
          kept: What is alive all the time, such as arguments that are not donated.
          within: Whether the program is the body of a loop. Its results then are temporary.
        """
        fused = self._fused(results)
        end = len(self._entries)
        last: dict[Buffer, int] = {}
        for at, entry in enumerate(self._entries):
            for buffer in entry.births:
                last.setdefault(buffer, at)
            for use in entry.uses:
                for buffer in _held(use, fused):
                    last[buffer] = at
        held = [buffer for result in results for buffer in _held(result, fused)]
        last |= dict.fromkeys([*kept, *held], end)
        return self._sweep(last, fused, set() if within else set(results))

    def _fused(self, results: Sequence[Buffer]) -> set[Buffer]:
        """Return the buffers that are fused into their uses."""
        uses: Counter[Buffer] = Counter()
        needed = set(results)
        for entry in self._entries:
            uses.update(set(entry.uses))
            if entry.loop:
                needed.update(entry.uses)
        return {
            buffer
            for entry in self._entries
            for buffer in entry.births
            if buffer.operands is not None
            and buffer not in needed
            and (buffer.cheap or uses[buffer] < 2)
        }

    def _sweep(self, last: Mapping[Buffer, int], fused: set[Buffer], results: set[Buffer]) -> Peak:
        dying: dict[int, list[Buffer]] = {}
        for buffer, at in last.items():
            dying.setdefault(at, []).append(buffer)
        alive: dict[Buffer, None] = {}
        low = high = least = most = 0
        kinds: dict[str, int] = {}

        def unavoidable(buffer: Buffer) -> int:
            return 0 if buffer.kind == TEMPORARY and buffer not in results else buffer.size

        def drop(buffer: Buffer) -> None:
            nonlocal low, high
            if buffer in alive:
                del alive[buffer]
                high -= buffer.size
                low -= unavoidable(buffer)

        for at, entry in enumerate(self._entries):
            for buffer in entry.in_place:
                if last.get(buffer) == at:
                    drop(buffer)
            for buffer in entry.births:
                if buffer not in fused and buffer not in alive:
                    alive[buffer] = None
                    high += buffer.size
                    low += unavoidable(buffer)
            least = max(least, low + entry.inner.low)
            now = high + entry.inner.high + entry.moved
            if now > most:
                most, kinds = now, _by_kind(alive, entry)
            for buffer in dying.get(at, ()):
                drop(buffer)
        return Peak(low=least, high=most, kinds=kinds)


def _by_kind(alive: Iterable[Buffer], entry: _Entry) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for buffer in alive:
        kinds[buffer.kind] += buffer.size
    kinds.update(entry.inner.kinds)
    kinds[TEMPORARY] += entry.moved
    return {kind: size for kind, size in kinds.items() if size}


def _held(buffer: Buffer, fused: set[Buffer]) -> list[Buffer]:
    """Return what a use of a buffer reads: the buffer, or if it is fused, its operands."""
    found: dict[Buffer, None] = {}
    seen = {buffer}
    waiting = [buffer]
    while waiting:
        current = waiting.pop()
        if current not in fused:
            found[current] = None
            continue
        for operand in current.operands or ():
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return list(found)
