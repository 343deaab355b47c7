"""`check --fix` and `plan --fix`: the edits, what they keep, and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli.fix import rename, set_value
from shardwright.cli.main import main

pytest.importorskip("tomlkit", reason="the extra fix installs it")

MINE = """\
# Ours.
version = 1

[mesh]  # eight devices
fsdp = 2
tp = 4

[rules]
batch = "fsdp"
KV_HEAD = "tp"  # one head per device
# The residual.
embed = "-"
head = "tp"
head_dim = "-"
length = "-"

[modes.decode]
kv_head = "fsdp"
"""
TENSORS = """\
[params.q]
axes = "EMBED HEAD HEAD_DIM"
shape = [64, 8, 16]
role = "param"

[params.k]
axes = "EMBED KV_HEAD HEAD_DIM"
shape = [64, 3, 16]
role = "param"

[params.scale]
axes = "NORM"
shape = [64]
role = "param"

[acts.x]
axes = "BATCH LENGTH EMBED"
shape = [8, 16, 64]

[acts.k]
axes = "LENGTH KV_HEAD"
shape = [16, 3]
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE, encoding="utf-8")
    Path("tensors.toml").write_text(TENSORS, encoding="utf-8")


def check(words: str) -> int:
    return main(shlex.split(f"check {words}"))


def changed(before: str, after: str) -> list[str]:
    """Return the lines that differ, the removed ones first."""
    old, new = before.splitlines(), after.splitlines()
    return [
        *(f"-{line}" for line in old if line not in new),
        *(f"+{line}" for line in new if line not in old),
    ]


def specs(text: str) -> dict[str, object]:
    """Return the specs of q and x, which resolve before and after."""
    pm = sw.PartitionManager(sw.Strategy.loads(text), mesh=sw.abstract_mesh("fsdp:2,tp:4"))
    return {
        mode: (
            pm.resolve(sw.EMBED, sw.HEAD, sw.HEAD_DIM, shape=(64, 8, 16), mode=mode, role="param"),
            pm.resolve(sw.BATCH, sw.LENGTH, sw.EMBED, shape=(8, 16, 64), mode=mode),
        )
        for mode in ("train", "decode")
    }


def test_edits_keep_comments_and_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("mine.toml --tensors tensors.toml") == 1
    capsys.readouterr()
    assert check("mine.toml --tensors tensors.toml --fix") == 0
    after = Path("mine.toml").read_text(encoding="utf-8")
    assert changed(MINE, after) == [
        '-KV_HEAD = "tp"  # one head per device',
        '-kv_head = "fsdp"',
        '+KV_HEAD = "tp | -"  # one head per device',
        '+kv_head = "fsdp | -"',
        "+[params]",
        '+norm = "-"',
    ]
    kept = [line for line in MINE.split("\n") if line and line in after.split("\n")]
    assert [line for line in after.split("\n") if line in kept] == kept
    assert specs(after) == specs(MINE)
    out = capsys.readouterr().out
    assert '+KV_HEAD = "tp | -"  # one head per device' in out
    assert "mine.toml is fixed" in out
    # A second run has nothing to do.
    assert check("mine.toml --tensors tensors.toml --fix") == 0
    assert Path("mine.toml").read_text(encoding="utf-8") == after
    assert "nothing to fix" in capsys.readouterr().out


def test_dry_run_shows_the_edits_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("mine.toml --tensors tensors.toml --fix --dry-run") == 0
    out = capsys.readouterr().out
    assert '+KV_HEAD = "tp | -"  # one head per device' in out
    assert "mine.toml is not written (--dry-run)" in out
    assert Path("mine.toml").read_text(encoding="utf-8") == MINE


@pytest.mark.parametrize("mesh", ["[mesh]  # eight devices\nfsdp = 2\ntp = 4\n", ""])
def test_misspelled_names_are_renamed(mesh: str) -> None:
    right = MINE.replace("[mesh]  # eight devices\nfsdp = 2\ntp = 4\n", mesh)
    right = right.replace('"fsdp"\nKV', '"fsdp"  # not fdsp\nKV')
    wrong = right.replace("\nhead =", "\nheda =").replace('batch = "fsdp"', 'batch = "fdsp"')
    Path("mine.toml").write_text(wrong, encoding="utf-8")
    assert check("mine.toml --fix") == 0
    assert Path("mine.toml").read_text(encoding="utf-8") == right


def test_a_rule_of_a_preset_is_overridden() -> None:
    own = "# Only a name.\n[policy]\nidle = '-'\n"
    Path("mine.toml").write_text(own, encoding="utf-8")
    words = '"fsdp_tp | mine.toml" --tensors tensors.toml --mesh fsdp:2,tp:4'
    # kv_head has a fallback in the preset, so only heads are left.
    text = TENSORS.replace("[64, 8, 16]", "[64, 6, 16]")
    Path("tensors.toml").write_text(text, encoding="utf-8")
    assert check(words) == 1
    assert check(f"{words} --fix") == 0
    after = Path("mine.toml").read_text(encoding="utf-8")
    assert after.startswith(own)
    assert sw.Strategy.loads(after).rules == {"head": "tp | -"}


