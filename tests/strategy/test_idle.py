"""`[policy] idle`: mesh axes that no rule names on purpose."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import MissingMeshAxisError
from shardwright.lints.finding import Code
from shardwright.resolution.rules import Policy
from shardwright.testing import cpu_mesh
from tests.raising import Facts, facts, raises

FILE = """
version = 1
[mesh]
replica = 2
autoregressive = 2
dp = 2
[rules]
batch = "dp"
[policy]
idle = "replica+autoregressive"
"""


def loaded(text: str = FILE) -> sw.Strategy:
    return sw.Strategy.loads(text, source="idle.toml")


def test_idle_mesh_axis_needs_no_rule() -> None:
    strategy = loaded()
    pm = sw.PartitionManager(strategy, mesh=cpu_mesh("replica:2,autoregressive:2,dp:2"))
    assert pm.rules.policy.idle == ("replica", "autoregressive")
    x = pm.shard(np.ones((8, 8), np.float32), sw.BATCH, sw.EMBED)
    assert x.sharding.spec == sw.PartitionManager(strategy, mesh=pm.mesh).resolve(
        sw.BATCH, sw.EMBED
    )
    assert {shard.data.shape for shard in x.addressable_shards} == {(4, 8)}
    assert len({shard.replica_id for shard in x.addressable_shards}) == 4


def test_unnamed_mesh_axes_are_refused() -> None:
    with raises(sw.MeshMismatchError, "other", 2, "dp", fix="other") as caught:
        sw.PartitionManager(loaded(), mesh=cpu_mesh("replica:1,autoregressive:2,dp:2,other:2"))
    assert 'or declare that it is idle, [policy] idle = "other"' in str(caught.value)


def test_idle_mesh_axis_must_be_in_the_mesh() -> None:
    with raises(sw.MeshMismatchError, "autoregressive", "replica", 2, "dp", fix="replica"):
        sw.PartitionManager(loaded(), mesh=cpu_mesh("replica:2,dp:4"))
    with raises(
        MissingMeshAxisError,
        "replca",
        "dp",
        "fsdp",
        "tp",
        path="idle.toml:10 policy.idle",
        fix="replica",
    ) as caught:
        loaded(FILE.replace('"replica+autoregressive"', '"replca"'))
    assert "idle.toml:10" in str(caught.value)
    assert "did you mean 'replica'?" in str(caught.value)


@pytest.mark.parametrize(
    "lines",
    [
        '[params]\nembed = "replica"',
        '[modes.decode]\nbatch = "dp | replica"',
        '[[tensors]]\nmatch = "w"\nembed = "replica+dp"',
    ],
)
def test_rule_names_idle_mesh_axis(lines: str) -> None:
    with raises(
        sw.StrategyError, "replica", "rule", path="idle.toml:10 policy.idle", fix="replica"
    ) as caught:
        loaded(FILE + lines)
    assert "idle.toml:10" in str(caught.value)
    assert "idle.toml:1" in str(caught.value.problems[0].rule)


@pytest.mark.parametrize("key", ["gather", "zero1"])
def test_policy_names_idle_mesh_axis(key: str) -> None:
    with raises(
        sw.StrategyError, "replica", "rule", path="idle.toml:10 policy.idle", fix="replica"
    ):
        loaded(FILE + f'{key} = "replica"')


@pytest.mark.parametrize("text", ["a | b", "a | -", "?"])
def test_idle_is_one_set_of_mesh_axes(text: str) -> None:
    with raises(sw.StrategyError, "mesh", path="policy.idle", fix="replica") as caught:
        sw.Strategy(policy={"idle": text})
    assert 'write "replica", "replica+other" for several, or "-" for none' in str(caught.value)


def test_idle_written_as_a_list() -> None:
    with raises(sw.StrategyError, "a", "b", path="policy.idle", fix="a+b") as caught:
        sw.Strategy(policy={"idle": ["a", "b"]})  # type: ignore[dict-item]
    assert '"a+b" for all of them at once' in str(caught.value)


@pytest.mark.parametrize("format", ["toml", "json"])
def test_round_trip(tmp_path: Path, format: str) -> None:
    strategy = loaded()
    assert sw.Strategy.load(strategy.dump(tmp_path / f"idle.{format}")) == strategy
    jsonschema.validate(strategy.to_data(), sw.Strategy.json_schema())
    assert "idle" in sw.Strategy.json_schema()["$defs"]["PolicyTable"]["properties"]


def test_overlay() -> None:
    fragment = sw.Strategy(policy={"idle": "replica"})
    both = sw.Strategy.preset("ddp") | sw.Strategy(mesh={"replica": 2}) | fragment
    assert both.compile().policy.idle == ("replica",)
    assert (both | sw.Strategy(policy={"idle": "-"})).compile().policy.idle == ()


def test_idle_is_part_of_equality() -> None:
    first, other = loaded().compile(), loaded(FILE.replace("replica+autoregressive", "-")).compile()
    assert first != other
    assert first.fingerprint() != other.fingerprint()
    assert first == loaded().compile()


def test_idle_mesh_axis_has_no_lint() -> None:
    def codes(strategy: sw.Strategy) -> list[tuple[str, str]]:
        return [
            (finding.code, finding.key)
            for finding in sw.lint(strategy)
            if finding.code == Code.IDLE_MESH_AXIS
        ]

    assert codes(loaded()) == []
    assert codes(loaded(FILE.replace("replica+", ""))) == [(Code.IDLE_MESH_AXIS, "mesh.replica")]


@pytest.mark.parametrize(
    ("idle", "message"),
    [
        (["a"], facts("a", "tuple", path="idle", fix="fsdp")),
        (("a b",), facts("idle", "a b", path="idle", fix="fsdp")),
        (("a", "a"), facts("idle", "a", path="idle")),
    ],
)
def test_policy_in_python(idle: object, message: Facts) -> None:
    with raises(sw.StrategyError, message):
        Policy(idle=idle)  # type: ignore[arg-type]
