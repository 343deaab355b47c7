"""Read sizes and counts that callers pass: integers of Python and NumPy, but not bools.

Every package reads its integers here, so that all packages accept the same values and raise the
same errors.
"""

from __future__ import annotations

import math
import numbers
import textwrap
from typing import Any

import numpy as np

from shardwright.errors import ShardingError


def as_integer(value: Any) -> int | None:
    """Return an integer as a Python `int`, or None if the value is not an integer.

    A bool is not accepted: `layers=True` is a mistake. An array is not accepted either. Sizes are
    static, and inside `jit` an array has no value.

    >>> as_integer(np.int64(8)), as_integer(8.0), as_integer(True)
    (8, None, None)
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return int(value) if is_integer else None


def read_integer(
    name: str,
    value: Any,
    *,
    error: type[ShardingError],
    least: int = 1,
    most: int | None = None,
    fix: str = "",
) -> int:
    """Return the integer argument `name` as a Python `int`.

    Args:
      name: Name of the argument, for the message.
      value: The value that the caller passed.
      error: Class of the error.
      least: Smallest allowed value.
      most: Largest allowed value. Defaults to no limit.
      fix: Text after `fix`. Defaults to the nearest allowed value, as in `pass batch=2`.

    Raises:
      ShardingError: The value is not an integer, or is out of range. The class is `error`.

    >>> read_integer("batch", np.int32(2), error=ShardingError)
    2
    """
    for what, wanted in integer_faults(name, value, least=least, most=most, fix=fix):
        raise error(what, fix=wanted)
    return int(value)


def integer_faults(
    name: str, value: Any, *, least: int, most: int | None, fix: str
) -> list[tuple[str, str]]:
    """Return the faults of the integer argument `name`, each with its fix, or []."""
    integer = as_integer(value)
    if integer is not None and least <= integer and (most is None or integer <= most):
        return []
    kinds = {1: "a positive integer", 0: "a non-negative integer"}
    kind = kinds.get(least, f"an integer of at least {least}")
    if most is not None:
        kind = f"an integer from {least} to {most}"
    what = f"{name} must be {kind}, got {quoted(value)}"
    return [(what, fix or f"pass {name}={_nearest(value, least, most)}")]


def quoted(value: Any) -> str:
    """Return a value as a message quotes it, in at most 80 characters."""
    text = repr(value)
    shown = textwrap.shorten(text, 80)
    # `shorten` cuts between words. If the first word is too long, nothing would remain.
    return f"{text[:75]}[...]" if shown == "[...]" else shown


def with_article(cls: type) -> str:
    """Return `an int`, `a str` or `None`."""
    name = cls.__name__
    if cls is type(None):
        return "None"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _nearest(value: Any, least: int, most: int | None) -> int:
    """Return an allowed integer near a number, or near the number in a text: 2 for 2.5 and "2".

    For any other value return `least`.
    """
    is_number = isinstance(value, numbers.Real) and math.isfinite(value)
    # `int` raises an error for text of more than 4,300 digits.
    is_digits = isinstance(value, str) and value.isdecimal() and len(value) < 20
    integer = int(value) if is_number or is_digits else least
    return max(least, integer if most is None else min(integer, most))
