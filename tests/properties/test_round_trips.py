"""Rules, meshes and strategies can be written and read back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import shardwright as sw
from shardwright.mesh.build import mesh_sizes, parse_mesh
from shardwright.resolution.rules import Fallback, Rule, parse_rule
from shardwright.vocabulary.axes import SEMANTIC_AXES, STANDARD_MESH_AXES, canonical_axis, file_name
from tests.properties import cases

SPACE = st.sampled_from(["", " ", "  ", "\t"])
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_.]{0,8}", fullmatch=True)
CANDIDATES = st.lists(NAMES, min_size=1, max_size=4, unique=True).map(tuple)


@given(st.lists(CANDIDATES, max_size=4), st.sampled_from(list(Fallback)), st.data())
def test_rule_round_trip(
    candidates: list[tuple[str, ...]], fallback: Fallback, data: st.DataObject
) -> None:
    if not candidates and fallback is Fallback.NONE:
        fallback = Fallback.REPLICATED
    space = lambda: data.draw(SPACE)  # noqa: E731
    parts = [
        "+".join(f"{space()}{name}{space()}" for name in candidate) for candidate in candidates
    ]
    parts += [f"{space()}{fallback.value}{space()}"] if fallback else []
    rule = parse_rule("|".join(parts))
    assert rule.candidates == tuple(candidates)
    assert rule.fallback is fallback
    canonical = " | ".join(
        ["+".join(candidate) for candidate in rule.candidates]
        + ([rule.fallback.value] if rule.fallback else [])
    )
    assert parse_rule(canonical) == rule


@settings(max_examples=200)
@given(st.text(alphabet="dpt1_ +|-?:,.", max_size=12))
def test_any_text_is_a_rule_or_an_error(text: str) -> None:
    rule, error = parsed(text)
    if error is not None:
        shown, mark = error.snippet.split("\n")
        assert shown == text
        assert mark.strip() == "^"
        assert 0 <= len(mark) - 1 <= len(text)
        assert error.fix
    if rule is not None:
        assert rule.candidates or rule.fallback
        assert all(len({*names}) == len(names) > 0 for names in rule.candidates)
        again = " | ".join(
            [*map("+".join, rule.candidates), *([rule.fallback.value] if rule.fallback else [])]
        )
        assert parse_rule(again) == rule


def parsed(text: str) -> tuple[Rule | None, sw.StrategyError | None]:
    try:
        return parse_rule(text), None
    except sw.StrategyError as error:
        return None, error


# Names as people misspell them, then any text at all.
MESH_NAMES = st.one_of(st.text(alphabet="dcn.x_-+|:,?! '\"4", max_size=6), st.text(max_size=6))


@settings(max_examples=200)
@given(MESH_NAMES)
@example("a?b")
@example("it's")
@example("-x")
@example("!x")
@example("dcn.x")
@example("x-y.z")
@example("__")
def test_rules_can_name_every_mesh_axis(name: str) -> None:
    """One rule of names, for meshes of JAX, for texts of meshes, for rules and for policies."""
    rule, _ = parsed(name)
    nameable = rule is not None and rule.candidates == ((name,),)
    assert (
        nameable
        == accepted(lambda: mesh_sizes({name: 2}))
        == accepted(lambda: mesh_sizes([(name, 2)]))
    )
    assert nameable == accepted(
        lambda: mesh_sizes(AbstractMesh((2,), (name,), axis_types=(AxisType.Auto,)))
    )
    assert (
        nameable
        == accepted(lambda: parse_mesh({name: 2}))
        == accepted(lambda: sw.Policy(gather=(name,)))
    )
    if nameable:
        assert parse_mesh(f"{name}:2") == parse_mesh(f" {name} : 2 ") == parse_mesh({name: 2})
        assert (
            parsed(f"{name}x|{name}+{name}x|-")[0]
            == parsed(f" {name}x | {name} + {name}x | - ")[0]
            is not None
        )


def accepted(call: Callable[[], Any]) -> bool:
    try:
        call()
    except sw.ShardingError:
        return False
    return True


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True),
        st.integers(1, 64),
        min_size=1,
        max_size=6,
    )
)
def test_mesh_round_trip(sizes: dict[str, int]) -> None:
    text = ",".join(f"{name}:{size}" for name, size in sizes.items())
    assert parse_mesh(text) == parse_mesh(sizes) == parse_mesh(tuple(sizes.values()), tuple(sizes))
    assert dict(zip(parse_mesh(text).names, parse_mesh(text).sizes, strict=True)) == sizes


@given(st.sampled_from(SEMANTIC_AXES), st.sampled_from([str.lower, str.upper]))
def test_every_spelling_of_an_axis_is_one_axis(axis: str, case: Any) -> None:
    assert canonical_axis(case(file_name(axis))) == canonical_axis(canonical_axis(axis)) == axis


AXIS_KEYS = st.sampled_from([file_name(axis) for axis in SEMANTIC_AXES])
# No `?` and only standard mesh axes: what any strategy may say about parameters too.
TEXTS = st.sampled_from([text for text in cases.PARAMETER_RULES if "model" not in text])
RULE_TABLE = st.dictionaries(AXIS_KEYS, TEXTS, max_size=4)
WORDS = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\x00"), max_size=12
)


@st.composite
def strategies(draw: cases.Choose) -> sw.Strategy:
    """A strategy that sets some of everything."""
    own = draw(st.lists(st.from_regex(r"my_[a-z]{1,5}", fullmatch=True), max_size=2, unique=True))
    mesh = draw(st.dictionaries(st.sampled_from(STANDARD_MESH_AXES), st.integers(1, 8), max_size=4))
    data: dict[str, Any] = {
        "version": 1,
        "name": draw(WORDS),
        "axes": {name: draw(WORDS) for name in own},
        "rules": draw(RULE_TABLE) | dict.fromkeys(own, "tp | -"),
        "params": draw(RULE_TABLE),
        "modes": {
            mode: draw(RULE_TABLE) | ({"params": draw(RULE_TABLE)} if draw(st.booleans()) else {})
            for mode in draw(st.lists(st.sampled_from(cases.MODES), max_size=2, unique=True))
        },
        "policy": {
            "indivisible": draw(st.sampled_from(["error", "prefix", "replicate", "drop"])),
            "gather": draw(st.sampled_from(["-", "fsdp+sp"])),
        },
        "tensors": [
            {
                "match": draw(st.sampled_from(["lm_head/.*", r"\d+\.w$", 'a"b', "ü"])),
                "embed": draw(TEXTS),
            }
        ],
    }
    if mesh:
        data["mesh"] = mesh
    kept = (
        draw(st.lists(st.sampled_from(sorted(data)), unique=True))
        if draw(st.booleans())
        else sorted(data)
    )
    if "rules" in kept and "axes" not in kept:
        data["rules"] = {key: text for key, text in data["rules"].items() if key not in own}
    return sw.Strategy(**{key: data[key] for key in kept})


@settings(max_examples=80)
@given(strategies(), st.sampled_from(["toml", "json"]))
@example(sw.Strategy(name="\U0001f600 \x7f \u2028 \x85"), "toml")
def test_strategy_round_trip(strategy: sw.Strategy, format: Any) -> None:
    again = sw.Strategy.loads(strategy.dumps(format=format), format=format)
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.dumps(format=format) == strategy.dumps(format=format)
    assert again.compile() == strategy.compile()


@settings(max_examples=60)
@given(strategies(), strategies())
def test_overlay_keeps_the_rest(base: sw.Strategy, over: sw.Strategy) -> None:
    both = base | over
    assert both.rules == {**base.rules, **over.rules}
    assert both.params == {**base.params, **over.params}
    assert [entry.match for entry in both.tensors] == [
        entry.match for entry in (*over.tensors, *base.tensors)
    ]
    assert base | sw.Strategy() == base
    assert (both | over).rules == both.rules


@pytest.mark.parametrize("preset", sw.Strategy.presets())
def test_preset_over_itself_is_equal(preset: str) -> None:
    strategy = sw.Strategy.preset(preset)
    assert (strategy | strategy).compile() == strategy.compile()


@settings(max_examples=60)
@given(strategies(), st.randoms(use_true_random=False))
@example(sw.Strategy(name="", rules={"batch": "dp", "head": "tp"}), Random(1))
def test_equal_strategies_have_equal_hashes(strategy: sw.Strategy, random: Any) -> None:
    data = strategy.model_dump(exclude_none=True)  # with every default spelled out
    keys = [*data["rules"]]
    random.shuffle(keys)
    other = sw.Strategy(**{**data, "rules": {key: data["rules"][key] for key in keys}})
    assert other == strategy
    assert hash(other) == hash(strategy)


def test_mesh_order_is_part_of_a_strategy() -> None:
    # Slowest first: these two lay devices out in different ways.
    assert sw.Strategy(mesh={"dp": 2, "tp": 4}) != sw.Strategy(mesh={"tp": 4, "dp": 2})
