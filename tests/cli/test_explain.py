"""`shardwright explain`.

Messages for bad input, and no backend ever. Whole outputs are golden files, see test_outputs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli import main as main_module
from shardwright.resolution.partition_specs import spec_of
from tests.cli.cases import MESH, run

SRC = Path(__file__).resolve().parents[2] / "src"


BAD = {
    "": (2, "", "usage: shardwright <command>"),
    "plan config.json --mesh tp:2": (2, "`shardwright search` finds the best", ""),
    "explian": (2, "no command 'explian', did you mean 'explain'?", ""),
    "explain BATCH": (2, "required: --strategy\n  fix   add --strategy fsdp_tp, another", ""),
    "explain --strategy fsdp_tp --devices 8": (
        2,
        "nothing to explain\n  fix   give the axes of an array",
        "",
    ),
    "explain '' --strategy fsdp_tp --devices 8": (
        2,
        "the axes are empty text\n  fix   write (), for a scalar, or axes",
        "",
    ),
    "explain ' , ' --strategy fsdp_tp --devices 8": (2, "the axes are empty text", ""),
    "explain BATCH --strategy fdsp_tp --devices 8": (
        2,
        "no preset 'fdsp_tp'\n  fix   did you mean 'fsdp_tp'? presets are ddp,",
        "",
    ),
    "explain BATCH --strategy fsdp_tp": (
        2,
        "mesh axis fsdp = -1 in strategy fsdp_tp needs a number of devices\n  fix   add --devices",
        "",
    ),
    "explain BATCH --strategy fsdp_tp --mesh dp:-1": (
        2,
        "mesh axis dp = -1 needs a number of devices\n  fix   add --devices 8, or give",
        "",
    ),
    "explain BATCH --strategy fsdp_tp --mesh dp:2,tp": (
        2,
        "part 'tp' has no size\n  dp:2,tp\n       ^",
        "",
    ),
    "explain BATCH --strategy fsdp_tp --devices 6": (
        2,
        "does not divide the number of devices, 6",
        "",
    ),
    "explain BATCH --strategy fsdp_tp --devices 0": (2, "'0' is not a positive integer", ""),
    "explain BATCH --strategy fsdp_tp --devices 8 --shape 4,x": (2, "'4,x' is not a shape", ""),
    "explain BATCH --strategy fsdp_tp --devices 8 --mode serve": (2, "invalid choice: 'serve'", ""),
    "explain BATCH --strategy head.toml": (
        2,
        "strategy head.toml has no [mesh]\n  fix   give a mesh: --mesh dp:2,tp:4",
        "",
    ),
    "explain BATCH --strategy none.toml --devices 8": (2, "no file 'none.toml'", ""),
    "explain BATCH --strategy fsdp.toml --devices 8": (
        2,
        "no file 'fsdp.toml'\n  fix   for the preset, write fsdp",
        "",
    ),
    "explain BATCH --strategy bad.toml --devices 8": (2, "bad.toml:2 rules.batch", ""),
    "explain BATCH --strategy folder.toml --devices 8": (
        2,
        "cannot read 'folder.toml': is a directory",
        "",
    ),
    "explain BATCH --strategy ./x.yaml --devices 8": (
        2,
        "x.yaml: unknown format 'yaml'",
        "",
    ),
    "explain BATCH --strategy model.toml --mesh dp:2": (
        2,
        "a rule names the mesh axis 'model'",
        "",
    ),
    "explain Columnwise --strategy fsdp_tp --devices 8": (
        2,
        "no layout 'Columnwise'\n  fix   did you mean 'ColumnWise'?",
        "",
    ),
    "explain SRowWise.bias --strategy fsdp_tp --devices 8": (
        2,
        "layout SRowWise has no bias\n  fix   biases are ColumnWise.bias",
        "",
    ),
    "explain BATCH: --strategy fsdp_tp --devices 8": (2, "'BATCH:' is not AXIS:SIZE", ""),
    "explain HEAD:0*KV_HEAD_DIM:2 --strategy fsdp_tp --devices 8": (
        2,
        "'HEAD:0' is not AXIS:SIZE",
        "",
    ),
    "explain DP+ --strategy fsdp_tp --devices 8": (
        2,
        "'DP+' is not a dim\n  fix   write axes such as",
        "",
    ),
    "explain BATCH --tensors tensors.toml --strategy ddp --devices 8": (
        2,
        "--tensors cannot be combined with axes",
        "",
    ),
    "explain --tensors none.toml --strategy ddp --devices 8": (
        2,
        "cannot read 'none.toml': no such file",
        "",
    ),
    "explain --tensors x.txt --strategy ddp --devices 8": (
        2,
        "cannot read 'x.txt': no such file",
        "",
    ),
    "explain --tensors empty.toml --strategy ddp --devices 8": (
        2,
        "empty.toml: the file has no tensors",
        "",
    ),
    "explain --tensors list.json --strategy ddp --devices 8": (
        2,
        'list.json: expected a table, got list\n  fix   write a table, such as {"mlp": {"wi": ',
        "",
    ),
    "explain --tensors latin.toml --strategy ddp --devices 8": (2, "latin.toml is not UTF-8", ""),
    "explain BATCH HEAD --strategy fsdp_tp --mesh tp:4 --shape 3,6": (
        1,
        "",
        "dim 1 HEAD: size 6 does not divide over tp=4",
    ),
    "explain BATHC --strategy fsdp_tp --mesh tp:4": (1, "", "did you mean 'BATCH'?"),
    "explain BATCH KV_HEAD --strategy fsdp_tp --mesh tp:4": (
        1,
        "",
        "fix   give the sizes: --shape",
    ),
}
FILES = {
    "bad.toml": '[rules]\nbatch = "dp |"\n',
    "model.toml": '[mesh]\nmodel = 2\n[rules]\nhead = "model"\n',
    "empty.toml": "",
    "list.json": "[1]",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_has_a_message(line: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.toml").write_bytes(b"\xe9")
    (tmp_path / "folder.toml").mkdir()
    code, out, err = run(line, tmp_path)
    wanted, says_err, says_out = BAD[line]
    assert code == wanted, out + err
    assert says_err in err
    assert says_out in out
    assert "Traceback" not in out + err
    assert bool(err) == (code == 2 and bool(line))


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    answers = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "marked.toml").write_text(
            '[mesh]\ndp = 2\n[rules]\nbatch = "dp"\n', encoding=encoding
        )
        for name, text in {
            "arrays.toml": '[x]\naxes = "BATCH"\n',
            "arrays.json": '{"x": {"axes": "BATCH"}}',
        }.items():
            (tmp_path / name).write_text(text, encoding=encoding)
            answers.append(run(f"explain --tensors {name} --strategy marked.toml", tmp_path))
    assert answers[0][0] == 0, answers[0]
    assert answers.count(answers[0]) == 4


def test_empty_axes_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty_text.toml").write_text('[x]\naxes = ""\n', encoding="utf-8")
    code, out, err = run("explain --tensors empty_text.toml --strategy ddp --devices 8", tmp_path)
    assert (code, out) == (2, "")
    assert "empty_text.toml:2 x.axes: the axes are empty text" in err
    (tmp_path / "none.toml").write_text("[x]\naxes = []\n", encoding="utf-8")
    assert run("explain --tensors none.toml --strategy ddp --devices 8", tmp_path)[0] == 0


def test_all_problems_of_a_tensors_file(tmp_path: Path) -> None:
    text = """\
