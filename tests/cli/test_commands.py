"""`check`, `diff`, `presets` and `schema`: exit codes, files and bad input.

Whole outputs are golden files; see test_outputs.py.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import shardwright as sw
from shardwright.cli.main import COMMANDS, parser
from shardwright.strategy import files
from tests.cli.cases import MESH, run

BAD = {
    "check": "the following arguments are required: STRATEGY",
    "check nope": "no preset 'nope'",
    "check fdsp_tp": "did you mean 'fsdp_tp'?",
    "check nope.toml": "no file 'nope.toml'",
    "check fsdp.toml": "no file 'fsdp.toml'",
    "check odd.txt": "no preset 'odd.txt'",
    "check latin.toml": "latin.toml is not UTF-8",
    "check fsdp --tensors nope.toml": "cannot read 'nope.toml'",
    "check fsdp --mesh dp:x": "size 'x' is not an integer",
    "check fsdp --mesh dp:99999999999999999999": "is too large",
    "check fsdp_tp --devices 6": "does not divide the number of devices, 6",
    "check fsdp_tp --devices 0": "'0' is not a positive integer",
    "diff fsdp": "one of the arguments --tensors --model --plan is required",
    "diff --tensors tensors.toml": "no strategy is given",
    "diff fsdp ddp --tensors tensors.toml --topology v5e:2x4": "--topology is for programs",
    "diff fsdp --model m.py:f --plan a.json": "not allowed with argument",
    "diff --plan a.json": "--plan is given 1 times",
    "diff --plan absent.json --plan absent.json": "cannot read 'absent.json'",
    "diff --plan latin.toml --plan latin.toml": "latin.toml is not UTF-8",
    "diff fsdp --plan a.json --plan b.json": "STRATEGY cannot change a plan",
    "diff fsdp --tensors tensors.toml": "both sides are the same\n  fix   give two strategies, or "
    "--mesh, --devices or --mode twice",
    "diff fsdp fsdp --tensors tensors.toml --mesh dp:2": "both sides are the same",
    "diff fsdp ddp tensor --tensors tensors.toml --mesh dp:2": (
        "STRATEGY is given 3 times\n  fix   give one value for both sides"
    ),
    "diff fsdp --tensors tensors.toml --mesh dp:2 --mesh dp:4 --mesh dp:8": (
        "--mesh is given 3 times"
    ),
    "diff fsdp ddp --tensors tensors.toml": "mesh axis fsdp = -1 in strategy fsdp needs a number "
    "of devices",
    "diff fsdp ddp --tensors tensors.toml --devices 8 --mode serve": "invalid choice: 'serve'",
    "diff fsdp ddp --tensors odd.toml --devices 8": "odd.toml",
    "presets lst": "invalid choice: 'lst'",
    "presets list ddp": "presets list takes no preset\n  fix   write shardwright presets list",
    "presets show": "presets show takes a preset\n  fix   write shardwright presets show fsdp_tp",
    "presets show ddp x.toml": "presets show takes a preset",
    "presets copy": "presets copy takes a preset\n  fix   write shardwright presets copy fsdp_tp "
    "mine.toml",
    "presets show fdsp": "no preset 'fdsp'\n  fix   did you mean 'fsdp'? presets are ddp,",
    "presets copy ddp mine.yaml": "mine.yaml: unknown format 'yaml'",
    "presets copy ddp nowhere/mine.toml": "cannot write 'nowhere/mine.toml': no such file",
    "schema nowhere/schema.json": "cannot write 'nowhere/schema.json': no such file or directory\n"
    "  fix   create its folder first",
    "schema folder": "cannot write 'folder': is a directory",
    "schema pipe": "'pipe' is not a regular file, and would be replaced by one\n"
    "  fix   choose another name, or print the text and redirect it (>)",
    "check 'fsdp |'": "no preset ''",
}


def test_presets_fit_a_narrow_terminal(tmp_path: Path) -> None:
    _, out, _ = run("presets list --width 60", tmp_path)
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize("line", BAD)
def test_bad_input_has_a_message(line: str, tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"\xe9")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    code, out, err = run(line, tmp_path)
    assert (code, out) == (2, ""), err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert BAD[line] in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_exit_codes(command: str, tmp_path: Path) -> None:
    code, out, _ = run(f"{command} --help", tmp_path)
    assert code == 0
    assert "exit codes: 0 " in out
    assert "2 the arguments are wrong" in " ".join(out.split())


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("check fsdp", 0),
        ("check odd.toml", 0),
        ("check odd.toml --strict", 1),
        ("check fsdp odd.toml --strict", 1),
        ("check broken.toml", 1),
        ("check fsdp broken.toml", 1),
        ("check odd.toml --json", 0),
        ("check odd.toml --json --strict", 1),
        (f"check odd.toml --tensors tensors.toml {MESH.replace('tp:2', 'tp:3')}", 1),
        ("diff ddp fsdp --tensors tensors.json --mesh fsdp:2", 0),
        ("diff ddp fsdp --tensors tensors.json --mesh fsdp:2 --exit-code", 1),
        ("diff ddp single --tensors tensors.json --mesh fsdp:2 --exit-code", 0),
        ("diff ddp fsdp --tensors tensors.json --mesh fsdp:3", 1),
        # One size that does not divide, and one strategy with a mistake, in each command.
        ("explain --tensors tensors.json --strategy fsdp --mesh fsdp:3", 1),
        ("plan tensors.json --strategy fsdp --mesh fsdp:3", 1),
        ("check fsdp --tensors tensors.json --mesh fsdp:3", 1),
        ("explain --tensors tensors.json --strategy broken.toml --mesh fsdp:2", 2),
        ("plan tensors.json --strategy broken.toml --mesh fsdp:2", 2),
        ("diff ddp broken.toml --tensors tensors.json --mesh fsdp:2", 2),
    ],
)
def test_exit_codes(line: str, code: int, tmp_path: Path) -> None:
    assert run(line, tmp_path)[0] == code


def test_check_finds_what_load_refuses(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        '[mesh]\ndp = 2\n[rules]\nbatch = "dp |"\nbathc = "dp"\nhead = "dpp"\n', encoding="utf-8"
    )
    code, out, _ = run("check two.toml --json", tmp_path)
    actual = json.loads(out)["strategies"][0]["findings"]
    assert code == 1
    assert [
        (finding["code"], finding["file"], finding["line"], finding["key"]) for finding in actual
    ] == [
        ("invalid", "two.toml", 4, "rules.batch"),
        ("unknown_axis", "two.toml", 5, "rules.bathc"),
        ("unknown_mesh_axis", "two.toml", 6, "rules.head"),
    ]


def test_check_names_the_overlay_file(tmp_path: Path) -> None:
    (tmp_path / "over.toml").write_text('[rules]\nbatch = "dp | dp"\n', encoding="utf-8")
    code, out, _ = run('check "fsdp_tp | over.toml" --json', tmp_path)
    (actual,) = json.loads(out)["strategies"][0]["findings"]
    assert (code, actual["file"], actual["line"]) == (0, "over.toml", 2)
    (tmp_path / "wrong.toml").write_text('[rules]\nbatch = "dpp"\n', encoding="utf-8")
    code, out, _ = run('check "fsdp_tp | wrong.toml" --json', tmp_path)
    (actual,) = json.loads(out)["strategies"][0]["findings"]
    assert (code, actual["code"], actual["file"]) == (1, "unknown_mesh_axis", "wrong.toml")


def test_check_accepts_strategy_options(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text('[rules]\nbatch = "dpp"\n', encoding="utf-8")
    for words in ("fsdp", "'fsdp_tp | wrong.toml'", "odd.toml"):
        assert run(f"check --strategy {words}", tmp_path) == run(f"check {words}", tmp_path)
    assert run("check fsdp --strategy wrong.toml", tmp_path) == run(
        "check fsdp wrong.toml", tmp_path
    )


def test_file_name_with_a_bar(tmp_path: Path) -> None:
    (tmp_path / "a|b.toml").write_text('[rules]\nbatch = "dp"\n', encoding="utf-8")
    assert run("check 'a|b.toml'", tmp_path)[:2] == (0, "a|b.toml\n  no findings\n")


def test_explain_accepts_overlays_in_one_word(tmp_path: Path) -> None:
    line = (
        "explain EMBED VOCAB --role param --path lm_head/kernel --mesh fsdp:2,tp:2 --shape "
        "64,256 --mode train"
    )
    code, out, _ = run(f'{line} --strategy "fsdp_tp | head.toml"', tmp_path)
    assert code == 0
    assert out.startswith("strategy fsdp_tp | head.toml on")
    code, out, error = run(f"{line} --strategy fsdp_tp --strategy head.toml", tmp_path)
    assert (code, out) == (2, "")
    assert 'given twice: write --strategy "fsdp_tp | head.toml" for an overlay' in error


def test_diff_has_exact_bytes(tmp_path: Path) -> None:
    code, out, _ = run(
        "diff ddp fsdp_tp --tensors tensors.toml --mesh fsdp:2,tp:2 --json", tmp_path
    )
    answer = json.loads(out)
    embed = next(tensor for tensor in answer["tensors"] if tensor["path"] == "params/embed")
    assert code == 0
    assert embed["before"]["bytes_per_device"] == 128256 * 4096 * 2
    assert embed["after"]["bytes_per_device"] == 128256 * 4096 * 2 // 4
    assert embed["after"]["shards"] == [2, 2]
    total = next(
        row for row in answer["totals"] if row["role"] == "param" and row["mode"] == "train"
    )
    in_train = [
        tensor
        for tensor in answer["tensors"]
        if tensor["role"] == "param" and tensor["mode"] == "train"
    ]
    assert total["bytes_after"] == sum(tensor["after"]["bytes_per_device"] for tensor in in_train)
    assert answer["changed"] == 6


def test_diff_of_two_device_counts(tmp_path: Path) -> None:
    code, out, _ = run(
        "diff fsdp --tensors tensors.json --devices 2 --devices 4 --mode train --json", tmp_path
    )
    answer = json.loads(out)
    assert code == 0
    assert (answer["before"]["mesh"], answer["after"]["mesh"]) == (
        {"dp": 1, "fsdp": 2},
        {"dp": 1, "fsdp": 4},
    )
    assert answer["totals"][0] == {
        "role": "param",
        "mode": "train",
        "bytes_before": 32768,
        "bytes_after": 16384,
        "uncounted": 0,
    }


def test_diff_names_the_place_for_sizes(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('[k]\naxes = "KV_HEAD"\n', encoding="utf-8")
    code, out, _ = run("diff fsdp_tp ddp --tensors t.toml --mesh tp:2", tmp_path)
    assert code == 1
    assert "fix   give its shape in the file of tensors" in out


def test_presets_copy_keeps_comments(tmp_path: Path) -> None:
    assert run("presets copy fsdp_tp mine.toml", tmp_path)[:2] == (
        0,
        "fsdp_tp copied to mine.toml\n",
    )
    copied = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert copied == files.preset_text("fsdp_tp").replace('name = "fsdp_tp"', 'name = "mine"')
    assert sw.Strategy.load(tmp_path / "mine.toml").name == "mine"
    assert "# replicated on purpose" in copied
    code, out, err = run("presets copy ddp mine.toml", tmp_path)
    assert (code, out) == (2, "")
    assert "'mine.toml' exists\n  fix   choose another name, or replace it with --force" in err
    assert (tmp_path / "mine.toml").read_text(encoding="utf-8") == copied
    assert run("presets copy ddp mine.toml --force", tmp_path)[0] == 0
    assert sw.Strategy.load(tmp_path / "mine.toml").mesh == {"dp": -1}
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_presets_copy_names_and_formats(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert run("presets copy ddp", tmp_path)[1] == "ddp copied to ddp.toml\n"
    assert run("presets copy ddp folder", tmp_path)[1] == "ddp copied to folder/ddp.toml\n"
    assert run("presets copy ddp mine.json", tmp_path)[0] == 0
    preset = sw.Strategy.preset("ddp")
    assert (tmp_path / "ddp.toml").read_text(encoding="utf-8") == files.preset_text("ddp")
    copied = sw.Strategy.load(tmp_path / "mine.json")
    assert copied.to_data() == {**preset.to_data(), "name": "mine"}
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "ddp.toml").stat().st_mode) == 0o666 & ~mask


def test_presets_copy_name(tmp_path: Path) -> None:
    names = {
        "a.toml --name ours": "ours",
        "b.json --name ours": "ours",
        "c.toml --name \\1": "\\1",
        'd"e.toml': 'd"e',
        "x.y.toml": "x.y",
        "f.toml --name ": "",
        os.fsdecode(b"g\xff.toml"): "g?",
    }
    for words, name in names.items():
        file, *option = words.split(" ", maxsplit=2)
        code, _, err = run(shlex.join(["presets", "copy", "fsdp", file, *option]), tmp_path)
        assert (code, err) == (0, "")
        assert sw.Strategy.load(tmp_path / file).name == name
    assert "takes no --name" in run("presets list --name x", tmp_path)[2]


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "link", broken)
    code, _, err = run("presets copy ddp ddp2.toml", tmp_path)
    assert code == 2
    assert "cannot write 'ddp2.toml': no space left on device" in err
    assert [name for name in os.listdir(tmp_path) if "ddp2" in name] == []


def test_write_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "real.toml").write_text("old", encoding="utf-8")
    (tmp_path / "link.toml").symlink_to("folder/real.toml")
    assert run("presets copy ddp link.toml", tmp_path)[0] == 2
    assert run("presets copy ddp link.toml --force", tmp_path)[0] == 0
    assert (tmp_path / "link.toml").is_symlink()
    assert sw.Strategy.load(tmp_path / "folder" / "real.toml").name == "link"


@pytest.mark.full
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 2, "shardwright: cannot write the output: no space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_unwritable_output_has_a_message(redirection: str, code: int, said: str) -> None:
    line = f"{sys.executable} -m shardwright schema {redirection}"
    done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_presets_as_json(tmp_path: Path) -> None:
    listed = json.loads(run("presets list --json", tmp_path)[1])["presets"]
    assert [preset["name"] for preset in listed] == list(sw.Strategy.presets())
    assert all(preset["what"] for preset in listed)
    assert (
        json.loads(run("presets show serve_tp --json", tmp_path)[1])
        == sw.Strategy.preset("serve_tp").to_data()
    )
    assert run("presets show serve_tp", tmp_path)[1] == files.preset_text("serve_tp")
    assert json.loads(run("presets copy ddp mine.toml --json", tmp_path)[1]) == {
        "preset": "ddp",
        "file": "mine.toml",
    }


def test_total_skips_uncounted_tensors(tmp_path: Path) -> None:
    text = 'dtype = "int8"\n[a]\naxes = "HEAD"\nshape = [8]\n[b]\naxes = "HEAD"\nshape = [3]\n'
    (tmp_path / "two.toml").write_text(text, encoding="utf-8")
    out = run("explain --tensors two.toml --strategy fsdp_tp --mesh tp:2", tmp_path)[1]
    assert "per device: 4 B in all modes; all together 8 B (1 of 2 not counted)" in out


def test_schema_accepts_presets(tmp_path: Path) -> None:
    printed = run("schema", tmp_path)[1]
    assert run("schema strategy.schema.json", tmp_path)[:2] == (
        0,
        "schema written to strategy.schema.json\n",
    )
    assert (tmp_path / "strategy.schema.json").read_text(encoding="utf-8") == printed
    schema = json.loads(printed)
    for name in sw.Strategy.presets():
        jsonschema.validate(sw.Strategy.preset(name).to_data(), schema)
    with pytest.raises(jsonschema.ValidationError, match="'ruls' was unexpected"):
        jsonschema.validate({"ruls": {}}, schema)


# Shell completion.


def test_one_parser_has_every_command() -> None:
    text = parser().format_help()
    assert [name for name in COMMANDS if name not in text] == []
    arguments = parser().parse_args(["check", "ddp", "--tensors", "model.toml", "--strict"])
    assert (arguments.strategies, arguments.tensors, arguments.strict) == (
        ["ddp"],
        "model.toml",
        True,
    )


def test_parser_marks_files_for_completion() -> None:
    marked = {
        action.dest
        for command in COMMANDS
        for action in parser()._subparsers._group_actions[0].choices[command]._actions
        if hasattr(action, "complete")
    }
    assert marked == {
        "strategies",
        "strategy",
        "tensors",
        "file",
        "hardware",
        "out",
        "axes",
        "plan",
        "html",
        "fit",
    }
