"""What no file needs: numbers that no array has, tables within tables without end, text that no terminal can show.

Checked before anything else looks at a file, so that whatever comes later may print, compare and walk what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.strategy.origin import KeyPath, Origin, source_of

DEEPEST = 64
# What a dim can be at most, in JAX and in XLA; an array of more elements than this has no address.
MOST_ELEMENTS = 2**63 - 1


def check_limits(data: Mapping[str, Any], origin: Origin) -> None:
    """Check data from a file.

    Raises:
      StrategyError: every value that is beyond a limit, each with its line and key path.
    """
    raise_problems(list(_problems(data, origin)))


def _problems(data: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    waiting: list[tuple[KeyPath, Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        what, fix = _fault(path, value)
        if what:
            # A path of a thousand keys, or of keys that cannot be shown, is no help.
            shown = ".".join(key for key in path[:4] if is_text(key)) + ("..." if len(path) > 4 else "")
            yield Problem(error=StrategyError, what=what, path=f"{source_of(path, origin)} {shown}".strip(), fix=fix)
        elif isinstance(value, Mapping):
            waiting += reversed([((*path, str(key)), entry) for key, entry in value.items()])
        elif isinstance(value, list):
            waiting += reversed([((*path, str(at)), entry) for at, entry in enumerate(value)])


def _fault(path: KeyPath, value: Any) -> tuple[str, str]:
    if path and not is_text(path[-1]):
        return f"the key {path[-1]!r} has a character that is no text (half of a surrogate pair)", "use letters, digits and _"
    if isinstance(value, str) and not is_text(value):
        return f"{value!r:.80} has a character that is no text (half of a surrogate pair)", "use letters, digits and _"
    if isinstance(value, int) and abs(value) > MOST_ELEMENTS:
        return f"a number of {value.bit_length()} bits is no size", "write a smaller number: at most 2^63 - 1"
    if isinstance(value, (Mapping, list)) and len(path) >= DEEPEST:
        return f"tables and lists are nested more than {DEEPEST} deep", "flatten the file"
    return "", ""


def is_text(text: str) -> bool:
    """Tell whether text can be written as UTF-8: JSON's escapes and undecodable arguments may hold halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
