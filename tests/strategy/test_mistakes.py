"""A mistake in a strategy is one problem with a fix."""

from __future__ import annotations

from typing import Any

import pytest

import shardwright as sw
from shardwright.strategy.model import Strategy
from tests.raising import Facts, facts, raises


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"rules": {"batch": "dp*fsdp"}},
            facts("dp*fsdp", "dp", "fsdp", "tp", path="rules.batch", fix=("+", "dp+fsdp")),
        ),
        ({"rules": {"batch": "DP"}}, facts("DP", "dp", "fsdp", "tp", path="rules.batch", fix="dp")),
        (
            {"rules": {"batch": "Data"}},
            facts("Data", "dp", "fsdp", "tp", "ep", path="rules.batch", fix=("1", "dp")),
        ),
        (
            {"rules": {"batch": ["dp", "fsdp"]}},
            facts("dp", "fsdp", path="rules.batch", fix=("dp+fsdp", "dp | fsdp")),
        ),
        (
            {"modes": {"decode": {"params": {"embed": ["dp", "-"]}}}},
            facts("dp", "-", path="modes.decode.params.embed", fix="dp | -"),
        ),
        (
            {"policy": {"gather": ["dp", "fsdp"]}},
            facts("dp", "fsdp", path="policy.gather", fix="dp+fsdp"),
        ),
        ({"rules": {"batch": 3}}, facts(3, path="rules.batch", fix="tp | -")),
        ({"name": ["x"]}, facts("x", path="name", fix="quotes")),
        (
            {"axis_types": "manual"},
            facts("manual", path="axis_types", fix="auto"),
        ),
        (
            {"axis_types": {"dp": "manual"}},
            facts("manual", path="axis_types.dp", fix="auto"),
        ),
        (
            {"axis_types": 3},
            facts(3, path="axis_types", fix="auto"),
        ),
    ],
)
def test_one_mistake_is_one_problem(data: dict[str, Any], says: Facts) -> None:
    with raises(sw.ShardingError, says) as caught:
        Strategy(mesh={"dp": 2, "fsdp": 2, "tp": 2}, **data)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "version = true\n",
            facts("True", path="<toml>:1 version", fix="1"),
        ),
        (
            'version = 1\nrules = ["a"]\n',
            facts("a", path="<toml>:2 rules.0", fix="rules"),
        ),
        ("version = 1\npolicy = 3\n", facts(3, path="<toml>:2 policy")),
        (
            'version = 1\n[tensors]\nmatch = "a"\n',
            facts("match", "a", path="<toml>:2 tensors", fix="tensors"),
        ),
        (
            'version = 1\n[modes.decode.rules]\nbatch = "dp"\n',
            facts("mode", path="<toml>:2 modes.decode.rules", fix="modes.decode"),
        ),
    ],
)
def test_value_of_the_wrong_type(text: str, says: Facts) -> None:
    with raises(sw.StrategyError, says):
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
