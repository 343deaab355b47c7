"""`[memory]` in strategy files: keys, overlays, limits, mistakes, and what `explain` says."""

from __future__ import annotations

import json
import pickle

import pytest

import shardwright as sw
from tests.raising import Facts, facts, raises

RULES = '[mesh]\ndp = 2\n[rules]\nembed = "dp"\n'
TEXT = (
    RULES
    + """[memory]
state = "host"
[[memory.tensors]]
match = "norm"
state = "device"
[[memory.tensors]]
match = "embedding/.*"
params = "host"
[modes.prefill.memory]
params = "host"
[memory.saved]
residual = "host"
mlp_out = "device"
[modes.decode.memory]
params = "host"
[modes.insert.memory]
params = "device"
"""
)
MODES = ("train", "prefill", "decode", "insert")


def load(text: str = TEXT, source: str = "mine.toml") -> sw.Strategy:
    return sw.Strategy.loads(text, source=source)


def ask(strategy: sw.Strategy, role: str, path: str | None = None, mode: str = "train") -> str:
    found = sw.explain(
        (sw.EMBED,), strategy.compile(), {"dp": 2}, role=role, mode=mode, path=path, shape=(8,)
    )
    assert found.on_host == (found.memory is not None and found.memory.text == "host")
    return "device" if found.memory is None else f"{found.memory.text} {found.memory.source}"


def test_the_first_table_that_applies_decides() -> None:
    strategy = load()
    assert ask(strategy, "state", "mlp/up") == "host mine.toml:6"
    assert ask(strategy, "state") == "host mine.toml:6"
    assert ask(strategy, "state", "layers/norm") == "device mine.toml:9"
    assert [ask(strategy, "param", "mlp/up", mode) for mode in MODES] == [
        "device",
        "host mine.toml:14",
        "host mine.toml:19",
        "device mine.toml:21",
    ]
    assert ask(strategy, "param", "embedding/table") == "host mine.toml:12"
    # Only what is stored has a memory of its own.
    assert ask(strategy, "use", "embedding/table") == "device"
    assert ask(strategy, "activation", "embedding/table") == "device"
    inherits = load(TEXT.replace("[modes.insert.memory]", "[modes.train.memory]"))
    assert ask(inherits, "param", mode="insert") == "host mine.toml:19"


def test_a_moment_lives_where_its_parameter_says() -> None:
    rules = load().compile()
    moment = sw.PartOf(annotation=(sw.EMBED,), shape=(8,), dims=(0,), path="layers/norm")
    found = sw.explain(moment, rules, {"dp": 2}, role="state", shape=(8,), path="0/mu/x")
    assert not found.on_host
    scalar = sw.explain((), rules, {"dp": 2}, role="state", shape=())
    assert scalar.memory is None, "scalars live on the device"


def test_saved_activations() -> None:
    saved = load().compile().saved
    assert (saved.memory, saved.of("residual"), saved.of("other")) == ("device", "host", "device")
    assert str(saved.ref) == 'residual = "host"   (mine.toml:16, [memory.saved])'
    over = load('[memory]\nactivations = "host"\n[memory.saved]\nresidual = "device"\n')
    saved = (load() | over).compile().saved
    assert [saved.of(name) for name in ("residual", "mlp_out", "other")] == [
        "device",
        "device",
        "host",
    ]


def test_explain_names_the_line() -> None:
    found = sw.explain((sw.EMBED,), load().compile(), {"dp": 2}, role="state", shape=(8,))
    line = 'lives on the host: state = "host"   (mine.toml:6, [memory])'
    assert line in str(found)
    assert line.replace('"', "&quot;").replace("  ", "") in found._repr_html_().replace("  ", "")
    assert found.to_json()["memory"] == {
        "key": "state",
        "text": "host",
        "table": "memory",
        "source": "mine.toml:6",
    }


def test_rules_of_memory_are_part_of_equality() -> None:
    strategy, rules = load(), load().compile()
    elsewhere = load("\n" + TEXT, source="other.toml")
    assert elsewhere == strategy
    assert (elsewhere.compile(), hash(elsewhere.compile())) == (rules, hash(rules))
    assert elsewhere.compile().fingerprint() == rules.fingerprint()
    assert pickle.loads(pickle.dumps(rules)) == rules
    for change in (
        ('state = "host"', 'state = "device"'),
        ('"norm"', '"norms"'),
        ("prefill", "train"),
        ('[modes.insert.memory]\nparams = "device"\n', ""),
        ("mlp_out", "attention_out"),
    ):
        other = load(TEXT.replace(*change))
        assert other != strategy
        assert other.compile() != rules
        assert other.compile().fingerprint() != rules.fingerprint()


@pytest.mark.parametrize("format", ["toml", "json"])
def test_dump_and_load_keep_memory(format: str) -> None:
    strategy = load()
    again = sw.Strategy.loads(strategy.dumps(format=format), format=format)
    assert again == strategy
    assert again.to_data() == strategy.to_data()
    assert again.compile() == strategy.compile()