def test_a_base_beside_the_file_is_read() -> None:
    Path("below").mkdir()
    Path("below/base.toml").write_text(MINE, encoding="utf-8")
    Path("below/mine.toml").write_text('base = "base.toml"\n', encoding="utf-8")
    assert check("below/mine.toml --tensors tensors.toml --fix") == 0
    assert Path("below/base.toml").read_text(encoding="utf-8") == MINE
    assert sw.Strategy.load("below/mine.toml").rules["kv_head"] == "tp | -"


@pytest.mark.parametrize("policy", ['conflict = "first_dim"', 'order = "rules"'])
def test_a_policy_is_not_preempted(policy: str) -> None:
    text = f"{MINE}\n[policy]\n{policy}\n"
    Path("mine.toml").write_text(text, encoding="utf-8")
    assert check("mine.toml --tensors tensors.toml --fix") == 1
    assert Path("mine.toml").read_text(encoding="utf-8") == text


def test_a_change_of_a_result_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # With a fallback of length, the composite of the other tensor takes (dp, -) and not (-, sp).
    text = """\
[mesh]
dp = 4
sp = 2

[rules]
batch = "dp | -"
length = "sp"
embed = "-"
"""
    tensors = """\
[both]
axes = "BATCH+LENGTH EMBED"
shape = [4, 64]

[alone]
axes = "LENGTH"
shape = [3]
"""
    Path("mine.toml").write_text(text, encoding="utf-8")
    Path("tensors.toml").write_text(tensors.replace("[4, 64]", "[2, 64]"), encoding="utf-8")
    assert check("mine.toml --tensors tensors.toml --fix") == 0
    Path("mine.toml").write_text(text, encoding="utf-8")
    Path("tensors.toml").write_text(tensors, encoding="utf-8")
    assert check("mine.toml --tensors tensors.toml --fix") == 1
    assert Path("mine.toml").read_text(encoding="utf-8") == text
    assert "more edits would change arrays that resolve now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "size", "code"), [(6, "tp = 2", 0), (16, "tp = 4", 0), (7, "tp = 1", 0)]
)
def test_a_mesh_is_fitted_to_the_devices(devices: int, size: str, code: int) -> None:
    text = '[mesh]\nfsdp = -1\ntp = 4  # heads\n[rules]\nbatch = "fsdp"\nhead = "tp"\n'
    Path("mine.toml").write_text(text, encoding="utf-8")
    assert check(f"mine.toml --devices {devices} --fix") == code
    assert Path("mine.toml").read_text(encoding="utf-8") == text.replace("tp = 4", size)


BAD = {
    "fsdp_tp --fix": "copy it first: shardwright presets copy fsdp_tp mine.toml",
    "mine.toml --dry-run": "--dry-run is used with --fix",
    "mine.toml --fix --json": "--fix prints a difference",
    "absent.toml --fix": "cannot read 'absent.toml'",
}


@pytest.mark.parametrize("words", BAD)
def test_wrong_use_has_a_fix(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(words) == 2
    assert BAD[words] in capsys.readouterr().err


def test_programs_are_fixed_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.py").write_text(
        """
import jax
import shardwright as sw
from shardwright.plan import Program

def forward(w, x):
    x = sw.shard(x, sw.BATCH, sw.EMBED)
    return sw.shard(x @ w, sw.BATCH, sw.KV_HEAD)

def programs():
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 3), (8, 64)))
    one = jax.ShapeDtypeStruct((64, 4), "float32")
    specs = ((sw.EMBED, sw.KV_HEAD), (sw.BATCH, sw.EMBED))
    kept = Program(lambda w, x: forward(w, x), (one, x), specs)
    return {"train": Program(forward, (w, x), specs), "prefill": kept}
""",
        encoding="utf-8",
    )
    words = shlex.split("plan model.py:programs --strategy mine.toml --fix")
    assert main([*words, "--dry-run"]) == 0
    assert Path("mine.toml").read_text(encoding="utf-8") == MINE
    assert main(words) == 0
    after = Path("mine.toml").read_text(encoding="utf-8")
    assert changed(MINE, after) == [
        '-KV_HEAD = "tp"  # one head per device',
        '+KV_HEAD = "tp | -"  # one head per device',
    ]
    assert "mode train" in capsys.readouterr().out


def test_edits_of_text() -> None:
    text = '[rules]\nbatch = "dp"\n\n[mesh]\ndp = 2\n'
    assert set_value(text, ("rules",), "BATCH", "-") == text.replace('"dp"', '"-"')
    assert set_value(text, ("rules",), "embed", "-") == text.replace(
        '"dp"\n', '"dp"\nembed = "-"\n'
    )
    nested = set_value(text, ("modes", "decode"), "embed", "-")
    assert nested == f'{text}\n[modes.decode]\nembed = "-"\n'
    arrays = '[[rules]]\nbatch = "dp"\n'
    assert set_value(arrays, ("rules",), "batch", "-") == arrays
    entry = '[[tensors]]\nmatch = "x"\nembed = "tp"\n'
    assert set_value(entry, ("tensors", "0"), "embed", "-") == entry.replace('"tp"', '"-"')
    assert rename('a = "dpp+dp"\ndpp = 2', 1, "dpp", "dp") == 'a = "dp+dp"\ndpp = 2'
    line = """dpp = "a # dpp \\" dpp" + 'dpp'  # dpp "dpp"""
    assert rename(line, 1, "dpp", "dp") == """dp = "a # dp \\" dp" + 'dp'  # dpp "dpp"""
