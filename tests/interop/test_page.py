"""The page of behaviors has a row for each behavior, and the last column of each row is true."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest

from tests.docs.snippets import ROOT, blocks
from tests.interop import test_behaviors

TEXT = (ROOT / "docs" / "development" / "eformer.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| .+ \| .+ \| `(.+)` \|$", TEXT, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    actual: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks(TEXT):
            if block.lang == "python":
                exec(block.text, actual)
    return actual


def test_every_behavior_has_a_row_and_a_test() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 26))
    tests = re.findall(r"^test_(\d\d)_", "\n".join(vars(test_behaviors)), flags=re.MULTILINE)
    assert [int(number) for number in tests] == list(range(1, 26))


@pytest.mark.parametrize(("number", "line"), ROWS)
def test_row_is_true(number: str, line: str, namespace: dict[str, Any]) -> None:
    assert eval(line, namespace) is True, number
