"""The page on speed shows the files of results; `--update-golden -k speed` writes it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT
from tests.docs.speed import read_results, with_tables

PAGE = ROOT / "docs" / "development" / "speed.md"


def row(subject: str, value: float, verdict: str, **target: float) -> dict[str, Any]:
    bounds = {"at_most": None, "at_least": None, **target} if target else None
    return {
        "subject": subject,
        "case": "all",
        "what": "ours",
        "against": "",
        "value": value,
        "unit": "x",
        "target": bounds,
        "verdict": verdict,
    }


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "new": {
            "context": dict.fromkeys(("jax", "python", "machine", "cpu", "date"), "1"),
            "rows": list(rows),
        }
    }


MARKS = "".join(
    f"<!-- results: {name} -->\n{name}\n<!-- end -->\n" for name in ("machines", "missed", "tree")
)


def test_the_page_shows_the_results(golden: Golden) -> None:
    golden.file(
        PAGE,
        with_tables(
            PAGE.read_text(encoding="utf-8"), read_results(ROOT / "benchmarks" / "results")
        ),
    )


def test_tables_mark_missed_targets() -> None:
    missed, met, free = (
        row("tree", 0.512, "MISSED", at_most=0.5),
        row("tree", 9.0, "ok", at_least=8.0),
        row("enter", 1.0, ""),
    )
    page = with_tables(MARKS, results(missed, met, free))
    assert "| all | ours | - | ≤ 0.5 x | **0.512 x, missed** |" in page
    assert "| all | ours | - | ≥ 8 x | 9.00 x |" in page
    assert "- `new`: 1 of 2 targets met, missed:\n    - tree, ours: 0.512 x, not ≤ 0.5 x\n" in page
    assert with_tables(page, results(missed, met, free)) == page
    assert "- `new`: 1 of 1 targets met.\n" in with_tables(page, results(met))


def test_missing_subject_is_detected() -> None:
    with pytest.raises(AssertionError, match=r"the results have \['tree', 'enter'\]"):
        with_tables(
            MARKS,
            results(row("tree", 1.0, "ok", at_most=2.0), row("enter", 1.0, "ok", at_most=2.0)),
        )
