"""`shardwright check` compares `[memory]` with the programs of a model."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shardwright.cli import check

MODEL = """
import jax
import jax.numpy as jnp
import shardwright as sw
from jax.ad_checkpoint import checkpoint_name
from shardwright.plan import Program

SPECS = {"up": sw.ArraySpec((16, 16), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
HIDDEN = (sw.BATCH, sw.EMBED)


def loss(params, x):
    w = sw.gather(params, SPECS)
    return (checkpoint_name(sw.shard(x, HIDDEN) @ w["up"], "inner") ** 2).sum()


def step(params, moments, x):
    grads = jax.grad(jax.checkpoint(loss))(params, x)
    return params, jax.tree.map(lambda m, g: m + g, moments, grads)


def programs(donated=()):
    shapes = {"up": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    holds = ("parameters", "optimizer", "inputs")
    specs = (SPECS, SPECS, HIDDEN)
    return {"train": Program(step, (shapes, shapes, x), specs, holds=holds, donated=donated)}


def donating():
    return programs((0, 1))
"""
STRATEGY = """
[memory]
state = "host"

[memory.saved]
{name} = "host"
"""


@pytest.mark.parametrize(
    ("function", "name", "codes"),
    [
        ("programs", "inner", ["state_not_donated"]),
        ("donating", "iner", ["unused_saved"]),
        ("donating", "inner", []),
    ],
)
def test_memory_is_compared_with_programs(
    function: str,
    name: str,
    codes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL, encoding="utf-8")
    Path("mine.toml").write_text(STRATEGY.format(name=name), encoding="utf-8")
    command = shlex.split(f'"fsdp | mine.toml" model.py:{function} --strict')
    assert check.run(check.parser().parse_args(command)) == bool(codes)
    printed = " ".join(capsys.readouterr().out.split())
    found = [code for code in ("state_not_donated", "unused_saved") if code in printed]
    assert found == codes
    if codes == ["state_not_donated"]:
        assert "mine.toml:3 memory.state: warning" in printed
        assert "argument 1" in printed
        assert "donated=(1,)" in printed
    if codes == ["unused_saved"]:
        assert "mine.toml:6 memory.saved.iner: warning" in printed
        assert "did you mean 'inner'?" in printed
