"""`shardwright check` finds the convolutions that XLA may compute wrongly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from shardwright.cli import check

MODEL = """
import jax
import shardwright as sw
from shardwright.plan import Program

KERNEL = sw.ArraySpec((3, 3, 8, 16), "float32", (sw.EMPTY, sw.EMPTY, sw.EMPTY, sw.CHANNEL_OUT))
IMAGES = (sw.BATCH, sw.HEIGHT, sw.WIDTH, sw.EMPTY)


def forward(kernel, x):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def programs():
    shapes = KERNEL.shape, (8, 16, 16, 8)
    arrays = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return {"train": Program(forward, arrays, (KERNEL, IMAGES))}
"""
RULES = """
[mesh]
fsdp = 2
sp = 2
tp = 2

[rules]
batch = "fsdp"
height = "sp"
channel_out = "{}"
"""


@pytest.mark.parametrize("channels", ["tp", "-"])
def test_sharded_height_and_channels_are_found(
    channels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL, encoding="utf-8")
    Path("mine.toml").write_text(RULES.format(channels), encoding="utf-8")
    command = shlex.split("mine.toml model.py:programs --json")
    check.run(check.parser().parse_args(command))
    checked = json.loads(capsys.readouterr().out)["strategies"]
    found = [each for result in checked for each in result["findings"]]
    wrong = [each for each in found if each["code"] == "spatial_and_channel"]
    assert len(wrong) == (channels == "tp"), found
    for each in wrong:
        assert each["fix"] == "store the kernel whole over tp"
        assert "sharded along the window over sp" in each["message"]
        assert (each["file"], each["line"]) == ("model.py", 11)
