"""Patterns of paths: regular expressions of Python's `re`, compiled once."""

from __future__ import annotations

import re

from shardwright.errors import StrategyError


def compile_pattern(text: str, *, where: str = "") -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
      StrategyError: The text is not a regular expression.
    """
    try:
        return re.compile(text)
    # `re` raises TypeError for what is not text, OverflowError for a repetition such as
    # a{99999999999}, and RecursionError for groups that are nested thousands deep.
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        at = " " * (getattr(error, "pos", 0) or 0)
        what = f"{where}not a regular expression: {getattr(error, 'msg', error)}"
        fix = "write one as text; see the documentation of Python's re"
        raise StrategyError(what, snippet=f"{text}\n{at}^", fix=fix) from error
