"""Patterns of paths: regular expressions of Python's `re`, compiled once."""

from __future__ import annotations

import re

from shardwright.errors import StrategyError
from shardwright.vocabulary.integers import quoted


def compile_pattern(text: str, *, where: str = "") -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
      StrategyError: The text is not a regular expression.
    """
    # Rules are compared and hashed by their text, and `re.compile` accepts bytes and patterns too.
    if not isinstance(text, str):
        what = f"{where}{quoted(text)} is not text"
        raise StrategyError(what, fix="write a regular expression as text")
    try:
        return re.compile(text)
    # `re` raises OverflowError for a repetition such as a{99999999999}, and RecursionError for
    # groups that are nested thousands deep.
    except (re.error, OverflowError, RecursionError) as error:
        at = " " * (getattr(error, "pos", 0) or 0)
        what = f"{where}not a regular expression: {getattr(error, 'msg', error)}"
        fix = "see the documentation of Python's re"
        raise StrategyError(what, snippet=f"{text}\n{at}^", fix=fix) from error
