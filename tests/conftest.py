"""Choose the cases of wide sweeps that every run includes."""

from __future__ import annotations

import collections
import gc

import pytest

# Steps of the golden ratio spread the chosen cases over all the axes of a product.
_STEP = (5**0.5 - 1) / 2


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but `keep` cases of each test with `@pytest.mark.sweep(keep=...)` as wide.

    With `wide=`, only that many are wide, and the rest are slow.
    """
    sweeps: dict[tuple[str, object, int, int | None], list[pytest.Item]]
    sweeps = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sweep")
        if marker is not None:
            # Cases that are slow by themselves are not counted.
            slow = any(item.get_closest_marker(name) for name in ("slow", "product", "wide"))
            if not slow:
                name = item.nodeid.partition("[")[0]
                keep, wide = marker.kwargs["keep"], marker.kwargs.get("wide")
                sweeps[name, item.parent, keep, wide].append(item)
    for (_, _, keep, wide), cases in sweeps.items():
        order = sorted(range(len(cases)), key=lambda index: index * _STEP % 1)
        for place, index in enumerate(order[keep:]):
            cases[index].add_marker("wide" if wide is None or place < wide else "slow")


def pytest_collection_finish() -> None:
    """Run the garbage collector rarely, and not over the objects that collection creates.

    JAX adds work to each run of the collector. Thousands of runs take a twentieth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
