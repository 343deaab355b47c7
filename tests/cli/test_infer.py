"""`shardwright infer`: what it prints and writes, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from shardwright.cli.main import main

MODEL = """
import jax
import jax.numpy as jnp


def forward(params, tokens):
    x = params["table"][tokens]
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    return x @ params["head"]


def init(key):
    shapes = {"table": (96, 24), "up": (24, 40), "down": (40, 24), "head": (24, 7)}
    return {name: jax.random.normal(key, shape) for name, shape in shapes.items()}


def scanned(params, tokens):
    total = jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(24), params["table"])[0]
    return params["table"][tokens] + total


def ready():
    return {"table": jnp.ones((96, 24))}


def fails(params, tokens):
    return params["missing"]
"""
TOKENS = '--input "int32[2,10] BATCH LENGTH"'


def infer(words: str) -> int:
    """Run the command and return its exit code."""
    return main(shlex.split(f"infer {words}"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "plain_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


def test_table_and_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "axes.toml"
    assert infer(f"{model}:forward --params init {TOKENS} -o {out}") == 0
    printed = capsys.readouterr().out
    assert "guess: logits (dot_general, plain_model.py:9)" in " ".join(printed.split())
    assert "8 of 8 dims named, 1 of them by guess; 0 open; 0 conflicts" in printed
    assert printed.endswith(f"rules written to {out}\n")
    assert tomllib.loads(out.read_text(encoding="utf-8")) == {
        "^down$": ["MLP_INTERMEDIATE", "EMBED"],
        "^head$": ["EMBED", "VOCAB"],
        "^table$": ["VOCAB", "EMBED"],
        "^up$": ["EMBED", "MLP_INTERMEDIATE"],
    }


def test_strict_fails_on_guesses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{model}:forward --params init {TOKENS} --strict --json"
    assert infer(words) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["guesses"], data["open"], data["ok"]) == (1, 0, False)
    assert infer(f"{words} --size 7=classes") == 0
    data = json.loads(capsys.readouterr().out)
    (head,) = [dim for dim in data["dims"] if (dim["path"], dim["dim"]) == ("head", 1)]
    assert (head["axis"], head["reason"]) == ("CLASSES", "size 7 is in sizes")
    assert data["ok"]


def test_conflict_writes_no_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "axes.toml"
    assert infer(f"{model}:scanned --params ready {TOKENS} -o {out}") == 1
    printed = capsys.readouterr().out
    assert "plain_model.py:19" in printed
    assert "plain_model.py:18" in printed
    assert f"rules not written to {out}" in printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("MODEL:nothing --params init", "has no function 'nothing'"),
        ("MODEL:forward --params nothing", "has no function 'nothing'"),
        ("MODEL --params init", "is not file.py:function"),
        ('MODEL:forward --params init --input "int32 BATCH"', "is not dtype[shape] and axes"),
        ('MODEL:forward --params init --input "int3[2] BATCH"', "is not dtype[shape] and axes"),
        ('MODEL:forward --params init --input "int32[2,3] BATCH"', "one axis for each of 2 dims"),
        (f"MODEL:forward --params init {TOKENS} --size 7", "--size '7' is not N=AXIS"),
        (f"MODEL:forward --params init {TOKENS} -o axes.txt", "'axes.txt' is not a .toml file"),
        (f"MODEL:fails --params init {TOKENS}", "raised KeyError: 'missing' at plain_model.py:27"),
        ("MODEL:forward --params init", "missing 1 required positional argument: 'tokens'"),
    ],
)
def test_invalid_question(
    words: str, says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert infer(words.replace("MODEL", model)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert "Traceback" not in captured.err
