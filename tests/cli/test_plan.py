"""`shardwright plan`: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.cli.plan_programs import _breach_lines
from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.events import Event

MODEL = """
import jax
import jax.numpy as jnp
import shardwright as sw
from shardwright.plan import Program

specs = {"up": sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))}
hidden = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)


def forward(params, x):
    w = sw.gather(params, specs)
    return sw.shard(sw.shard(x, hidden) @ w["up"], sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)


def programs():
    params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
    one = jax.ShapeDtypeStruct((8, 1, 64), jnp.float32)
    return {
        "train": Program(forward, (params, x), (specs, hidden)),
        "decode": Program(forward, (params, one), (specs, hidden)),
    }


def incomplete():
    return Program(jnp.linalg.cholesky, (jax.ShapeDtypeStruct((8, 8), jnp.float32),))


def fails():
    return Program(lambda x: x.nothing, (jax.ShapeDtypeStruct((8,), jnp.float32),))


def raises():
    raise KeyError("data")


def wrong():
    return 3


def empty():
    return {}


def leaves():
    raise SystemExit(0)


def ranks():
    return sw.ArraySpec((8, 8), jnp.float32, (sw.EMBED,))


def like_inputs():
    params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
    return Program(forward, (params, x), ({"up": specs["up"].axes}, hidden))


def summed():
    w = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    axes = ((sw.BATCH, sw.MLP_INTERMEDIATE), (sw.MLP_INTERMEDIATE, sw.EMBED))
    return Program(lambda x, w: x @ w, (x, w), axes)


def twice():
    return {"decode": incomplete(), "__autoregressive__": incomplete()}
