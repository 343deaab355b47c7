"""`[[rules]]` and `[[params]]`: chains of several names that interleave."""

from __future__ import annotations

import copy
import pickle

import jsonschema
import pytest

import shardwright as sw
from shardwright.strategy.chains import InterleavedRules
from tests.raising import Facts, facts, raises

MESH = "[mesh]\nfsdp = 2\ntp = 2\nsp = 2\n"
ORDERED = MESH + '[policy]\norder = "rules"\nconflict = "next"\n'
INTERLEAVED = '[[rules]]\nembed = "fsdp"\nvocab = "tp"\n[[rules]]\nEMBED = "sp"\n'
MESH_SIZES = {"fsdp": 2, "tp": 2, "sp": 2}


def load(text: str, source: str = "a.toml") -> sw.Strategy:
    return sw.Strategy.loads(text, source=source)


def test_array_without_interleaving_is_one_table() -> None:
    strategy = load(ORDERED + '[[rules]]\nembed = "fsdp"\n[[rules]]\nEMBED = "sp"\nvocab = "tp"\n')
    assert dict(strategy.rules) == {"embed": "fsdp | sp", "vocab": "tp"}
    assert strategy == load(ORDERED + '[rules]\nembed = "fsdp | sp"\nvocab = "tp"\n')
    assert "[rules]" in strategy.dumps()
    assert strategy.source("rules", "embed") == "a.toml:9, a.toml:11"
    assert sw.Strategy(rules=[]).rules == {}


def test_interleaved_chains_round_trip() -> None:
    strategy = load(ORDERED + INTERLEAVED)
    assert isinstance(strategy.rules, InterleavedRules)
    assert strategy.rules["embed"] == "fsdp | sp"
    assert '[[rules]]\nembed = "sp"' in strategy.dumps()
    schema = sw.Strategy.json_schema()
    jsonschema.Draft202012Validator(schema).validate(strategy.to_data())
    for same in (
        load(strategy.dumps()),
        sw.Strategy.loads(strategy.dumps(format="json"), format="json"),
        sw.Strategy(**strategy.to_data()),
        sw.Strategy(**{**strategy.to_data(), "rules": strategy.rules}),
        pickle.loads(pickle.dumps(strategy)),
        copy.deepcopy(strategy),
    ):
        assert (same, hash(same), same.to_data()) == (strategy, hash(strategy), strategy.to_data())
        assert same.compile() == strategy.compile()
        assert pickle.loads(pickle.dumps(same.compile())) == strategy.compile()


def test_order_counts_only_in_rule_order() -> None:
    first, other = (
        '[rules]\nembed = "fsdp"\nvocab = "tp"\n',
        '[rules]\nvocab = "tp"\nembed = "fsdp"\n',
    )
    assert load(MESH + first) == load(MESH + other)
    assert load(ORDERED + first) != load(ORDERED + other)
    plain = '[rules]\nembed = "fsdp | sp"\nvocab = "tp"\n'
    assert load(MESH + INTERLEAVED) == load(MESH + plain)
    assert hash(load(MESH + INTERLEAVED)) == hash(load(MESH + plain))
    assert load(ORDERED + INTERLEAVED) != load(ORDERED + plain)


