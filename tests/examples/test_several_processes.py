"""Processes that lose one go on with fewer, and their losses stay the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.multiprocess
def test_losses_survive_a_lost_process() -> None:
    command = [sys.executable, str(ROOT / "examples" / "several_processes.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All losses agree" in done.stdout
    assert done.stdout.count("has given no sign of life") == 1 + 3
    assert done.stdout.count("serves 4 prompts: 32 bytes") == 2
