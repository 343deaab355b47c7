"""Tell whether a text ends with a stop sequence, and which last tokens may become part of one."""

from __future__ import annotations

from collections.abc import Sequence


def stopped_by(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest stop sequence at the end of the tokens, or 0."""
    lengths = [
        len(sequence)
        for sequence in stop
        if len(sequence) <= len(tokens) and tuple(tokens[-len(sequence) :]) == tuple(sequence)
    ]
    return max(lengths, default=0)


def may_begin(tokens: Sequence[int], stop: Sequence[Sequence[int]]) -> int:
    """Return how many of the last tokens are the beginning of a stop sequence."""
    most = max((len(sequence) for sequence in stop), default=1) - 1
    for count in range(min(most, len(tokens)), 0, -1):
        end = tuple(tokens[-count:])
        if any(tuple(sequence[:count]) == end for sequence in stop if len(sequence) > count):
            return count
    return 0
