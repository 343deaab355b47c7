"""`shardwright plan` on questions that cannot be answered: message, fix and exit code."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import main

MODEL = """
import jax
import jax.numpy as jnp
import shardwright as sw
from shardwright.plan import Program

hidden = (sw.BATCH, sw.EMBED)


def forward(batch, embed=64):
    specs = {"up": sw.ArraySpec((embed, 4 * embed), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    params = {"up": jax.ShapeDtypeStruct(specs["up"].shape, jnp.float32)}

    def run(params, x):
        w = sw.gather(params, specs)
        return sw.shard(sw.shard(x, hidden) @ w["up"], sw.BATCH, sw.MLP_INTERMEDIATE)

    x = jax.ShapeDtypeStruct((batch, embed), jnp.float32)
    return Program(run, (params, x), (specs, hidden))


def small():
    return forward(16)


def odd_batch():
    return forward(6)


def huge():
    return forward(16, 2**17)


def enormous():
    return forward(16, 2**20)


def raises():
    return Program(lambda x: x.missing, (jax.ShapeDtypeStruct((8,), jnp.float32),))


def unknown():
    return Program(jnp.linalg.cholesky, (jax.ShapeDtypeStruct((8, 8), jnp.float32),))
"""

# Function and options -> exit code, and what the output says.
CASES = {
    "small --topology v5e:3x5": (2, ("v5e has no slice 3x5", "fix", "nearest slices are 4x4")),
    "small --topology v9:2x4": (2, ("no chip 'v9'", "fix", "chips are v4, v5e")),
    "small --topology v5e:8x8": (2, ("8 devices", "64", "fix")),
    "odd_batch": (2, ("size 6 does not divide over fsdp=4", "rule", "fix")),
    "huge --topology v5e:2x4": (
        1,
        ("mode train does not fit", "one copy of the state is 256.0 GiB", "can hold it is v5e:4x8"),
    ),
    "enormous --topology v5e:2x4": (1, ("does not fit", "no slice of v5e can hold it")),
    "raises": (2, ("for train raised AttributeError", "missing", "fix")),
    "unknown": (1, ("incomplete: no rule for cholesky", "fix   compile the program", "--verify")),
    "small --verify --topology v5e:2x4": (
        2,
        ("needs libtpu, which is not installed", "tpu-aot", "--compiler cpu"),
    ),
}


@pytest.mark.parametrize("words", CASES)
def test_bad_question_has_message_and_fix(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    function, _, options = words.partition(" ")
    command = f"plan bad_model.py:{function} --strategy fsdp_tp --mesh fsdp:4,tp:2 {options}"
    code, says = CASES[words]
    assert main(shlex.split(command)) == code
    captured = capsys.readouterr()
    assert [text for text in says if text not in captured.out + captured.err] == []
    assert "Traceback" not in captured.err


PROBE = """
import sys
from shardwright.cli.main import main
code = main(sys.argv[1:])
import jax
jax.config.update("jax_num_cpu_devices", 3)  # raises if a backend is there
sys.exit(code)
"""


def test_plan_starts_no_backend(tmp_path: Path) -> None:
    model = tmp_path / "planned_model.py"
    model.write_text(MODEL, encoding="utf-8")
    words = f"plan {model}:small --strategy fsdp_tp --mesh fsdp:4,tp:2 --topology v5e:2x4 --json"
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *shlex.split(words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
