"""Exit codes: 2 if the arguments are wrong or an input cannot be read, 1 if a problem was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from shardwright.errors import (
    MeshMismatchError,
    MeshSpecError,
    ShardingError,
    StrategyError,
    in_file,
)

OK: Final = 0
FOUND: Final = 1
USAGE: Final = 2
DEFECT: Final = 70


class FoundError(Exception):
    """An input could be read, but has a problem."""

    def __init__(self, error: ShardingError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def finding_problems(file: str = "") -> Iterator[None]:
    """Turn errors about a program or a tree that was read, such as an indivisible size, into
    `FoundError`.

    Args:
      file: The file in which the user changes rules, for the text of fixes. Defaults to no file.
    """
    try:
        yield
    except ShardingError as error:
        if code_of(error) == USAGE:
            raise
        problems = [in_file(problem, file) if file else problem for problem in error.problems]
        raise FoundError(type(error)(problems=problems)) from error


def code_of(error: ShardingError) -> int:
    """Return the exit code of an error about a program under a strategy."""
    # These errors mean that the arguments are wrong: the options, the file or the mesh.
    is_question = isinstance(error, (StrategyError, MeshSpecError, MeshMismatchError))
    return USAGE if is_question else FOUND
