"""Compute which values of a program are in memory at the same time, per device.

Equations run in the order of the program. The result is a range, since the compiler decides which
values it keeps. `fusion` lists the choices.

* The upper end counts every value that a compiler cannot fuse into its use: matmuls, results of
  collectives and of loops, and elementwise values with several uses. A fused value keeps its
  operands alive instead. Results that do not reuse the memory of a donated argument are in memory
  from the start. The upper end also covers another order of the equations, see `_depth_first`.
* The lower end is that of a compiler at its best. Each chain of elementwise values overwrites a
  value that it starts with. A sum over devices is never in memory as a whole.

The values that every compiler keeps are also counted separately: the arguments, the results, and
the arrays that loops stack.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final

from shardwright.plan.walk.entries import LOOPS, TEMPORARY, Buffer, Entry, Live, Padded, Peak
from shardwright.plan.walk.fusion import (
    Fusion,
    Reads,
    find_reads,
    fused_buffers,
    inside_kernels,
    nested_matmuls,
    read_instead,
    roots,
)

# Rematerialization repeats matmuls. Compilers order these matmuls so that fewer gradients are in
# memory at a time. So of the values that not every compiler keeps, the lower end counts 1/14 less.
# Without this allowance, the measured peak of `scanned_layers` would be 0.96 of the lower end.
_REMAT: Final = 14


class Timeline:
    """The equations of one program, in order. The body of a loop has its own timeline."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._after: dict[Buffer, list[Entry]] = {}
        self._angles: dict[tuple[str, int, frozenset[Buffer]], Buffer] = {}
        self.recomputes = False  # whether a matmul is rematerialized
        self.padded: dict[Buffer, Padded] = {}  # written array -> its copies in a padded layout
        # carries of the loop that runs this body, if the body counts them
        self.carries: list[Buffer] = []

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
        matmul: bool = False,
        moved: int = 0,
        parts: int = 0,
        early: bool = False,
        carries: Iterable[Buffer] = (),
        after: Buffer | None = None,
    ) -> None:
        """Add an equation, at the end or right after the equation that makes the buffer `after`."""
        entry = Entry(
            uses=tuple(uses),
            births=tuple(births),
            in_place=tuple(in_place),
            inner=inner or Peak(),
            loop=loop,
            matmul=matmul,
            moved=moved,
            parts=parts,
            early=early,
            carries=tuple(carries),
        )
        if after is None:
            self._entries.append(entry)
        else:
            self._after.setdefault(after, []).append(entry)

    def _in_order(self) -> list[Entry]:
        """Return the equations, each followed by those that were added after its results."""
        waiting = dict(self._after)
        entries: list[Entry] = []
        stack = self._entries[::-1]
        while stack:
            entries.append(stack.pop())
            later = [each for buffer in entries[-1].births for each in waiting.pop(buffer, ())]
            stack += later[::-1]
        return _late([*entries, *(each for later in waiting.values() for each in later)])

    def peak(
        self,
        results: Sequence[Buffer],
        *,
        kept: Sequence[Buffer] = (),
        written: Sequence[Buffer] = (),
        within: bool = False,
    ) -> Peak:
        """Return the peak.

        Args:
          results: Buffers that are alive at the end.
          kept: Buffers that are alive all the time, such as arguments that are not donated.
          written: Results of a loop's body that the loop stacks. The equation that makes such a
            value writes it to the stack, so the value takes memory of its own only for other uses.
          within: Whether the program is the body of a loop. Then its results are temporary.
        """
        # From here, the position of an equation is its time, in `_last` and `_Alive` too.
        self._entries, self._after = self._in_order(), {}
        # A stacked value that is also the next carry needs memory of its own beside the stack.
        stacked = frozenset(written) - frozenset(results)
        reads = find_reads(self._entries, results, stacked)
        narrow = self._way(fused_buffers(self._entries, reads, Fusion.NARROW), results, kept)
        # The body of a loop writes to carries and stacks, which the outer timeline counts.
        reserved = () if within else self._own_results(results, kept)
        choices = [
            [fused_buffers(self._entries, reads, each, join=join) for join in (False, True)]
            for each in (Fusion.NARROW, Fusion.WIDE)
        ]
        # Some compiled programs are like NARROW, others like WIDE. So the upper end is the larger
        # of the two.
        most = [max(self._highest(choices, results, kept, reserved, reads), key=_bytes)]
        recomputes = self.recomputes or any(entry.inner.recomputes for entry in self._entries)
        # XLA takes the best of several schedules. In programs with loops, the best schedule is
        # often depth-first, so the larger of the two choices counts. In other programs, the best
        # schedule is depth-first only if that needs little memory, so the smaller one counts.
        program = self._entries
        if not recomputes:
            loops = within or any(entry.loop for entry in program)
            self._entries = _depth_first(program, [*results, *written])
            ends = self._highest(choices, results, kept, reserved, reads)
            most.append((max if loops else min)(ends, key=_bytes))
            self._entries = program
        high, live = max(most, key=_bytes)
        outputs = frozenset() if within else frozenset(results)
        sure = self._sure(narrow, results, outputs)
        # Values on the host are never fused, so all choices of `Fusion` give the same number.
        host = 0
        if any(
            entry.inner.host or any(each.host for each in entry.births) for entry in self._entries
        ):
            host = self._lowest_peak(
                narrow,
                lambda buffer: 0 if buffer in stacked else buffer.host,
                lambda entry: entry.inner.host,
            )
        low = self._at_best(results, kept, stacked, outputs, reserved)
        if not recomputes:
            self._entries = _list_order(self._entries, narrow.fused, {*results, *kept})
            low = min(low, self._at_best(results, kept, stacked, outputs, reserved))
            self._entries = program
        better = _parts_first(self._entries)
        if any(map(_is_fetch, better)):
            better = _one_by_one(better)
        if better != self._entries:
            self._entries = better
            low = min(low, self._at_best(results, kept, stacked, outputs, reserved))
        if self.recomputes:
            # Another order of matmuls does not reduce the values that every compiler keeps.
            low -= max(low - sure, 0) // _REMAT
        kinds: Counter[str] = Counter()
        for present in live:
            kinds[present.kind] += present.size
        return Peak(
            sure=sure,
            low=low,
            high=high,
            kinds=dict(kinds),
            live=live,
            host=host,
            recomputes=recomputes,
        )

    def _highest(
        self,
        choices: Iterable[Sequence[set[Buffer]]],
        results: Sequence[Buffer],
        kept: Sequence[Buffer],
        reserved: Sequence[Buffer],
        reads: Reads,
    ) -> list[tuple[int, tuple[Live, ...]]]:
        """Return, for each choice, the upper end of the peak and the values in memory then."""
        ends = []
        for either in choices:
            ways = [self._way(fused, results, kept) for fused in either]
            for fused, way in zip(either, tuple(ways), strict=True):
                nested = nested_matmuls(self._entries, way.fused) - reads.needed - reads.stacked
                if nested:
                    ways.append(self._way(fused | nested, results, kept))
            # A compiler does not join values to a kernel if this needs more memory.
            ends.append(min((self._most(way, reserved) for way in ways), key=_bytes))
        return ends

    def _sure(self, way: _Lifetimes, results: Sequence[Buffer], outputs: frozenset[Buffer]) -> int:
        """Return the bytes of the values that every compiler keeps."""

        def size(buffer: Buffer) -> int:
            if buffer.kind == LOOPS and buffer not in results:
                # A carry may be in memory as a shard only, see `_shard_sums` of `buffers`.
                return buffer.min_bytes
            return buffer.size if _is_kept(buffer, outputs) else 0

        return self._lowest_peak(way, size, lambda entry: entry.inner.sure)

    def _at_best(
        self,
        results: Sequence[Buffer],
        kept: Sequence[Buffer],
        stacked: frozenset[Buffer],
        outputs: frozenset[Buffer],
        reserved: Sequence[Buffer],
    ) -> int:
        """Return the lower end of the peak for the present order of the equations."""
        reads = find_reads(self._entries, results, stacked)
        parts = dict(zip(map(id, self._entries), self._parts(), strict=True))

        def lowest(fusion: Fusion) -> int:
            way = self._way(fused_buffers(self._entries, reads, fusion), results, kept)
            skipped = stacked | inside_kernels(self._entries, way.fused)

            def size(buffer: Buffer) -> int:
                if _is_kept(buffer, outputs) and buffer not in stacked:
                    return buffer.size
                return 0 if buffer in skipped else buffer.min_bytes

            inner = lambda entry: entry.inner.low + parts[id(entry)]  # noqa: E731
            return self._lowest_peak(way, size, inner, reserved)

        return min(lowest(fusion) for fusion in Fusion)

    def _parts(self) -> list[int]:
        """Return, for each equation, the bytes that collective matmuls hold while it runs.

        The parts of a collective matmul are in memory until the next matmul is done, because they
        are sent while that one runs.
        """
        parts, sent = [], 0
        for entry in self._entries:
            parts.append(max(sent, entry.parts))
            if entry.matmul:
                sent = entry.parts
        return parts

    def _way(
        self, fused: set[Buffer], results: Sequence[Buffer], kept: Sequence[Buffer]
    ) -> _Lifetimes:
        instead = read_instead(self._entries, fused)
        return _Lifetimes(fused=instead, last=self._last(results, kept, instead))

    def _last(
        self,
        results: Sequence[Buffer],
        kept: Sequence[Buffer],
        fused: Mapping[Buffer, Sequence[Buffer]],
    ) -> dict[Buffer, int]:
        """Return the last use of each buffer."""
        # No equation is at this position, so `_Alive.end` never drops what is alive at the end.
        end = len(self._entries)
        last: dict[Buffer, int] = {}
        for at, entry in enumerate(self._entries):
            for buffer in entry.births:
                # A result that nothing reads still takes memory while its equation writes it.
                last.setdefault(buffer, at)
            for use in entry.uses:
                if use not in fused:
                    last[use] = at
                else:
                    for buffer in fused[use]:
                        last[buffer] = at
        for array, copy in self.padded.items():
            last[copy.buffer] = end if copy.late else last.get(array, end)
        alive = [buffer for result in results for buffer in fused.get(result, (result,))]
        return last | dict.fromkeys([*kept, *alive], end)

    def _own_results(self, results: Sequence[Buffer], kept: Sequence[Buffer]) -> list[Buffer]:
        """Return the results that do not take the memory of a donated argument.

        XLA reserves the memory of such a result when the program starts.
        """
        arguments = {buffer for entry in self._entries if not entry.uses for buffer in entry.births}
        donated = Counter(
            buffer.size
            for buffer in arguments - {*kept, *results}
            if buffer.kind not in (TEMPORARY, LOOPS)
        )
        own = []
        # JAX aliases a donated argument to one result of its shape and type. Here, equal bytes
        # stand for equal shape and type.
        for buffer in dict.fromkeys(results):
            if buffer in arguments:
                continue
            if donated[buffer.size]:
                donated[buffer.size] -= 1
            else:
                own.append(buffer)
        return own

    def _most(self, way: _Lifetimes, reserved: Sequence[Buffer]) -> tuple[int, tuple[Live, ...]]:
        """Return the upper end of the peak, and the values in memory at that time.

        Args:
          way: Which values are fused.
          reserved: Buffers whose memory is taken from the start.
        """
        # The memory of carries is counted outside of the body, so carries count 0 bytes here.
        outside = set(self.carries)
        alive = _Alive(way, lambda buffer: 0 if buffer in outside else buffer.size)
        alive.add(reserved)
        kinds: dict[Buffer, str] = {}  # kinds of values that overwrite a donated argument
        for entry in self._entries:
            # XLA computes the sines of all layers first, see `angle`.
            if entry.early:
                alive.add(entry.births)
        most, present, at_peak, sent = 0, list[Buffer](), (Peak(), 0), 0
        for at, entry in enumerate(self._entries):
            ended = [buffer for buffer in entry.in_place if way.last.get(buffer) == at]
            # A result that overwrites an argument gets the argument's kind: an updated cache is a
            # cache.
            free = {buffer.size: kinds.get(buffer, buffer.kind) for buffer in ended}
            kinds.update(
                (birth, free[birth.size])
                for birth in entry.births
                if free.get(birth.size, TEMPORARY) not in (TEMPORARY, LOOPS)
            )
            # Drop these buffers before the results are added, so that reused memory counts once.
            alive.drop(ended)
            overwritten = {buffer.size for buffer in ended if buffer in outside}
            outside.update(birth for birth in entry.births if birth.size in overwritten)
            alive.add(entry.births)
            # A value that a collective sends is in memory until the next matmul is done, because
            # compilers overlap the collective with this matmul.
            moved = max(entry.moved, sent)
            if entry.matmul or entry.moved:
                sent = entry.moved
            now = alive.total + entry.inner.high + moved
            if now > most:
                most, present = now, [each for each in alive.buffers if each not in outside]
                at_peak = entry.inner, moved
            alive.end(at)
        return most, _live(present, *at_peak, kinds)

    def _lowest_peak(
        self,
        way: _Lifetimes,
        weigh: Callable[[Buffer], int],
        extra: Callable[[Entry], int],
        reserved: Sequence[Buffer] = (),
    ) -> int:
        """Return the lower end of the peak.

        Args:
          way: Which values are fused.
          weigh: Returns the bytes to count for a buffer.
          extra: Returns the bytes to count for an equation while it runs.
          reserved: Results whose memory is taken from the start. Before a result is made, its
            memory may hold one other value.
        """
        # Unlike at the upper end, sines are computed where they are used.
        alive = _Alive(way, weigh)
        waiting, results = dict.fromkeys(reserved), frozenset(reserved)
        peak = 0
        for at, entry in enumerate(self._entries):
            # A chain of elementwise values may overwrite a value that it starts with.
            starts = [
                start
                for birth in entry.births
                if birth.operands is not None and birth not in way.fused
                for operand in birth.operands
                for start in way.fused.get(operand, (operand,))
            ]
            ended = (buffer for buffer in (*entry.in_place, *starts) if way.last.get(buffer) == at)
            alive.drop(ended)
            alive.add(birth for birth in entry.births if birth not in entry.carries)
            for birth in entry.births:
                waiting.pop(birth, None)
            inner = extra(entry)
            if alive.total + max(inner, sum(each.size for each in waiting)) > peak:
                # What a loop or a collective matmul holds may be in the memory of results, too.
                sizes = [weigh(each) for each in alive.buffers if not _is_kept(each, results)]
                peak = max(peak, alive.total + max(inner, _unused(waiting, sizes)))
            alive.add(entry.carries)
            alive.end(at)
        return peak


