"""Files of others: names that a terminal would execute, and files that are not what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import visible
from shardwright.show.html import html_text

# Sets the title of the window, clears the screen, reverses the text, pretends to be another line.
EVIL = "w\x1b]0;t\x07\x1b[2J\u202ex\nevil.toml: ok"
SHOWN = r"w\x1b]0;t\x07\x1b[2J\u202ex\nevil.toml: ok"
STRATEGY = f'[mesh]\ndp = 2\ntp = 2\n[axes]\n{json.dumps(EVIL)} = "odd"\n'
TENSORS = json.dumps({EVIL: {"axes": "EMBED", "shape": [6], "role": "param"}})
RULES = json.dumps([[EVIL, "data"], [EVIL, "data"], ["embed", None]])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tensors.json").write_text(TENSORS, encoding="utf-8")
    Path("rules.json").write_text(RULES, encoding="utf-8")
    Path("evil.toml").write_text(STRATEGY, encoding="utf-8")
    return tmp_path


LINES = (
    "check evil.toml",
    "check fsdp_tp --tensors tensors.json --mesh fsdp:4,tp:2",
    "explain --tensors tensors.json --strategy fsdp_tp --mesh fsdp:4,tp:2",
    "explain --tensors tensors.json --strategy fsdp_tp --mesh fsdp:2,tp:4",
    "diff fsdp_tp ddp --tensors tensors.json --mesh fsdp:2,tp:4 --mode train",
    "import rules rules.json --mesh data:2",
    "import rules rules.json --mesh model:2",
)


@pytest.mark.parametrize("line", LINES)
def test_names_are_escaped(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) in (0, 1, 2)
    out, err = capsys.readouterr()
    text = out + err
    assert "evil.toml: ok" not in text.splitlines()
    assert all(char.isprintable() for char in text.replace("\n", "")), ascii(text)
    assert r"\u202e" in text


def test_imported_file_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "rules", "rules.json", "--mesh", "data:2", "-o", "imported.toml"]) == 0
    text = Path("imported.toml").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert sw.Strategy.load("imported.toml").mesh == {"data": 2}
    capsys.readouterr()


def test_configuration_is_no_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps({"model_type": "llama", **dict.fromkeys("abcdefgh", 1)})
    Path("config.json").write_text(text, encoding="utf-8")
    assert main(["check", "config.json"]) == 1
    out = capsys.readouterr().out
    assert "this is the configuration of a model, not a strategy" in out
    assert out.endswith("\n1 error\n")


def test_visible() -> None:
    assert visible(EVIL) == SHOWN
    assert visible("größe 層") == "größe 層"
    assert html_text("<w\u202ex>") == r"&lt;w\u202ex&gt;"


FILES = {
    "nul.yml": ("logical_axis_rules:\n- [embed, f\0]\n", "nul.yml: the file is not YAML"),
    "digits.json": (f"[{'9' * 5000}]", "digits.json is not JSON: Exceeds the limit"),
    "deep.json": ("[" * 100_000, "deep.json is not JSON: maximum recursion depth exceeded"),
    "loop.yml": (
        "&a [[embed, *a]]\n",
        "loop.yml: its aliases expand to more than 1,000,000 values",
    ),
    "bomb.yml": (
        "- &a [f,f,f,f,f,f,f,f,f]\n"
        + "".join(
            f"- &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in itertools.pairwise("abcdefgh")
        ),
        "bomb.yml: its aliases expand to more than 1,000,000 values",
    ),
    "long.yml": ("- [embed, f]\n" * 100_000, "long.yml has more than 1,000,000 characters"),
    "long.json": (json.dumps([["embed", "f"]] * 10_001), "there are 10001 rules"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_have_a_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = FILES[name]
    Path(name).write_text(text, encoding="utf-8")
    assert main(["import", "rules", name, "--mesh", "f:2"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "  fix   " in error
    assert len(error) < 2000
