"""Limits on a strategy: size of the file, size of integers, nesting, number of entries.

The limits are checked first, so that later steps can print, compare and traverse every value. Each
limit is far above what a strategy needs, and the error states the limit. A strategy file is
trusted, like a configuration of pytest. So no limit bounds the time that a pattern or the TOML
parser takes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.strategy.origin import KeyPath, KeySources, problem_at, source_of

# Merging and writing are recursive, so this is far below Python's limit of 1,000 nested calls.
DEEPEST = 64
# The largest size of a dim in JAX and XLA. An array with more elements cannot be addressed.
MOST_ELEMENTS = 2**63 - 1
LONGEST_FILE = 1_000_000
LONGEST_PATTERN = 1000
MOST_PROBLEMS = 100
# The largest number of entries of each table whose keys are names that the user chooses.
MOST_ENTRIES = 1000
_TABLES = (
    ("mesh",),
    ("dcn",),
    ("axis_types",),
    ("axes",),
    ("tensors",),
    ("memory", "tensors"),
    ("memory", "saved"),
)


def check_limits(data: Mapping[str, Any], origin: KeySources) -> None:
    """Check data from a file.

    Raises:
      StrategyError: Values exceed limits. The error has each of them, with its line and key path.
    """
    raise_problems(first_problems(_problems(data, origin)))


def first_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first MOST_PROBLEMS problems. If there are more, add a problem that says so."""
    remaining = iter(problems)
    first = list(itertools.islice(remaining, MOST_PROBLEMS))
    if next(remaining, None) is not None:
        what = f"there are more problems than these {MOST_PROBLEMS}"
        first.append(Problem(error=StrategyError, what=what, fix="correct these first"))
    return first


def check_entries(data: Mapping[str, Any], origin: KeySources) -> None:
    """Check how many entries the tables of a strategy have.

    Raises:
      StrategyError: Tables have too many entries. The error has all of these tables.
    """
    problems = []
    for path in _TABLES:
        table: Any = data
        for key in path:
            table = table.get(key) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping | list | tuple) and len(table) > MOST_ENTRIES:
            what = f"there are {len(table)} entries, at most {MOST_ENTRIES} are read"
            problems.append(problem_at(path, origin, what, "keep those that the model needs"))
    raise_problems(problems)


def _problems(data: Mapping[str, Any], origin: KeySources) -> Iterator[Problem]:
    # Use a list instead of recursion, because the depth is not checked yet. The entries are
    # reversed, so that `pop` returns them in the order of the file.
    waiting: list[tuple[KeyPath, Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        entries: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            entries = [*value.items()]
        elif isinstance(value, list):
            entries = [*enumerate(value)]
        what = ""
        if isinstance(value, int) and abs(value) > MOST_ELEMENTS:
            what = f"a number of {value.bit_length()} bits is too large"
            fix = "write a smaller number: at most 2^63 - 1"
        elif isinstance(value, (Mapping, list)) and len(path) >= DEEPEST:
            what = f"tables and lists are nested more than {DEEPEST} deep"
            fix = "flatten the file"
        if what:
            # The path may have many keys, so show the first four.
            shown = ".".join(path[:4]) + ("..." if len(path) > 4 else "")
            place = f"{source_of(path, origin)} {shown}".strip()
            yield Problem(error=StrategyError, what=what, path=place, fix=fix)
        else:
            waiting += reversed([((*path, str(key)), entry) for key, entry in entries])


def has_too_many_elements(shape: Iterable[int]) -> bool:
    """Tell whether an array of this shape has more than MOST_ELEMENTS elements.

    The function stops at the first product that is too large, so that the integers stay small.
    """
    sizes = list(shape)
    products = itertools.accumulate(sizes, operator.mul)
    return 0 not in sizes and any(product > MOST_ELEMENTS for product in products)