def test_explain_names_the_line_that_decided() -> None:
    strategy = load(ORDERED + INTERLEAVED + 'head = "fsdp"\n')
    rules = strategy.compile()
    resolution = sw.explain((sw.EMBED, sw.VOCAB), rules, MESH_SIZES, shape=(4, 4))
    assert [str(decision.rule) for decision in resolution.decisions] == [
        'embed = "fsdp"   (a.toml:9, [rules])',
        'vocab = "tp"   (a.toml:10, [rules])',
    ]
    other = load(ORDERED + '[[rules]]\nhead = "fsdp"\n' + INTERLEAVED).compile()
    resolution = sw.explain((sw.EMBED, sw.HEAD), other, MESH_SIZES, shape=(4, 4))
    assert str(resolution.decisions[0].rule) == 'embed = "sp"   (a.toml:14, [rules])'


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        (INTERLEAVED, '[rules]\nembed = "tp"\n', {"embed": "tp", "vocab": "tp"}),
        (
            INTERLEAVED,
            '[rules]\nhead = "tp"\nvocab = "-"\n',
            [{"embed": "fsdp", "vocab": "-"}, {"embed": "sp", "head": "tp"}],
        ),
        (
            '[rules]\nembed = "tp"\nhead = "tp"\n',
            INTERLEAVED,
            {"embed": "fsdp | sp", "head": "tp", "vocab": "tp"},
        ),
        (
            '[rules]\nhead = "tp"\n',
            INTERLEAVED,
            [{"head": "tp", "embed": "fsdp", "vocab": "tp"}, {"embed": "sp"}],
        ),
        ("", INTERLEAVED, [{"embed": "fsdp", "vocab": "tp"}, {"embed": "sp"}]),
    ],
)
def test_overlay_replaces_whole_chains(base: str, over: str, expected: object) -> None:
    both = load(ORDERED + base, "base.toml") | load(over, "over.toml")
    assert both.to_data()["rules"] == expected
    assert list(both.rules) == list(dict.fromkeys(both.rules))
    sources = {name: both.source("rules", name).split(":")[0] for name in both.rules}
    named = {name.split(" = ")[0].lower() for name in over.splitlines() if " = " in name}
    assert sources == {name: "over.toml" if name in named else "base.toml" for name in both.rules}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rules]]\nembed = 3\n", facts(3, path="a.toml:2 rules.0.embed", fix="tp | -")),
        (
            "rules = [1]\n",
            facts(1, path="a.toml:1 rules.0", fix="rules"),
        ),
        (
            '[[params]]\nembed = "tp"\nEMBED = "tp"\n',
            (
                facts("written", "twice", path="a.toml:3 params.0.embed"),
                facts("written", "twice", path="a.toml:3 params.0.EMBED"),
            ),
        ),
        (
            '[[rules]]\nembed = "-"\nvocab = "tp"\n[[rules]]\nembed = "tp"\n',
            facts("-", path="a.toml:5 rules.1.embed", fix=("-", "a.toml")),
        ),
        (MESH + '[[params]]\nembed = "?"\n', facts("?", path="a.toml:6 params.embed", fix="-")),
        (
            MESH + '[[rules]]\nembed = "cp"\nvocab = "tp"\n[[rules]]\nembed = "tp"\n',
            facts("cp", "dp", "fsdp", "tp", path="a.toml:6, a.toml:9 rules.embed", fix="fsdp"),
        ),
        (
            MESH + '[[rules]]\nembedd = "tp"\n',
            facts("axis", path="a.toml:6 rules.embedd", fix="embed"),
        ),
        (
            MESH + '[policy]\norder = "rule"\n',
            facts("rule", path="a.toml:6 policy.order", fix="rules"),
        ),
    ],
)
def test_malformed_arrays(text: str, message: Facts) -> None:
    with raises(sw.ShardingError, message):
        load(text)


def test_long_interleaved_chain() -> None:
    tables = "".join('[[rules]]\nembed = "tp"\nvocab = "tp"\n' for _ in range(65))
    with raises(
        sw.StrategyError,
        facts("rule", 65, path="a.toml:198 rules.64.embed"),
        facts("rule", 65, path="a.toml:199 rules.64.vocab"),
    ):
        load(MESH + tables)


def test_params_rank_before_rules() -> None:
    text = ORDERED + '[rules]\nembed = "tp"\n[params]\nvocab = "tp"\n'
    rules = load(text).compile()
    for role, expected in (("activation", (["tp"], [])), ("param", ([], ["tp"]))):
        resolution = sw.explain((sw.EMBED, sw.VOCAB), rules, MESH_SIZES, shape=(4, 4), role=role)
        actual = tuple(list(decision.mesh_axes) for decision in resolution.decisions)
        assert actual == (expected if role == "param" else (["tp"], [])), role
