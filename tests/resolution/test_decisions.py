"""A resolution as a table, as data, and as a spec that is derived from its decisions."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.errors import Problem
from shardwright.resolution.decisions import (
    DimDecision,
    ModeFrom,
    Outcome,
    Reason,
    Resolution,
    RuleRef,
    Skip,
)
from shardwright.resolution.partition_specs import canonical_spec
from shardwright.resolution.resolver import explain
from shardwright.resolution.rules import Policy
from shardwright.vocabulary.shown import WIDTH
from tests.resolving import make_rules

RULES = make_rules(
    Policy(gather=("fsdp",)),
    rules={
        sw.BATCH: "dp+fsdp",
        sw.QUERY_LENGTH: "sp",
        sw.HEAD: "tp",
        sw.KV_HEAD: "tp | -",
        sw.HEAD_DIM: "-",
        sw.VOCAB: "?",
        sw.EMBED: "-",
    },
    params={sw.EMBED: "fsdp+sp"},
)
MESH = {"dp": 2, "fsdp": 2, "sp": 1, "tp": 4}


def words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_that_people_read() -> None:
    resolution = explain(
        (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.EMPTY),
        RULES,
        MESH,
        shape=(8, 16, 6, 3),
        mode="decode",
        path="attn/k",
    )
    assert words(str(resolution)) == [
        "attn/k (BATCH, QUERY_LENGTH, KV_HEAD, _) as activation in decode -> P(('dp', 'fsdp'))",
        "dim axis size mesh axes rule written in",
        "why",
        '0 BATCH 8 dp+fsdp batch = "dp+fsdp" t.toml [rules]',
        "first candidate fits",
        '1 QUERY_LENGTH 16 - query_length = "sp" t.toml [rules]',
        "sp has size 1; no mesh axis left: replicated",
        '2 KV_HEAD 6 - kv_head = "tp | -" t.toml [rules]',
        "tp: 6 % 4 != 0; replicated by rule",
        "3 _ 3 -",
        "not sharded by annotation",
    ]


def test_the_columns_of_the_table_are_aligned() -> None:
    resolution = explain((sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD), RULES, MESH, shape=(8, 16, 6))
    _, head, *rows = str(resolution).splitlines()
    for column in ("axis", "size", "mesh axes", "rule"):
        at = head.index(column)
        cells = [row for row in rows if row.strip()[0].isdigit()]
        assert len(cells) == 3
        assert all(row[at - 1] == " " and row[at] != " " for row in cells)
    assert not any(line != line.rstrip() for line in str(resolution).splitlines())


def test_a_long_why_is_below_its_row() -> None:
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.HEAD_DIM)
    resolution = explain(axes, RULES, {"tp": 4, "sp": 1}, shape=(8, 16, 6, 128), mode="prefill")
    _, *lines = str(resolution).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[:2] == [
        "  dim  axis          size  mesh axes  rule                 written in",
        "       why",
    ]
    for decision in resolution.decisions:
        assert f"       {decision.why}" in lines


def test_table_of_a_failed_resolution() -> None:
    resolution = explain((sw.BATCH, sw.HEAD), RULES, MESH, shape=(8, 6), path="attn/q")
    assert words(str(resolution)) == [
        "attn/q (BATCH, HEAD) as activation in train -> failed",
        "dim axis size mesh axes rule written in why",
        '0 BATCH 8 dp+fsdp batch = "dp+fsdp" t.toml [rules] first candidate fits',
        '1 HEAD 6 ! head = "tp" t.toml [rules] tp: 6 % 4 != 0; failed',
        "attn/q dim 1 HEAD: size 6 does not divide over tp=4",
        'rule head = "tp" (t.toml, [rules], mode train)',
        'fix add a fallback, head = "tp | -", or choose a size and a mesh that divide',
    ]


def test_remarks_of_decisions() -> None:
    assert (
        explain((sw.VOCAB,), RULES, MESH, shape=(7,)).decisions[0].why
        == "left to the compiler by rule"
    )
    assert words(str(explain((sw.VOCAB,), RULES, MESH, shape=(7,))))[2].startswith(
        "0 VOCAB 7 ? vocab ="
    )
    assert (
        explain((sw.EMBED,), RULES, MESH, shape=(8,), role="use").decisions[0].why
        == "sp has size 1; gathered over fsdp"
    )
    assert explain((sw.HEAD,), RULES, MESH).decisions[0].why == "size not given: not checked"
    applied = explain((sw.BATCH,), RULES, MESH, shape=(2,), manual=frozenset({"dp"}))
    assert applied.decisions[0].why == "dp already applied by shard_map"


def test_as_data() -> None:
    resolution = explain(
        (sw.VOCAB, sw.BATCH, sw.KV_HEAD), RULES, MESH, shape=(7, 8, 6), mode="prefill", path="x"
    )
    data = json.loads(json.dumps(resolution.to_json()))
    assert {
        key: data[key]
        for key in ("annotation", "path", "mode", "mode_from", "role", "ok", "problems", "notes")
    } == {
        "annotation": "(VOCAB, BATCH, KV_HEAD)",
        "path": "x",
        "mode": "prefill",
        "mode_from": "call",
        "role": "activation",
        "ok": True,
        "problems": [],
        "notes": [],
    }
    assert data["spec"] == ["?", ["dp", "fsdp"], []]
    assert data["dims"][2] == {
        "dim": 2,
        "axis": "KV_HEAD",
        "size": 6,
        "mesh_axes": [],
        "outcome": "replicated",
        "rule": {"key": "kv_head", "text": "tp | -", "table": "rules", "source": "t.toml"},
        "skipped": [
            {"reason": "indivisible", "candidate": ["tp"], "mesh_axis": "", "detail": "6 % 4 != 0"}
        ],
        "gathered": [],
        "largest_dim": [],
        "zero1": [],
        "manual": [],
        "unchecked": False,
    }


def test_a_failure_as_data() -> None:
    data = explain((sw.HEAD,), RULES, MESH, shape=(6,)).to_json()
    assert (data["ok"], data["spec"]) == (False, None)
    assert [problem["error"] for problem in data["problems"]] == ["IndivisibleError"]
    assert data["problems"][0]["message"].startswith("dim 0 HEAD: size 6 does not divide over tp=4")


def decision(
    dim: int, *mesh_axes: str, outcome: Outcome = Outcome.CHOSEN, manual: tuple[str, ...] = ()
) -> DimDecision:
    return DimDecision(
        dim=dim, label="X", size=8, outcome=outcome, mesh_axes=mesh_axes, manual=manual
    )


@pytest.mark.parametrize(
    ("decisions", "spec"),
    [
        ((), P()),
        ((decision(0),), P()),
        ((decision(0, "a"), decision(1)), P("a")),
        ((decision(0), decision(1, "a", "b"), decision(2), decision(3)), P(None, ("a", "b"))),
        ((decision(0, "a", "b", manual=("a",)),), P("b")),
        ((decision(0, "a", manual=("a",)),), P()),
        ((decision(0, outcome=Outcome.UNCONSTRAINED),), P(P.UNCONSTRAINED)),
    ],
)
def test_spec_follows_from_decisions(decisions: tuple[DimDecision, ...], spec: P) -> None:
    assert canonical_spec(decision.entry for decision in decisions) == spec
    resolution = Resolution(
        annotation="x",
        decisions=decisions,
        mode=sw.MODE_TRAIN,
        mode_from=ModeFrom.CALL,
        role=sw.Role.PARAM,
    )
    assert resolution.ok
    assert resolution.spec == spec


def test_a_resolution_with_problems_has_no_spec() -> None:
    resolution = explain((sw.BATCH,), RULES, MESH, shape=(8,))
    failed = dataclasses.replace(resolution, problems=(Problem(error=sw.StrategyError, what="no"),))
    assert not failed.ok
    assert failed.spec is None


def test_answers_pickle_and_are_frozen() -> None:
    resolution = explain((sw.BATCH, sw.HEAD), RULES, MESH, shape=(8, 6))
    assert pickle.loads(pickle.dumps(resolution)) == resolution
    with pytest.raises(dataclasses.FrozenInstanceError, match="mode"):
        resolution.mode = "train"  # type: ignore[misc]


def test_a_rule_says_where_it_was_written() -> None:
    assert (
        str(RuleRef(key="kv_head", text="tp | -", table="modes.decode", source="a.toml:3"))
        == 'kv_head = "tp | -"   (a.toml:3, [modes.decode])'
    )
    assert str(RuleRef(key="kv_head", text="tp")) == 'kv_head = "tp"'


def test_a_skip_says_what_was_passed_over() -> None:
    assert (
        str(Skip(reason=Reason.MISSING, candidate=("a", "b"), mesh_axis="a"))
        == "a is not in the mesh"
    )
    assert str(Skip(reason=Reason.SIZE_ONE, candidate=("a",), mesh_axis="a")) == "a has size 1"
    assert (
        str(Skip(reason=Reason.TAKEN, candidate=("a", "b"), detail="a is taken by dim 0 X"))
        == "a+b: a is taken by dim 0 X"
    )
    assert str(Skip(reason=Reason.EMPTY, candidate=("a",))) == "a: no mesh axis left"
