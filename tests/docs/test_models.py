"""The page on models of others shows the results; `--update-golden -k models` writes it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.testing.golden import Golden
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "development" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "models"
MESHES = ("fsdp:8", "fsdp:4,tp:2", "dp:2,tp:4")
TABLE = re.compile(r"(<!-- results: models -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = """| model | mesh | bytes | own rules | all | largest difference | lines |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""


def rows() -> Sequence[Mapping[str, Any]]:
    (path,) = RESULTS.glob("*.json")
    found: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


def line(row: Mapping[str, Any]) -> str:
    own = row["own"]
    if isinstance(own, str):
        own_text = own.partition(":")[0]
    else:
        own_text = f"{own:,}"
    cells = [row["model"], f"`{row['mesh']}`", f"{row['bytes']:,}", own_text, f"{row['all']:,}"]
    cells += [f"{row['difference']:.1e}", str(row["lines"])]
    return f"| {' | '.join(cells)} |"


def test_the_page_shows_the_results(golden: Golden) -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join([HEAD, *map(line, rows())])
    sources = "\n".join(f"- {source}" for source in dict.fromkeys(row["source"] for row in rows()))
    shown = TABLE.sub(
        lambda match: f"{match[1]}\n{table}\n\nWhat is imported:\n\n{sources}\n\n{match[2]}", text
    )
    golden.file(PAGE, shown)


def test_each_result_is_within_its_limits() -> None:
    models = {row["model"] for row in rows()}
    assert len(models) == 7
    for model in models:
        assert [row["mesh"] for row in rows() if row["model"] == model] == list(MESHES)
    for row in rows():
        assert row["difference"] <= 1e-6
        assert 1 <= row["lines"] <= 3
        assert row["bytes"] < row["all"] / 2


def test_lines_are_counted_from_the_code() -> None:
    functions = {
        node.name: node.body
        for path in (ROOT / "benchmarks" / "models").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("shard_")
    }
    counts = {
        name: sum((node.end_lineno or 0) - node.lineno + 1 for node in body)
        for name, body in functions.items()
    }
    assert {row["lines"] for row in rows()} <= {*counts.values()}
    assert max(counts.values()) <= 3
