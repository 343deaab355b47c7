"""The main job as people start it: `python examples/demo.py`."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


# The demo with one wrong byte in what the second server writes, and no tolerance for losses.
SPOILT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import demo
right, served = demo.generate, []
def spoilt(*args, **kwargs):
    texts = right(*args, **kwargs)
    served.append(texts)
    if len(served) == 1:
        return texts
    return [*texts[:3], bytes([texts[3][0] ^ 1]) + texts[3][1:], *texts[4:]]
demo.generate, demo.TOLERANCE = spoilt, 0.0
sys.exit(demo.main(["--quick"]))
"""


def run_demo(*options: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    return run_python(str(ROOT / "examples" / "demo.py"), *options, flags=flags)


def run_python(*arguments: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    env["XLA_FLAGS"] = flags
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "always", *arguments]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.full
def test_demo_runs_without_warnings() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything agrees" in done.stdout
    for text in (
        "single",
        "fsdp:8",
        "fsdp:2 tp:4",
        "fsdp:2 sp:4",
        "dp:2 tp:4",
        "prefill",
        "insert",
        "decode",
        "bytes per device",
    ):
        assert text in done.stdout
    assert "8 of 8 texts confirmed" in done.stdout
    assert "Warning" not in done.stderr
    assert "rematerialization" not in done.stderr


@pytest.mark.full
def test_short_demo_agrees() -> None:
    done = run_demo("--quick", flags="--xla_backend_optimization_level=0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything agrees" in done.stdout
    assert "8 of 8 texts confirmed" in done.stdout


@pytest.mark.full
def test_demo_with_indivisible_batch() -> None:
    done = run_demo("--quick", "--batch", "12")
    assert done.returncode == 2
    assert "IndivisibleError  dim 0 BATCH: size 12 does not divide over fsdp=8" in done.stdout
    assert 'rule  batch = "fsdp"   (fsdp.toml:' in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.full
def test_demo_fails_on_different_results() -> None:
    done = run_python("-c", SPOILT, str(ROOT / "examples"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED losses differ by" in done.stdout
    assert "FAILED slot 3: single and serve_tp differ from byte 0" in done.stdout
    assert "FAILED slot 3: without a cache the model writes another text" in done.stdout
    assert "Everything agrees" not in done.stdout


@pytest.mark.full
def test_demo_reports_without_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything that the demo prints, in seconds: zeros take the place of trained weights."""
    pytest.importorskip("rich")
    import demo
    from decoder.config import DecoderConfig
    from decoder.train import Trained, Trainer, decoder_specs

    def zeros(trainer: Trainer, _: Any) -> dict[str, Any]:
        specs = decoder_specs(trainer.config)
        params = trainer.pm.abstract(specs)
        opt = trainer.pm.abstract_state(trainer.optimizer, specs)
        return jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
            {"params": params, "opt": opt},
        )

    def untrained(trainer: Trainer, state: Any, batches: Any, *, on_step: Any) -> Trained:
        losses = tuple(float(batch["inputs"].shape[0]) for batch in batches)
        on_step(losses[-1])
        return Trained(state=state, losses=losses)

    tiny = functools.partial(DecoderConfig, layers=1, embed=16, head_dim=4, mlp=16)
    monkeypatch.setattr(demo, "DecoderConfig", tiny)
    monkeypatch.setattr(demo, "train", untrained)
    for name in ("init", "start"):
        monkeypatch.setattr(Trainer, name, zeros)
    assert demo.main(["--steps", "1", "--further", "1", "--new-bytes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "not trained in this run" in " ".join(printed.split())
    results = json.loads(demo.PRECISIONS.read_text(encoding="utf-8"))["losses"]
    assert [*results] == ["float32", "bfloat16", "delayed", "current", "mxfp8"]
    row = [f"{losses['at 500']:.4f}" for losses in results.values()]
    assert re.search(r"\s+".join(map(re.escape, row)), printed)
    assert "Everything agrees" in printed
    assert "8 of 8 texts confirmed" in printed
    for mesh in ("fsdp:8", "fsdp:2 tp:4", "fsdp:2 sp:4", "dp:2 tp:4"):
        assert mesh in printed
    sections = re.split(r"^(?=\d+\. )", printed, flags=re.MULTILINE)
    assert [section.partition(".")[0] for section in sections[1:]] == [*map(str, range(1, 11))]
    assert [section for section in sections if len(section.strip().splitlines()) > 24] == []
    assert "presets copy fsdp_tp mine.toml" in sections[-1]


@pytest.mark.full
def test_wrong_option_has_a_fix() -> None:
    done = run_demo("--steps", "0")
    assert done.returncode == 2
    assert "--steps, --batch and --new-bytes must be at least 1" in done.stderr
