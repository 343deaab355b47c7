"""The notebook of the quickstart: its cells run in order and show what the text promises."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.manager import context

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
# A part of what the cells print, in order.
PRINTED = (
    "8 devices",
    "P('fsdp', 'tp') P('fsdp'",
    "query dim 1 HEAD: size 6 does not divide over tp=4",
    'fix   add a fallback, head = "tp | -"',
    "P('fsdp'",
    "ddp       163,840 bytes per device",
    "fsdp_tp    20,480 bytes per device",
    "with six heads",
)


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells), "clear the outputs"
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def in_order(text: str) -> None:
    at = 0
    for part in PRINTED:
        at = text.find(part, at) + len(part)
        assert at >= len(part), f"{part!r} is not printed in order:\n{text}"


def test_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel: the value of the last line of a cell is what a notebook shows."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    out = io.StringIO()
    shown = []
    for source in code_cells():
        # `%pip` is a command of notebooks, for machines without shardwright.
        lines = [line for line in source.splitlines() if not line.strip().startswith("%")]
        tree = ast.parse("\n".join(lines))
        last = tree.body[-1]
        value = ast.Expression(tree.body.pop().value) if isinstance(last, ast.Expr) else None
        with contextlib.redirect_stdout(out):
            exec(compile(tree, "cell", "exec"), names)
            if value is not None:
                shown.append(eval(compile(value, "cell", "eval"), names))
    in_order(out.getvalue())
    pictures = [each for each in shown if hasattr(each, "_repr_html_")]
    assert len(pictures) == 3
    assert all("<svg" in each._repr_html_() for each in pictures)
    assert context.current() is None


@pytest.mark.full
def test_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    in_order("".join(output.get("text", "") for output in outputs))
    pictures = [output for output in outputs if "text/html" in output.get("data", {})]
    assert len(pictures) == 3
