"""Compute which values of a program are in memory at the same time, per device.

Equations run in the order of the program. The result is a range, since a compiler decides which
values it keeps:

* The upper end counts every value that a compiler cannot fuse into its use: products, results of
  collectives and of loops, and elementwise values with several uses. A fused value keeps its
  operands alive instead. An elementwise value with several uses is fused, too, if its operands take
  no more memory.
* The lower end is that of a compiler at its best. Each chain of elementwise values overwrites a
  value that it starts with. An array that is gathered or summed over devices is never in memory as
  a whole.

Values that every compiler keeps are also counted alone: the arguments, the results, and the arrays
that loops stack.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

LOOPS: Final = "loops"
CONSTANTS: Final = "constants"
TEMPORARY: Final = "temporary"
RESULTS: Final = "results"


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Buffer:
    """The memory of one value on one device.

    Attributes:
      size: Bytes.
      kind: What it is for: a category of arguments, `loops`, `temporary` or `results`.
      operands: The buffers from which a compiler computes it in each use, if it may fuse it. None
        if it may not.
      cheap: Whether it is fused even if it has several uses, such as a conversion or a reshape.
      least: Bytes of it that are in memory at one time at least. They are less than `size` if a
        compiler may send or sum the value part by part.
      reduced: Whether a reduction reads it.
      dtype: Element type, or "" if it is not known.
      shape: Shape on one device.
      source: Line of the model that makes it, `model.py:12`, or "".
    """

    size: int
    kind: str
    operands: tuple[Buffer, ...] | None = None
    cheap: bool = False
    least: int = 0
    reduced: bool = False
    dtype: str = ""
    shape: tuple[int, ...] = ()
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Values of one kind, shape and line that are in memory at the time of the peak.

    Attributes:
      kind: What they are for, as in `Buffer`.
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
    """The range of the most bytes that are in memory at one time.

    Attributes:
      sure: Bytes of the values that every compiler keeps.
      low: Bytes if the compiler is at its best.
      high: Bytes if the compiler fuses only what it always fuses.
      kinds: Kind -> bytes at the time of `high`.
      live: The values in memory at the time of `high`, the largest first.
    """

    sure: int = 0
    low: int = 0
    high: int = 0
    kinds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    live: tuple[Live, ...] = dataclasses.field(default=(), compare=False)

    @staticmethod
    def most(peaks: Iterable[Peak]) -> Peak:
        """Return the peak of several programs of which one runs at a time."""
        peaks = list(peaks)
        if not peaks:
            return Peak()
        highest = max(peaks, key=lambda peak: peak.high)
        low = max(peak.low for peak in peaks)
        sure = max(peak.sure for peak in peaks)
        return dataclasses.replace(highest, sure=sure, low=low)


@dataclasses.dataclass(slots=True, kw_only=True)
class Padded:
    """A copy of a written array in a layout that is padded, which only the upper end counts.

    Attributes:
      buffer: The copy.
      late: Whether it may be in memory until the end, and not only until the last use of the array.
    """

    buffer: Buffer
    late: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One equation.

    Attributes:
      uses: Buffers that it reads.
      births: Buffers of its results.
      in_place: Buffers that it reads and may overwrite.
      inner: Peak of the jaxpr that it runs.
      loop: Whether it is a loop. Its operands are not fused into it.
      moved: Bytes of the copies of its operands that are in another sharding.
      early: Whether its results are computed at the start of the program.
    """

    uses: tuple[Buffer, ...]
    births: tuple[Buffer, ...]
    in_place: tuple[Buffer, ...]
    inner: Peak
    loop: bool
    moved: int
    early: bool


