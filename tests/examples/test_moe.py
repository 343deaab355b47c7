"""The example of an MoE model, with few steps."""

from __future__ import annotations

import moe
import pytest


@pytest.mark.full
def test_an_moe_model_trains_and_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe.main(["--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "tokens and experts are sharded over ep: two all-to-alls" in text
    assert "all_to_all over ep" in text
    assert "The losses agree" in text
    assert "generates the same text" in text


def test_losses_that_differ_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = {"single": [2.0, 1.0], "fsdp": [2.0, 1.0], "moe_ep": [2.0, 1.001]}
    monkeypatch.setattr(moe, "train", lambda pm, *_: (None, actual.get(pm.name, actual["single"])))
    assert moe.main(["--steps", "2"]) == 1
    assert "FAILED: largest relative difference 1.0e-03 (at most 2e-05)." in capsys.readouterr().out


def test_invalid_number_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        moe.main(["--steps", "0"])
    assert "--steps is at least 1" in capsys.readouterr().err
