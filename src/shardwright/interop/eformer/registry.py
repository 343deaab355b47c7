"""The axes that ported code registers for the whole process. They exist only here: a manager takes a snapshot when it is built."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from shardwright.errors import StrategyError
from shardwright.interop.eformer.errors import NotRegisteredError
from shardwright.vocabulary.axes import NOT_GIVEN, canonical_axis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAxis:
    """One registered axis.

    Attributes:
      name: as it was given.
      axis_rule: an attribute of `PartitionAxis`, an axis (an alias of it), a mesh axis, a tuple of those, or None: replicated.
      generation_axis_rule: likewise for decode and insert; `NOT_GIVEN` inherits.
    """

    name: str
    axis_rule: Any
    generation_axis_rule: Any = NOT_GIVEN


Registered = tuple[RegisteredAxis, ...]


class _Process:
    """What this process has registered, by canonical name; replaced as a whole, never changed in place."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.axes: dict[str, RegisteredAxis] = {}


_PROCESS = _Process()


def registered_axes() -> Registered:
    """Return what is registered now; hashable, and not affected by what is registered later."""
    return tuple(_PROCESS.axes.values())


def add(axis: RegisteredAxis, *, taken: bool, override: bool) -> None:
    """Register an axis; `taken` says whether the vocabulary has it already.

    Raises:
      StrategyError: the name exists, and `override` is not given.
    """
    key = canonical_axis(axis.name)
    with _PROCESS.lock:
        if not override and (taken or key in _PROCESS.axes):
            raise StrategyError(
                f"Semantic axis {axis.name!r} already exists",
                fix="pass override=True to replace its rule",
            )
        _PROCESS.axes = {**_PROCESS.axes, key: axis}


def remove(name: str, *, missing_ok: bool) -> None:
    """Take an axis back.

    Raises:
      NotRegisteredError: it is not registered, and `missing_ok` is False.
    """
    key = canonical_axis(name)
    with _PROCESS.lock:
        if key not in _PROCESS.axes and not missing_ok:
            raise NotRegisteredError(
                f"Semantic axis {name!r} is not registered", fix="pass missing_ok=True"
            )
        _PROCESS.axes = {other: axis for other, axis in _PROCESS.axes.items() if other != key}


def clear() -> None:
    """Take all axes back."""
    with _PROCESS.lock:
        _PROCESS.axes = {}
