"""`shardwright plan` on questions that cannot be answered: message, fix and exit code."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.testing.golden import Golden

MODEL = """
import jax
import jax.numpy as jnp
import shardwright as sw
from shardwright.plan import Program

hidden = (sw.BATCH, sw.EMBED)
UP = (sw.EMBED, sw.MLP_INTERMEDIATE)


def forward(batch, embed=64):
    specs = {"up": sw.ArraySpec((embed, 4 * embed), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
    params = {"up": jax.ShapeDtypeStruct(specs["up"].shape, jnp.float32)}

    def run(params, x):
        w = sw.gather(params, specs)
        return sw.shard(sw.shard(x, hidden) @ w["up"], sw.BATCH, sw.MLP_INTERMEDIATE)

    x = jax.ShapeDtypeStruct((batch, embed), jnp.float32)
    return Program(run, (params, x), (specs, hidden))


def deep(embed, layers):
    specs = {"up": sw.ArraySpec((layers, embed, embed), jnp.float32, (sw.EMPTY, *UP))}
    params = {"up": jax.ShapeDtypeStruct(specs["up"].shape, jnp.float32)}

    def run(params, x):
        def layer(x, w):
            return sw.shard(x @ sw.gather(w, *UP), hidden), None

        return jax.lax.scan(layer, sw.shard(x, hidden), params["up"])[0]

    x = jax.ShapeDtypeStruct((16, embed), jnp.float32)
    return Program(run, (params, x), (specs, hidden))


def small():
    return forward(16)


def odd_batch():
    return forward(6)


def huge():
    return deep(2**13, 2**10)


def enormous():
    return deep(2**13, 2**16)


def broken(x):
    raise ValueError("no data")


def raises():
    return Program(broken, (jax.ShapeDtypeStruct((8,), jnp.float32),))


def unknown():
    return Program(jnp.linalg.cholesky, (jax.ShapeDtypeStruct((8, 8), jnp.float32),))


def large():
    return deep(2**12, 2**8)


def wide():
    return forward(2**28, 64)
"""

# Name -> function and options.
CASES = {
    "impossible_slice": "small --topology v5e:3x5",
    "unknown_chip": "small --topology v9:2x4",
    "other_number_of_devices": "small --topology v5e:8x8",
    "batch_does_not_divide": "odd_batch",
    "does_not_fit": "huge --topology v5e:2x4",
    "fits_no_slice": "enormous --topology v5e:2x4",
    "function_raises": "raises",
    "unknown_primitive": "unknown",
    "missing_extra": "small --verify --topology v5e:2x4",
    "worker_killed": "small --verify --compiler cpu",
    "worker_out_of_time": "small --verify --compiler cpu --verify-timeout 1",
}
CODES = dict.fromkeys(("does_not_fit", "fits_no_slice", "unknown_primitive"), 1)
CODES["batch_does_not_divide"] = 1
CODES |= dict.fromkeys(("worker_killed", "worker_out_of_time"), 1)
# The worker process is replaced by a script.
WORKERS = {"worker_killed": "kill -9 $$", "worker_out_of_time": "exec sleep 600"}


@pytest.mark.full(
    but=[
        "impossible_slice",
        "unknown_chip",
        "other_number_of_devices",
        "batch_does_not_divide",
        "does_not_fit",
        "fits_no_slice",
        "function_raises",
        "unknown_primitive",
        "missing_extra",
        "worker_killed",
    ]
)
@pytest.mark.parametrize("name", CASES)
def test_bad_question_has_message_and_fix(
    name: str,
    golden: Golden,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    if name in WORKERS:
        path = tmp_path / "worker"
        path.write_text(f"#!/bin/sh\n{WORKERS[name]}\n", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
    function, _, options = CASES[name].partition(" ")
    command = f"plan bad_model.py:{function} --strategy fsdp_tp --mesh fsdp:4,tp:2 {options}"
    code = main([*shlex.split(command), "--width", "100"])
    captured = capsys.readouterr()
    text = re.sub(r"jaxlib [0-9.]+", "jaxlib VERSION", captured.out + captured.err)
    assert code == CODES.get(name, 2)
    assert "  fix   " in text
    assert "Traceback" not in text
    golden(f"{text}exit code {code}\n", name)


PROBE = """
import sys
from shardwright.cli.main import main
main(["--help"])
main(["presets"])
assert "shardwright.plan" not in sys.modules
from shardwright.testing.golden import Golden
code = main(sys.argv[1:])
import jax
jax.config.update("jax_num_cpu_devices", 3)  # raises if a backend is there
sys.exit(code)
"""


def test_plan_starts_no_backend(tmp_path: Path) -> None:
    """Nor is the planner imported for `--help`."""
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


def _plan_text(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "bad_model.py").write_text(MODEL, encoding="utf-8")
    assert main(shlex.split(f"plan {folder / 'bad_model.py'}:{words} --topology v5e:2x4")) == 1
    return capsys.readouterr().out


@pytest.mark.parametrize("preset", ["fsdp_tp", "ddp"])
def test_advice_works_when_it_is_followed(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 GiB of weights fit on eight chips if all share them, and not if dp copies them.

    In the table that replicates them, a rule for dp would be in conflict with that of the batch.
    """
    text = _plan_text(f"large --strategy {preset} --mesh dp:8", tmp_path, capsys)
    assert "does not fit: it needs at least 16.0 GiB of 15.8 GiB per device" in text
    plan = f"plan {tmp_path / 'bad_model.py'}:large --topology v5e:2x4"
    mesh = re.search(r"fix   (?:use|try) (\S+) on v5e:2x4", text)
    if preset == "fsdp_tp":
        assert mesh is not None
        assert main(shlex.split(f"{plan} --strategy {preset} --mesh {mesh[1]}")) == 0
    written = re.search(
        r'write (.*) in a file with base = "(\w+)": then it needs at least 2\.1 GiB', text
    )
    assert written is not None
    assert written[2] == preset
    overlay = tmp_path / "followed.toml"
    overlay.write_text(_toml(written[1]), encoding="utf-8")
    followed = f"{plan} --strategy '{preset} | {overlay}' --mesh dp:8"
    assert main(shlex.split(followed)) == 0


def _toml(advice: str) -> str:
    """Return `[params] embed = "dp" and [policy] gather = "dp"` as lines of a file."""
    return "\n".join(advice.replace("] ", "]\n").split(" and "))


def test_advice_for_a_file_of_tensors_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tensors.toml"
    file.write_text(
        '[w]\naxes = "EMBED VOCAB"\nshape = [65536, 65536]\ndtype = "float32"\nrole = "param"\n',
        encoding="utf-8",
    )
    words = f"plan {file} --mesh dp:8 --topology v5e:2x4 --mode decode --strategy"
    assert main(shlex.split(f"{words} ddp")) == 1
    text = capsys.readouterr().out
    advice = '[params] embed = "dp" and [policy] gather = "dp"'
    assert f'fix   write {advice} in a file with base = "ddp"' in text
    overlay = tmp_path / "followed.toml"
    overlay.write_text('base = "ddp"\n', encoding="utf-8")
    assert main(shlex.split(f"{words} {overlay}")) == 1
    assert f"write {advice} in followed.toml" in capsys.readouterr().out
    overlay.write_text(f'base = "ddp"\n{_toml(advice)}\n', encoding="utf-8")
    assert main(shlex.split(f"{words} {overlay}")) == 0


def test_advice_for_large_activations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _plan_text("wide --strategy fsdp_tp --mesh fsdp:8", tmp_path, capsys)
    assert "the state takes" in text
    assert "reduce the values of the step: a smaller batch or length" in text
    assert "smallest slice" not in text
