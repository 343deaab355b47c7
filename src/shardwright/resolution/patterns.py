"""Patterns of paths: regular expressions of Python's `re`, compiled once."""

from __future__ import annotations

import re

from shardwright.errors import StrategyError


def compile_pattern(text: str, *, where: str = "") -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
      StrategyError: The text is not a regular expression.
    """
    if not isinstance(text, str):
        raise StrategyError(
            f"{where}{text!r} is not a pattern", fix="write a regular expression as text"
        )
    try:
        return re.compile(text)
    # `re` raises OverflowError for a repetition such as a{99999999999}, and RecursionError for
    # groups that are nested thousands deep.
    except (re.error, OverflowError, RecursionError) as error:
        message, at = (
            (error.msg, error.pos or 0) if isinstance(error, re.error) else (str(error), 0)
        )
        raise StrategyError(
            f"{where}not a regular expression: {message}",
            snippet=f"{text}\n{' ' * at}^",
            fix="see the documentation of Python's re",
        ) from error
