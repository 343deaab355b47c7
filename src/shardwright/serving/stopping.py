"""Stop sequences: whether a text ends in one, and how much of its end could still become one."""

from __future__ import annotations

from collections.abc import Sequence


def stopped_by(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest stop sequence that the tokens end in, 0 if they end in none."""
    return max(
        (
            len(one)
            for one in stop
            if len(one) <= len(tokens) and tuple(tokens[-len(one) :]) == tuple(one)
        ),
        default=0,
    )


def may_begin(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int:
    """Return how many tokens at the end may yet become part of a stop sequence: the longest end that one of them begins with."""
    most = max((len(one) for one in stop), default=1) - 1
    for count in range(min(most, len(tokens)), 0, -1):
        end = tuple(tokens[-count:])
        if any(tuple(one[:count]) == end for one in stop if len(one) > count):
            return count
    return 0
