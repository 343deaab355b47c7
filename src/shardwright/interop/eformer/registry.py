"""Axes that are registered for the whole process. A manager takes a snapshot when it is built."""

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
      name: The name as registered, not its canonical form.
      axis_rule: An attribute of `PartitionAxis`, an axis (of which this one is an alias), a mesh
        axis, a tuple of those, or None to replicate.
      generation_axis_rule: The rule for decode and insert. `NOT_GIVEN` derives it from `axis_rule`.
    """

    name: str
    axis_rule: Any
    generation_axis_rule: Any = NOT_GIVEN


Registered = tuple[RegisteredAxis, ...]


class _Process:
    """The registered axes by canonical name. The dict is replaced, never changed in place."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.axes: dict[str, RegisteredAxis] = {}


_PROCESS = _Process()


def registered_axes() -> Registered:
    """Return the axes that are registered now, as a hashable snapshot."""
    return tuple(_PROCESS.axes.values())


def add(axis: RegisteredAxis, *, is_known: bool, override: bool) -> None:
    """Register an axis. `is_known` says whether the vocabulary already has the name.

    Raises:
      StrategyError: The name exists, and `override` is False.
    """
    key = canonical_axis(axis.name)
    with _PROCESS.lock:
        if not override and (is_known or key in _PROCESS.axes):
            raise StrategyError(
                f"Semantic axis {axis.name!r} already exists",
                fix="pass override=True to replace its rule",
            )
        _PROCESS.axes = {**_PROCESS.axes, key: axis}


def remove(name: str, *, missing_ok: bool) -> None:
    """Unregister an axis.

    Raises:
      NotRegisteredError: The axis is not registered, and `missing_ok` is False.
    """
    key = canonical_axis(name)
    with _PROCESS.lock:
        if key not in _PROCESS.axes and not missing_ok:
            raise NotRegisteredError(
                f"Semantic axis {name!r} is not registered", fix="pass missing_ok=True"
            )
        _PROCESS.axes = {other: axis for other, axis in _PROCESS.axes.items() if other != key}


def clear() -> None:
    """Unregister all axes."""
    with _PROCESS.lock:
        _PROCESS.axes = {}
