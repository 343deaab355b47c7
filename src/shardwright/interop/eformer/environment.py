"""The two environment variables of eformer, read on each use, never at import."""

from __future__ import annotations

import os

from shardwright.errors import StrategyError

_TRUE = ("true", "yes", "1", "on")


def log_sharding_move() -> bool:
    """Tell whether `LOG_SHARDING_MOVE` asks for a warning when a policy changes a sharding."""
    return os.environ.get("LOG_SHARDING_MOVE", "false").lower() in _TRUE


def min_sharding_size() -> int:
    """Return the number of elements in the environment variable `MIN_SHARDING_SIZE`.

    `match_partition_rules(min_size=None)` replicates smaller arrays.

    Raises:
      StrategyError: The variable is not a number.
    """
    text = os.environ.get("MIN_SHARDING_SIZE", "16384")
    try:
        return int(text)
    except ValueError as error:
        raise StrategyError(
            f"the environment variable MIN_SHARDING_SIZE is {text!r}",
            fix="set it to a number of elements",
        ) from error
