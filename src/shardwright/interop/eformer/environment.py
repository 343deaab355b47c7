"""The two environment variables of eformer, read when something asks, never at import."""

from __future__ import annotations

import os

from shardwright.errors import StrategyError

_TRUE = ("true", "yes", "1", "on")


def log_sharding_move() -> bool:
    """Whether a permissive policy warns about each array that it changes something for: `LOG_SHARDING_MOVE`."""
    return os.environ.get("LOG_SHARDING_MOVE", "false").lower() in _TRUE


def min_sharding_size() -> int:
    """Elements below which `match_partition_rules(min_size=None)` replicates an array: `MIN_SHARDING_SIZE`.

    Raises:
      StrategyError: it is no number.
    """
    text = os.environ.get("MIN_SHARDING_SIZE", "16384")
    try:
        return int(text)
    except ValueError as error:
        raise StrategyError(
            f"the environment variable MIN_SHARDING_SIZE is {text!r}",
            fix="set it to a number of elements",
        ) from error
