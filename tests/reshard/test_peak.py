"""The peak of a move of real size, measured in a fresh process, is below that of its plan."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks import moving

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="resets the peak through /proc"),
]


@pytest.mark.parametrize("way", [moving.DONATED, moving.KEPT])
@pytest.mark.parametrize("tree", moving.TREES)
def test_peak_is_planned(tree: str, way: str) -> None:
    peak = moving.measure(tree, way)
    assert peak.growth <= peak.allowed
    assert peak.growth <= peak.planned


@pytest.mark.parametrize("way", moving.RESTORES)
@pytest.mark.parametrize("tree", moving.TREES)
def test_peak_of_restoring(tree: str, way: str) -> None:
    """The target and three pieces."""
    pytest.importorskip("orbax.checkpoint")
    peak = moving.measure(tree, way)
    assert peak.growth <= peak.allowed


def test_parent_process_does_not_count() -> None:
    large = np.ones(2**30, np.uint8)
    peak = moving.measure("512 MiB, 16 leaves", moving.DONATED)
    assert peak.growth <= peak.allowed < large.nbytes
