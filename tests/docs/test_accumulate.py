"""The page on accumulation shows the results; `--update-golden -k accumulate` writes it."""

from __future__ import annotations

import re

from benchmarks.accumulate import MESHES, WAYS, judge, read_rows, table
from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "accumulate.md"
RESULTS = ROOT / "benchmarks" / "results" / "accumulate" / "v5e-2x4.json"
TABLE = re.compile(r"(<!-- results: accumulate -->\n).*?(<!-- end -->)", re.DOTALL)


def test_the_page_shows_the_results(golden: Golden) -> None:
    rows, context = read_rows(RESULTS)
    versions = f"JAX {context['jax']}, libtpu {context['libtpu']}"
    text = f"{table(rows)}\n\nCompiled for a {context['target']} with {versions}."
    page = PAGE.read_text(encoding="utf-8")
    golden.file(PAGE, TABLE.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page))


def test_results_have_all_ways_and_meet_the_targets() -> None:
    rows, _ = read_rows(RESULTS)
    assert [(row.preset, row.way) for row in rows] == [(p, way) for p in MESHES for way in WAYS]
    assert all(judge(rows).values())
