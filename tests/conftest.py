"""Let a marker name the cases of a test that do not have it; bound what a worker remembers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

# Bytes of memory after which a worker forgets its compiled programs.
_MOST_MEMORY = 1_200_000_000


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[Any]:
    """Take `full(but=[...])` and `product(but=[...])` from the cases that they name.

    Raises:
      Collector.CollectError: No case of the test has that name.
    """
    made = yield
    if isinstance(made, list):
        for marker in ("full", "product"):
            _spare(marker, made)
    return made


def _spare(marker: str, items: list[pytest.Function]) -> None:
    names = {name for item in items for mark in _named(item, marker) for name in mark.kwargs["but"]}
    cases = {item.callspec.id: item for item in items if hasattr(item, "callspec")}
    if unknown := names - set(cases):
        raise pytest.Collector.CollectError(
            f"{items[0].originalname}: {marker}(but=...) names {sorted(unknown)}, but its cases "
            f"are {list(cases)}"
        )
    for name in names:
        marks = cases[name].own_markers
        marks[:] = [mark for mark in marks if mark not in _named(cases[name], marker)]


def _named(item: pytest.Function, marker: str) -> list[pytest.Mark]:
    return [mark for mark in item.own_markers if mark.name == marker and "but" in mark.kwargs]


def pytest_collection_finish() -> None:
    """Run the garbage collector rarely, and not over the objects that collection creates.

    JAX adds work to each run of the collector. Thousands of runs take a twentieth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
