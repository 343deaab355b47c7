"""Union and difference of intervals of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order and without overlaps.

    >>> merged([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > start:
            union.append((start, end))
    return union


def outside(intervals: Iterable[Interval], covers: Sequence[Interval]) -> list[Interval]:
    """Return the union of intervals without the time in `covers`.

    Args:
      intervals: Intervals in any order.
      covers: Result of `merged`.

    >>> outside([(0, 10)], [(2, 3), (5, 12)])
    [(0, 2), (3, 5)]
    """
    rest: list[Interval] = []
    first = 0
    for start, end in merged(intervals):
        while first < len(covers) and covers[first][1] <= start:
            first += 1
        # A cover may also reach into the next interval, so do not move `first` here.
        free, at = start, first
        while at < len(covers) and covers[at][0] < end:
            rest.append((free, covers[at][0]))
            free = covers[at][1]
            at += 1
        rest.append((free, end))
    return [(start, end) for start, end in rest if start < end]


def total(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - start for start, end in intervals)
