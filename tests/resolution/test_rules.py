"""The grammar of rules, with carets at faults, and the layering of tables."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

import shardwright as sw
from shardwright.resolution.decisions import RuleRef
from shardwright.resolution.rules import (
    POLICY_PRESETS,
    AxisRules,
    Conflict,
    Fallback,
    Indivisible,
    Missing,
    Policy,
    Rank,
    TensorRules,
    build_rules,
    default_rule,
    foreign_mesh_axes,
    parse_rule,
    unnamed_mesh_axes,
)
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.modes import MODES
from tests.raising import Facts, facts, raises


@pytest.mark.parametrize(
    ("text", "candidates", "fallback"),
    [
        ("tp", (("tp",),), Fallback.NONE),
        ("dp+fsdp", (("dp", "fsdp"),), Fallback.NONE),
        ("fsdp+dp", (("fsdp", "dp"),), Fallback.NONE),
        ("dp+fsdp | dp | -", (("dp", "fsdp"), ("dp",)), Fallback.REPLICATED),
        ("  dp  +  fsdp|dp|?  ", (("dp", "fsdp"), ("dp",)), Fallback.UNCONSTRAINED),
        ("-", (), Fallback.REPLICATED),
        ("?", (), Fallback.UNCONSTRAINED),
        ("data_1", (("data_1",),), Fallback.NONE),
        ("_x", (("_x",),), Fallback.NONE),
        ("tp | tp", (("tp",), ("tp",)), Fallback.NONE),
    ],
)
def test_a_rule_is_candidates_and_a_fallback(
    text: str, candidates: tuple[tuple[str, ...], ...], fallback: Fallback
) -> None:
    rule = parse_rule(text)
    assert rule.candidates == candidates
    assert rule.fallback is fallback
    assert rule.ref.text == text
    assert rule.mesh_axes == tuple(
        dict.fromkeys(axis for candidate in candidates for axis in candidate)
    )


@pytest.mark.parametrize(
    ("text", "caret", "says"),
    [
        ("", 0, facts("mesh", "axis", fix="+")),
        ("   ", 3, facts("mesh", "axis", fix="+")),
        ("dp |", 4, facts("mesh", "axis", fix="+")),
        ("| dp", 0, facts("mesh", "axis", fix="+")),
        ("dp | | tp", 5, facts("mesh", "axis", fix="+")),
        ("dp + + tp", 5, facts("mesh", "axis", fix="+")),
        ("dp+", 3, facts("mesh", "axis", fix="+")),
        ("+dp", 0, facts("mesh", "axis", fix="+")),
        ("- | tp", 4, facts("-", fix="+")),
        ("tp | ? | -", 9, facts("?", fix="+")),
        ("- | -", 4, facts("-", fix="+")),
        ("tp+-", 3, facts("-", "+", fix="+")),
        ("?+tp", 0, facts("?", "+", fix="+")),
        ("dp+dp", 3, facts("dp", fix="+")),
        ("tp | dp + fsdp + dp", 17, facts("dp", fix="+")),
        (
            "dp fsdp",
            0,
            facts("dp fsdp", "mesh", "axis", fix="+"),
        ),
        (
            "dp, fsdp",
            0,
            facts("dp, fsdp", ",", fix="+"),
        ),
        (
            "tp | dp:2",
            5,
            facts("dp:2", ":", fix="+"),
        ),
        (
            "tp?",
            0,
            facts("tp?", "?", fix="+"),
        ),
        ("_", 0, facts("_", "mesh", "axis", fix="+")),
        (
            "--",
            0,
            facts("--", "-", fix="+"),
        ),
        (
            "dp + 'tp'",
            5,
            facts("'tp'", "'", fix="+"),
        ),
        (
            "dp | !tp",
            5,
            facts("!tp", "!", fix="+"),
        ),
        (
            "dcn.dp",
            0,
            facts("dcn.dp", "dcn.", fix="+"),
        ),
    ],
)
def test_a_fault_has_a_caret(text: str, caret: int, says: Facts) -> None:
    with raises(sw.StrategyError, says) as caught:
        parse_rule(text, ref=RuleRef(key="batch", text=text, table="rules", source="my.toml:7"))
    error = caught.value
    shown, mark = error.snippet.split("\n")
    assert shown == text
    assert mark == " " * caret + "^"
    assert error.axis == "batch"
    assert "my.toml:7, [rules]" in error.rule
    assert '"dp+fsdp | dp | -"' in error.fix


def test_rules_are_equal_wherever_they_were_written() -> None:
    rule = parse_rule(
        "tp | -", ref=RuleRef(key="head", text="tp | -", table="rules", source="a.toml:1")
    )
    other = parse_rule("tp|-", ref=RuleRef(key="kv_head", text="tp|-", source="b.json:9"))
    assert rule == other
    assert hash(rule) == hash(other)
    assert rule != parse_rule("tp")
    assert rule != parse_rule("tp | ?")


def test_rules_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="fallback"):
        parse_rule("tp").fallback = Fallback.REPLICATED  # type: ignore[misc]


TABLES = {
    "rules": {sw.BATCH: parse_rule("dp"), sw.EMBED: parse_rule("-"), sw.HEAD: parse_rule("tp")},
    "params": {sw.EMBED: parse_rule("fsdp")},
    "modes.decode": {sw.BATCH: parse_rule("fsdp"), sw.HEAD: parse_rule("ep")},
    "modes.decode.params": {sw.EMBED: parse_rule("sp")},
    "modes.insert": {sw.HEAD: parse_rule("-")},
    "modes.prefill": {sw.BATCH: parse_rule("sp")},
    "modes.prefill.params": {sw.HEAD: parse_rule("fsdp")},
}


def stated(rules: AxisRules, axis: str, mode: str, role: Role) -> str:
    rule = rules.stated(axis, mode=mode, role=role, path=None)
    return "" if rule is None else rule.ref.text


@pytest.mark.parametrize(
    ("axis", "role", "by_mode"),
    [
        # train, prefill, decode, insert
        (sw.BATCH, Role.ACTIVATION, ("dp", "sp", "fsdp", "fsdp")),
        (sw.HEAD, Role.ACTIVATION, ("tp", "tp", "ep", "-")),
        (sw.EMBED, Role.ACTIVATION, ("-", "-", "-", "-")),
        (sw.BATCH, Role.PARAM, ("dp", "dp", "dp", "dp")),
        (sw.EMBED, Role.PARAM, ("fsdp", "fsdp", "sp", "sp")),
        (sw.HEAD, Role.PARAM, ("tp", "fsdp", "tp", "tp")),
        (sw.HEAD, Role.USE, ("tp", "fsdp", "tp", "tp")),
        (sw.VOCAB, Role.ACTIVATION, ("", "", "", "")),
    ],
)
def test_the_table_of_each_mode_and_role(axis: str, role: Role, by_mode: tuple[str, ...]) -> None:
    rules = build_rules(TABLES)
    assert tuple(stated(rules, axis, mode, role) for mode in MODES) == by_mode


def test_equality_and_hash_cover_rules_and_policy_only() -> None:
    same = {
        table: {axis: parse_rule(f" {rule.ref.text} ") for axis, rule in rules.items()}
        for table, rules in reversed(TABLES.items())
    }
    assert build_rules(TABLES) == build_rules(same)
    assert hash(build_rules(TABLES)) == hash(build_rules(same))
    assert build_rules(TABLES) != build_rules({**TABLES, "modes.insert": {}})
    assert build_rules(TABLES) != build_rules(TABLES, policy=Policy(indivisible=Indivisible.PREFIX))
    assert build_rules(TABLES) != build_rules(TABLES, user_axes=("__MINE__",))
    assert build_rules(TABLES) != build_rules(
        TABLES, tensors=[TensorRules(match="x", rules=((sw.EMBED, parse_rule("-")),))]
    )
    assert build_rules(TABLES) != "rules"


def test_mode_table_equal_to_the_inherited() -> None:
    inherited = build_rules(
        {**TABLES, "modes.insert": {sw.HEAD: parse_rule("-"), sw.BATCH: parse_rule("fsdp")}}
    )
    assert inherited == build_rules(TABLES)


def test_compiled_rules_pickle() -> None:
    rules = build_rules(TABLES, user_axes=("__MINE__",), policy=Policy(gather=("fsdp",)))
    sw.resolve((sw.BATCH,), rules, {"dp": 2}, shape=(4,))  # fills the cache, which must not travel
    again = pickle.loads(pickle.dumps(rules))
    assert again == rules
    assert hash(again) == hash(rules)
    assert (
        again.stated(sw.HEAD, mode=sw.MODE_INSERT, role=Role.ACTIVATION, path=None).ref.text == "-"
    )  # type: ignore[union-attr]


def test_named_mesh_axes() -> None:
    tensors = [TensorRules(match="x", rules=((sw.EMBED, parse_rule("mine")),))]
    rules = build_rules(
        {"rules": {sw.BATCH: parse_rule("dp | a+dp")}},
        tensors=tensors,
        policy=Policy(gather=("b",)),
    )
    assert rules.named_mesh_axes() == ("dp", "a", "mine", "b")
    assert foreign_mesh_axes(rules.named_mesh_axes(), ("a",)) == ("mine", "b")
    assert foreign_mesh_axes(rules.named_mesh_axes(), ("a", "b", "mine", "other")) == ()


class TestTensors:
    ENTRIES = (
        TensorRules(match="lm_head/.*", rules=((sw.EMBED, parse_rule("-")),)),
        TensorRules(
            match="head", rules=((sw.EMBED, parse_rule("tp")), (sw.VOCAB, parse_rule("fsdp+tp")))
        ),
    )

    @pytest.mark.parametrize(
        ("axis", "path", "found"),
        [
            (sw.EMBED, "lm_head/kernel", "-"),
            (sw.EMBED, "head", "tp"),
            (sw.VOCAB, "lm_head/kernel", "fsdp+tp"),
            (sw.EMBED, "blocks/0/attn", None),
            (sw.HEAD, "lm_head/kernel", None),
            (sw.EMBED, None, None),
        ],
    )
    def test_first_matching_tensor_entry(
        self, axis: str, path: str | None, found: str | None
    ) -> None:
        rules = build_rules({}, tensors=self.ENTRIES)
        for role in (Role.PARAM, Role.USE):
            rule = rules.tensor_rule(axis, role=role, path=path)
            assert (None if rule is None else rule.ref.text) == found

    def test_activations_are_left_alone(self) -> None:
        rules = build_rules({}, tensors=self.ENTRIES)
        assert rules.tensor_rule(sw.EMBED, role=Role.ACTIVATION, path="lm_head/kernel") is None


def test_default_rules() -> None:
    actual = default_rule(sw.TP)
    assert actual is not None
    assert actual.candidates == (("tp",),)
    assert str(actual.ref) == 'tensor_parallel = "tp"   (default)'
    assert default_rule(sw.HEAD) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"zero1": "dp | -"},
            facts("dp | -", path="zero1", fix="shardwright.resolution.rules.parse_rule"),
        ),
        (
            {"zero1": ("dp",)},
            facts("dp", path="zero1", fix="shardwright.resolution.rules.parse_rule"),
        ),
        ({"zero1": parse_rule("dp | ?")}, facts("?", path="zero1", fix="-")),
        ({"gather": ["fsdp"]}, facts("fsdp", "tuple", path="gather", fix=("fsdp", "sp"))),
        ({"idle": ["replica"]}, facts("replica", "tuple", path="idle", fix="fsdp")),
        ({"idle": ("replica", "replica")}, facts("different", "replica", path="idle")),
        ({"gather": ("fsdp", 3)}, facts("fsdp", 3, "tuple", path="gather", fix="fsdp")),
        ({"gather": ("fsdp+sp",)}, facts("fsdp+sp", path="gather", fix="fsdp")),
        ({"gather": ("",)}, facts("mesh", path="gather", fix="fsdp")),
        ({"gather": ("-",)}, facts("mesh", "-", path="gather", fix="fsdp")),
        ({"gather": ("fsdp", "sp", "fsdp")}, facts("different", "fsdp", path="gather")),
        ({"missing": "skipp"}, facts("skipp", path="missing", fix="skip")),
    ],
)
def test_policy_checks_its_values(fields: dict[str, Any], says: Facts) -> None:
    with raises(sw.StrategyError, says):
        Policy(**fields)


def test_policy_presets() -> None:
    assert POLICY_PRESETS["strict"] == Policy(
        indivisible=Indivisible.ERROR,
        conflict=Conflict.ERROR,
        gather=(),
        missing=Missing.SKIP,
        rank=Rank.ERROR,
    )
    assert POLICY_PRESETS["eformer"] == Policy(
        indivisible=Indivisible.DROP, missing=Missing.REPLICATE, rank=Rank.FIT
    )


def test_the_length_of_a_rule_is_limited() -> None:
    longest = "|".join(f"m{at}" for at in range(64))
    assert len(parse_rule(longest).mesh_axes) == 64
    with raises(sw.StrategyError, 65, 64, axis="rule", fix="candidates") as caught:
        parse_rule(longest + "|m64")
    assert caught.value.rule.startswith('rule = "m0')


def test_rule_without_source_text() -> None:
    ref = parse_rule("dp | -").ref
    assert (ref.key, ref.text) == ("rule", "dp | -")


def strategy_rules(text: str = "", source: str = "a.toml") -> AxisRules:
    common = (
        '[params]\nembed = "fsdp"\n[[tensors]]\nmatch = "head"\nembed = "-"\n[attention]\ntrain = '
        '"ring"\n'
    )
    return sw.Strategy.loads(common + text, source=source).compile()


def test_rules_survive_pickling_whole() -> None:
    rules = strategy_rules()
    again = pickle.loads(pickle.dumps(rules))
    assert again == rules
    assert again.tensors == rules.tensors != ()
    assert again.attention == rules.attention != ()
    assert pickle.loads(pickle.dumps(rules.tensors[0])) == rules.tensors[0]
    assert (
        pickle.loads(pickle.dumps(rules.tensors[0])).find(sw.EMBED, "lm_head")
        == rules.tensors[0].find(sw.EMBED, "head")
        is not None
    )


def test_a_fingerprint_tells_rules_apart() -> None:
    """Equal where rules are equal, wherever they are written; different where any part differs."""
    rules = strategy_rules()
    assert len(rules.fingerprint()) == 32
    assert rules.fingerprint() is rules.fingerprint()
    for equal in (
        strategy_rules(source="b.toml"),
        strategy_rules("\n"),
        pickle.loads(pickle.dumps(rules)),
    ):
        assert equal.fingerprint() == rules.fingerprint()
    others = [
        strategy_rules('decode = "ring"\n'),
        strategy_rules('[[tensors]]\nmatch = "tail"\nembed = "-"\n'),
        strategy_rules('[policy]\nindivisible = "prefix"\n'),
        strategy_rules('[policy]\nzero1 = "dp"\n'),
        strategy_rules('[policy]\nzero1 = "dp | -"\n'),
        strategy_rules('[policy]\ngather = "fsdp"\n'),
        strategy_rules('[axes]\nmine = "an axis"\n'),
        strategy_rules('[rules]\nbatch = "dp"\n'),
        strategy_rules('[rules]\nbatch = "dp | -"\n'),
        strategy_rules('[rules]\nbatch = "dp | ?"\n'),
        strategy_rules('[rules]\nbatch = "fsdp"\n'),
        strategy_rules('[rules]\nhead = "dp"\n'),
        strategy_rules('[modes.decode]\nbatch = "dp"\n'),
    ]
    assert len({rules.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_equal_values_become_one_object() -> None:
    first, other = strategy_rules(), strategy_rules(source="b.toml")
    assert first._values is not other._values
    assert first == other
    assert first._values is other._values
    assert first == other
    assert (first == strategy_rules('[rules]\nbatch = "dp"\n')) is False


def test_values_are_compared_where_hashes_agree() -> None:
    first, other = strategy_rules(), strategy_rules('[rules]\nbatch = "dp"\n')
    object.__setattr__(other, "_hash", hash(first))
    assert first != other


def test_tables_of_every_mode_are_needed() -> None:
    rules = build_rules({})
    for name in ("activations", "params"):
        with pytest.raises(ValueError, match="shorter than argument 1"):
            dataclasses.replace(rules, **{name: getattr(rules, name)[1:]})


@pytest.mark.parametrize("name", ["allgather_kv", "ring", "zz_own"])
def test_attention_is_auto_or_named(name: str) -> None:
    """Every name but `auto` is kept, whatever its place in the alphabet; modes without a line have
    the default's.
    """
    lines = {
        "default": RuleRef(key="default", text=name),
        "decode": RuleRef(key="decode", text="auto"),
    }
    rules = build_rules({}, attention=lines)
    assert [
        rules.attention_in(mode) for mode in (sw.MODE_TRAIN, sw.MODE_PREFILL, sw.MODE_DECODE)
    ] == [lines["default"]] * 2 + [None]
    assert [mode for mode, _ in rules.attention] == sorted([sw.MODE_TRAIN, sw.MODE_PREFILL])


def test_unnamed_mesh_axes() -> None:
    """Mesh axes of one device are left out, standard ones and named ones too."""
    rules = build_rules({"rules": {sw.BATCH: parse_rule("data")}})
    sizes = {"dp": 4, "x": 2, "one": 1, "data": 3, "y": 3, "tp": 2}
    assert unnamed_mesh_axes(rules, sizes) == ("x", "y")
    zero1 = build_rules({}, policy=Policy(zero1=parse_rule("x")))
    assert zero1.named_mesh_axes() == ("x",)
    assert unnamed_mesh_axes(zero1, sizes) == ("data", "y")
