"""Every lint has its section, every command its row."""

from __future__ import annotations

from shardwright.cli.main import COMMANDS
from shardwright.lints.catalogue import Code
from tests.docs.snippets import ROOT, anchors


def test_every_code_has_a_section_and_a_row() -> None:
    text = (ROOT / "docs" / "lints.md").read_text(encoding="utf-8")
    assert [code for code in Code if code not in anchors(text)] == []
    assert [code for code in Code if f"[`{code}`](#{code})" not in text] == []
    assert anchors(text) - {"lints"} == {*Code}


def test_every_command_has_a_row() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert [command for command in COMMANDS if f"| `{command}` |" not in text] == []
