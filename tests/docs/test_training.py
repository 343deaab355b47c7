"""The training page stays short: few of its lines are about sharding."""

from __future__ import annotations

import re

from tests.docs.snippets import ROOT, blocks

MOST_LINES = 25


def test_lines_about_sharding() -> None:
    """A line is about sharding if it calls this library; lines that print a result do not count."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    program = text.partition("## Evaluate")[0]
    lines = [
        line
        for block in blocks(program)
        if block.lang == "python"
        for line in block.text.splitlines()
        if re.search(r"\b(sw|pm)\.\w", line) and "print(" not in line
    ]
    assert f"{len(lines)} lines are about sharding" in " ".join(text.split())
    assert len(lines) <= MOST_LINES, "\n".join(lines)
