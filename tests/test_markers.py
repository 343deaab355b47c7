"""Markers of this project's own tests, which `tests/conftest.py` reads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

PAIRWISE = """
import pytest

@pytest.mark.parametrize("c", [0, 1, 2])
@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.full(but=["1-1-2"])
@pytest.mark.pairwise
def test(a, b, c):
    pass
"""
ALTERNATE = """
import pytest

@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.full(but=["0-1"])
@pytest.mark.alternate
def test(a, b):
    pass
"""


def kept_cases(pytester: pytest.Pytester, suite: str) -> list[str]:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers =\n  full\n  product\n  pairwise\n  alternate")
    (pytester.mkdir(".ci") / "full").touch()
    items: list[pytest.Function] = pytester.getitems(suite)  # type: ignore[assignment]
    return [item.callspec.id for item in items if not item.get_closest_marker("product")]


def test_pairwise_cases_show_each_pair_of_values(pytester: pytest.Pytester) -> None:
    kept = kept_cases(pytester, PAIRWISE)
    assert len(kept) == 6, "of 12"
    assert "1-1-2" in kept
    for (at, own), (to, others) in itertools.combinations(enumerate(("01", "01", "012")), 2):
        pairs = {(case.split("-")[at], case.split("-")[to]) for case in kept}
        assert pairs == {*itertools.product(own, others)}


def test_alternate_cases_show_each_value(pytester: pytest.Pytester) -> None:
    assert kept_cases(pytester, ALTERNATE) == ["0-0", "0-1", "1-1", "2-0"]
