"""What an engine is made of, checked before anything is put on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardwright.errors import Problem, ServingError, raise_problems
from shardwright.manager.manager import PartitionManager
from shardwright.serving.steps import CacheShape
from shardwright.vocabulary.integers import integer_problem


def check_kinds(
    *, model: Any, shape: Any, cache_options: Any, clock: Any, manager: Any, prefill_manager: Any
) -> None:
    """Check that what an engine is made of is of the right kinds.

    Raises:
      ServingError: all that is wrong, at once.
    """
    sizes = [field.name for field in dataclasses.fields(CacheShape) if field.name != "layers"]
    own = [
        name
        for name in ("batch", "capacity", "mode", *sizes)
        if isinstance(cache_options, Mapping) and name in cache_options
    ]
    checks = (
        (
            "model",
            callable(model),
            model,
            "pass a function of (params, tokens, caches, valid); see serving.Model",
        ),
        (
            "model",
            _hashable(model),
            model,
            "the model must be hashable, as compiled steps are found by it: a function or a frozen dataclass",
        ),
        (
            "shape",
            isinstance(shape, CacheShape),
            shape,
            "pass serving.CacheShape(layers=..., kv_heads=..., head_dim=...)",
        ),
        (
            "cache_options",
            isinstance(cache_options, Mapping),
            cache_options,
            'pass a mapping, such as {"page_size": 16}',
        ),
        (
            "cache_options",
            not own,
            own,
            "they are said by slots, capacity and shape, and each cache's mode by the engine: leave them out",
        ),
        (
            "clock",
            callable(clock),
            clock,
            "pass a function that returns seconds, such as time.perf_counter",
        ),
        (
            "manager",
            manager is None or isinstance(manager, PartitionManager),
            manager,
            "pass a PartitionManager",
        ),
        (
            "prefill_manager",
            prefill_manager is None or isinstance(prefill_manager, PartitionManager),
            prefill_manager,
            "likewise",
        ),
    )
    problems = [
        Problem(error=ServingError, what=f"{name}={given!r}", path=name, fix=fix)
        for name, fits, given, fix in checks
        if not fits
    ]
    raise_problems(problems)


def deleted_weights() -> ServingError:
    """Return the error of weights whose arrays are gone."""
    fix = "keep the arrays while the engine is in use: donate a copy to the training step, or make another engine with the new weights"
    return ServingError(
        "arrays of the weights were deleted, by delete() or by a function that they were donated to",
        path="params",
        fix=fix,
    )


def _hashable(model: Any) -> bool:
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
    """Return sizes by name as Python ints; check that prefill has no mesh where the slots have none.

    Raises:
      ServingError: all that is wrong, at once.
    """
    problems = [
        problem
        for name, count in counts.items()
        if (problem := integer_problem(name, count, error=ServingError))
    ]
    if prefill_manager is not None and manager is None:
        what = "prefill has a manager, and the slots have none"
        problems.append(
            Problem(error=ServingError, what=what, path="manager", fix="pass manager= too")
        )
    raise_problems(problems)
    return {name: int(count) for name, count in counts.items()}