[a]
axes = "BATCH"
shape = "4"
[b]
axes = 3
rule = "param"
[c]
shape = [3]
[d]
axes = "BATCH"
role = "weight"
dtype = "bf61"
[e]
axes = "DP+"
"""
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    code, out, err = run("explain --tensors bad.toml --strategy ddp --devices 8", tmp_path)
    assert (code, out) == (2, "")
    for says in (
        "7 problems",
        "bad.toml:3 a.shape: '4' is not a shape",
        "bad.toml:6 b.rule: unknown key 'rule'\n      fix   did you mean 'role'?",
        "bad.toml:5 b.axes: 3 is not a list of axes",
        "bad.toml:8 c.shape: the tensor has no axes",
        "bad.toml:11 d.role: unknown role 'weight'",
        "bad.toml:12 d.dtype: unknown dtype 'bf61'",
        "bad.toml:14 e.axes: 'DP+' is not a dim",
    ):
        assert says in err


def test_json_equals_the_manager(tmp_path: Path) -> None:
    code, out, _ = run(
        f"explain BATCH QUERY_LENGTH HEAD HEAD_DIM --strategy fsdp_tp {MESH} --shape 16,64,8,32 "
        f"--json",
        tmp_path,
    )
    answer = json.loads(out)
    assert code == 0
    assert answer["mesh"] == {"dp": 1, "fsdp": 2, "sp": 2, "tp": 2}
    manager = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("dp:1,fsdp:2,sp:2,tp:2")
    )
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
    for mode in ("train", "prefill", "decode", "insert"):
        entries = answer["modes"][mode]["spec"]
        assert spec_of(*map(tuple, entries)) == manager.resolve(
            axes, mode=mode, shape=(16, 64, 8, 32)
        )


def test_bytes_per_device_equal_the_shards(tmp_path: Path) -> None:
    code, out, _ = run(f"explain --tensors tensors.json --strategy fsdp_tp {MESH} --json", tmp_path)
    weight, step = json.loads(out)["tensors"]
    manager = sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.abstract_mesh("dp:1,fsdp:2,sp:2,tp:2")
    )
    rows, columns = manager.sharding(
        sw.EMBED, sw.MLP_INTERMEDIATE, role="param", shape=(64, 256)
    ).shard_shape((64, 256))
    assert code == 0
    assert weight["modes"]["train"]["bytes_per_device"] == rows * columns * 4 == 64 * 256 * 4 // 8
    assert step["modes"]["train"]["bytes_per_device"] is None


def test_unconstrained_dims_have_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "open.toml").write_text(
        'version = 1\nmesh = { tp = 4 }\n[rules]\nembed = "?"\nvocab = "tp"\n'
    )
    tensors = (
        '{"h": {"axes": "VOCAB EMBED", "shape": [8, 8], "dtype": "float32"}, "s": {"axes": '
        '"VOCAB EMBED", "dtype": "float32"}}'
    )
    (tmp_path / "open.json").write_text(tensors)
    code, out, _ = run("explain --tensors open.json --strategy open.toml --json", tmp_path)
    assert (
        code,
        [tensor["modes"]["train"]["bytes_per_device"] for tensor in json.loads(out)["tensors"]],
    ) == (0, [None, None])


def test_missing_shape_belongs_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('{"h": {"axes": "KV_HEAD"}}')
    code, out, _ = run(f"explain --tensors sizes.json --strategy fsdp_tp {MESH}", tmp_path)
    assert code == 1
    assert "fix   give its shape in the file of tensors" in out
    assert "--shape" not in out


def test_refused_annotation_shows_the_mode(
    tmp_path: Path,
) -> None:
    _, out, _ = run(
        "explain BATCH EMBED --strategy ddp --devices 2 --shape 4 --mode decode --json", tmp_path
    )
    assert json.loads(out)["modes"]["decode"]["mode"] == "decode"


def test_defect_is_reported_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(words: list[str]) -> int:
        raise RuntimeError("oops")

    monkeypatch.setattr(main_module, "_run", broken)
    code, _, err = run("explain", tmp_path)
    assert code == 70
    assert "RuntimeError: oops" in err
    assert "this is a defect of shardwright" in err


def test_help_and_version(tmp_path: Path) -> None:
    assert run("--help", tmp_path)[:2] == (0, run("", tmp_path)[1])
    assert run("--version", tmp_path)[:2] == (0, f"shardwright {sw.__version__}\n")
    code, out, _ = run("explain --help", tmp_path)
    assert code == 0
    assert "exit codes: 0 resolved" in out


def _process(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    }
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SRC)}
    return subprocess.run(
        [sys.executable, *words],
        env=env,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.full
def test_python_m_and_closed_pipes() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = _process(
            "-m",
            "shardwright",
            "explain",
            "BATCH",
            "--strategy",
            "ddp",
            "--devices",
            "8",
            stdout=write,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
