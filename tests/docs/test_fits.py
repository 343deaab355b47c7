"""The page shows the verdicts on memory; `--update-golden -k fits` writes them."""

from __future__ import annotations

import re

import pytest

from benchmarks.fits import CASES, HEADER, Row, cells, judge, read_rows
from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "development" / "compiled.md"
RESULTS = ROOT / "benchmarks" / "results" / "compiled" / "fits.json"
_PLACE = re.compile(r"(<!-- fits: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def row(compiled: float, verdict: str, *, high: float = 2.0) -> Row:
    return Row(
        case=CASES[0],
        low=0.1,
        high=high,
        verdict=verdict,
        compiled=compiled,
        refused=compiled > 1,
    )


def test_the_page_shows_the_verdicts(golden: Golden) -> None:
    rows, context = read_rows(RESULTS)
    versions = ", ".join(f"{name} {value}" for name, value in context.items() if name != "target")
    met = [f"- {'met' if met else '**missed**'}: {words}." for words, met in judge(rows).items()]
    table = [list(HEADER), ["---"] * len(HEADER), *map(cells, rows)]
    parts = {
        "verdicts": "\n".join([*met, f"- Compiled for {context['target']} ({versions})."]),
        "table": "\n".join("| " + " | ".join(each) + " |" for each in table),
    }
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(actual[2] for actual in _PLACE.finditer(text)) == sorted(parts)
    shown = _PLACE.sub(lambda actual: f"{actual[1]}\n{parts[actual[2]]}\n\n{actual[3]}", text)
    golden.file(PAGE, shown)


def test_results_have_all_cases() -> None:
    rows, _ = read_rows(RESULTS)
    assert [each.case for each in rows] == list(CASES)
    assert len(CASES) == 30


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([row(0.5, "fits"), row(1.5, "does not fit")], [True, True, True, True, True]),
        ([row(0.7, "fits"), row(1.5, "does not fit")], [False, True, True, True, True]),
        ([row(0.5, "fits"), row(1.5, "fits")], [True, False, False, True, True]),
        ([row(0.5, "does not fit"), row(1.5, "does not fit")], [True, True, False, True, True]),
        ([row(0.5, "fits"), row(1.5, "close")], [True, True, True, False, True]),
        ([row(0.5, "fits", high=0.4), row(1.5, "does not fit")], [True, True, True, True, False]),
    ],
)
def test_targets_are_judged(rows: list[Row], met: list[bool]) -> None:
    assert list(judge(rows).values()) == met
