"""The last complete checkpoint survives saves that are killed; see `saving.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright import checkpoint
from tests.multiprocess import pairs, saving

pytestmark = pytest.mark.multiprocess
pytest.importorskip("orbax.checkpoint")


@pytest.mark.parametrize(
    ("count", "kills"),
    [
        pytest.param(2, 1, marks=pytest.mark.full),
        pytest.param(1, 25, marks=pytest.mark.full),
        pytest.param(2, 25, marks=pytest.mark.full),
    ],
)
def test_killed_saves(count: int, kills: int, tmp_path: Path) -> None:
    """Kill one process or all, at random moments; check each checkpoint that is left."""
    random = np.random.default_rng(0)
    folder = tmp_path / "run"
    newest = 0
    for number in range(kills):
        killed = ("0", "1", "01")[number % 3] if count == 2 else "0"
        arguments = [count, folder, killed, random.uniform(0, 1.2)]
        ended = pairs.run("tests.multiprocess.saving", arguments, tmp_path, count=count)
        output = "\n".join(process.text for process in ended)
        assert all(f"restored {newest}" in process.text for process in ended), output
        known = checkpoint.steps(folder)
        assert len(known) <= saving.KEEP + 1
        for step in known:
            saved = saving.values_of(step)
            restored = checkpoint.restore(folder, saved, step=step)
            assert all(np.array_equal(restored[name], saved[name]) for name in saved)
        assert known[-1] > newest
        newest = known[-1]
    checkpoint.save(folder, saving.values_of(newest + 1), step=newest + 1, keep=saving.KEEP)
    kept = [*known[1 - saving.KEEP :], newest + 1]
    assert sorted(int(path.name) for path in folder.iterdir()) == kept
