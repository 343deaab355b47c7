"""What messages suggest for mistakes that are easy to make."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import errors
from shardwright.errors import did_you_mean
from tests.bad_input.slips import router
from tests.cli.cases import run
from tests.raising import Facts, facts, raises


def test_expert_gate_is_not_advised_elsewhere() -> None:
    with raises(sw.AxisConflictError, "ep", 0, "BATCH", dim=1, axis="EXPERT", fix="EXPERT_GATE"):
        router(sw.BATCH, sw.EXPERT, sw.CAPACITY)
    with raises(sw.AxisConflictError, "fsdp", 0, "BATCH", dim=2, axis="CAPACITY") as caught:
        router(sw.BATCH, sw.EXPERT_GATE, sw.CAPACITY)
    assert "router weights" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("dpp", ["dp", "fsdp", "tp", "ep", "sp", "pp"], "dp"),
        ("ttp", ["dp", "fsdp", "tp", "ep", "sp", "pp"], "tp"),
        ("fdsp", ["dp", "fsdp"], "fsdp"),
        ("HEAD", ["head", "HEAD_DIM"], "head"),
        ("zzz", ["dp"], ""),
    ],
)
def test_closest_name(name: str, known: list[str], meant: str) -> None:
    assert did_you_mean(name, known) == (f"did you mean {meant!r}?" if meant else "")


# The command line.


def test_presets_without_an_action_lists_them(tmp_path: Path) -> None:
    assert run("presets", tmp_path) == run("presets list", tmp_path)
    assert run("presets", tmp_path)[0] == 0
    assert run("presets --json", tmp_path) == run("presets list --json", tmp_path)


@pytest.mark.parametrize("command", ["", "explain", "check", "diff", "presets", "schema"])
@pytest.mark.parametrize("columns", [60, 100])
def test_help_follows_the_width_of_the_terminal(
    command: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(f"{command} --help", tmp_path)
    prose = [line for line in out.splitlines() if not line.startswith("  ")]
    assert code == 0
    assert [line for line in prose if len(line) > columns] == []
    monkeypatch.setenv("COLUMNS", "200")
    assert len(run(f"{command} --help", tmp_path)[1].splitlines()) <= len(out.splitlines())


def test_control_characters_are_escaped() -> None:
    text = "\x1b[2J\ud800"
    error = sw.StrategyError(
        f"rule {text}", path=text, axis=text, rule=text, fix=text, snippet=text
    )
    message = str(error)
    assert message.count(r"\x1b[2J\ud800") == 5
    assert all(line.isprintable() for line in message.split("\n"))
    assert error.path == text


# How tests assert an error.

OURS = {
    name
    for name, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, sw.ShardingError)
}
# Texts that hold for any error; and one that a test makes itself.
ANY = {"'.'", r"'\\S'", "re.escape(str(error))"}


def test_prose_stands_in_golden_files_only() -> None:
    """Tests use `raises` of `tests/raising.py` for errors of ours: a new wording breaks none."""
    wrong = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "pytest.raises" in text else ():
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.raises":
                continue
            names = set(re.findall(r"\w+", ast.unparse(node.args[0])))
            prose = [each for each in node.keywords if each.arg == "match"]
            if names & OURS and prose and ast.unparse(prose[0].value) not in ANY:
                wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize(
    "wrong",
    [
        facts(6, path="mlp/up", fix="mlp"),
        facts(60, path="mlp/gate", fix="mlp"),
        facts("tp", path="mlp/gate", fix="embed"),
        facts(6, path="mlp/gate", count=2),
        facts(6, path="mlp/gate", dim=0),
        facts(6, path="mlp/gate", rule="embed"),
    ],
)
def test_other_facts_are_found(wrong: Facts) -> None:
    """A test fails if the error is about another path, size, rule or fix."""

    def call() -> None:
        raise sw.IndivisibleError(
            "size 6 does not divide over tp=4",
            path="mlp/gate",
            dim=1,
            size=6,
            rule='mlp = "tp"',
            fix='write mlp = "tp | -"',
        )

    with raises(sw.IndivisibleError, "tp=4", 6, path="mlp/gate", dim=1, rule="mlp", fix="tp | -"):
        call()
    with pytest.raises(AssertionError), raises(sw.IndivisibleError, wrong):
        call()


def test_error_without_a_fix_is_found() -> None:
    with pytest.raises(AssertionError, match="no fix"), raises(sw.StrategyError, "dp"):
        raise sw.StrategyError("the mesh has no axis dp")


def test_assertion_needs_a_fact() -> None:
    with pytest.raises(TypeError, match="needs a fact"), raises(sw.StrategyError):
        raise sw.StrategyError("the mesh has no axis dp", fix="add it")