def _unused(reserved: Iterable[Buffer], sizes: Iterable[int]) -> int:
    """Return the bytes of reserved results that no value can use.

    Args:
      reserved: Results that are not made yet.
      sizes: Bytes of the values that are in memory.
    """
    unused, free = 0, sorted(filter(None, sizes))
    for size in sorted(result.size for result in reserved):
        at = bisect.bisect_right(free, size)  # the largest value that fits is before this position
        unused += size - (free.pop(at - 1) if at else 0)
    return unused


def _list_order(
    entries: Sequence[Entry], fused: Mapping[Buffer, Sequence[Buffer]], kept: Container[Buffer]
) -> list[Entry]:
    """Return equations in the order of XLA's list scheduler (`ListMemoryScheduler`).

    Of the equations whose operands are made, the one that frees the most bytes comes first. Of
    equal ones, the one with the most readers comes first.

    Args:
      entries: The equations, in order.
      fused: Buffer that is fused into its uses -> the buffers that its uses read instead.
      kept: Buffers that stay in memory.
    """
    makers: dict[Buffer, int] = {}
    for at, entry in enumerate(entries):
        for birth in entry.births:
            makers.setdefault(birth, at)
    reads = [
        dict.fromkeys(each for use in entry.uses for each in fused.get(use, (use,)))
        for entry in entries
    ]
    # An equation whose results are fused runs as a part of its readers.
    hidden = {
        at for at, entry in enumerate(entries) if entry.births and fused.keys() >= {*entry.births}
    }
    readers: dict[Buffer, list[int]] = {}
    for at, found in enumerate(reads):
        if at not in hidden:
            for buffer in found:
                readers.setdefault(buffer, []).append(at)
    waits = [
        {makers[each] for each in found if makers.get(each, at) != at}
        for at, found in enumerate(reads)
    ]
    left = Counter({buffer: len(found) for buffer, found in readers.items()})

    def rank(at: int) -> tuple[int, int, int]:
        freed = sum(each.size for each in reads[at] if left[each] == 1 and each not in kept)
        births = [birth for birth in entries[at].births if birth not in fused]
        users = {each for birth in births for each in readers.get(birth, ())}
        return sum(birth.size for birth in births) - freed, -len(users), at

    ready = [rank(at) for at in range(len(entries)) if at not in hidden and not waits[at]]
    heapq.heapify(ready)
    ordered: dict[int, None] = {}

    def place(at: int) -> None:
        """Add an equation behind the hidden ones that it reads."""
        stack = [at]
        while stack:
            uses = entries[stack[-1]].uses
            missing = [makers[use] for use in uses if use in makers and makers[use] not in ordered]
            if missing:
                stack += missing
            else:
                ordered.setdefault(stack.pop())

    while ready:
        chosen = heapq.heappop(ready)
        at = chosen[-1]
        if at in ordered:
            continue
        if chosen != rank(at):
            heapq.heappush(ready, rank(at))
            continue
        place(at)
        for buffer in reads[at]:
            left[buffer] -= 1
        after = [each for birth in entries[at].births for each in readers.get(birth, ())]
        for each in after:
            waits[each].discard(at)
        # A reader may free an operand now.
        last = [each for buffer in reads[at] if left[buffer] == 1 for each in readers[buffer]]
        for each in (*after, *last):
            if not waits[each] and each not in ordered:
                heapq.heappush(ready, rank(each))
    for at in range(len(entries)):
        place(at)
    return [entries[at] for at in ordered]


