"""The example that trains and serves in turn, with a small model."""

from __future__ import annotations

import post_training
import pytest


@pytest.mark.full
def test_training_and_serving_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert post_training.main(["--quick", "--rounds", "2"]) == 0
    text = capsys.readouterr().out
    assert "a request ran with version 0 then 1" in text
    assert "a request ran with version 1 then 2" in text
    assert "writes the same texts" in text


def test_invalid_number_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        post_training.main(["--rounds", "0"])
    assert "--rounds is at least 1" in capsys.readouterr().err