"""
SETTING = "--strategy fsdp_tp --mesh fsdp:2,tp:4"


def plan(words: str) -> int:
    """Run the command and return its exit code."""
    return main(shlex.split(f"plan {words}"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "planned_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return str(path)


def test_table_per_mode(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{model}:programs {SETTING}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mode")] == ["mode train", "mode decode"]
    rows = [line.split() for line in lines if "all_gather" in line]
    # 64 x 256 float32 over tp:4, gathered over fsdp:2.
    assert (
        rows
        == [
            ["1", "all_gather", "fsdp", "EMBED", "16.0", "KiB", "8.0", "KiB", "planned_model.py:12"]
        ]
        * 2
    )


def test_json_has_the_events_of_each_mode(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{model}:programs {SETTING} --json --mode decode") == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["modes"]) == ["decode"]
    (event,) = data["modes"]["decode"]["events"]
    assert (event["kind"], event["axes"], event["logical_bytes"]) == (
        "all_gather",
        ["EMBED"],
        64 * 256,
    )


def test_forbidden_collectives_of_one_line_are_one_line() -> None:
    event = Event(
        kind=Kind.ALL_GATHER,
        mesh_axes=("fsdp",),
        dtype="float32",
        logical_bytes=2048,
        wire_bytes=1024,
        runs=1,
        source="model.py:7",
    )
    paths = ("gate", "up", "gate", "down", "key")
    events = [dataclasses.replace(event, path=path) for path in paths]
    other = dataclasses.replace(event, source="model.py:8")
    start = "forbidden by *: all_gather over fsdp sends 1.0 KiB at model.py"
    assert _breach_lines([("*", each) for each in (*events, other)]) == [
        f"{start}:7, 5 times (gate, up, down and 1 more)",
        f"{start}:8",
    ]


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("all_gather@decode>1KiB", 1),
        ("all_gather@decode>1MiB", 0),
        ("*@train", 1),
        ("all_to_all", 0),
    ],
)
def test_forbidden_collectives_fail(
    model: str, rule: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{model}:programs {SETTING} --forbid '{rule}'") == code
    assert ("forbidden by" in capsys.readouterr().out) == bool(code)


def test_an_incomplete_plan_fails(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{model}:incomplete {SETTING}") == 1
    assert "incomplete: no rule for cholesky (1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("programs", "is not file.py:function"),
        ("absent.py:programs", "no file"),
        ("{model}:program", "has no function 'program'"),
        ("{model}:raises", "raised KeyError: 'data' at planned_model.py:35"),
        ("{model}:fails", "for train raised AttributeError"),
        ("{model}:wrong", "returned 3 for train"),
        ("{model}:empty", "returned no program"),
        ("{model}:leaves", "raised SystemExit"),
        ("{model}:ranks", "(EMBED) has rank 1, and the array has rank 2: shape (8, 8) at planned"),
        ("{model}:twice", "names one mode twice"),
        ("{model}:forward", "to plan forward itself, write programs() beside it, which returns "),
        ("{model}:like_inputs", 'write holds=("parameters", "inputs"), or pass ArraySpecs'),
    ],
)
def test_invalid_models_are_refused(
    model: str, what: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{what.format(model=model)} {SETTING}") == 2
    message = capsys.readouterr().err
    assert says in message
    assert "fix" in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--mode insert", "has no mode insert"),
        ("--forbid all_gather@prefill", "names a mode that is not planned"),
        ("--forbid 'all_gather>..B'", "is not KIND"),
        ("--forbid all_gathr", "did you mean"),
        ("--forbid 'all_gather>1'", "is not KIND, KIND@MODE or KIND@MODE>BYTES"),
        ("--mesh fsdp:2,tq:4", "tq"),
        ("--batch 16 --set batch=8", "batch is given twice: --batch 16 and --set batch=8"),
        ("--set rows=8 --set rows=9", "rows is given twice: --set rows=8 and --set rows=9"),
    ],
)
def test_invalid_options_are_refused(
    model: str, arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{model}:programs {SETTING} {arguments}") == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.startswith("shardwright: ")
    assert "  fix   " in message
    assert "usage:" not in message


def test_folder_of_a_model_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = {"model_type": "llama", "torch_dtype": "bfloat16", **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert plan(f"{tmp_path} {SETTING} --mode decode") == 0
    assert "the sizes of llama" in capsys.readouterr().out


TENSORS = """
role = "param"
dtype = "bfloat16"
[up]
axes = "EMBED MLP_INTERMEDIATE"
shape = [64, 256]
[norm]
axes = "NORM"
shape = [64]
[cache.keys]
role = "activation"
axes = "BATCH KV_LENGTH KV_HEAD KV_HEAD_DIM"
shape = [8, 32, 4, 16]
"""


@pytest.fixture
def tensors(tmp_path: Path) -> str:
    path = tmp_path / "tensors.toml"
    path.write_text(TENSORS, encoding="utf-8")
    return str(path)


def test_tensors_give_state_alone(tensors: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{tensors} {SETTING} --optimizer-copies 2 --cache ^cache/ --json") == 0
    (state,) = [mode["state"] for mode in json.loads(capsys.readouterr().out)["modes"].values()]
    parameters = 64 * 256 * 2 // 8 + 64 * 2
    counted = {name: sums["per_device"] for name, sums in state["by_category"].items()}
    assert counted == {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": 2 * parameters,
        "cache": 8 * 32 * 4 * 16 * 2 // 8,
    }
    assert plan(f"{tensors} {SETTING} --cache ^cache/") == 0
    assert "collectives and activations need a function" in capsys.readouterr().out


def test_uncounted_tensors_fail(tensors: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{tensors} {SETTING}") == 1
    assert "not counted: cache/keys is an activation" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "code"), [("2%", 0), ("1%", 1), ("1KiB", 1), ("4KiB", 0)])
def test_copies_above_a_limit_fail(
    tensors: str, limit: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """896 bytes of the norm and 896 of its gradient are copies, of 98 KiB held."""
    assert plan(f"{tensors} {SETTING} --cache ^cache/ --max-replicated {limit}") == code
    assert ("of the state are copies" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("{tensors} --forbid all_gather", "--forbid needs a function"),
        ("{model}:programs --cache x", "--cache is for a file of tensors"),
        ("{model}:programs --optimizer-copies 2", "--optimizer-copies is for a file of tensors"),
        ("{tensors} --max-replicated 2", "'2' is not a size; write 2% or 1GiB"),
    ],
)
def test_misplaced_options_are_refused(
    model: str, tensors: str, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{words.format(model=model, tensors=tensors)} {SETTING}") == 2
    assert says in capsys.readouterr().err


def test_a_topology_sizes_the_mesh(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--strategy fsdp_tp --mesh fsdp:-1,tp:4 --topology v5e:2x4 --mode train"
    assert plan(f"{model}:programs {words}") == 0
    assert "v5e:2x4: fsdp on x, tp on y" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--topology v5e:2x5", "the nearest slices are 2x4"),
        ("--topology v5e:2x2", "8"),
        ("--topology v5e:2x4 --devices 8", "--topology and --devices exclude each other"),
        ("--hardware mine.toml", "no --topology is given"),
        ("--topology v5e:2x4 --hardware absent.toml", "cannot read 'absent.toml'"),
    ],
)
def test_bad_topologies_are_refused(
    model: str, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{model}:programs {SETTING} {words}") == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--topology v5e:2x4", 0, "15.8 GiB usable on v5e: fits"),
        ("--topology v5e:2x4 --hardware small.toml", 1, "mode train does not fit"),
        ("--topology v5e:2x4 --hardware near.toml", 0, "close: compile the program to know"),
        ("--max-hbm 1KiB", 1, "--max-hbm 1KiB: mode train: up to 56.0 KiB per device"),
        ("--topology v5e:2x4 --max-hbm 1%", 0, "fits"),
        ("--max-hbm 90%", 2, "no --topology is given"),
    ],
)
def test_memory_is_judged(
    model: str, words: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(model).parent
    for name, gib in (("small", 1e-6), ("near", 5e-5)):
        cell = f'{{ value = {gib}, source = "a test", date = "2026-01-01" }}'
        (folder / f"{name}.toml").write_text(f"[v5e]\nhbm_gib = {cell}\n", encoding="utf-8")
        words = words.replace(f"{name}.toml", str(folder / f"{name}.toml"))
    assert plan(f"{model}:programs {SETTING} --mode train {words}") == code
    captured = capsys.readouterr()
    assert says in (captured.err if code == 2 else captured.out)


def test_state_too_large_does_not_fit(
    tensors: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = '{ value = 1e-6, source = "a test", date = "2026-01-01" }'
    (tmp_path / "small.toml").write_text(f"[v5e]\nhbm_gib = {cell}\n", encoding="utf-8")
    words = f"--cache ^cache/ --topology v5e:2x4 --hardware {tmp_path / 'small.toml'}"
    assert plan(f"{tensors} {SETTING} {words}") == 1
    assert (
        "does not fit: one copy of the state is 64.1 KiB, and the smallest slice that can hold it "
        "is v5e:8x8"
    ) in capsys.readouterr().out


def test_a_plan_has_the_axis_types_of_its_strategy(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On Explicit mesh axes, JAX asks how the result of a matmul over fsdp is sharded."""
    strategy = tmp_path / "explicit.toml"
    strategy.write_text('base = "fsdp_tp"\naxis_types = "explicit"\n', encoding="utf-8")
    both = f"{model}:summed --mode train --mesh fsdp:2,tp:4 --strategy"
    assert plan(f"{both} fsdp_tp") == 0
    capsys.readouterr()
    assert plan(f"{both} {strategy}") == 1
    assert "JAX refuses the program on a mesh with Explicit axes" in capsys.readouterr().err
    # Another mesh may lack mesh axes that the strategy types.
    strategy.write_text(
        'base = "fsdp_tp"\n[axis_types]\nsp = "auto"\ntp = "explicit"\n', encoding="utf-8"
    )
    assert plan(f"{both} {strategy}") == 1
