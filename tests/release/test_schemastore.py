"""The entry of SchemaStore, and what editors say of strategy files through taplo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

import shardwright as sw
from shardwright.strategy.files import preset_text
from tests.release.test_package import environment
from tools import schemastore


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A checkout with two entries, as SchemaStore has them, and ours."""
    catalog = tmp_path / "src" / "api" / "json" / "catalog.json"
    catalog.parent.mkdir(parents=True)
    entries = [{"name": "Ruff", "url": "r"}, {"name": "tsconfig", "url": "t"}]
    catalog.write_text(json.dumps({"version": 1.0, "schemas": entries}), encoding="utf-8")
    schemastore.write(tmp_path)
    return tmp_path


def test_entry_is_added_once_and_in_order(store: Path) -> None:
    catalog = store / "src" / "api" / "json" / "catalog.json"
    before = catalog.read_text(encoding="utf-8")
    names = [entry["name"] for entry in json.loads(before)["schemas"]]
    assert names == ["Ruff", "shardwright", "tsconfig"]
    schemastore.write(store)
    assert catalog.read_text(encoding="utf-8") == before


def test_presets_are_valid_and_name_the_schema(store: Path) -> None:
    schema = json.loads((store / "src/schemas/json/shardwright.json").read_text(encoding="utf-8"))
    assert schema["$id"] == schemastore.URL
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    for name in sw.Strategy.presets():
        assert preset_text(name).partition("\n")[0] == f"#:schema {schemastore.URL}"
        assert list(validator.iter_errors(sw.Strategy.preset(name).to_data())) == []
    wrong = {"rules": {"batch": 3}, "policy": {"conflict": "no"}}
    assert len(list(validator.iter_errors(wrong))) == 2


@pytest.mark.full
def test_taplo_checks_strategies(store: Path, tmp_path: Path) -> None:
    environment(tmp_path / "environment", "taplo")
    tool = tmp_path / "environment" / "bin" / "taplo"
    schema = (store / "src/schemas/json/shardwright.json").as_uri()

    def check(text: str) -> tuple[int, str]:
        # The first line as presets have it, with the file in place of its address.
        file = tmp_path / "mine.toml"
        file.write_text(text.replace(schemastore.URL, schema), encoding="utf-8")
        done = subprocess.run(
            [tool, "lint", file], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        return done.returncode, done.stderr

    for name in sw.Strategy.presets():
        code, said = check(preset_text(name))
        assert code == 0, said
    good = preset_text("fsdp_tp")
    for wrong in (
        good.replace('head = "tp"', "head = 3"),
        good.replace("[rules]", "[rule]"),
        good.replace("[policy]", '[policy]\nconflict = "no"'),
    ):
        assert wrong != good
        code, said = check(wrong)
        assert code != 0, wrong
        assert "mine.toml" in said
