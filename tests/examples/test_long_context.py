"""The example of long sequences, on short ones."""

from __future__ import annotations

from typing import Any

import long_context
import pytest
from decoder.train import Trained, Trainer

from tests.examples.test_demo import ROOT, run_python


@pytest.mark.full
def test_ring_training_equals_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert long_context.main(["--length", "128", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert 'long_context: ring   the strategy says train = "ring"' in text
    assert "mesh  q_length sp, kv_length sp" in text
    assert "The losses agree" in text


def test_losses_that_differ_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {1: (2.0, 1.0), 8: (2.0, 1.001)}

    def trained(trainer: Trainer, state: Any, batches: Any, *, on_step: Any) -> Trained:
        return Trained(state=state, losses=losses[trainer.pm.mesh.size])

    monkeypatch.setattr(long_context, "train", trained)
    monkeypatch.setattr(Trainer, "init", lambda trainer, seed: {})
    assert long_context.main(["--length", "128"]) == 1
    assert "FAILED: largest relative difference 1.0e-03 (at most 2e-05)." in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--length", "100"], ["--length", "0"], ["--steps", "0"]])
def test_invalid_sizes(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        long_context.main(options)
    assert "--length must be a multiple of 16" in capsys.readouterr().err


@pytest.mark.full
def test_command_of_the_docstring_runs() -> None:
    done = run_python(str(ROOT / "examples" / "long_context.py"), "--length", "64", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses agree" in done.stdout
    assert "rematerialization" not in done.stderr
