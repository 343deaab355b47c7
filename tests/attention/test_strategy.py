"""Strategies name implementations by mode: files, schema, rules and choice."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import jsonschema
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention import implementation
from shardwright.attention.choose import AUTO
from shardwright.attention.implementation import SHIPPED
from shardwright.resolution.rules import Attention
from shardwright.testing.meshes import cpu_mesh
from tests.raising import Facts, facts, raises

TEXT = (
    '[rules]\nbatch = "dp"\n[attention]\ndefault = "blockwise"\ntrain = "vanilla"\ndecode '
    '= "auto"\n'
)


def shapes(length: int = 8) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((2, length, heads, 8), "float32") for heads in (4, 2, 2)]


def test_mode_line_else_default() -> None:
    rules = sw.Strategy.loads(TEXT).compile()
    actual = {
        mode: str(rules.attention_in(mode))
        for mode in (sw.MODE_TRAIN, sw.MODE_PREFILL, sw.MODE_DECODE)
    }
    assert actual == {
        sw.MODE_TRAIN: 'train = "vanilla"   (<toml>:5, [attention])',
        sw.MODE_PREFILL: 'default = "blockwise"   (<toml>:4, [attention])',
        sw.MODE_DECODE: "None",
    }
    elsewhere = sw.Strategy.loads("\n" + TEXT, source="my.toml").compile()
    assert elsewhere == rules
    assert hash(elsewhere) == hash(rules)
    again = pickle.loads(pickle.dumps(elsewhere))
    assert again == rules
    assert str(again.attention_in(sw.MODE_TRAIN)) == 'train = "vanilla"   (my.toml:6, [attention])'
    assert rules != sw.Strategy.loads(TEXT.replace("vanilla", "ring")).compile()
    assert sw.Strategy.loads('[rules]\nbatch = "dp"\n').compile().attention == ()


@pytest.mark.full(but=["toml"])
@pytest.mark.parametrize("format", ["toml", "json"])
def test_round_trip_overlay_and_schema(format: str) -> None:
    strategy = sw.Strategy.loads(TEXT)
    text = strategy.dumps(format=format)  # type: ignore[arg-type]
    assert sw.Strategy.loads(text, format=format) == strategy  # type: ignore[arg-type]
    both = strategy | sw.Strategy.loads('[attention]\ndecode = "flash_decode"\n')
    assert both.attention.model_dump() == {
        "default": "blockwise",
        "train": "vanilla",
        "prefill": None,
        "decode": "flash_decode",
    }
    schema = sw.Strategy.json_schema()
    jsonschema.validate(strategy.to_data(), schema)
    jsonschema.validate({"attention": {"train": "own:mine"}}, schema)
    for wrong in ("rings", "own:", "own:a b", "paged"):
        with pytest.raises(jsonschema.ValidationError, match=f"'{wrong}' is not valid under any"):
            jsonschema.validate({"attention": {"train": wrong}}, schema)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            'train = "rings"',
            facts("rings", path="my.toml:2 attention.train", fix="ring"),
        ),
        (
            'train = "own:"',
            facts("own:", path="my.toml:2 attention.train", fix="allgather_kv"),
        ),
        ('decode = "paged"', facts("paged", path="my.toml:2 attention.decode", fix="allgather_kv")),
        ('insert = "ring"', facts("key", path="my.toml:2 attention.insert")),
        ("train = 3", facts(3, path="my.toml:2 attention.train", fix="allgather_kv")),
    ],
)
def test_mistakes_in_a_file(line: str, says: Facts) -> None:
    with raises(sw.StrategyError, says):
        sw.Strategy.loads(f"[attention]\n{line}\n", source="my.toml")


def test_call_overrides_strategy() -> None:
    q, k, v = shapes()
    with sw.PartitionManager(sw.Strategy.loads(TEXT), mesh=cpu_mesh("dp:2")):
        resolution = attention.explain(q, k, v, mode="train")
        assert (resolution.name, resolution.why) == (
            "vanilla",
            'the strategy says train = "vanilla"   (<toml>:5, [attention])',
        )
        assert attention.explain(q, k, v, mode="train", implementation="auto").name == "blockwise"
        assert attention.explain(q, k, v, mode="decode").name == "blockwise"
        with raises(sw.AttentionError, "blockwise", 4, fix=("auto", "vanilla")):
            attention.explain(q, k, v, mode="prefill", return_weights=True).require()


def test_refusal_names_the_choice_of_auto() -> None:
    q, k, v = shapes()
    with sw.PartitionManager(sw.Strategy.loads(TEXT), mesh=cpu_mesh("dp:2")):
        refused = attention.explain(
            q, k, v, mode="train", implementation="blockwise", return_weights=True
        )
        assert (
            str(refused).splitlines()[0] == "refused   blockwise was asked for by name and refuses"
        )
        assert str(refused).splitlines()[-1] == "  auto  vanilla: only vanilla returns weights"
        says = facts("blockwise", snippet="weights", fix=("auto", "vanilla"))
        with raises(sw.AttentionError, says):
            refused.require()
        with raises(sw.AttentionError, "blockwise", 4, fix=("auto", "vanilla")):
            attention.explain(q, k, v, mode="prefill", return_weights=True).require()


def test_nothing_serves_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    resting = [
        dataclasses.replace(kernel, supports=lambda call: ("it rests",)) for kernel in SHIPPED
    ]
    monkeypatch.setattr(implementation, "SHIPPED", tuple(resting))
    named = attention.explain(*shapes(), mode="train", implementation="ring")
    assert str(named).splitlines()[-1] == "  auto  no implementation: all refuse"
    with raises(sw.AttentionError, "ring", snippet="ring: it rests", fix="implementation"):
        named.require()
    with raises(sw.AttentionError, "attention", snippet="it rests", fix="refuses"):
        attention.explain(*shapes(), mode="train").require()


def test_strategy_names_every_implementation() -> None:
    assert {kernel.name for kernel in SHIPPED} | {AUTO} == set(Attention)
    names = sw.Strategy.json_schema()["$defs"]["AttentionTable"]["properties"]["default"]["anyOf"][
        0
    ]["enum"]
    assert names == [str(name) for name in Attention]
    assert names[0] == AUTO


def test_own_implementation_needs_a_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = shapes()
    strategy = sw.Strategy.loads('[attention]\ntrain = "own:mine"\n', source="my.toml")
    with sw.PartitionManager(strategy, mesh=cpu_mesh("dp:2")):
        says = facts("mine", rule=("own:mine", "my.toml:2"), fix="registers")
        with raises(sw.AttentionError, says):
            attention.explain(q, k, v, mode="train")
        monkeypatch.setattr(implementation, "_own", ())
        attention.register(dataclasses.replace(implementation.find("blockwise"), name="mine"))
        resolution = attention.explain(q, k, v, mode="train")
        assert (resolution.name, resolution.why) == (
            "mine",
            'the strategy says train = "own:mine"   (my.toml:2, [attention])',
        )
        assert attention.dot_product_attention(
            jnp.ones((2, 8, 4, 8)), k=jnp.ones((2, 8, 2, 8)), v=jnp.ones((2, 8, 2, 8)), mode="train"
        ).shape
