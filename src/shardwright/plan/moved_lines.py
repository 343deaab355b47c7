"""Find the lines of a model that moved between two plans, by what happens on each line."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping

# Line of a model, `model.py:12` -> what a plan says about this line.
Lines = Mapping[str, frozenset[Hashable]]


def moved_lines(before: Lines, after: Lines) -> dict[str, str]:
    """Return the new place of each line that moved within its file.

    Two lines are the same line if a plan says the same about both. Of equal lines, the order within
    the file decides.

    Args:
      before: The lines of the left plan.
      after: The lines of the right plan.

    >>> moved_lines({"a.py:3": frozenset({"x"})}, {"a.py:4": frozenset({"x"})})
    {'a.py:3': 'a.py:4'}
    """
    moved: dict[str, str] = {}
    for file in dict.fromkeys(source.rpartition(":")[0] for source in before):
        left, right = (
            [each for each in _of(file, lines) if before.get(each) != after.get(each)]
            for lines in (before, after)
        )
        matcher = difflib.SequenceMatcher(
            None, [before[each] for each in left], [after[each] for each in right], autojunk=False
        )
        for start, other, size in matcher.get_matching_blocks():
            moved.update(zip(left[start : start + size], right[other : other + size], strict=True))
    return moved


def _of(file: str, lines: Lines) -> list[str]:
    """Return the lines of a file in the order of their numbers."""
    numbered = [source for source in lines if source.rpartition(":")[0] == file]
    return sorted(numbered, key=_number)


def _number(source: str) -> int:
    number = source.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0
