"""Runtime modes, as exact strings, so that static arguments and JSON files can contain them."""

from __future__ import annotations

from typing import Literal, TypeGuard

from shardwright.errors import StrategyError, did_you_mean

MODE_TRAIN = "__train__"
MODE_PREFILL = "__prefill__"
MODE_DECODE = "__autoregressive__"
MODE_INSERT = "__insert__"

MODES: tuple[str, ...] = (MODE_TRAIN, MODE_PREFILL, MODE_DECODE, MODE_INSERT)
GENERATION_MODES: frozenset[str] = frozenset({MODE_DECODE, MODE_INSERT})
# The name `RUNTIME_MODE_TYPES` and the texts of the modes are those of `eformer.common_types`.
RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]

_SHORT = {
    "train": MODE_TRAIN,
    "prefill": MODE_PREFILL,
    "decode": MODE_DECODE,
    "insert": MODE_INSERT,
}
_MODE = {**_SHORT, **{mode: mode for mode in MODES}}
_NAME = {mode: short for short, mode in _SHORT.items()}
# The short names of the modes, in the order of MODES.
MODE_NAMES: tuple[str, ...] = tuple(_SHORT)


def parse_mode(mode: str) -> str:
    """Return the canonical mode of `"decode"` or `"__autoregressive__"`.

    Raises:
      StrategyError: There is no such mode.

    >>> parse_mode("decode")
    '__autoregressive__'
    """
    if not is_mode(mode):
        hint = did_you_mean(str(mode).lower(), _MODE)
        raise StrategyError(
            f"unknown mode {mode!r}", fix=f"{hint} modes are {', '.join(_SHORT)}".strip()
        )
    return _MODE[mode]


def is_mode(mode: object) -> TypeGuard[str]:
    """Tell whether a value names a mode in one of its two spellings."""
    return isinstance(mode, str) and mode in _MODE


def mode_name(mode: str) -> str:
    """Return the short name of a mode: `"decode"` for `MODE_DECODE`."""
    return _NAME[parse_mode(mode)]