def test_entries_of_an_overlay_come_first() -> None:
    base = load('[[memory.tensors]]\nmatch = "a"\nstate = "host"\n', "base.toml")
    over = load(
        '\n[memory]\nparams = "host"\n[[memory.tensors]]\nmatch = "a/b"\nstate = "device"\n',
        "over.toml",
    )
    both = base | over
    assert [entry.match for entry in both.memory.tensors] == ["a/b", "a"]
    assert ask(both, "state", "a/b") == "device over.toml:6"
    assert ask(both, "state", "a/c") == "host base.toml:3"
    assert ask(both, "param", "a/c") == "host over.toml:3"
    assert both == sw.Strategy(**both.to_data())


def test_schema_has_memory() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(sw.Strategy.json_schema())
    validator.validate(json.loads(load().dumps(format="json")))
    for memory in ({"state": "gpu"}, {"caches": "host"}, {"tensors": [{"state": "host"}]}):
        assert not validator.is_valid({"memory": memory})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[memory]\nstate = "pinned_host"\n',
            facts("value", "pinned_host", path="<toml>:2 memory.state", fix=("device", "host")),
        ),
        ("[memory]\nsate = 1\n", facts("key", path="<toml>:2 memory.sate", fix="state")),
        (
            '[memory]\noptimizer = "host"\n',
            facts("key", path="<toml>:2 memory.optimizer", fix="mean 'state'"),
        ),
        (
            '[memory]\nkv_cache = "host"\n',
            facts("key", path="<toml>:2 memory.kv_cache", fix=("remove", "state", "saved")),
        ),
        (
            '[modes.decode.memory]\nstate = "host"\n',
            facts("key", path="<toml>:2 modes.decode.memory.state", fix="remove"),
        ),
        (
            '[modes.decode.memory]\nparams = "gpu"\n',
            facts("value", "gpu", path="<toml>:2 modes.decode.memory.params", fix="host"),
        ),
        (
            '[modes.decode.memory]\nparms = "host"\n',
            facts("key", path="<toml>:2 modes.decode.memory.parms", fix="mean 'params'"),
        ),
        (
            '[[memory.tensors]]\nmatch = "a"\nactivations = "host"\n',
            facts("key", path="<toml>:3 memory.tensors.0.activations", fix="remove"),
        ),
        (
            '[[memory.tensors]]\nmatch = "("\nstate = "host"\n',
            facts("expression", path="<toml>:2 memory.tensors.0.match", fix="re"),
        ),
        (
            '[[memory.tensors]]\nmatch = "a"\n',
            facts("rule", path="<toml>:1 memory.tensors.0", fix="host"),
        ),
        (
            '[[memory.tensors]]\nstate = "host"\n',
            facts("missing", path="<toml>:1 memory.tensors.0.match", fix="add"),
        ),
        (
            f'[[memory.tensors]]\nmatch = "{"a" * 1001}"\nstate = "host"\n',
            facts(1001, 1000, path="<toml>:2 memory.tensors.0.match", fix="memory.tensors"),
        ),
        (
            "".join(f'[[memory.tensors]]\nmatch = "w{at}"\nstate = "host"\n' for at in range(1001)),
            facts(1001, 1000, path="<toml> memory.tensors", fix="model"),
        ),
        (
            '[memory.saved]\nresidual = "gpu"\n',
            facts("value", "gpu", path="<toml>:2 memory.saved.residual", fix="host"),
        ),
        ('memory = "host"\n', facts("table", "host", path="<toml>:1 memory", fix="memory")),
        (
            '[axes]\nmemory = "of a recurrent layer"\n',
            facts("memory", path="<toml>:2 axes.memory", fix="rename"),
        ),
        (
            '[axes]\nMEMORY = "of a recurrent layer"\n',
            facts("MEMORY", path="<toml>:2 axes.MEMORY", fix="rename"),
        ),
        (
            '[modes.decode]\nmemory = "dp"\n',
            facts("table", "dp", path="<toml>:2 modes.decode.memory", fix="modes.decode.memory"),
        ),
    ],
)
def test_mistakes(text: str, says: Facts) -> None:
    with raises(sw.StrategyError, says) as caught:
        sw.Strategy.loads(text)
    assert len(caught.value.problems) == 1


def test_an_entry_that_matches_nothing_is_found() -> None:
    tree = {"up": sw.ArraySpec((8,), "float32", (sw.EMBED,))}
    found = sw.lint(load(), tree)
    assert [(each.code, each.where) for each in found if "match" in each.message] == [
        ("unused_tensors", "mine.toml:8 memory.tensors.0.match"),
        ("unused_tensors", "mine.toml:11 memory.tensors.1.match"),
    ]
