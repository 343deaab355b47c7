"""The serving example, in its short form."""

from __future__ import annotations

import json

import pytest
import serving


@pytest.mark.full
@pytest.mark.parametrize("cache", serving.CACHES)
def test_texts_equal_requests_alone(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--quick", "--json", "--cache", cache]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["different"] == []
    assert (report["report"]["requests"], report["report"]["finished"]["canceled"]) == (12, 1)
    assert report["report"]["slots_in_use"] > 2


@pytest.mark.full
def test_output_streams_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--quick"]) == 0
    text = capsys.readouterr().out
    assert "12 requests, 4 slots, dense caches, serve_tp on dp:2,tp:4" in text
    assert "12 of 12 texts equal the text of the request served alone" in text
    assert "request 1: " in text
    assert "first token   p50 " in text
