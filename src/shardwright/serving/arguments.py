"""Read the arguments of an engine, before anything is put on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from shardwright.errors import ServingError
from shardwright.manager.manager import PartitionManager
from shardwright.serving.steps import CacheShape
from shardwright.vocabulary.read import instance, integer, passes, read_all, read_value, refuse


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


_COUNT: Final = integer()
_MANAGER: Final = instance(PartitionManager, type(None), fix="pass a PartitionManager")
_KINDS: Final = {
    "model": passes(
        lambda value: callable(value) and _is_hashable(value),
        "is not a hashable function",
        fix="pass a hashable function of (params, tokens, caches, valid), or a frozen dataclass "
        "with such a `__call__`: it is a key of jit's cache; see serving.Model",
    ),
    "shape": instance(
        CacheShape, fix="pass serving.CacheShape(layers=..., kv_heads=..., head_dim=...)"
    ),
    "cache_options": instance(Mapping, fix='pass a mapping, such as {"page_size": 16}'),
    "clock": passes(
        callable,
        "is not a function",
        fix="pass a function that returns seconds, such as time.perf_counter",
    ),
    "ahead": instance(bool),
    "manager": _MANAGER,
    "prefill_manager": _MANAGER,
    **dict.fromkeys(("slots", "prefill_rows", "prefill_chunk", "decode_steps", "queue"), _COUNT),
}
# Options of a cache that the engine sets itself.
_RESERVED: Final = {"batch", "capacity", "mode"} | {
    field.name for field in dataclasses.fields(CacheShape) if field.name != "layers"
}


def read_arguments(**given: Any) -> dict[str, Any]:
    """Return the arguments by name, with counts as Python ints.

    Raises:
      ServingError: All problems of single arguments at once; if there are none, all problems
        between arguments.
    """
    values = read_all([(name, given[name], _KINDS[name]) for name in given], error=ServingError)
    read = dict(zip(given, values, strict=True))
    read_value("layers", read["shape"].layers, _COUNT, error=ServingError)
    reserved = [name for name in read["cache_options"] if name in _RESERVED]
    refuse(
        ServingError,
        (
            reserved,
            "cache_options",
            f"cache_options={reserved}",
            "leave them out: slots, capacity and shape set them, and the engine sets the modes",
        ),
        (
            read["prefill_manager"] is not None and read["manager"] is None,
            "manager",
            "prefill has a manager, but decode has none",
            "pass manager= too",
        ),
    )
    return read


def deleted_weights() -> ServingError:
    """Return the error to raise if arrays of the weights were deleted."""
    return ServingError(
        "arrays of the weights were deleted, by delete() or because they were donated",
        path="params",
        fix="keep the arrays while the engine is in use: donate a copy to the training step, or "
        "create another engine with the new weights",
    )
