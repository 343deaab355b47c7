"""Check the arguments of an engine, before anything is put on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardwright.errors import Problem, ServingError, raise_problems
from shardwright.manager.manager import PartitionManager
from shardwright.serving.steps import CacheShape
from shardwright.vocabulary.integers import integer_problem


def check_kinds(given: Mapping[str, Any]) -> None:
    """Check the types of the arguments, which are given by name.

    Raises:
      ServingError: All problems at once.
    """
    model, cache_options = given["model"], given["cache_options"]
    sizes = [field.name for field in dataclasses.fields(CacheShape) if field.name != "layers"]
    is_mapping = isinstance(cache_options, Mapping)
    reserved = [
        name
        for name in ("batch", "capacity", "mode", *sizes)
        if is_mapping and name in cache_options
    ]
    checks = (
        (
            "model",
            model,
            callable(model),
            "pass a function of (params, tokens, caches, valid); see serving.Model",
        ),
        (
            "model",
            model,
            _is_hashable(model),
            "pass a hashable model (a key of jit's cache): a function, or a frozen dataclass",
        ),
        (
            "shape",
            given["shape"],
            isinstance(given["shape"], CacheShape),
            "pass serving.CacheShape(layers=..., kv_heads=..., head_dim=...)",
        ),
        ("cache_options", cache_options, is_mapping, 'pass a mapping, such as {"page_size": 16}'),
        (
            "cache_options",
            reserved,
            not reserved,
            "leave them out: slots, capacity and shape set them, and the engine sets the modes",
        ),
        (
            "clock",
            given["clock"],
            callable(given["clock"]),
            "pass a function that returns seconds, such as time.perf_counter",
        ),
        ("ahead", given["ahead"], isinstance(given["ahead"], bool), "pass True or False"),
        *(
            (name, given[name], _is_manager(given[name]), "pass a PartitionManager")
            for name in ("manager", "prefill_manager")
        ),
    )
    raise_problems(
        [
            Problem(error=ServingError, what=f"{name}={value!r}", path=name, fix=fix)
            for name, value, is_valid, fix in checks
            if not is_valid
        ]
    )


def _is_manager(manager: Any) -> bool:
    return manager is None or isinstance(manager, PartitionManager)


def deleted_weights() -> ServingError:
    """Return the error to raise if arrays of the weights were deleted."""
    return ServingError(
        "arrays of the weights were deleted, by delete() or because they were donated",
        path="params",
        fix="keep the arrays while the engine is in use: donate a copy to the training step, or "
        "create another engine with the new weights",
    )


def _is_hashable(model: Any) -> bool:
    try:
        hash(model)
    except TypeError:
        return False
    return True


def read_counts(
    counts: Mapping[str, Any],
    *,
    manager: PartitionManager | None,
    prefill_manager: PartitionManager | None,
) -> dict[str, int]:
    """Return sizes by name as Python ints.

    If prefill has a manager, decode must have a manager too.

    Raises:
      ServingError: All problems at once.
    """
    problems = [
        problem
        for name, count in counts.items()
        if (problem := integer_problem(name, count, error=ServingError))
    ]
    if prefill_manager is not None and manager is None:
        what = "prefill has a manager, but decode has none"
        problems.append(
            Problem(error=ServingError, what=what, path="manager", fix="pass manager= too")
        )
    raise_problems(problems)
    return {name: int(count) for name, count in counts.items()}
