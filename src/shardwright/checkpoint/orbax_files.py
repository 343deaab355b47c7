"""Import orbax, and read the path of a directory, for all code that writes files with orbax."""

from __future__ import annotations

import os
from typing import Any

from shardwright import _jax
from shardwright.errors import ShardingError


def import_orbax(what: str, error: type[ShardingError]) -> Any:
    """Return `orbax.checkpoint`.

    Args:
      what: Subject of the message, such as "saving and restoring caches".
      error: Class of the error.

    Raises:
      ShardingError: orbax is not installed.
    """
    try:
        import orbax.checkpoint as orbax
    except ImportError as err:
        raise error(
            f"{what} needs orbax, which is not installed",
            fix='pip install orbax-checkpoint, or python -m pip install -e ".[checkpoint]" in a '
            "clone of shardwright",
        ) from err
    return orbax


def check_outside_of_trace(what: str, error: type[ShardingError]) -> None:
    """Refuse a call inside a trace, such as "a cache can be saved"."""
    if _jax.in_trace():
        raise error(
            f"{what} only outside of jit",
            fix="return it from the compiled function, or call this before that function",
        )


def directory(path: str | os.PathLike[str], error: type[ShardingError], name: str = "path") -> str:
    """Return the absolute path of a directory as text. The address of a bucket does not change.

    Raises:
      ShardingError: The value is not a path, or there is a file at this path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise error(
            f"{name} is {type(path).__name__}", path=name, fix="pass the path of a directory"
        )
    text = os.fspath(path)
    if "://" in text:
        return text
    text = os.path.abspath(text)
    if os.path.exists(text) and not os.path.isdir(text):
        raise error(f"{text} is a file", path=name, fix="pass the path of a directory")
    return text