def _late(entries: Sequence[Entry]) -> list[Entry]:
    """Return equations in an order in which early results come right before their first reader."""
    makers = {birth: entry for entry in entries if entry.early for birth in entry.births}
    ordered: dict[int, Entry] = {}  # keyed by id, because two different equations may compare equal

    def place(entry: Entry) -> None:
        for use in entry.uses:
            if use in makers:
                place(makers[use])
        ordered.setdefault(id(entry), entry)

    for entry in entries:
        if not entry.early:
            place(entry)
    unread = [entry for entry in entries if id(entry) not in ordered]
    return [*unread, *ordered.values()]


def _depth_first(entries: Sequence[Entry], results: Iterable[Buffer]) -> list[Entry]:
    """Return equations in the order of XLA's depth-first scheduler (`DFSMemoryScheduler`).

    Each equation comes directly before the first equation that reads its result. The operands of an
    equation are sorted. For each operand, two sums are taken over all values that it is computed
    from: a sum of readers, in which a value's first reader does not count, and a sum of bytes. The
    operand with the most readers comes first. If two have equally many, the one with more bytes
    comes first. The results of the program are sorted in the same way. No equation reads the
    gradients of weights, so the backward pass may run before the matmuls of these gradients. Then
    all that these matmuls read is in memory at the same time.
    """
    makers: dict[Buffer, int] = {}
    for at, entry in enumerate(entries):
        for birth in entry.births:
            makers.setdefault(birth, at)
    reads = [dict.fromkeys(makers[use] for use in entry.uses if use in makers) for entry in entries]
    readers = Counter(itertools.chain.from_iterable(reads))
    # A value that is read twice counts twice in these sums, so bound them, as XLA does.
    largest = sum(birth.size for entry in entries for birth in entry.births)
    ranks: list[tuple[int, int]] = []  # both sums, negated, so that the largest is sorted first
    for at, entry in enumerate(entries):
        if entry.uses:
            extra = max(readers[at] - 1, 0) - sum(ranks[each][0] for each in reads[at])
            size = sum(birth.size for birth in entry.births)
            size -= sum(ranks[each][1] for each in reads[at])
            ranks.append((-min(extra, len(entries)), -min(size, largest)))
        else:
            ranks.append((0, 0))
    arguments = sum(1 for _ in itertools.takewhile(lambda entry: not entry.uses, entries))
    ordered = dict.fromkeys(range(arguments))
    waiting = sorted({makers[each] for each in results if each in makers}, key=ranks.__getitem__)
    waiting.reverse()
    while waiting:
        missing = [at for at in reads[waiting[-1]] if at not in ordered]
        if missing:
            waiting += sorted(missing, key=ranks.__getitem__, reverse=True)
        else:
            ordered.setdefault(waiting.pop())
    turns = {at: turn for turn, at in enumerate(ordered)}
    placed, turn = [], 0
    for at in range(len(entries)):
        # An equation that no result needs, such as a copy, stays behind the equation before it in
        # the program, and behind the equations whose results it reads.
        turn = turns.setdefault(at, max([turn, *(turns.get(each, 0) for each in reads[at])]))
        placed.append((turn, at))
    return [entries[at] for _, at in sorted(placed)]


