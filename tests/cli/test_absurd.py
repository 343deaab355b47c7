"""Absurd input: huge numbers, deep nesting, undecodable text, invalid dtypes.

Each is an input error with a message, never a traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.cases import run

SRC = Path(__file__).resolve().parents[2] / "src"
STRATEGY = "--strategy fsdp_tp --mesh fsdp:2,tp:2"
DIGITS = "9" * 5000
HEX = "0x" + "8" * 5000


def tensor(**entries: object) -> str:
    return json.dumps({"w": {"axes": "EMBED", "shape": [8], **entries}})


TENSORS: dict[str, tuple[str, str, str]] = {
    "digits": (
        "json",
        '{"w": {"axes": "EMBED", "shape": [' + DIGITS + "]}}",
        "value has 5000 digits",
    ),
    "fewer digits": (
        "json",
        '{"w": {"axes": "EMBED", "shape": [' + "8" * 400 + "]}}",
        "t.json:1 w.shape.0: a number of 1329 bits is too large",
    ),
    "hexadecimal": (
        "toml",
        f'[w]\naxes = "EMBED"\nshape = [{HEX}]',
        "t.toml:3 w.shape.0: a number of 20000 bits is too large",
    ),
    "hexadecimal axes": ("toml", f"[w]\naxes = {HEX}", "t.toml:2 w.axes: a number of 20000 bits"),
    "hexadecimal dtype": (
        "toml",
        f'[w]\naxes = "EMBED"\ndtype = {HEX}',
        "t.toml:3 w.dtype: a number of 20000 bits",
    ),
    "infinite": ("json", '{"w": {"axes": "EMBED", "shape": [1e999]}}', "[inf] is not a shape"),
    "elements": (
        "json",
        tensor(axes="_ _", shape=[2**62, 2]),
        "t.json:1 w.shape: the array has too many elements",
    ),
    "rank": (
        "json",
        tensor(axes=" ".join("_" * 400), shape=[2**62] * 400),
        "the array has too many elements",
    ),
    "deep": (
        "json",
        '{"a": ' * 500 + "1" + "}" * 500,
        "t.json:1 a.a.a.a...: tables and lists are nested more than 64 deep",
    ),
    "very deep": (
        "json",
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        "t.json: maximum recursion depth exceeded",
    ),
    "deep list": (
        "json",
        '{"w": {"axes": ' + "[" * 900 + "]" * 900 + "}}",
        "nested more than 64 deep",
    ),
    "deep table": (
        "toml",
        ".".join("a" * 2000) + " = 1",
        "t.toml a.a.a.a...: tables and lists are nested more than 64 deep",
    ),
    "surrogate axes": (
        "json",
        '{"w": {"axes": "\\ud800"}}',
        "t.json:1 w.axes: '\\ud800' is not a dim",
    ),
    "surrogate dtype": (
        "json",
        '{"w": {"axes": "EMBED", "dtype": "\\udfff"}}',
        "t.json:1 w.dtype: unknown dtype '\\udfff'",
    ),
}
DTYPES = [
    *(
        "O",
        "object",
        "V8",
        "S5",
        "U",
        "str",
        "bytes",
        "void",
        "datetime64",
        "M8[s]",
        "timedelta64",
        "i4,i4",
        "(2,2)f4",
        ">f4",
        "\x00",
    ),
    *(
        "float128",
        "longdouble",
        "complex256",
        "clongdouble",
        "float0",
        "key<fry>",
        "{'names':['a'],'formats':['O']}",
        "",
        "bf16",
    ),
    *(0, 5, 1.5, False, True, [], [[1]], {"a": []}),
]


@pytest.mark.parametrize("name", TENSORS)
def test_absurd_tensors_file(name: str, tmp_path: Path) -> None:
    ending, text, says = TENSORS[name]
    (tmp_path / f"t.{ending}").write_text(text, encoding="utf-8")
    code, out, err = run(f"explain --tensors t.{ending} {STRATEGY}", tmp_path)
    assert (code, out) == (2, ""), err[-500:]
    assert says in err
    assert len(err) < 1000


@pytest.mark.parametrize("dtype", DTYPES, ids=repr)
def test_invalid_dtype(dtype: object, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(tensor(dtype=dtype), encoding="utf-8")
    code, out, err = run(f"explain --tensors t.json {STRATEGY}", tmp_path)
    assert (code, out) == (2, ""), err[-500:]
    assert "t.json:1 w.dtype" in err


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("bool", 8),
        ("complex64", 64),
        ("int", 64),
        (None, None),
    ],
)
def test_valid_dtype(dtype: str | None, size: int | None, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(tensor(dtype=dtype), encoding="utf-8")
    code, out, _ = run(f"explain --tensors t.json {STRATEGY} --mode train --json", tmp_path)
    assert code == 0
    assert json.loads(out)["tensors"][0]["modes"]["train"]["bytes_per_device"] == size


ARGUMENTS = {
    f"EMBED --shape {DIGITS}": "is not a shape",
    f"EMBED --shape {'8' * 400}": "is not a shape",
    "_ _ --shape 4611686018427387904,2": "has too many elements",
    "EMBED --shape ٣": "is not a shape",
    f"KV_HEAD:{DIGITS}*KV_HEAD_DIM:2": "is not AXIS:SIZE",
    f"EMBED --devices {DIGITS}": "is not a positive integer",
    f"EMBED --width {'9' * 30}": "is not a positive integer",
    f"EMBED --mesh dp:{DIGITS}": "is too large",
    "EMBED --mesh dp:4611686018427387904,fsdp:2": "the mesh has too many devices",
}


@pytest.mark.parametrize("words", ARGUMENTS)
def test_absurd_numbers(words: str, tmp_path: Path) -> None:
    code, out, err = run(f"explain {STRATEGY} {words}", tmp_path)
    assert (code, out) == (2, ""), err[-500:]
    assert ARGUMENTS[words] in err.replace("\n", " ")


def test_split_mesh_and_misspelled_key(tmp_path: Path) -> None:
    code, _, err = run("check fsdp_tp --mesh fsdp:2 tp:4", tmp_path)
    assert code == 2
    assert "fix   a mesh is one word, its axes joined by commas: --mesh dp:2,tp:4" in err
    (tmp_path / "t.toml").write_text('[w]\naxis = "EMBED HEAD"\n', encoding="utf-8")
    code, _, err = run("check fsdp_tp --mesh fsdp:2,tp:4 --tensors t.toml", tmp_path)
    assert code == 2
    assert "t.toml:2 w.axis: 'axis' is not a table\n  fix   did you mean 'axes'?" in err


LISTED = {
    '[[tensors]]\npath = "mlp/wi"\naxes = "EMBED"\n': (
        "t.toml:1 tensors.0: tensors cannot be a list: "
        "each tensor is a table that is named by its path\n"
        '  fix   a tensor is a table [mlp.wi]: axes = "EMBED MLP_INTERMEDIATE", shape = ['
    ),
    '[mlp]\n[[mlp.up]]\naxes = "EMBED"\n[[mlp.up]]\naxes = "EMBED"\n': (
        "t.toml:2 mlp.up.0: tensors cannot be a list: … fix   a tensor is a table"
    ),
    '{"tensors": [{"axes": "EMBED"}]}': "tensors cannot be a list: … fix   a tensor is a table",
    'version = 1\n[rules]\nembed = "fsdp"\n': (
        "t.toml: this is a strategy file, not a file of tensors\n"
        "  fix   pass it as the strategy; a file of tensors has one table per tensor, such as "
        "[mlp.wi]: axes ="
    ),
}


@pytest.mark.parametrize("text", LISTED)
def test_tensors_file_of_another_form(text: str, tmp_path: Path) -> None:
    name = "t.json" if text.startswith("{") else "t.toml"
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, _, err = run(f"check fsdp_tp --mesh fsdp:2,tp:4 --tensors {name}", tmp_path)
    assert code == 2
    for words in LISTED[text].split(" … "):
        assert words in err, err
    assert len(err.splitlines()) == 2, "one problem"


@pytest.mark.parametrize(
    "text", ['{"version": 1,\n "rules": {"batch": "dp",}}', '{"rules": {},\n}', '{"rules": [1, ]}']
)
def test_trailing_comma_in_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text, encoding="utf-8")
    code, out, _ = run("check s.json", tmp_path)
    assert code == 1
    assert "no comma may stand before a bracket" in out
    # The caret that this fix speaks of stands below the line.
    lines = out.split("\n")
    at = next(number for number, line in enumerate(lines) if line.strip() == "^")
    assert lines[at - 1].strip() in map(str.strip, text.split("\n"))
    assert "snippet" in run("check s.json --json", tmp_path)[1]


STRATEGIES = {
    '{"rules": {"batch": "\\ud800"}}': "rules.batch: mesh axis '\\ud800' is neither in [mesh] nor "
    "a standard one",
    '{"\\ud800": 1}': "unable to parse raw data as a unicode string, got '\\ud800'",
    '{"rules": {"batch": ' + "[" * 900 + "]" * 900 + "}}": "nested more than 64 deep",
    '{"mesh": {"dp": ' + "8" * 400 + "}}": "s.json:1 mesh.dp: a number of 1329 bits is too large",
}


@pytest.mark.parametrize("text", STRATEGIES, ids=STRATEGIES.values())
def test_absurd_strategy(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text, encoding="utf-8")
    code, out, err = run("explain EMBED --strategy s.json --mesh dp:2", tmp_path)
    assert (code, out) == (2, ""), err[-500:]
    assert STRATEGIES[text] in err


def test_huge_hexadecimal_number(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f"[rules]\nbatch = {HEX}\n", encoding="utf-8")
    code, _, err = run("explain EMBED --strategy s.toml --mesh dp:2", tmp_path)
    assert code == 2
    assert "s.toml:2 rules.batch: a number of 20000 bits is too large" in err


@pytest.mark.parametrize(
    "line", ["explain EMBED --strategy ddp", "check ddp", "diff ddp fsdp --tensors tensors.toml"]
)
def test_undecodable_mesh_is_refused(line: str, tmp_path: Path) -> None:
    code, out, err = run(f"{line} --mesh \udcff:2", tmp_path)
    assert code == (1 if line == "check ddp" else 2)
    # Errors escape the character; a table prints it, and the terminal's encoding escapes it.
    assert "udcff=2" in ascii(out + err)


@pytest.mark.full
def test_undecodable_names_are_shown_escaped(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.toml"
    Path(os.fsdecode(name)).write_text("version = 1\n", encoding="utf-8")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)}
    words = [
        sys.executable,
        "-m",
        "shardwright",
        "explain",
        "EMBED",
        "--mesh",
        "dp:2",
        "--strategy",
        name,
    ]
    done = subprocess.run(words, env=env, capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"strategy \\udcff.toml on dp:2" in done.stdout
    shown = subprocess.run(
        [*words[:-1], "ddp", "--path", b"\xff"],
        env=env,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"\\udcff  (EMBED) as activation" in shown.stdout


@pytest.mark.full
def test_ascii_terminal_gets_escapes(tmp_path: Path) -> None:
    (tmp_path / "schön.toml").write_text("version = 1\n", encoding="utf-8")
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(SRC),
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "1",
    }
    words = [
        sys.executable,
        "-m",
        "shardwright",
        "explain",
        "EMBED",
        "--mesh",
        "dp:2",
        "--strategy",
        str(tmp_path / "schön.toml"),
    ]
    done = subprocess.run(words, env=env, capture_output=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"strategy sch\\xf6n.toml on dp:2" in done.stdout
