"""`shardwright infer`, and `check` of a model: outputs, refusals and exit codes."""

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
    layer = lambda x, row: (x + (x @ row) * row, None)
    total = jax.lax.scan(layer, jnp.ones(24), params["table"])[0]
    return params["table"][tokens] + total


def ready():
    return {"table": jnp.ones((96, 24))}


def specs():
    import shardwright as sw

    axes = {"table": "VOCAB EMBED", "up": "EMBED VOCAB", "down": "MLP_INTERMEDIATE EMBED"}
    shapes = {**jax.eval_shape(init, jax.random.key(0))}
    axes["head"] = "EMBED CLASSES"
    return {
        name: sw.ArraySpec(shape.shape, shape.dtype, tuple(axes[name].split()))
        for name, shape in shapes.items()
    }


def shaped(key):
    return {**init(key), "act": jax.nn.gelu, "hidden": 40}


def with_function(params, tokens):
    x = params["table"][tokens]
    hidden = params["act"](x @ params["up"]).reshape(-1, params["hidden"])
    return (x.reshape(-1, 24) + hidden @ params["down"]) @ params["table"].T


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
    # The file has every array, so only those with guesses are printed.
    assert [line for line in printed.splitlines() if line in ("down", "head", "table")] == ["head"]
    assert printed.endswith(f"rules written to {out}\n")
    assert tomllib.loads(out.read_text(encoding="utf-8")) == {
        "^down$": ["MLP_INTERMEDIATE", "EMBED"],
        "^head$": ["EMBED", "VOCAB"],
        "^table$": ["VOCAB", "EMBED"],
        "^up$": ["EMBED", "MLP_INTERMEDIATE"],
    }


