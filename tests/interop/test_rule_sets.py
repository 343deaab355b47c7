"""The record of published rule lists that equal flax, and the tool that compares them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.snippets import ROOT

PATH = ROOT / "tests" / "interop" / "golden" / "rule_sets.json"
YAML = """\
sharding:
  rules: [['batch', 'data'], ['embed', ['data', 'model']], ['embed', 'data'], ['mlp', 'model']]
"""
PYTHON = """\
BATCH = "batch"
X = "x"
weight, activation, unknown = ("embed", "mlp"), (BATCH, None, "mlp"), ("embed", "other")


def rules(dims):
    shapes = [3]
    if dims == 1:
        table = [("embed", None), ("mlp", "model")]
    else:
        table = [("embed", "data"), ("mlp", "model")]
    return table


def logical_to_physical(logical: Axes, rules: Rules) -> P:
    spec = [getattr(rules, name) if name else None for name in logical]
    if len(set(jax.tree.leaves(spec))) < len(jax.tree.leaves(spec)):
        raise ValueError
    return P(*spec)


class Rules:
    embed: str = X
    mlp: tuple = (X, "y")
    batch: None = None
"""


def test_record_of_published_lists() -> None:
    data = json.loads(PATH.read_text(encoding="utf-8"))
    sets = data["sets"]
    assert len({(row["repository"], row["file"], row["part"]) for row in sets}) == len(sets) >= 40
    assert len({row["rules_digest"] for row in sets}) >= 30
    assert sum(row["published"] for row in sets if row["semantics"] == "flax") >= 1000
    for repository in ("maxtext", "t5x", "TransformerEngine", "levanter", "flax"):
        rows = [row for row in sets if row["repository"].endswith(f"/{repository}")]
        assert all(row["tuples"] and row["nnx"]["specs_digest"] for row in rows)
        assert rows, repository
    for semantics in ("flax", "strict"):
        rows = [row for row in sets if row["semantics"] == semantics]
        assert sum(row["tuples"] for row in rows) >= 2500
    assert sum(row["nnx"]["errors"] for row in sets if "nnx" in row) >= 1000


def test_lists_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flax.linen.spmd")
    monkeypatch.syspath_prepend(str(ROOT))
    from tools import rule_sets

    repository = tmp_path / "owner" / "name"
    repository.mkdir(parents=True)
    (repository / "rules.yml").write_text(YAML, encoding="utf-8")
    (repository / "model.py").write_text(PYTHON, encoding="utf-8")
    git = ["git", "-C", str(repository)]
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "-q"], ["add", "."], [*me, "commit", "-q", "-m", "Add rules"]):
        subprocess.run([*git, *command], check=True)
    expected: list[tuple[str, str, str, str, dict[str, int]]] = [
        ("rules.yml", "yaml", "sharding.rules", "flax", {"rules": 4, "published": 3, "tuples": 12}),
        ("model.py", "literals", "rules:0", "flax", {"rules": 2, "published": 2, "tuples": 6}),
        ("model.py", "literals", "rules:1", "flax", {"rules": 2, "published": 2, "tuples": 6}),
        ("model.py", "class", "Rules", "strict", {"rules": 3, "published": 3, "tuples": 12}),
    ]
    for file, kind, part, semantics, counts in expected:
        listed: dict[str, Any] = {"repository": "owner/name", "commit": "HEAD", "file": file}
        listed |= {"kind": kind, "part": part, "semantics": semantics}
        row, problems = rule_sets.compared(listed, repository)
        assert problems == []
        assert counts.items() <= row.items(), row
        assert row["errors"] == (3 if semantics == "strict" else 0)
