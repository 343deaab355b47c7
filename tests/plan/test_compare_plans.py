"""Two plans compared: quantities, collectives and marks, from reports and from JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.cli.main import main
from shardwright.plan.compare_plans import compare_plans, moved_lines
from shardwright.plan.walk.events import Event
from tests.cli.test_plan import MODEL
from tests.plan.test_walk import manager, mlp, plan
from tests.raising import raises

BEFORE, AFTER = manager("fsdp_tp", "fsdp:2,tp:4"), manager("fsdp_tp", "fsdp:4,tp:2")


def test_changes_are_differences_of_both_plans() -> None:
    left, right = plan(BEFORE, mlp), plan(AFTER, mlp)
    comparison = compare_plans(left, json.loads(json.dumps(right.to_json())))
    values = {change.name: (change.before, change.after) for change in comparison.changes}
    assert values["sent"] == (left.sent_bytes, right.sent_bytes)
    assert values["memory at most"] == (left.memory.high, right.memory.high)
    for axis, sent in left.by_axis().items():
        assert values[f"sent for {axis}"][0] == sent
    assert sum(row.before[1] for row in comparison.traffic) == left.sent_bytes
    assert sum(row.after[1] for row in comparison.traffic) == right.sent_bytes
    assert comparison.changed
    assert not compare_plans(left, left).changed


def test_one_rule_changes_only_rows_of_its_axis() -> None:
    rules = sw.Strategy.model_validate({"rules": {"mlp_intermediate": "-"}})
    after = sw.PartitionManager(sw.Strategy.preset("fsdp_tp") | rules, mesh=BEFORE.mesh)
    comparison = compare_plans(plan(BEFORE, mlp), plan(after, mlp))
    changed = {row.axes for row in comparison.traffic if row.changed}

    assert ("MLP_INTERMEDIATE",) in changed
    assert any(text.startswith("idle: tp") for text in comparison.new)


def test_events_survive_json() -> None:
    for event in plan(BEFORE, mlp).events:
        assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_moved_lines_are_no_change(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A comment above the model moves its lines. A changed matmul next to it is a change."""
    text = MODEL.replace("def programs", "def other(params, x):\n    return x\n\n\ndef programs")
    for name, source in {
        "before": MODEL,
        "moved": f"# a comment\n{text}",
        "doubled": f"# a comment\n{MODEL}".replace("(8, 16, 64)", "(16, 16, 64)"),
    }.items():
        (model / "planned_model.py").write_text(source, encoding="utf-8")
        options = "--strategy fsdp_tp --mesh fsdp:2,tp:2,dp:2 --json --mode train"
        assert main(shlex.split(f"plan planned_model.py:programs {options}")) == 0
        (model / f"{name}.json").write_text(capsys.readouterr().out, encoding="utf-8")

    def diff(after: str) -> tuple[int, str]:
        code = main(["diff", "--plan", "before.json", "--plan", f"{after}.json", "--exit-code"])
        return code, capsys.readouterr().out

    code, text = diff("moved")
    assert code == 0
    assert "both plans are equal\nmoved: planned_model.py:12 -> 13" in text
    code, text = diff("doubled")
    assert code == 1
    assert "inputs" in text


def test_lines_are_matched_in_order() -> None:
    def lines(text: str, start: int) -> dict[str, frozenset[str]]:
        return {f"a.py:{number}": frozenset(word) for number, word in enumerate(text, start)}

    assert moved_lines(lines("xyz", 3), lines("xyz", 3)) == {}
    # One line is new and one is gone. Equal lines without a move stay where they are.
    assert moved_lines(lines("xvyz", 3), lines("wxvz", 3)) == {
        "a.py:3": "a.py:4",
        "a.py:4": "a.py:5",
    }
    assert moved_lines(lines("xxyz", 3), lines("wxxz", 3)) == {"a.py:3": "a.py:5"}
    assert moved_lines(lines("x", 3), {"b.py:4": frozenset("x")}) == {}


def test_a_line_that_is_gone_is_not_paired_with_a_moved_one() -> None:
    plans = []
    for first, rest in (("mine.py:12", "mine.py:13"), ("", "mine.py:12")):
        data = json.loads(json.dumps(plan(BEFORE, mlp).to_json()))
        gathers = [event for event in data["events"] if event["kind"] == "all_gather"]
        reduce = next(event for event in data["events"] if event["kind"] == "all_reduce")
        data["events"] = [{**reduce, "kind": "all_gather", "source": first}] if first else []
        data["events"] += [{**event, "source": rest} for event in gathers]
        plans.append(data)
    comparison = compare_plans(*plans)
    assert comparison.moved == {"mine.py:13": "mine.py:12"}
    changed = [row.source for row in comparison.traffic if row.changed]
    assert changed == ["mine.py:12 (before)"]


@pytest.mark.parametrize("data", [{}, {"state": 3}, {"state": {"by_category": {}}, "events": [{}]}])
def test_other_data_is_refused(data: dict[str, Any]) -> None:
    with raises(sw.StrategyError, "data", fix="MODEL"):
        compare_plans(data, data)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned_model.py").write_text(MODEL, encoding="utf-8")
    return tmp_path


def test_command_compares_files_and_strategies(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(words: str) -> tuple[int, str]:
        code = main(shlex.split(words))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    for name in ("fsdp", "fsdp_tp"):
        setting = f"--strategy {name} --mesh fsdp:2,tp:4 --topology v5e:2x4 --json"
        (model / f"{name}.json").write_text(run(f"plan planned_model.py:programs {setting}")[1])
    code, files = run("diff --plan fsdp.json --plan fsdp_tp.json")
    assert code == 0
    command = "diff fsdp fsdp_tp --model planned_model.py:programs --mesh fsdp:2,tp:4"
    assert run(f"{command} --topology v5e:2x4") == (0, files)
    assert "mode train\n- fsdp on fsdp:2,tp:4, v5e:2x4" in files
    assert run("diff --plan fsdp.json --plan fsdp.json --exit-code")[0] == 0
    code, data = run("diff --plan fsdp.json --plan fsdp_tp.json --exit-code --json")
    assert code == 1
    assert json.loads(data)["changed"]
    code, text = run("diff --plan fsdp.json --plan fsdp.json --mode train --mode decode")
    assert code == 0
    assert "mode train -> decode" in text
    plans = json.loads((model / "fsdp.json").read_text())
    del plans["modes"]["train"]
    (model / "decode.json").write_text(json.dumps(plans))
    code, text = run("diff --plan decode.json --plan fsdp.json --markdown")
    assert code == 0
    assert text.endswith("```\n\nonly after: mode train\n")
    (model / "other.json").write_text('{"modes": {"insert": {"state": {"by_category": {}}}}}')
    code, text = run("diff --plan fsdp.json --plan other.json")
    assert code == 2
    assert "no mode in common" in text
