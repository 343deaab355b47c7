"""Run pytest in a process of its own, as a user of the plugin does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"


def run_pytest(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    files: Mapping[str, str],
    *args: str,
    ini: str = "",
    inline: bool = False,
) -> pytest.RunResult:
    """Write files into pytester's folder and run pytest there, without settings of this process.

    `inline` runs it in this process. That saves the import of JAX for tests that do not use JAX.
    """
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name, text in {"pytest.ini": f"[pytest]\n{ini}\n", **files}.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    words = ("-p", "shardwright_pytest", "--strict-markers", *args)
    # Collecting garbage takes longer than such a run.
    return (
        pytester.runpytest_inprocess(*words, "-p", "no:unraisableexception")
        if inline
        else pytester.runpytest_subprocess(*words)
    )


def said(result: pytest.RunResult) -> str:
    """Return all that pytest printed."""
    return "\n".join([*result.outlines, *result.errlines])