def _parts_first(entries: list[Entry]) -> list[Entry]:
    """Return equations in an order in which parts of an array are read before it is overwritten.

    In a trace, the derivative of `x.at[i].set(v)` first writes zeros into part i of the gradient,
    and then reads the values that were there before. XLA reads first if it can. Otherwise it would
    have to copy the array.
    """
    written: dict[Buffer, Entry] = {}
    # keyed by id, because two different equations may compare equal
    earlier: dict[int, list[Entry]] = {}
    for entry in entries:
        found = [written[use] for use in entry.uses if use in written]
        if len(entry.births) == len(found) == 1 and entry.births[0].operands is not None:
            (part,) = entry.births
            if 2 * part.size <= max(use.size for use in entry.uses):
                # the part is copied, not fused: it is used after the array is overwritten
                part.operands = None
                earlier.setdefault(id(found[0]), []).append(entry)
        written.update(dict.fromkeys(entry.in_place, entry))
    moved = {id(each) for parts in earlier.values() for each in parts}
    return [
        each
        for entry in entries
        if id(entry) not in moved
        for each in (*earlier.get(id(entry), ()), entry)
    ]


def _is_fetch(entry: Entry) -> bool:
    """Tell whether an equation brings an argument from the host."""
    return entry.early and any(use.host for use in entry.uses)