class Timeline:
    """The equations of one program, in order. The body of a loop has its own timeline."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._after: dict[Buffer, list[_Entry]] = {}
        self._angles: dict[tuple[str, int, frozenset[Buffer]], Buffer] = {}
        self.padded: dict[Buffer, Padded] = {}  # written array -> its copies in a padded layout

    def angle(self, name: str, size: int, operands: Iterable[Buffer]) -> Buffer:
        """Return the buffer of a sine or cosine. If it is new, add it to the timeline.

        A compiler computes the sine of the same values only once. It computes the sines of all
        layers at the start of the program, since they need no weights.

        Args:
          name: `sin` or `cos`.
          size: Bytes of the result.
          operands: Buffers that it is computed from.
        """
        starts = frozenset(root for operand in operands for root in roots(operand))
        key = name, size, starts
        if key not in self._angles:
            self._angles[key] = Buffer(size=size, kind=TEMPORARY)
            self.add(starts, [self._angles[key]], early=True)
        return self._angles[key]

    def add(
        self,
        uses: Iterable[Buffer] = (),
        births: Iterable[Buffer] = (),
        *,
        in_place: Iterable[Buffer] = (),
        inner: Peak | None = None,
        loop: bool = False,
        moved: int = 0,
        early: bool = False,
        after: Buffer | None = None,
    ) -> None:
        """Add an equation, at the end or right after the one that makes the buffer `after`."""
        entry = _Entry(
            uses=tuple(uses),
            births=tuple(births),
            in_place=tuple(in_place),
            inner=inner or Peak(),
            loop=loop,
            moved=moved,
            early=early,
        )
        if after is None:
            self._entries.append(entry)
        else:
            self._after.setdefault(after, []).append(entry)

    def _in_order(self) -> list[_Entry]:
        """Return the equations, each followed by those that were added after its results."""
        waiting = dict(self._after)
        entries = []
        for entry in self._entries:
            later = [each for buffer in entry.births for each in waiting.pop(buffer, ())]
            entries += [entry, *later]
        return [*entries, *(each for later in waiting.values() for each in later)]

    def peak(
        self, results: Sequence[Buffer], *, kept: Sequence[Buffer] = (), within: bool = False
    ) -> Peak:
        """Return the peak.

        Args:
          results: Buffers that are alive at the end.
          kept: Buffers that are alive all the time, such as arguments that are not donated.
          within: Whether the program is the body of a loop. Then its results are temporary.
        """
        self._entries, self._after = self._in_order(), {}
        fused = self._fused(results)
        end = len(self._entries)
        last: dict[Buffer, int] = {}
        for at, entry in enumerate(self._entries):
            for buffer in entry.births:
                last.setdefault(buffer, at)
            for use in entry.uses:
                for buffer in _held(use, fused):
                    last[buffer] = at
        for array, copy in self.padded.items():
            last[copy.buffer] = end if copy.late else last.get(array, end)
        held = [buffer for result in results for buffer in _held(result, fused)]
        last |= dict.fromkeys([*kept, *held], end)
        high, live = self._most(last, fused)

        def unavoidable(buffer: Buffer) -> bool:
            return buffer.kind != TEMPORARY or (not within and buffer in results)

        def sure(buffer: Buffer) -> int:
            return buffer.size if unavoidable(buffer) else 0

        def best(buffer: Buffer) -> int:
            return buffer.size if unavoidable(buffer) else buffer.least

        return Peak(
            sure=self._least(last, fused, sure, lambda inner: inner.sure),
            low=self._least(last, fused, best, lambda inner: inner.low),
            high=high,
            kinds=_by_kind(live),
            live=live,
        )

    def _fused(self, results: Sequence[Buffer]) -> set[Buffer]:
        """Return the buffers that are fused into their uses."""
        uses = Counter(buffer for entry in self._entries for buffer in set(entry.uses))
        needed = set(results)
        for entry in self._entries:
            if entry.loop:
                needed.update(entry.uses)
        fused: set[Buffer] = set()
        for entry in self._entries:
            for buffer in entry.births:
                if buffer.operands is None or buffer in needed:
                    continue
                if buffer.cheap or uses[buffer] < 2 or _computed_again(buffer, fused):
                    fused.add(buffer)
        return fused

    def _most(self, last: Mapping[Buffer, int], fused: set[Buffer]) -> tuple[int, tuple[Live, ...]]:
        """Return the upper end of the peak, and what is in memory then."""
        alive = _Alive(last, fused, lambda buffer: buffer.size)
        kinds: dict[Buffer, str] = {}  # of values that overwrite a donated argument
        for entry in self._entries:
            if entry.early:
                alive.add(entry.births)
        most, held, peak_entry = 0, list[Buffer](), None
        for at, entry in enumerate(self._entries):
            ended = [buffer for buffer in entry.in_place if last.get(buffer) == at]
            kinds.update(_kept_kinds(ended, entry.births, kinds))
            alive.drop(ended)
            alive.add(entry.births)
            now = alive.total + entry.inner.high + entry.moved
            if now > most:
                most, held, peak_entry = now, list(alive.buffers), entry
            alive.end(at)
        return most, () if peak_entry is None else _live(held, peak_entry, kinds)

    def _least(
        self,
        last: Mapping[Buffer, int],
        fused: set[Buffer],
        weigh: Callable[[Buffer], int],
        weigh_inner: Callable[[Peak], int],
    ) -> int:
        """Return the lower end of the peak.

        Args:
          last: Last use of each buffer.
          fused: Buffers that are fused into their uses.
          weigh: Returns the bytes to count for a buffer.
          weigh_inner: Returns the bytes to count for the jaxpr that an equation runs.
        """
        alive = _Alive(last, fused, weigh)
        least = 0
        for at, entry in enumerate(self._entries):
            # A chain of elementwise values may overwrite a value that it starts with.
            starts = [
                start
                for birth in entry.births
                if birth.operands is not None and birth not in fused
                for operand in birth.operands
                for start in _held(operand, fused)
            ]
            alive.drop(buffer for buffer in (*entry.in_place, *starts) if last.get(buffer) == at)
            alive.add(entry.births)
            least = max(least, alive.total + weigh_inner(entry.inner))
            alive.end(at)
        return least


class _Alive:
    """The buffers that are in memory while the equations run one by one."""

    def __init__(
        self, last: Mapping[Buffer, int], fused: set[Buffer], weigh: Callable[[Buffer], int]
    ) -> None:
        self.buffers: dict[Buffer, None] = {}
        self.total = 0
        self._fused = fused
        self._weigh = weigh
        self._dying: dict[int, list[Buffer]] = {}
        for buffer, at in last.items():
            self._dying.setdefault(at, []).append(buffer)

    def add(self, buffers: Iterable[Buffer]) -> None:
        """Add those buffers that are not fused."""
        for buffer in buffers:
            if buffer not in self._fused and buffer not in self.buffers:
                self.buffers[buffer] = None
                self.total += self._weigh(buffer)

    def drop(self, buffers: Iterable[Buffer]) -> None:
        """Remove those buffers that are in memory."""
        for buffer in buffers:
            if buffer in self.buffers:
                del self.buffers[buffer]
                self.total -= self._weigh(buffer)

    def end(self, at: int) -> None:
        """Remove the buffers whose last use is the equation at a position."""
        self.drop(self._dying.get(at, ()))


def _computed_again(buffer: Buffer, fused: set[Buffer]) -> bool:
    """Tell whether the operands of a value together take no more memory than the value.

    A compiler then holds the operands, and computes the value again for each use. It does not if a
    reduction reads the value.
    """
    if buffer.reduced:
        return False
    operands = {held for operand in buffer.operands or () for held in _held(operand, fused)}
    return sum(operand.size for operand in operands) <= buffer.size


def roots(buffer: Buffer) -> list[Buffer]:
    """Return the closest buffers that cannot be fused, from which a buffer is computed."""
    return _closest(buffer, lambda each: each.operands is None)


def _held(buffer: Buffer, fused: set[Buffer]) -> list[Buffer]:
    """Return the buffers that a use of a buffer reads: itself, or its operands if it is fused."""
    return _closest(buffer, lambda each: each not in fused)


def _closest(buffer: Buffer, ends: Callable[[Buffer], bool]) -> list[Buffer]:
    """Return the first buffers for which `ends` holds, from a buffer back through its operands."""
    found: dict[Buffer, None] = {}
    seen = {buffer}
    waiting = [buffer]
    while waiting:
        current = waiting.pop()
        if ends(current):
            found[current] = None
            continue
        for operand in current.operands or ():
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return list(found)


def _kept_kinds(
    ended: Iterable[Buffer], births: Iterable[Buffer], kinds: Mapping[Buffer, str]
) -> dict[Buffer, str]:
    """Return the kinds of results that overwrite arguments: an updated cache is a cache."""
    free = {buffer.size: kinds.get(buffer, buffer.kind) for buffer in ended}
    return {
        birth: free[birth.size]
        for birth in births
        if free.get(birth.size, TEMPORARY) not in (TEMPORARY, LOOPS)
    }


def _live(held: Iterable[Buffer], entry: _Entry, kinds: Mapping[Buffer, str]) -> tuple[Live, ...]:
    """Return the values in memory at one equation, grouped by kind, shape and line."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    for buffer in held:
        key = kinds.get(buffer, buffer.kind), buffer.dtype, buffer.shape, buffer.source
        groups.setdefault(key, []).append(buffer.size)
    for each in entry.inner.live:
        key = each.kind, each.dtype, each.shape, each.source
        groups.setdefault(key, []).extend([each.size // each.count] * each.count)
    if entry.moved:
        groups.setdefault((TEMPORARY, "", (), ""), []).append(entry.moved)
    live = [
        Live(kind=kind, dtype=dtype, shape=shape, source=source, size=sum(sizes), count=len(sizes))
        for (kind, dtype, shape, source), sizes in groups.items()
        if sum(sizes)
    ]
    return tuple(sorted(live, key=lambda each: -each.size))


def _by_kind(live: Iterable[Live]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for each in live:
        kinds[each.kind] += each.size
    return dict(kinds)
