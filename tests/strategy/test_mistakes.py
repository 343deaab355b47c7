"""A mistake in a strategy is one problem with a fix."""

from __future__ import annotations

from typing import Any

import pytest

import shardwright as sw
from shardwright.strategy.model import Strategy


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"rules": {"batch": "dp*fsdp"}},
            r'\n  fix   mesh axes are joined by "\+": did you mean "dp\+fsdp"\?$',
        ),
        ({"rules": {"batch": "DP"}}, r"\n  fix   did you mean 'dp'\?$"),
        (
            {"rules": {"batch": "Data"}},
            r"\n  fix   add it to \[mesh\], Data = 1, or name one of dp, fsdp, tp, ep, sp, pp$",
        ),
        (
            {"rules": {"batch": ["dp", "fsdp"]}},
            (
                r"\n"
                r'  fix   write "dp\+fsdp" for all of them at once, "dp \| fsdp" for the '
                r"first that "
                r"fits$"
            ),
        ),
        (
            {"modes": {"decode": {"params": {"embed": ["dp", "-"]}}}},
            r'\n  fix   write "dp \| -" for the first that fits$',
        ),
        (
            {"policy": {"gather": ["dp", "fsdp"]}},
            r'\n  fix   write "dp\+fsdp" for all of them at once$',
        ),
        ({"rules": {"batch": 3}}, r'\n  fix   write text, such as "tp \| -"$'),
        ({"name": ["x"]}, r"expected text, got \['x'\]\n  fix   write text in quotes$"),
        (
            {"axis_types": "manual"},
            r"^axis_types: unknown value 'manual'\n  fix   write one of auto, explicit$",
        ),
        (
            {"axis_types": {"dp": "manual"}},
            r"^axis_types.dp: unknown value 'manual'\n  fix   write one of auto, explicit$",
        ),
        (
            {"axis_types": 3},
            r"^axis_types: unknown value 3\n  fix   write one of auto, explicit$",
        ),
    ],
)
def test_one_mistake_is_one_problem(data: dict[str, Any], says: str) -> None:
    with pytest.raises(sw.ShardingError, match=says) as caught:
        Strategy(mesh={"dp": 2, "fsdp": 2, "tp": 2}, **data)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "version = true\n",
            r"<toml>:1 version: expected an integer, got True\n  fix   write version = 1",
        ),
        (
            'version = 1\nrules = ["a"]\n',
            r"<toml>:2 rules.0: expected a table, got 'a'\n  fix   write \[\[rules\]\] above",
        ),
        ("version = 1\npolicy = 3\n", r"<toml>:2 policy: expected a table, got 3"),
        (
            'version = 1\n[tensors]\nmatch = "a"\n',
            r"<toml>:2 tensors: expected entries, .*\n  fix   write \[\[tensors\]\]",
        ),
        (
            'version = 1\n[modes.decode.rules]\nbatch = "dp"\n',
            (
                r"^<toml>:2 modes.decode.rules: a mode has no such table\n"
                r"  fix   write its rules under \[modes.decode\]"
            ),
        ),
    ],
)
def test_value_of_the_wrong_type(text: str, says: str) -> None:
    with pytest.raises(sw.StrategyError, match=says):
        sw.Strategy.loads(text)


@pytest.mark.parametrize("value", ["__batch__", "__BATCH__", "batch", "BATCH", "kv_head"])
def test_semantic_axis_as_a_rule_value(value: str) -> None:
    with pytest.raises(sw.MissingMeshAxisError) as caught:
        Strategy(mesh={"dp": 2}, rules={"batch": value})
    axis = "KV_HEAD" if value == "kv_head" else "BATCH"
    says = f"a rule names mesh axes, and {axis} is a semantic axis: name one of dp, fsdp, tp, ep, "
    assert caught.value.fix == f"{says}sp, pp"


def test_parallelism_axis_as_a_rule_value() -> None:
    with pytest.raises(sw.MissingMeshAxisError) as caught:
        Strategy(mesh={"dp": 2}, rules={"batch": "data_parallel"})
    assert caught.value.fix == "did you mean 'dp'?"


@pytest.mark.parametrize("key", ["_", "-", "EMPTY"])
def test_rule_for_a_word_that_names_no_axis(key: str) -> None:
    with pytest.raises(sw.ShardingError) as caught:
        Strategy(mesh={"dp": 2}, rules={key: "dp"})
    assert caught.value.fix == "use the name of an axis, such as batch"
