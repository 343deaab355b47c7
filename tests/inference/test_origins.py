"""Which of two summands is computed from the other, also where its shortest way is short."""

from __future__ import annotations

from shardwright.inference.facts import is_residual, new_origin


def test_a_value_is_deeper_than_each_of_its_parents() -> None:
    first = new_origin([])
    second = new_origin([first])
    third = new_origin([second])
    joined = new_origin([first, third])
    assert joined.depth == third.depth + 1
    assert is_residual(third, joined)
    assert is_residual(joined, first)
    assert not is_residual(third, new_origin([first]))
    assert not is_residual(joined, joined)
