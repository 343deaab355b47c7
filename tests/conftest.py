"""Choose the cases that a run includes: those of sweeps, and one half of the wide ones."""

from __future__ import annotations

import collections
import gc
import zlib

import pytest

# Steps of the golden ratio spread the chosen cases over all the axes of a product.
_STEP = (5**0.5 - 1) / 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--wide-half`."""
    parser.addoption(
        "--wide-half",
        type=int,
        choices=(0, 1),
        help="run one half of the wide cases; CI runs half 0 on the oldest JAX, 1 on the newest",
    )


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark sweeps as wide and slow, then drop the half of the wide cases that was not asked for."""
    _mark_sweeps(items)
    half = config.getoption("--wide-half")
    if half is not None:
        # By name, so that a new test moves no other one.
        other = [
            item
            for item in items
            if item.get_closest_marker("wide") and zlib.crc32(item.nodeid.encode()) % 2 != half
        ]
        config.hook.pytest_deselected(items=other)
        dropped = set(other)
        items[:] = [item for item in items if item not in dropped]


def _mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark all but `keep` cases of each test with `@pytest.mark.sweep(keep=...)` as wide.

    With `wide=`, only that many are wide, and the rest are slow, or have the marker `rest=`.
    """
    sweeps: dict[tuple[str, object, int, int | None, str], list[pytest.Item]]
    sweeps = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sweep")
        if marker is not None:
            # Cases that are slow by themselves are not counted.
            slow = any(item.get_closest_marker(name) for name in ("slow", "product", "wide"))
            if not slow:
                name = item.nodeid.partition("[")[0]
                keep, wide = marker.kwargs["keep"], marker.kwargs.get("wide")
                rest = marker.kwargs.get("rest", "slow")
                sweeps[name, item.parent, keep, wide, rest].append(item)
    for (_, _, keep, wide, rest), cases in sweeps.items():
        order = sorted(range(len(cases)), key=lambda index: index * _STEP % 1)
        for place, index in enumerate(order[keep:]):
            cases[index].add_marker("wide" if wide is None or place < wide else rest)


def pytest_collection_finish() -> None:
    """Run the garbage collector rarely, and not over the objects that collection creates.

    JAX adds work to each run of the collector. Thousands of runs take a twentieth of all time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
