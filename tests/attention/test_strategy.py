"""A strategy names implementations by mode: in files, in the schema, in the rules, in the choice."""

from __future__ import annotations

import re

import jax
import jsonschema
import pytest

import shardwright as sw
from shardwright import attention
from shardwright.attention.choose import AUTO, SHIPPED
from shardwright.attention.registry import impl_names
from shardwright.rules import Attention
from shardwright.testing.meshes import cpu_mesh

TEXT = '[rules]\nbatch = "dp"\n[attention]\ndefault = "blockwise"\ntrain = "vanilla"\ndecode = "auto"\n'


def shapes(length: int = 8) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((2, length, heads, 8), "float32") for heads in (4, 2, 2)]


def test_each_mode_has_its_own_and_the_rest_the_default() -> None:
    rules = sw.Strategy.loads(TEXT).compile()
    found = {mode: str(rules.attention_in(mode)) for mode in (sw.MODE_TRAIN, sw.MODE_PREFILL, sw.MODE_DECODE)}
    assert found == {sw.MODE_TRAIN: "vanilla", sw.MODE_PREFILL: "blockwise", sw.MODE_DECODE: "auto"}
    assert rules != sw.Strategy.loads(TEXT.replace("vanilla", "ring")).compile()
    assert sw.Strategy.loads('[rules]\nbatch = "dp"\n').compile().attention == ()


@pytest.mark.parametrize("format", ["toml", "json"])
def test_round_trip_overlay_and_schema(format: str) -> None:
    strategy = sw.Strategy.loads(TEXT)
    assert sw.Strategy.loads(strategy.dumps(format=format), format=format) == strategy  # type: ignore[arg-type]
    both = strategy | sw.Strategy.loads('[attention]\ndecode = "flash_decode"\n')
    assert both.attention.model_dump() == {"default": "blockwise", "train": "vanilla", "prefill": None, "decode": "flash_decode"}
    schema = sw.Strategy.json_schema()
    jsonschema.validate(strategy.to_data(), schema)
    with pytest.raises(jsonschema.ValidationError, match="'rings' is not one of"):
        jsonschema.validate({"attention": {"train": "rings"}}, schema)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('train = "rings"', "my.toml:2 attention.train: 'rings' is not a choice here\n  fix   did you mean 'ring'?"),
        ('insert = "ring"', "my.toml:2 attention.insert: unknown key"),
        ("train = 3", "my.toml:2 attention.train: "),
    ],
)
def test_what_a_file_says_wrong(line: str, says: str) -> None:
    with pytest.raises(sw.StrategyError, match=re.escape(says)):
        sw.Strategy.loads(f"[attention]\n{line}\n", source="my.toml")


def test_the_strategys_word_counts_unless_the_call_has_its_own() -> None:
    q, k, v = shapes()
    with sw.PartitionManager(sw.Strategy.loads(TEXT), mesh=cpu_mesh("dp:2")):
        found = attention.explain(q, k, v, mode="train")
        assert (found.name, found.why) == ("vanilla", "[attention] train of the strategy names vanilla")
        assert attention.explain(q, k, v, mode="train", implementation="auto").name == "blockwise"
        assert attention.explain(q, k, v, mode="decode").name == "blockwise"
        with pytest.raises(
            sw.AttentionError, match=r"prefill of the strategy names blockwise, which refuses\n(.*\n)*.*blockwise: it never has all"
        ):
            attention.explain(q, k, v, mode="prefill", return_weights=True).require()


def test_one_that_was_named_and_refuses_is_told_with_what_auto_takes() -> None:
    q, k, v = shapes()
    with sw.PartitionManager(sw.Strategy.loads(TEXT), mesh=cpu_mesh("dp:2")):
        refused = attention.explain(q, k, v, mode="train", implementation="blockwise", return_weights=True)
        assert str(refused).splitlines()[0] == "refused   blockwise was asked for by name and refuses"
        assert str(refused).splitlines()[-1] == "  auto  vanilla: only it returns weights"
        says = r'^blockwise was asked for by name.*\n(.*\n)* *not   blockwise: it never(.*\n)* *fix   implementation="auto" takes vanilla$'
        with pytest.raises(sw.AttentionError, match=says):
            refused.require()
        with pytest.raises(sw.AttentionError, match=r'names blockwise, which refuses\n(.*\n)*.*"auto" takes vanilla'):
            attention.explain(q, k, v, mode="prefill", return_weights=True).require()


def test_where_nothing_serves_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in SHIPPED:
        monkeypatch.setattr(one, "supports", classmethod(lambda cls, call: ("it rests",)))
    named = attention.explain(*shapes(), mode="train", implementation="ring")
    assert str(named).splitlines()[-1] == "  auto  no implementation: all refuse"
    with pytest.raises(sw.AttentionError, match=r"ring was asked for by name and refuses\n(.*\n)*.*nothing else serves it either"):
        named.require()
    with pytest.raises(sw.AttentionError, match="no attention implementation can serve this call: all refuse"):
        attention.explain(*shapes(), mode="train").require()


def test_a_strategy_may_name_every_implementation_that_is_shipped() -> None:
    assert {impl_names(one)[0] for one in SHIPPED} <= set(Attention)
    names = sw.Strategy.json_schema()["$defs"]["AttentionTable"]["properties"]["default"]["enum"]
    assert names == [str(name) for name in Attention]
    assert names[0] == AUTO
