"""Stop sequences: what ends a text, what is held back."""

from __future__ import annotations

import pytest

from shardwright.serving.scheduler import may_begin, stopped_by

STOP = ((5,), (1, 2, 3), (2, 3), (1, 2, 1, 2, 4))


@pytest.mark.parametrize(
    ("tokens", "length", "held"),
    [
        ((), 0, 0),
        ((7,), 0, 0),
        ((7, 5), 1, 0),
        ((7, 1), 0, 1),
        ((1, 2), 0, 2),
        ((1, 2, 3), 3, 0),
        ((7, 2, 3), 2, 0),
        ((1, 2, 1), 0, 3),
        ((1, 2, 1, 2), 0, 4),
        ((9, 2, 1, 2, 1, 2), 0, 4),
        ((1, 2, 1, 2, 4), 5, 0),
        ((2, 7), 0, 0),
    ],
)
def test_longest_stop_sequence_counts(tokens: tuple[int, ...], length: int, held: int) -> None:
    assert stopped_by(tokens, STOP) == length
    assert may_begin(tokens, STOP) == held


def test_nothing_is_withheld_without_stops() -> None:
    assert stopped_by((1, 2), ()) == 0
    assert may_begin((1, 2), ()) == 0