def _one_by_one(entries: Sequence[Entry]) -> list[Entry]:
    """Return equations in an order that needs few fetched arrays at a time.

    optax computes one moment of all parameters, then the next moment. A compiler may finish one
    parameter before it fetches the state of the next. So the equations that depend on a fetch are
    sorted by the length of the chain of equations that each needs, the longest chain first. Each
    comes directly after its chain, so the update of one parameter is finished before the next.
    Copies to the host come directly after what they copy.
    """
    makers: dict[Buffer, Entry] = {}
    depths: dict[int, int] = {}  # keyed by id, because two different equations may compare equal
    copies: dict[Buffer, list[Entry]] = {}
    behind: list[Entry] = []
    for entry in entries:
        above = [makers[use] for use in entry.uses if use in makers]
        if above or _is_fetch(entry):
            behind.append(entry)
            depths[id(entry)] = 1 + max((depths[id(maker)] for maker in above), default=0)
            makers.update(dict.fromkeys(entry.births, entry))
            if not any(birth.size for birth in entry.births) and len(entry.uses) == 1:
                copies.setdefault(entry.uses[0], []).append(entry)
    ordered = {id(entry): entry for entry in entries if id(entry) not in depths}
    for entry in sorted(behind, key=lambda entry: -depths[id(entry)]):
        stack = [entry]
        while stack:
            above = [makers[use] for use in stack[-1].uses if use in makers]
            waiting = [maker for maker in above if id(maker) not in ordered]
            if waiting:
                stack += waiting
                continue
            done = stack.pop()
            for each in (done, *(copy for birth in done.births for copy in copies.get(birth, ()))):
                ordered.setdefault(id(each), each)
    return list(ordered.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Lifetimes:
    """One choice of what is fused.

    Attributes:
      fused: Buffer that is fused into its uses -> the buffers that its uses read instead.
      last: Buffer -> position of the last equation that reads it.
    """

    fused: Mapping[Buffer, Sequence[Buffer]]
    last: Mapping[Buffer, int]


def _bytes(end: tuple[int, tuple[Live, ...]]) -> int:
    """Return the bytes of an upper end, which is given as (bytes, values in memory)."""
    return end[0]


def _is_kept(buffer: Buffer, outputs: frozenset[Buffer]) -> bool:
    """Tell whether every compiler keeps a value: an argument, or a result of the program."""
    return buffer.kind not in (TEMPORARY, LOOPS) or buffer in outputs


class _Alive:
    """The buffers that are in memory while the equations run one by one."""

    def __init__(self, way: _Lifetimes, weigh: Callable[[Buffer], int]) -> None:
        self.buffers: dict[Buffer, None] = {}
        self.total = 0
        self._fused = way.fused
        self._weigh = weigh
        self._dying: dict[int, list[Buffer]] = {}
        for buffer, at in way.last.items():
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


def _live(
    present: Iterable[Buffer], inner: Peak, moved: int, kinds: Mapping[Buffer, str]
) -> tuple[Live, ...]:
    """Return the values in memory at one equation, grouped by kind, shape and line."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[int]] = {}
    for buffer in present:
        key = kinds.get(buffer, buffer.kind), buffer.dtype, buffer.shape, buffer.source
        groups.setdefault(key, []).append(buffer.size)
    for each in inner.live:
        key = each.kind, each.dtype, each.shape, each.source
        # The values of a group have one shape and dtype, so all have this size.
        groups.setdefault(key, []).extend([each.size // each.count] * each.count)
    if moved:
        groups.setdefault((TEMPORARY, "", (), ""), []).append(moved)
    live = [
        Live(kind=kind, dtype=dtype, shape=shape, source=source, size=sum(sizes), count=len(sizes))
        for (kind, dtype, shape, source), sizes in groups.items()
        if sum(sizes)
    ]
    return tuple(sorted(live, key=lambda each: -each.size))
