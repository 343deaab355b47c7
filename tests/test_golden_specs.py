"""The specs of a whole layer under every preset, compared with golden files that were read line by line."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import shardwright as sw
from tests.golden import layer, specs, update

PRESETS = sw.Strategy.presets()


def complaint(preset: str, path: Path) -> str:
    """Say what is wrong with a golden file, or nothing if it is as rendered."""
    text = specs.render(preset)
    if not path.exists():
        return f"{path.name} is missing: run `python -m tests.golden.update`, read what it wrote, and commit it"
    golden = path.read_text(encoding="utf-8")
    if golden == text:
        return ""
    diff = difflib.unified_diff(golden.splitlines(), text.splitlines(), f"golden/{path.name}", "now", lineterm="", n=0)
    return "\n".join(["the specs changed; if that is meant, run `python -m tests.golden.update` and commit:", *diff])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_specs_of_a_layer_are_those_of_the_golden_file(preset: str) -> None:
    found = complaint(preset, specs.path_of(preset))
    assert not found, found


def test_every_golden_file_belongs_to_a_preset() -> None:
    assert {path.stem for path in specs.FOLDER.glob("*.txt")} == set(PRESETS)


def test_a_changed_or_missing_golden_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "fsdp_tp.txt"
    assert "fsdp_tp.txt is missing" in complaint("fsdp_tp", path)
    path.write_text(specs.render("fsdp_tp").replace("P('tp', 'fsdp')", "P('tp')", 1), encoding="utf-8")
    found = complaint("fsdp_tp", path)
    assert found.count("\n-") == 2  # the file's name and the line
    assert "\n+embedding " in found


def test_update_writes_what_the_test_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(update, "path_of", lambda preset: tmp_path / f"{preset}.txt")
    update.main()
    assert "fsdp.txt: written" in capsys.readouterr().out
    assert not complaint("fsdp", tmp_path / "fsdp.txt")
    update.main()
    assert "fsdp.txt: unchanged" in capsys.readouterr().out


def test_modes_of_one_answer_share_a_row_and_others_do_not() -> None:
    tensor = next(tensor for tensor in layer.ACTIVATIONS if tensor.name == "tokens")
    answers = {"train": ("a",), "prefill": ("a",), "decode": ("b",), "insert": ("a",)}
    rows = specs.collapsed(tensor, answers)
    assert rows == [("tokens", "16 4096", "(BATCH, LENGTH)", "train prefill insert", "a"), ("", "16 1", "", "decode", "b")]
