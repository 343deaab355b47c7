"""Choose which cases of a test have a marker; bound what a worker remembers."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import importlib
import itertools
import mmap
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# XLA for CPUs has as many threads as devices, if there are fewer cores. A collective blocks a
# thread, and a device may be in two: one of a loop, and one that does not need the loop's result.
# Seen in a pipeline on two cores: all threads waited, and XLA ended the process after its timeout.
os.environ.setdefault("NPROC", "32")

# JAX adds work to each run of the collector: a third of the time in which tests are collected.
gc.disable()

# No deadlines and no check of speed, because machines are shared.
for _name, _examples in (("shared", 60), ("thorough", 5000)):
    settings.register_profile(
        _name,
        deadline=None,
        max_examples=_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("shared")

# A worker that has more bytes than this, after a file of tests, forgets what it compiled; later
# again where it has so many again, or a step more than what it could not forget.
_FIRST_LIMIT, _STEP = 1_600_000_000, 300_000_000
_LIMIT = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each second worker import the files of all tests from the last to the first.

    Rewriting the assertions of new files takes half of a collection. Workers collect at the same
    time, and so each rewrites a half.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if int(worker) % 2 == 0 or session.config.args != session.config.getini("testpaths"):
        return
    root = session.config.rootpath
    for path in sorted(root.glob("tests/**/test_*.py"), reverse=True):
        # Collection shows what fails.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[Any]:
    """Take `full(but=[...])` and `product(but=[...])` from the cases that they name.

    Of a test with the marker `pairwise` or `alternate`, mark the cases left out as `product`.

    Raises:
      Collector.CollectError: No case of the test has that name.
    """
    made = yield
    if isinstance(made, list):
        for marker in ("full", "product"):
            _spare(marker, made)
        _leave_out([item for item in made if item.get_closest_marker("pairwise")])
        _alternate([item for item in made if item.get_closest_marker("alternate")])
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


def _leave_out(items: list[pytest.Function]) -> None:
    """Mark a case as `product` if other cases have each two of its parameters' values.

    Cases of `make test` are taken first, then each time the case with the most new pairs.
    """
    pairs = {
        item: {*itertools.combinations([(k, repr(v)) for k, v in item.callspec.params.items()], 2)}
        for item in items
    }
    new = set().union(*pairs.values())
    quick = [item for item in items if not item.get_closest_marker("full")]
    while new:
        item = quick.pop() if quick else max(pairs, key=lambda item: len(pairs[item] & new))
        new -= pairs.pop(item)
    for item in {*pairs} - {*quick}:
        item.add_marker("product")


def _alternate(items: list[pytest.Function]) -> None:
    """Mark every other case of a table of two parameters as `product`, as on a chess board."""
    seen: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for item in items:
        at = [seen[k].setdefault(repr(v), len(seen[k])) for k, v in item.callspec.params.items()]
        if sum(at) % 2 and item.get_closest_marker("full"):
            item.add_marker("product")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of each file and folder that `.ci/full` lists as `ci`."""
    lines = (config.rootpath / ".ci" / "full").read_text(encoding="utf-8").splitlines()
    listed = tuple(line for line in lines if line and not line.startswith("#"))
    for item in items:
        if item.nodeid.startswith(listed):
            item.add_marker("ci")


def _named(item: pytest.Function, marker: str) -> list[pytest.Mark]:
    return [mark for mark in item.own_markers if mark.name == marker and "but" in mark.kwargs]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Forget the compiled programs of a file of tests when they have become many.

    A worker that compiles thousands of programs and keeps them takes more than 4 GB.
    """
    done = yield
    stash = item.config.stash
    if nextitem is None or nextitem.path == item.path:
        return done
    if _memory() > stash.get(_LIMIT, _FIRST_LIMIT):
        import jax

        jax.clear_caches()
        gc.collect()
        _trim()
        stash[_LIMIT] = max(_FIRST_LIMIT, _memory() + _STEP)
    return done


def _trim() -> None:
    """Give freed memory back to the system. glibc keeps it otherwise, and does not reuse all."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _memory() -> int:
    """Return the bytes that this process has in memory; 0 where the system does not say."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE


def pytest_collection_finish() -> None:
    """Run the garbage collector again, rarely, and not over the objects that collection creates."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()
