"""Read text and JSON files that other programs write, up to a maximum size."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Final

from shardwright.errors import ShardingError, StrategyError

# The weight index of DeepSeek-V3 lists 91,000 tensors in 9 million characters.
LONGEST_JSON: Final = 100_000_000
_PIECE: Final = 100_000


def read_text(
    path: Path, *, most: int, error: type[ShardingError] = StrategyError, fix: str = ""
) -> str:
    """Return the text of a file, without a byte order mark.

    Args:
      path: The file.
      most: Largest number of characters that are read.
      error: The class to raise.
      fix: How to fix a file that cannot be opened.

    Raises:
      ShardingError: The file cannot be read, is not UTF-8, or is too long.
    """
    try:
        # Read in pieces, because `read(most)` allocates memory for `most` characters, even if the
        # file is short.
        with path.open(encoding="utf-8-sig") as file:
            # Read one piece more than `most` needs, to notice a file that is too long.
            pieces = itertools.islice(iter(lambda: file.read(_PIECE), ""), most // _PIECE + 1)
            text = "".join(pieces)
    except OSError as failure:
        raise cannot("read", path, failure, error=error, fix=fix) from failure
    except UnicodeDecodeError as failure:
        what = f"{path.name} is not UTF-8: {failure.reason} at byte {failure.start}"
        raise error(what, fix="save the file as UTF-8") from failure
    if len(text) > most:
        what = f"{path.name} has more than {most:,} characters, which is too long to read"
        raise error(what, fix="keep only the part that is needed")
    return text


def read_json(path: Path, *, error: type[ShardingError] = StrategyError, fix: str = "") -> Any:
    """Return the value of a JSON file.

    Args:
      path: The file.
      error: The class to raise.
      fix: How to fix a file that cannot be read or is not JSON.

    Raises:
      ShardingError: The file cannot be read, is too long, or is not JSON.
    """
    text = read_text(path, most=LONGEST_JSON, error=error, fix=fix)
    try:
        return json.loads(text)
    # Python also refuses integers of more than 4300 digits, and text that is nested too deeply.
    except (ValueError, RecursionError) as failure:
        what = f"{path.name} is not JSON: {str(failure).partition(';')[0]}"
        raise error(what, fix=fix or "repair the file") from failure


def cannot(
    verb: str,
    path: Path | str,
    failure: OSError,
    *,
    error: type[ShardingError] = StrategyError,
    fix: str = "",
) -> ShardingError:
    """Return the error for a file that the system refuses to read, write or create."""
    what = f"cannot {verb} {str(path)!r}: {(failure.strerror or str(failure)).lower()}"
    return error(what, fix=fix or "check the path, its folder and its permissions")
