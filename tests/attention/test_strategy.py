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


def test_a_strategy_may_name_every_implementation_that_is_shipped() -> None:
    assert {impl_names(one)[0] for one in SHIPPED} <= set(Attention)
    names = sw.Strategy.json_schema()["$defs"]["AttentionTable"]["properties"]["default"]["enum"]
    assert names == [str(name) for name in Attention]
    assert names[0] == AUTO
