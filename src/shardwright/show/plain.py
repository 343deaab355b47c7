"""Return values as plain data, which JSON can represent."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from shardwright.vocabulary.shown import data_of, function_for


def plain(value: Any) -> Any:
    """Return a value as plain data.

    Tuples become lists, and members of enumerations become text. A dataclass with `from_json`
    becomes the result of its `to_json`. Any other dataclass becomes the result of its function in
    this package or, if it has no function, a dict of its fields.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # `from_json` of the class reads this format, so the class itself writes it.
        if hasattr(type(value), "from_json"):
            return value.to_json()  # type: ignore[attr-defined]
        own = function_for(data_of, value)
        return fields_of(value) if own is None else own(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, enum.StrEnum) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Return all fields of a dataclass as plain data."""
    return named(value, *(field.name for field in dataclasses.fields(value)))


def named(value: Any, *names: str) -> dict[str, Any]:
    """Return some attributes of a value as plain data."""
    return {name: plain(getattr(value, name)) for name in names}
