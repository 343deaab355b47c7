"""The page on fp8 shows the results of its benchmark, and these are close to float32."""

from __future__ import annotations

import json
import re

from tests.docs.snippets import ROOT


def test_table_of_losses_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks/results/fp8/losses.json").read_text(encoding="utf-8"))
    losses = results["losses"]
    page = (ROOT / "docs/fp8.md").read_text(encoding="utf-8").split("## Losses")[1]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert rows == [
        (name, *(f"{loss:.3f}" for loss in row.values())) for name, row in losses.items()
    ]
    assert results["context"]["steps"] == 500
    for name, row in losses.items():
        assert abs(row["at 500"] / losses["float32"]["at 500"] - 1) < 0.003, name
