"""The page on GPUs shows what was measured on one; `--update-golden -k gpu_results` writes it."""

from __future__ import annotations

import re

from benchmarks.gpu_results import read_sections, table
from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "development" / "gpus.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu" / "h200.json"
TABLE = re.compile(r"(<!-- results: gpu -->\n).*?(<!-- end -->)", re.DOTALL)


def test_the_page_shows_the_results(golden: Golden) -> None:
    sections, context = read_sections(RESULTS)
    machine = (
        f"On {context['date']}, on one {context['device']}, with JAX {context['jax']} and Python "
        f"{context['python']}."
    )
    page = PAGE.read_text(encoding="utf-8")
    golden.file(
        PAGE,
        TABLE.sub(lambda match: f"{match[1]}\n{machine}\n\n{table(sections)}\n\n{match[2]}", page),
    )


def test_earlier_run_of_cudnn() -> None:
    sections, _ = read_sections(RESULTS.with_name("h200-first.json"))
    (row,) = sections["conformance_cudnn"]
    assert (row["equal"], row["refused"], row["value"]) == (20, 72, 0)
    assert read_sections(RESULTS)[0]["conformance_cudnn"] == []
    assert "20 cases of `cudnn` were equal to the oracle" in PAGE.read_text("utf-8")
