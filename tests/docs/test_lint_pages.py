"""Every lint and every command has its row."""

from __future__ import annotations

import re

from shardwright.cli.main import COMMANDS
from shardwright.lints.catalogue import Code
from tests.docs.snippets import ROOT


def test_every_code_has_one_row() -> None:
    text = (ROOT / "docs" / "lints.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(Code)


def test_every_command_has_a_row() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert [command for command in COMMANDS if f"| `{command}` |" not in text] == []
