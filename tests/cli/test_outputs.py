"""Whole outputs of commands against golden files that were read line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.testing.golden import Golden
from tests.cli.cases import CASES, OTHERS, shown


@pytest.mark.parametrize("name", CASES | OTHERS)
def test_output_is_the_golden_one_and_keeps_to_the_width(name: str, golden: Golden, tmp_path: Path) -> None:
    line = (CASES | OTHERS)[name]
    text = shown(line, tmp_path)
    golden(text, name)
    if "json" not in name and "completion" not in name:
        width = 80 if "80" in line else 120
        assert [found for found in text.splitlines()[1:] if len(found) > width] == []
