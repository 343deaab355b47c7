"""Strategy files.

Reading, writing, overlaying, their schema, and where each line of an explanation comes from.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright.strategy.model import Strategy
from shardwright.vocabulary.axes import SEMANTIC_AXES, file_name
from tests.raising import raises
from tests.strategy.small import SMALL

P = jax.P
PRESETS = Strategy.presets()


# Reading and writing.


@pytest.mark.parametrize("format", ["toml", "json"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip(name: str, format: str, tmp_path: Path) -> None:
    strategy = Strategy.preset(name)
    path = strategy.dump(tmp_path / f"{name}.{format}")
    again = Strategy.load(path)
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.compile() == strategy.compile()
    assert Strategy.loads(strategy.dumps(format=format), format=format) == strategy
    assert again.dump(tmp_path / f"again.{format}").read_text() == path.read_text()


def test_all_presets_exist() -> None:
    assert PRESETS == (
        "ddp",
        "fsdp",
        "fsdp_pp",
        "fsdp_tp",
        "fsdp_tp_sp",
        "moe_ep",
        "sequence",
        "serve_long_context",
        "serve_tp",
        "single",
        "tensor",
        "vision",
    )
    assert all(Strategy.preset(name).name == name for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_a_rule_for_every_axis(name: str) -> None:
    assert {file_name(axis) for axis in SEMANTIC_AXES} <= set(Strategy.preset(name).rules)


def test_load_accepts_text_and_path(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    assert Strategy.load(path) == Strategy.load(str(path)) == Strategy.loads(SMALL)


def test_invalid_types_are_refused() -> None:
    with raises(sw.StrategyError, 3, path="<toml>", fix="Strategy.load"):
        Strategy.loads(3)  # type: ignore[arg-type]
    with raises(sw.StrategyError, "text", "version", path="<json>", fix="text"):
        Strategy.loads(b'{"version": 1}', format="json")  # type: ignore[arg-type]
    with raises(sw.StrategyError, "<yaml>", "yaml", fix='format="toml"'):
        Strategy.loads("version: 1", format="yaml")  # type: ignore[arg-type]
    with raises(sw.StrategyError, "recursion", path="<json>", fix="flatten"):
        Strategy.loads("[" * 100_000, format="json")
    with raises(sw.StrategyError, 4300, path="<json>", fix="smaller"):
        Strategy.loads("9" * 5000, format="json")
    with pytest.raises(TypeError, match="unsupported operand"):
        Strategy() | 3  # type: ignore[operator]


def test_unset_keys_are_not_written() -> None:
    text = Strategy.loads(SMALL).dumps()
    assert text == SMALL
    assert Strategy.loads("version = 1\n").to_data() == {"version": 1}


def test_repr_is_short_and_str_is_the_file() -> None:
    strategy = Strategy.loads(SMALL)
    assert len(repr(Strategy.preset("fsdp_tp"))) < 160
    assert repr(Strategy(mesh={"dp": 2}, rules={"batch": "dp"})) == (
        "<Strategy '' from data, mesh dp:2, 1 rules; print it to see all>"
    )
    assert Strategy.loads(str(strategy)) == strategy


def test_equal_strategies_hash_alike() -> None:
    explicit, unsaid = (
        Strategy(version=1, name="", mesh={"dp": 2}, tensors=[]),
        Strategy(mesh={"dp": 2}),
    )
    assert explicit == unsaid
    assert hash(explicit) == hash(unsaid)
    assert len({explicit, unsaid}) == 1


def test_memory_of_a_mode_is_not_a_rule() -> None:
    strategy = Strategy(
        policy={"order": "rules"}, modes={"decode": {"batch": "dp", "memory": {"params": "host"}}}
    )
    assert hash(strategy) == hash(strategy | Strategy())
    assert "1 rules" in repr(strategy)


def test_frozen() -> None:
    strategy = Strategy.loads(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        strategy.name = "other"
    strategy.to_data()["rules"]["batch"] = "tp"
    assert strategy.rules["batch"] == "dp"


@pytest.mark.parametrize(
    "change",
    [
        lambda strategy: strategy.rules.update(batch="tp"),
        lambda strategy: strategy.rules.__setitem__("batch", "tp"),
        lambda strategy: strategy.params.pop("embed"),
        lambda strategy: strategy.mesh.clear(),
        lambda strategy: strategy.modes.__delitem__("decode"),
        lambda strategy: strategy.modes["decode"].params.setdefault("embed", "tp"),
        lambda strategy: strategy.tensors.append(strategy.tensors[0]),
        lambda strategy: strategy.tensors.sort(),
    ],
)
def test_tables_are_frozen(change: Any) -> None:
    strategy = Strategy.loads(FROZEN)
    before = strategy.dumps(), hash(strategy)
    with pytest.raises((TypeError, AttributeError), match=r"does not support|has no attribute"):
        change(strategy)
    assert (strategy.dumps(), hash(strategy)) == before


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda value: pickle.loads(pickle.dumps(value)),
        lambda value: value | value,
    ],
)
def test_copies_are_frozen(again: Any) -> None:
    strategy = Strategy.loads(FROZEN.partition("[[")[0])
    copied = again(strategy)
    assert copied == strategy
    with pytest.raises((TypeError, AttributeError), match=r"does not support|has no attribute"):
        copied.rules["batch"] = "tp"
    data = copied.to_data()
    data["rules"]["batch"] = "tp"
    assert Strategy(**data).rules["batch"] == "tp"


def test_copy_refuses_an_update() -> None:
    strategy = Strategy.loads(SMALL)
    assert strategy.model_copy() == strategy.model_copy(deep=True) == strategy
    with raises(sw.StrategyError, "model_copy", "update", "rules", fix="overlay"):
        strategy.model_copy(update={"rules": {"nonsense": 3}, "name": "x"})


FROZEN = """
version = 1
mesh = { fsdp = 2, tp = 4 }
rules = { batch = "fsdp", embed = "-" }
params = { embed = "fsdp" }
modes = { decode = { batch = "-", params = { embed = "-" } } }
[[tensors]]
match = "router"
embed = "-"
"""


def test_pickles_compiled_rules() -> None:
    rules = Strategy.preset("fsdp_tp").compile()
    again = pickle.loads(pickle.dumps(rules))
    assert again == rules
    assert again.stated(sw.EMBED, mode=sw.MODE_TRAIN, role=sw.Role.PARAM, path=None).candidates == (
        ("fsdp", "sp"),
    )


def test_compiling_twice_gives_equal_rules() -> None:
    strategy = Strategy.preset("moe_ep")
    assert strategy.compile() == strategy.compile()
    assert hash(strategy.compile()) == hash(strategy.compile())


# Spelling, axes of one's own, renamed parallelism axes, exceptions by path.


@pytest.mark.parametrize("spelling", ["kv_head", "KV_HEAD", "__KV_HEAD__", "Kv_Head"])
def test_spellings_are_one_axis(spelling: str) -> None:
    strategy = Strategy.loads(f'version = 1\n[rules]\n{spelling} = "tp"\n')
    assert strategy.rules == {"kv_head": "tp"}
    assert strategy == Strategy(rules={"kv_head": "tp"})
    assert strategy.compile() == Strategy(rules={"kv_head": "tp"}).compile()


def test_two_spellings_of_one_axis() -> None:
    with raises(sw.StrategyError, "kv_head", path="rules"):
        Strategy(rules={"kv_head": "tp", "KV_HEAD": "dp"})


def test_own_axes() -> None:
    text = SMALL + '[axes]\nrotary_dim = "half of a head"\n[modes.decode]\nrotary_dim = "-"\n'
    strategy = Strategy.loads(text.replace('embed = "-"', 'embed = "-"\nrotary_dim = "tp"'))
    rules = strategy.compile()
    for name in ("rotary_dim", "ROTARY_DIM", "__ROTARY_DIM__"):
        assert sw.resolve((sw.BATCH, name), rules, {"dp": 2, "tp": 4}).spec == P("dp", "tp")
    assert sw.resolve(("rotary_dim",), rules, {"dp": 2, "tp": 4}, mode="decode").spec == P()
    assert rules.user_axes == ("__ROTARY_DIM__",)
    with raises(sw.UnknownAxisError, "unknown", "axis", axis="ROTARY_DIM", fix="rotary_dim"):
        sw.resolve(("rotary_dim",), Strategy.loads(SMALL).compile(), {"dp": 2})
    bare = Strategy.loads('version = 1\n[axes]\nrotary_dim = "half of a head"\n').compile()
    assert sw.resolve(("rotary_dim",), bare, {"dp": 2}).decisions[0].outcome == "no_rule"


def test_renamed_parallelism_axes() -> None:
    text = """version = 1
