"""The page of inference shows the table of models; no name is wrong that is not a guess."""

from __future__ import annotations

from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT
from tests.inference.model_table import published, rows, with_table

PAGE = ROOT / "docs" / "development" / "inference.md"


def test_page_shows_the_table(golden: Golden) -> None:
    golden.file(PAGE, with_table(PAGE.read_text(encoding="utf-8")))


def test_wrong_names_are_guesses() -> None:
    *models, total = rows()
    assert len(models) >= 16
    assert [row[0] for row in models if row[5]] == []
    assert total[2] >= 0.98 * total[1], total


def test_published_models_are_named() -> None:
    results = published()
    assert len(results) >= 11
    assert [row["model"] for row in results if row["wrong, not marked"] or row["conflicts"]] == []
    dims, right = (sum(row[key] for row in results) for key in ("dims", "right"))
    assert right >= 0.98 * dims