def test_table_without_a_file(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert infer(f"{model}:forward --params init {TOKENS}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.isalpha()] == ["down", "head", "table", "up"]


def test_functions_and_numbers_of_parameters_stay(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--params` may name a class of equinox, whose leaves are not all arrays."""
    assert infer(f"{model}:with_function --params shaped {TOKENS} --json") == 0
    dims = json.loads(capsys.readouterr().out)["dims"]
    assert [dim["path"] for dim in dims if dim["axis"] == "MLP_INTERMEDIATE"] == ["down", "up"]
    assert {dim["path"] for dim in dims} == {"table", "up", "down", "head"}


def test_strict_fails_on_guesses(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{model}:forward --params init {TOKENS} --strict --json"
    assert infer(words) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["guesses"], data["open"], data["ok"]) == (1, 0, False)
    own = Path(model).parent / "own.toml"
    own.write_text('version = 1\n[axes]\nclasses = "classes of the head"\n', encoding="utf-8")
    assert infer(f"{words} --size 7=classes --strategy {own}") == 0
    data = json.loads(capsys.readouterr().out)
    (head,) = [dim for dim in data["dims"] if (dim["path"], dim["dim"]) == ("head", 1)]
    assert (head["axis"], head["reason"]) == ("CLASSES", "size 7 is in sizes")
    assert data["ok"]
    assert infer(f"{words} --size 'h* dim 1=classes' --strategy {own}") == 0
    capsys.readouterr()


def test_conflict_writes_no_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "axes.toml"
    assert infer(f"{model}:scanned --params ready {TOKENS} -o {out}") == 1
    printed = capsys.readouterr().out
    assert "plain_model.py:20" in printed
    assert "plain_model.py:19" in printed
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
        (f"MODEL:fails --params init {TOKENS}", "raised KeyError: 'missing' at plain_model.py:50"),
        (
            'MODEL:forward --params init --input "int32[2,10] BATCH SEQ"',
            "did you mean 'LENGTH' or 'QUERY_LENGTH'? declare an axis of your own in [axes]",
        ),
        (
            f"MODEL:forward --params init {TOKENS} --size 40=MLP_INTERMEDIAT",
            "did you mean 'MLP_INTERMEDIATE'? declare an axis of your own in [axes]",
        ),
        (f"MODEL:forward --params init {TOKENS} --strategy no.toml", "no file 'no.toml'"),
        ("MODEL:forward --params init", "missing a required argument"),
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


def check(words: str) -> int:
    """Run the command and return its exit code."""
    return main(shlex.split(f"check {words}"))


def test_check_compares_names_with_the_program(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{model}:forward --params specs {TOKENS}"
    assert check(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "plain_model.py:8 up dim 1: warning other_name the dim is named VOCAB" in printed
    assert "write MLP_INTERMEDIATE 1 warning" in printed
    assert check(f"{words} --strict --json") == 1
    (result,) = json.loads(capsys.readouterr().out)["strategies"]
    (finding,) = result["findings"]
    assert finding["code"] == "other_name"
    assert (finding["file"], finding["line"]) == ("plain_model.py", 8)


def test_check_takes_axes_that_a_strategy_declares(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text('version = 1\n[axes]\nword = "a position"\n', encoding="utf-8")
    words = f'{model}:forward --params specs --input "int32[2,10] BATCH WORD"'
    assert check(words) == 2
    assert "unknown axis 'WORD'" in capsys.readouterr().err
    assert check(f"{words} --strategy {own}") == 0


def test_check_reads_path_rules(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "axes.toml"
    assert infer(f"{model}:forward --params init {TOKENS} -o {out}") == 0
    words = f"{model}:forward --params init {TOKENS} --strict --axes {out}"
    assert check(words) == 0
    out.write_text(out.read_text(encoding="utf-8").replace("VOCAB", "LENGTH"), encoding="utf-8")
    assert check(words) == 1
    assert "table dim 0: warning other_name" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("MODEL:forward", "needs --params"),
        (
            'MODEL:forward --params specs --input "int32[2,10] BATCH LENGHT"',
            "did you mean 'LENGTH'?",
        ),
        (f"MODEL:forward --params init {TOKENS}", "init returns arrays without annotations"),
        (f"MODEL:forward --params init {TOKENS} --axes no.toml", "cannot read 'no.toml'"),
        (f"MODEL:forward --params init {TOKENS} --axes MODEL", "is not TOML"),
    ],
)
def test_invalid_check_of_a_model(
    words: str, says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(words.replace("MODEL", model)) == 2
    assert says in capsys.readouterr().err


PROGRAMS = """
import jax
import jax.numpy as jnp
import shardwright as sw
from shardwright.plan import Program

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)


def specs(up=(sw.EMBED, sw.MLP_INTERMEDIATE)):
    axes = {"table": (sw.VOCAB, sw.EMBED), "up": up, "down": (sw.MLP_INTERMEDIATE, sw.EMBED)}
    shapes = {"table": (96, 24), "up": (24, 40), "down": (40, 24)}
    return {name: sw.ArraySpec(shapes[name], jnp.float32, axes[name]) for name in axes}


def forward(params, tokens):
    weights = sw.gather(params, specs())
    x = weights["table"][tokens]
    x = sw.shard(x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], *HIDDEN)
    return x @ weights["table"].T


def of(function, *more, specs, holds=None):
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}
    tokens = jax.ShapeDtypeStruct((2, 10), "int32")
    axes = (specs, *(None for _ in more), (sw.BATCH, sw.LENGTH))
    return Program(function, (shapes, *more, tokens), axes, holds=holds)


def train(up=(sw.EMBED, sw.MLP_INTERMEDIATE)):
    def loss(params, tokens):
        return jax.nn.log_softmax(forward(params, tokens))[..., 0].mean()

    def step(params, state, tokens):
        gradients = jax.grad(loss)(params, tokens)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, state), state

    state = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs().items()}
    holds = ("parameters", "optimizer", "inputs")
    return of(step, state, specs=specs(up), holds=holds)


def swapped():
    return train(up=(sw.MLP_INTERMEDIATE, sw.EMBED))


def programs():
    wrong = of(forward, specs=specs((sw.MLP_INTERMEDIATE, sw.EMBED)))
    return {"prefill": of(forward, specs=specs()), "decode": wrong, "train": train()}


def nothing():
    return 3
"""


def test_check_of_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that the model gathers need a manager, which the command enters."""
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS, encoding="utf-8")
    assert check(f"{path}:programs --strict") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{path}:programs for prefill no findings" in printed
    assert "0/up dim 0: warning other_name the dim is named MLP_INTERMEDIATE" in printed
    assert f"{path}:programs for train no findings" in printed
    assert check(f'{path}:forward --params specs --input "int32[2,10] BATCH LENGTH" --strict') == 0
    capsys.readouterr()
    assert check(f"{path}:train --strict") == 0
    assert check(f"{path}:swapped --strict") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "0/up dim 0: warning other_name the dim is named MLP_INTERMEDIATE" in printed
    for function, says in (
        ("nothing", "return shardwright.plan.Program"),
        ("forward", "or name a function without arguments that returns programs"),
    ):
        assert check(f"{path}:{function}") == 2
        assert says in capsys.readouterr().err


def test_check_resolves_the_arrays_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a strategy beside it, a model is resolved as a manager would when it runs."""
    path, mine = tmp_path / "programs.py", tmp_path / "mine.toml"
    path.write_text(PROGRAMS, encoding="utf-8")
    rules = 'base = "fsdp_tp"\n[mesh]\nfsdp = 1\ntp = {}\n[rules]\nvocab = "-"\n'
    mine.write_text(rules.format(3), encoding="utf-8")  # 40 % 3 != 0
    forward = f'{path}:forward --params specs --input "int32[2,10] BATCH LENGTH"'
    for words, label in (
        (f"{path}:train", f"{path}:train for train"),
        (forward, f"{path}:forward"),
    ):
        assert check(f"{words} --strategy {mine}") == 1
        printed = " ".join(capsys.readouterr().out.split())
        assert f"{label} under mine.toml" in printed
        assert "up dim 1 MLP_INTERMEDIATE: error unresolved size 40 does not divide" in printed
        assert 'fix add a fallback, mlp_intermediate = "tp | -"' in printed
        assert "a fallback belongs in [rules] of mine.toml" in printed
        assert check(f"{words} --strategy {mine} --mesh tp:4") == 0
        assert f"{label} under mine.toml no findings" in " ".join(capsys.readouterr().out.split())
    # Activations inside of the program are resolved too.
    mine.write_text(rules.format(1).replace("fsdp = 1", "fsdp = 4"), encoding="utf-8")
    assert check(f"{path}:train --strategy {mine}") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "size 2 does not divide over fsdp=4 at programs.py:" in printed
    # Without sizes, a note says so.
    assert check(f"{path}:train --strategy fsdp_tp") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the arrays of the model are not resolved: mesh axis fsdp = -1" in printed


ATTENTION = """
import jax.numpy as jnp
import shardwright as sw
from shardwright import attention
from shardwright.plan import Program


def specs():
    qkv = sw.ArraySpec((24, 3, 4, 8), jnp.float32, (sw.EMBED, sw.EMPTY, sw.HEAD, sw.HEAD_DIM))
    return {"qkv": qkv}


def forward(params, x):
    q, k, v = jnp.einsum("bse,ethd->tbshd", x, params["qkv"])
    return attention.dot_product_attention(q, k, v, causal=True)


def programs():
    import jax

    shapes = {"qkv": jax.ShapeDtypeStruct((24, 3, 4, 8), jnp.float32)}
    x = jax.ShapeDtypeStruct((2, 10, 24), jnp.float32)
    program = Program(forward, (shapes, x), (specs(), (sw.BATCH, sw.LENGTH, sw.EMBED)))
    return {"train": program, "prefill": program}
"""


def test_attention_without_a_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`infer` and `check` trace under train, programs under their own mode."""
    path = tmp_path / "attends.py"
    path.write_text(ATTENTION, encoding="utf-8")
    given = '--params specs --input "float32[2,10,24] BATCH LENGTH EMBED"'
    assert infer(f"{path}:forward {given}") == 0
    assert check(f"{path}:forward {given}") == 0
    assert check(f"{path}:programs") == 0
    capsys.readouterr()
    assert infer(f"{path}:forward --params specs") == 2
    error = capsys.readouterr().err
    assert "takes params, x: missing a required argument" in error
    assert "add one --input for each array after the parameters" in error
    assert infer(f"{path}:forward {given} {given.partition('specs')[2]}") == 2
    assert "too many positional arguments" in capsys.readouterr().err