[mesh]
data = 2
model = 4
[rules]
batch = "data"
data_parallel = "data"
tensor_parallel = "model"
fully_sharded_data_parallel = "data"
sequence_parallel = "-"
"""
    rules = Strategy.loads(text).compile()
    mesh = {"data": 2, "model": 4}
    assert sw.resolve((sw.DP, sw.TP), rules, mesh).spec == P("data", "model")
    assert sw.resolve(sw.SRowWise, rules, mesh).spec == P("model")
    assert sw.resolve(sw.ColumnWise, rules, mesh, role="activation").spec == P("data", "model")
    with raises(
        sw.MissingMeshAxisError,
        "modle",
        "dp",
        "fsdp",
        "tp",
        path="<toml>:8 rules.tensor_parallel",
        fix="model",
    ):
        Strategy.loads(text.replace('"model"', '"modle"'))


def test_exceptions_by_path() -> None:
    text = (
        SMALL + '[[tensors]]\nmatch = "lm_head/.*"\nembed = "-"\nvocab = "tp"\n[[tensors]]\n'
        'match = "head"\nembed = "tp"\n'
    )
    rules = Strategy.loads(text, source="small.toml").compile()
    mesh = {"dp": 2, "tp": 4}

    def ask(path, role="param"):
        return sw.resolve((sw.EMBED, sw.VOCAB), rules, mesh, role=role, path=path)

    assert ask("lm_head/kernel").spec == P(None, "tp")
    assert ask("other/head").spec == P("tp"), (
        "the first entry that names the axis; vocab has no rule there"
    )
    assert ask("mlp/up").spec == P("dp")
    assert ask("lm_head/kernel", "activation").spec == P(), "entries are for weights"
    assert [decision.rule.source for decision in ask("lm_head/kernel").decisions] == [
        "small.toml:17",
        "small.toml:18",
    ]
    assert [decision.rule.table for decision in ask("lm_head/kernel").decisions] == [
        "tensors.0",
        "tensors.0",
    ]


# Overlay.


def test_overlay_wins_key_by_key() -> None:
    fragment = Strategy.loads(
        'version = 1\nname = "wide"\n[mesh]\ntp = 4\n[rules]\nhead = "-"\n[policy]\n'
        'indivisible = "prefix"\n',
        source="wide.toml",
    )
    both = Strategy.loads(SMALL, source="small.toml") | fragment
    assert (both.name, both.mesh) == ("wide", {"dp": 2, "tp": 4})
    assert both.rules == {"batch": "dp", "embed": "-", "head": "-"}
    rules = both.compile()
    assert rules.policy.indivisible == "prefix"
    resolution = sw.resolve((sw.BATCH, sw.HEAD), rules, {"dp": 2, "tp": 4}, shape=(8, 8))
    assert [decision.rule.source for decision in resolution.decisions] == [
        "small.toml:9",
        "wide.toml:6",
    ]


def test_fragment_uses_names_of_the_other() -> None:
    fragment = Strategy.loads('version = 1\n[rules]\nrotary_dim = "columns"\n')
    base = Strategy.loads(
        'version = 1\n[mesh]\ncolumns = 2\n[axes]\nrotary_dim = "half of a head"\n'
    )
    assert sw.resolve(("rotary_dim",), (base | fragment).compile(), {"columns": 2}).spec == P(
        "columns"
    )
    with raises(
        sw.UnknownAxisError,
        "unknown",
        "axis",
        path="<toml>:3 rules.rotary_dim",
        fix="what it is",
        count=2,
    ):
        fragment.compile()


def test_overlay_tensors_come_first() -> None:
    base = Strategy.loads(
        'version = 1\n[[tensors]]\nmatch = "a"\nembed = "dp"\n', source="base.toml"
    )
    over = Strategy.loads(
        'version = 1\n\n\n[[tensors]]\nmatch = "a/b"\nembed = "tp"\n[[tensors]]\nmatch = "c"\n'
        'embed = "-"\n',
        source="over.toml",
    )
    rules = (base | over).compile()
    assert [entry.match for entry in rules.tensors] == ["a/b", "c", "a"]

    def ask(path):
        return (
            sw.resolve((sw.EMBED,), rules, {"dp": 2, "tp": 2}, role="param", path=path)
            .decisions[0]
            .rule.source
        )

    assert [ask("a/b"), ask("a/x"), ask("c")] == ["over.toml:6", "base.toml:4", "over.toml:9"]


def test_python_overlay_has_no_file() -> None:
    both = Strategy.loads(SMALL, source="small.toml") | Strategy(rules={"batch": "tp"})
    resolution = sw.resolve((sw.BATCH, sw.HEAD), both.compile(), {"dp": 2, "tp": 1})
    assert resolution.decisions[0].rule.text == "tp"
    assert "small.toml" not in resolution.decisions[0].rule.source
    assert resolution.decisions[1].rule.source == "small.toml:11"


def test_a_file_names_its_base(tmp_path: Path) -> None:
    """`base` gives what `|` gives, with the lines of both files, under the name of the file."""
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    (tmp_path / "deep").mkdir()
    text = '[rules]\nbatch = "tp"\n'
    own = Strategy.loads(text)
    small = Strategy.loads(SMALL, source="small.toml")
    for base, below in (("fsdp_tp", Strategy.preset("fsdp_tp")), ("../small.toml", small)):
        path = tmp_path / "deep" / "own.toml"
        path.write_text(f'base = "{base}"\n{text}', encoding="utf-8")
        read = Strategy.load(path)
        assert read == below | own | Strategy(name="own") == Strategy.loads(read.dumps())
        assert read.source("rules", "batch") == "own.toml:3"
        assert read.source("rules", "head").startswith(("fsdp_tp.toml:", "small.toml:"))
        name = base.removeprefix("../")
        plain = tmp_path / "plain.toml"
        plain.write_text(text, encoding="utf-8")
        combined = Strategy.read(f"{name} | plain.toml", root=tmp_path)
        assert combined | Strategy(name="own") == read
    assert Strategy.read(plain) == own
    assert Strategy.loads(f'base = "fsdp_tp"\n{text}') == Strategy.preset("fsdp_tp") | own


def test_an_overlay_names_what_its_base_declares(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[axes]\nmine = "an axis"\n[mesh]\nrow = 2\n[rules]\nmine = "row"\n', encoding="utf-8"
    )
    over = tmp_path / "over.toml"
    over.write_text('base = "own.toml"\n[mesh]\nrow = 4\n[modes.decode]\nmine = "-"\n')
    assert dict(Strategy.load(over).mesh) == {"row": 4}
    over.write_text('base = "fsdp_tp"\n[mesh]\ntp = 8\n[axis_types]\nfsdp = "explicit"\n')
    assert Strategy.load(over).axis_types == {"fsdp": "explicit"}
    over.write_text('base = "fsdp_tp"\n[rules]\nbatch = "row"\n')
    with raises(sw.MissingMeshAxisError, "row", path="over.toml:3 rules.batch"):
        Strategy.load(over)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    with raises(sw.StrategyError, "loop.toml"):
        Strategy.load(loop)


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ('"a.toml"', "a.toml: base leads back to this file: a.toml -> b.toml -> a.toml"),
        ("3", "a.toml:1 base: base must be text, got 3"),
        ('"absent.toml"', "a.toml:1 base: no file"),
        ('"fdsp_tp"', "a.toml:1 base: no preset 'fdsp_tp'"),
    ],
)
def test_bad_bases_are_refused(base: str, says: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('base = "b.toml"\n' if "leads" in says else f"base = {base}", encoding="utf-8")
    second.write_text(f"base = {base}\n", encoding="utf-8")
    with pytest.raises(sw.StrategyError) as caught:
        Strategy.load(first)
    assert says in str(caught.value)
    with pytest.raises(sw.StrategyError):
        Strategy(base="fsdp_tp")


def test_overlay_changes_neither_side() -> None:
    base, over = Strategy.loads(SMALL), Strategy(rules={"head": "-"})
    both = base | over
    assert (base.rules["head"], over.to_data()) == ("tp | -", {"rules": {"head": "-"}})
    assert (both | Strategy()) == both == (Strategy() | both)


# Policy.


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", sw.Policy()),
        ('preset = "strict"', sw.Policy()),
        ('preset = "eformer"', ("drop", "error", "replicate", "fit")),
        (
            'preset = "eformer"\nindivisible = "prefix"\nrank = "error"',
            ("prefix", "error", "replicate", "error"),
        ),
        (
            'conflict = "first_dim"\nmissing = "replicate"',
            ("error", "first_dim", "replicate", "error"),
        ),
    ],
)
def test_policy_presets_and_overrides(text: str, wanted: Any) -> None:
    policy = Strategy.loads(f"version = 1\n[policy]\n{text}\n").compile().policy
    actual = (policy.indivisible, policy.conflict, policy.missing, policy.rank)
    assert actual == (
        wanted
        if isinstance(wanted, tuple)
        else (wanted.indivisible, wanted.conflict, wanted.missing, wanted.rank)
    )


def test_permissive_preset_is_recorded() -> None:
    rules = Strategy.loads(
        'version = 1\n[rules]\nbatch = "dp"\nhead = "tp"\n[policy]\npreset = "eformer"\n'
    ).compile()
    resolution = sw.resolve((sw.BATCH, sw.HEAD, sw.EMBED), rules, {"dp": 2, "tp": 4}, shape=(8, 6))
    assert resolution.spec == P("dp")
    assert resolution.decisions[1].outcome == "policy_drop"
    assert "3 dims fitted to the array's 2" in str(resolution)


# Schema.


def test_schema_accepts_presets_only() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = Strategy.json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for name in PRESETS:
        validator.validate(json.loads(Strategy.preset(name).dumps(format="json")))
    full = (
        SMALL
        + '[dcn]\ndp = 2\n[axes]\nmine = "x"\n[modes.decode.params]\nembed = "-"\n[[tensors]]\n'
        'match = "a"\nembed = "-"\n'
    )
    validator.validate(
        json.loads(
            Strategy.loads(full.replace("[mesh]", 'axis_types = {tp = "explicit"}\n[mesh]')).dumps(
                format="json"
            )
        )
    )
    bad = [
        {"version": 2},
        {"version": "1"},
        {"rulez": {}},
        {"rules": {"batch": 3}},
        {"mesh": {"dp": "2"}},
        {"mesh": [2, 4]},
        {"modes": {"training": {}}},
        {"modes": {"decode": {"params": {"embed": None}}}},
        {"policy": {"indivisible": "ignore"}},
        {"policy": {"unknown": "x"}},
        {"tensors": [{"embed": "-"}]},
        {"axis_types": "manual"},
    ]
    for data in bad:
        assert not validator.is_valid(data), data
        with pytest.raises(sw.StrategyError):
            Strategy(**data)


def test_schema_describes_every_key() -> None:
    schema = Strategy.json_schema()
    assert schema["additionalProperties"] is False
    assert all(
        entry.get("description") or "$ref" in entry for entry in schema["properties"].values()
    )
    json.dumps(schema)


# load(dump(s)) == s, for anything that can be said.

MESH_AXES = ("dp", "fsdp", "sp", "ep", "tp", "columns")
candidate = st.lists(st.sampled_from(MESH_AXES), min_size=1, max_size=3, unique=True).map("+".join)
any_rule = (
    st.tuples(st.lists(candidate, max_size=2), st.sampled_from(["", "-"]))
    .filter(lambda rule: rule[0] or rule[1])
    .map(lambda rule: " | ".join([*rule[0], *([rule[1]] if rule[1] else [])]))
)
table = st.dictionaries(
    st.sampled_from([file_name(axis) for axis in SEMANTIC_AXES]), any_rule, max_size=4
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
pattern = st.sampled_from(
    [
        ".*",
        "lm_head/.*",
        r"(a|b)\.w$",
        'quote"d',
        "back\\\\slash",
        "tab\tnew\nline",
        "ünï/💡",
        "[]]",
        "#",
    ]
)
place = st.sampled_from(["device", "host"])
mode_table = st.builds(
    lambda rules, params, memory: {
        **rules,
        **({"params": params} if params else {}),
        **({"memory": memory} if memory is not None else {}),
    },
    table,
    table,
    st.none() | st.fixed_dictionaries({}, optional={"params": place}),
)
entries = st.lists(
    st.builds(lambda match, rules: {"match": match, **rules}, pattern, table.filter(bool)),
    max_size=3,
)
memory = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["state", "params", "activations"], place),
        "saved": st.dictionaries(text, place, max_size=2),
        "tensors": st.lists(
            st.builds(lambda match, where: {"match": match, "state": where}, pattern, place),
            max_size=2,
        ),
    },
)
mesh = st.dictionaries(st.sampled_from(MESH_AXES[:-1]), st.sampled_from([1, 2, 4]), max_size=4).map(
    lambda sizes: {**sizes, "columns": -1}
)
data = st.fixed_dictionaries(
    {"mesh": mesh},
    optional={
        "version": st.just(1),
        "name": text,
        "axis_types": st.sampled_from(["auto", "explicit", {"columns": "explicit"}]),
        "axes": st.dictionaries(st.sampled_from(["rotary_dim", "patch", "x9"]), text, max_size=2),
        "rules": table,
        "params": table,
        "modes": st.dictionaries(
            st.sampled_from(["train", "prefill", "decode", "insert"]), mode_table, max_size=3
        ),
        "policy": st.fixed_dictionaries(
            {},
            optional={
                "preset": st.just("eformer"),
                "gather": candidate,
                "conflict": st.just("first_dim"),
            },
        ),
        "tensors": entries,
        "memory": memory,
    },
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=data, format=st.sampled_from(["toml", "json"]))
@example(data={"mesh": {}, "name": "\U0001f4a1"}, format="toml")
@example(data={"mesh": {"a.b": 2, "ü": 1}, "rules": {"batch": "a.b+ü"}}, format="toml")
@example(data={"mesh": {}, "name": "\x7f\x00\u2028\r\n"}, format="toml")
@example(data={"mesh": {}, "tensors": [], "rules": {}, "modes": {"decode": {}}}, format="toml")
def test_dump_and_load_round_trip(data: dict[str, Any], format: Any, tmp_path: Path) -> None:
    strategy = Strategy(**data)
    again = Strategy.load(strategy.dump(tmp_path / f"s.{format}"))
    assert again == strategy
    assert again.to_data() == strategy.to_data()
    assert again.compile() == strategy.compile()


@settings(max_examples=60, deadline=None)
@given(first=data, second=data)
def test_overlay_equals_overlaid_data(first: dict[str, Any], second: dict[str, Any]) -> None:
    second = {**second, "mesh": {}}
    kinds = [type(part["axis_types"]) for part in (first, second) if "axis_types" in part]
    if len(set(kinds)) > 1:
        with raises(sw.StrategyError, path="axis_types", fix=("axis_types", "tables")):
            _ = Strategy(**first) | Strategy(**second)
        return
    both = Strategy(**first) | Strategy(**second)
    assert both.rules == {**first.get("rules", {}), **second.get("rules", {})}
    assert [entry.match for entry in both.tensors] == [
        entry["match"] for part in (second, first) for entry in part.get("tensors", [])
    ]
    assert both == Strategy(**both.to_data())


def test_axis_types_word_over_table() -> None:
    """The type of dp would depend on the order of three overlays."""
    word = Strategy.loads('axis_types = "explicit"\n[mesh]\ndp = 2\ntp = 4\n', source="base.toml")
    table = Strategy.loads('\naxis_types = {tp = "auto"}\n', source="over.toml")
    with raises(
        sw.StrategyError,
        "explicit",
        "base.toml",
        1,
        path="over.toml:2 axis_types",
        fix="axis_types",
    ) as caught:
        _ = word | table
    assert 'axis_types = {dp = "explicit", tp = "explicit"}' in caught.value.fix
    with raises(
        sw.StrategyError,
        "explicit",
        "over.toml",
        2,
        path="base.toml:1 axis_types",
        fix="axis_types",
    ):
        _ = table | word
    tables = Strategy(mesh={"dp": 2, "tp": 4}, axis_types={"dp": "explicit"}) | table
    assert tables.axis_types == {"dp": "explicit", "tp": "auto"}
    assert (word | Strategy(axis_types="auto")).axis_types == "auto"


@pytest.mark.parametrize("format", ["toml", "json"])
def test_byte_order_mark_is_skipped(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"s.{format}"
    text = Strategy.loads(SMALL).dumps(format=format)  # type: ignore[arg-type]
    path.write_text(text, encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert Strategy.load(path) == Strategy.loads(SMALL)
    assert Strategy.load(path).source("rules", "head").startswith(path.name)
