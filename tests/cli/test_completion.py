"""Completion scripts know every option of every parser; bash itself is asked what it would complete."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import shardwright as sw
from shardwright.cli.completion import describe
from shardwright.cli.main import COMMANDS
from shardwright.cli.scripts import bash, fish, zsh
from shardwright.cli.scripts.described import Argument, Command, Kind

BASH = shutil.which("bash")
MODES = ["train", "prefill", "decode", "insert"]
needs_bash = pytest.mark.skipif(BASH is None, reason="no bash")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "completion.bash").write_text(bash.script(describe()), encoding="utf-8")
    work = tmp_path / "work"
    (work / "more").mkdir(parents=True)
    for name in ("mine.toml", "model.json", "two words.toml", "star*.toml"):
        (work / name).touch()
    return work


def complete(line: str, folder: Path, *, shell: str | None = None) -> list[str]:
    """What bash offers where the cursor stands at the end of the line."""
    words = [*line.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        f"set -u; source ../completion.bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMPREPLY=(); "
        '_shardwright; printf "%s\\n" "${COMPREPLY[@]+${COMPREPLY[@]}}"'
    )
    assert BASH is not None
    done = subprocess.run(
        [shell or BASH, "--norc", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [name for name in done.stdout.splitlines() if name]


@needs_bash
def test_bash_completes_commands(folder: Path) -> None:
    assert complete("shardwright ", folder) == [*COMMANDS, "--help", "--version"]
    assert complete("shardwright c", folder) == ["check", "completion"]
    assert complete("shardwright x", folder) == []


@needs_bash
@pytest.mark.parametrize("command", COMMANDS)
def test_bash_completes_every_option_of_the_parser(command: str, folder: Path) -> None:
    parser = importlib.import_module(f"shardwright.cli.{command}").parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert complete(f"shardwright {command} -", folder) == flags
    assert "--help" in flags


@needs_bash
@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("explain --mode ", [*MODES, "all"]),
        ("explain --mode de", ["decode"]),
        ("diff fsdp --mode ", MODES),
        ("explain --role p", ["param"]),
        ("explain QUERY", ["QUERY_LENGTH"]),
        ("explain BATCH KV", ["KV_LENGTH", "KV_HEAD", "KV_HEAD_DIM"]),
        ("explain BATCH --mesh dp=2 ColumnWiseB", ["ColumnWiseBias"]),
        ("explain --strategy fs", ["fsdp", "fsdp_tp"]),
        ("check serve", ["serve_long_context", "serve_tp"]),
        ("check ddp m", ["moe_ep", "mine.toml", "model.json", "more"]),
        ("check --strict ddp tw", ["two words.toml"]),
        ("check st", ["star*.toml"]),
        ("check --tensors mod", ["model.json"]),
        ("check --mesh ", []),
        ("check --mesh m", []),
        ("diff fsdp t", ["tensor", "two words.toml"]),
        ("presets ", ["list", "show", "copy"]),
        ("presets sh", ["show"]),
        ("presets show d", ["ddp"]),
        ("presets copy --force d", ["ddp"]),
        ("presets --width 80 copy d", ["ddp"]),
        ("presets copy ddp mi", ["mine.toml"]),
        ("presets --width ", []),
        ("schema mi", ["mine.toml"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("completion bash ", []),
        ("unknown m", []),
    ],
)
def test_bash_completes_values(line: str, offers: list[str], folder: Path) -> None:
    assert sorted(complete(f"shardwright {line}", folder)) == sorted(offers)


@needs_bash
def test_bash_completes_below_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert complete("shardwright schema ~/mod", folder) == [str(folder / "model.json")]


@needs_bash
def test_bash_has_the_function_where_it_looks(folder: Path) -> None:
    done = subprocess.run(
        [str(BASH), "--norc", "-c", "source ../completion.bash; complete -p shardwright"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "complete -o filenames -F _shardwright shardwright\n"


def test_what_is_described_is_what_the_parsers_have() -> None:
    described = {command.name: command for command in describe()}
    assert list(described) == list(COMMANDS)
    strategies = next(one for one in described["check"].positionals)
    assert (strategies.kind, strategies.words, strategies.repeated) == (
        Kind.STRATEGY,
        sw.Strategy.presets(),
        True,
    )
    kinds = {one.flags[-1]: one.kind for one in described["explain"].options}
    assert kinds["--tensors"] is Kind.FILE
    assert kinds["--strategy"] is Kind.STRATEGY
    assert kinds["--mode"] is Kind.WORDS
    assert kinds["--mesh"] is Kind.TEXT
    assert kinds["--json"] is Kind.NONE


def test_zsh_knows_every_option_and_choice() -> None:
    script = zsh.script(describe())
    for command in describe():
        case = script.partition(f"        {command.name})\n")[2].partition(";;")[0]
        assert [
            flag for one in command.options for flag in one.flags if f"{flag}[" not in case
        ] == []
        assert [
            one.name
            for one in command.arguments
            if one.kind is Kind.WORDS and f"({' '.join(one.words)})'" not in case
        ] == []


def test_fish_knows_every_option_and_choice() -> None:
    script = fish.script(describe())
    for command in describe():
        lines = "\n".join(
            line for line in script.splitlines() if f"seen_subcommand_from {command.name}'" in line
        )
        flags = [flag for one in command.options for flag in one.flags]
        assert [
            flag
            for flag in flags
            if f"-{'l' if flag[1] == '-' else 's'} {flag.lstrip('-')} " not in lines
        ] == []
        assert [
            one.name
            for one in command.arguments
            if one.kind is Kind.WORDS and f"-a '{' '.join(one.words)}'" not in lines
        ] == []


TRICKY = Command(
    name="odd",
    what="it's [odd]: a \\ and a 'quote'",
    arguments=(
        Argument(
            flags=("--odd",),
            kind=Kind.TEXT,
            words=(),
            repeated=False,
            name="A:B",
            what="it's [odd]: 50% \\",
        ),
        Argument(
            flags=(),
            kind=Kind.STRATEGY,
            words=("fsdp",),
            repeated=True,
            name="STRATEGY",
            what="which",
        ),
    ),
)


@pytest.mark.parametrize(("name", "shell"), [("bash", bash), ("zsh", zsh), ("fish", fish)])
@pytest.mark.parametrize("commands", [describe(), (TRICKY,)], ids=["real", "tricky"])
def test_scripts_parse_whatever_a_help_text_says(
    name: str, shell: ModuleType, commands: tuple[Command, ...], tmp_path: Path
) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"no {name}")
    (tmp_path / "script").write_text(shell.script(commands), encoding="utf-8")
    done = subprocess.run(
        [program, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_zsh_and_fish_quote_what_a_help_text_says() -> None:
    assert "'(--odd)--odd[it'\\''s \\[odd\\]\\: 50% \\\\]:A\\:B: '" in zsh.script((TRICKY,))
    assert "-d 'it\\'s [odd]: 50% \\\\'" in fish.script((TRICKY,))
