"""Processes that differ are told what differs, within 10 seconds; `divergent.py` has the cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess import divergences, pairs
from tests.multiprocess.divergent import PARTS

pytestmark = pytest.mark.multiprocess


@pytest.mark.full
def test_differences_are_told(tmp_path: Path) -> None:
    """Those that take longer; `test_two_processes.py` has the quick ones."""
    ended = pairs.run("tests.multiprocess.divergent", ["all"], tmp_path)
    output = "\n".join(f"process {rank}:\n{process.text}" for rank, process in enumerate(ended))
    for process in ended:
        passed = re.findall(r"told (\w+)", process.text)
        assert passed == [case.__name__ for case in PARTS["all"]], output
    assert [process.code for process in ended] == [0, 0], output


@pytest.mark.full
def test_every_divergence_ends_in_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table: `python -m tests.multiprocess.divergences`."""
    monkeypatch.setattr(divergences, "LIMIT_S", 60.0)  # a machine may be short of processors
    code = divergences.main()
    table = capsys.readouterr().out
    assert code == 0, table
    assert int(re.findall(r"^(\d+) divergences", table, flags=re.MULTILINE)[0]) >= 20, table
