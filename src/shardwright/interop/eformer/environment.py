"""Environment variables. None is read at import.

The two of eformer are read on each use. That of the default policy is read once, because a policy
that changed would not reach programs that are compiled already.
"""

from __future__ import annotations

import functools
import os

from shardwright.errors import StrategyError
from shardwright.resolution.rules import POLICY_PRESETS

POLICY_VARIABLE = "SHARDWRIGHT_EFORMER_POLICY"
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


@functools.cache
def default_policy() -> str:
    """Return the name of the policy of managers and calls that state none, or an empty text.

    Raises:
      StrategyError: The environment variable names no preset.
    """
    name = os.environ.get(POLICY_VARIABLE, "").strip().lower()
    if name and name not in POLICY_PRESETS:
        fix = f"set it to one of {', '.join(POLICY_PRESETS)}, or unset it"
        raise StrategyError(f"the environment variable {POLICY_VARIABLE} is {name!r}", fix=fix)
    return name
