"""Whole outputs of commands, compared with golden files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.testing.golden import Golden
from shardwright.vocabulary.shown import WIDTH
from tests.cli.cases import CASES, OTHERS, shown

# A line of an error, which the terminal wraps.
MESSAGE = re.compile(r" +(fix|rule|dim \d+) ")


@pytest.mark.parametrize("name", CASES | OTHERS)
def test_output_is_golden(name: str, golden: Golden, tmp_path: Path) -> None:
    line = (CASES | OTHERS)[name]
    text = shown(line, tmp_path)
    golden(text, name)
    if "json" not in name:
        width = 80 if "80" in line else WIDTH
        tables = [row for row in text.splitlines()[1:] if not MESSAGE.match(row)]
        assert [lines for lines in tables if len(lines) > width] == []
