"""Findings as data, and which ones a strategy or a tree has."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.lints.catalogue import Code, Severity, lint
from shardwright.lints.dead_rules import shadowed_tensors
from shardwright.lints.finding import from_problem
from shardwright.lints.subject import make_subject
from shardwright.resolution.rules import TensorRules
from shardwright.trees.tensors import Tensor
from tests.lints.cases import SERVING, act
from tests.raising import raises


def test_activation_axes_are_not_gathered() -> None:
    (finding,) = lint(sw.Strategy.loads('[rules]\nbatch = "dp+fsdp"\n' + SERVING))
    assert finding.message == "in decode, weights with EMBED are gathered over fsdp for every token"


def test_worst_finding_comes_first() -> None:
    strategy = sw.Strategy.loads(
        '[mesh]\nrow = 2\n[rules]\nbatch = "dp | dp"\n[modes.decode]\nbatch = "dp | dp"\n'
        'head = "tp"\n'
    )
    severities = [finding.severity for finding in lint(strategy)]
    assert severities == sorted(severities, key=list(Severity).index)
    assert {*severities} == {*Severity}


def test_tree_of_specs() -> None:
    tree = {"layers": [{"up": sw.ArraySpec((6, 4), jnp.float32, (sw.EMBED, sw.VOCAB))}]}
    strategy = sw.Strategy.loads('[rules]\nembed = "dp"\nvocab = "-"\n')
    (finding,) = sw.lint(strategy, tree, mesh=sw.abstract_mesh("dp:4"))
    assert (finding.code, finding.key) == (Code.UNRESOLVED, "layers/0/up dim 0 EMBED")
    assert sw.lint(strategy, tree, mesh=sw.abstract_mesh("dp:2")) == ()


def test_overlay_may_shadow_its_base() -> None:
    base = sw.Strategy.loads('[[tensors]]\nmatch = "a"\nembed = "-"\n', source="base.toml")
    overlay = sw.Strategy.loads('[[tensors]]\nmatch = "a"\nembed = "dp"\n', source="overlay.toml")
    assert lint(base | overlay) == ()


def test_missing_sizes_are_not_a_finding() -> None:
    strategy = sw.Strategy.loads('[rules]\nbatch = "dp+fsdp | dp | -"\n')
    assert lint(strategy, [act("x", sw.BATCH)], mesh="dp:2,fsdp:2") == ()


def test_bad_annotation_is_one_finding() -> None:
    (finding,) = lint(
        sw.Strategy.loads('[rules]\nbatch = "dp"\n'),
        [Tensor(path="x", axes=(sw.BATCH, sw.BATCH))],
        mesh="dp:2",
    )
    assert finding.code is Code.UNRESOLVED
    assert finding.key == "x dim 1 BATCH"
    assert finding.message.startswith("dp is taken by dim 0 BATCH; rule batch")


def test_finding_is_data() -> None:
    (finding,) = lint(sw.Strategy.loads('[rules]\nbatch = "dp | dp"\n', source="s.toml"))
    assert finding.to_json() == {
        "code": "unreachable_candidate",
        "severity": "warning",
        "file": "s.toml",
        "line": 2,
        "key": "rules.batch",
        "message": 'in "dp | dp" the candidate dp is never used: whenever it fits, the earlier '
        "dp fits too",
        "fix": "drop one of dp and dp",
    }
    assert str(finding).startswith("s.toml:2 rules.batch: warning unreachable_candidate: in ")
    assert hash(finding) == hash(dataclasses.replace(finding))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        finding.fix = ""  # type: ignore[misc]


def test_file_problem_has_a_place() -> None:
    with raises(
        sw.StrategyError, "mesh", "axis", path="my file.toml:2 rules.batch", fix="+"
    ) as caught:
        sw.Strategy.loads('[rules]\nbatch = "dp |"\n', source="my file.toml")
    finding = from_problem(caught.value.problems[0])
    assert (finding.code, finding.source, finding.key) == (
        Code.INVALID,
        "my file.toml:2",
        "rules.batch",
    )


def test_invalid_arguments_are_refused() -> None:
    with raises(sw.StrategyError, "fsdp", fix="Strategy.load"):
        lint("fsdp")
    with raises(sw.MeshSpecError, "dp", "x"):
        lint(sw.Strategy.preset("fsdp"), mesh="dp:x")
    with raises(sw.StrategyError, "str", "ArraySpec", path="w", fix="ArraySpecs"):
        lint(sw.Strategy.preset("fsdp"), {"w": "EMBED"})


def test_patterns_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each pair of entries, which a file of 1,000 entries would make a million of."""
    entries = [{"match": f"^w{at}|w", "embed": "-"} for at in range(20)]
    tree = tuple(
        Tensor(path=f"w{at}", axes=(sw.EMBED,), shape=(8,), role=sw.Role.PARAM, dtype="float32")
        for at in range(30)
    )
    subject = make_subject(sw.Strategy(version=1, mesh={"dp": 2}, tensors=entries), tree, None)
    searches: list[str] = []
    monkeypatch.setattr(TensorRules, "matches", lambda self, path: searches.append(path) is None)
    assert len(list(shadowed_tensors(subject))) == len(entries) - 1
    assert len(searches) == len(entries) * len(tree)
