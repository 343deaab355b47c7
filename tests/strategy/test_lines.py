"""Every rule knows the file and line where it was written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.strategy.model import Strategy
from shardwright.vocabulary.axes import file_name
from tests.strategy.small import SMALL


@pytest.mark.parametrize("format", ["toml", "json"])
@pytest.mark.parametrize("name", ["fsdp_tp", "moe_ep", "serve_long_context"])
def test_every_rule_has_its_line(name: str, format: str, tmp_path: Path) -> None:
    path = Strategy.preset(name).dump(tmp_path / f"{name}.{format}")
    lines = path.read_text().splitlines()
    rules = Strategy.load(path).compile()
    seen = 0
    for table in (*rules.activations, *rules.params):
        for axis, rule in table:
            source, number = rule.ref.source.split(":")
            assert source == path.name
            line = lines[int(number) - 1]
            assert re.match(rf'\s*"?{file_name(axis)}"?\s*[:=]', line), line
            assert json.dumps(rule.ref.text) in line
            seen += 1
    assert seen > 100


def test_lines_of_awkward_toml() -> None:
    text = """# comment with [rules] in it
version = 1   # and = signs

[ rules ]     # a header with spaces
batch = "dp"
"embed" = '-'
'head'   =   "tp | -"

modes.decode.head = "-"

[modes."prefill"]
batch = "dp | -"

[modes.prefill.params]
embed = "dp"
"""
    text = text.replace('\nmodes.decode.head = "-"\n', "")
    rules = Strategy.loads(text, source="awkward.toml").compile()

    def ask(axis, **options):
        return (
            sw.resolve((axis,), rules, {"dp": 2, "tp": 2}, shape=(8,), **options)
            .decisions[0]
            .rule.source
        )

    assert [ask(sw.BATCH), ask(sw.EMBED), ask(sw.HEAD)] == [
        "awkward.toml:5",
        "awkward.toml:6",
        "awkward.toml:7",
    ]
    assert ask(sw.BATCH, mode="prefill") == "awkward.toml:10"
    assert ask(sw.EMBED, mode="prefill", role="param") == "awkward.toml:13"


def test_dotted_and_inline_tables_have_a_file() -> None:
    dotted = Strategy.loads(
        'version = 1\nmodes.decode.head = "-"\nrules.batch = "dp"\n', source="d.toml"
    ).compile()
    assert sw.resolve((sw.BATCH,), dotted, {"dp": 2}).decisions[0].rule.source == "d.toml:3"
    assert (
        sw.resolve((sw.HEAD,), dotted, {"dp": 2}, mode="decode").decisions[0].rule.source
        == "d.toml:2"
    )
    inline = Strategy.loads(
        'version = 1\n\nrules = { batch = "dp", head = "tp" }\n', source="i.toml"
    )
    assert (
        sw.resolve((sw.BATCH,), inline.compile(), {"dp": 2}).decisions[0].rule.source == "i.toml:3"
    ), "the line of the inline table"


def test_lines_of_compact_and_awkward_json() -> None:
    one_line = Strategy.loads(
        '{"version": 1, "rules": {"batch": "dp"}, "name": "a \\"rules\\": {"}',
        format="json",
        source="s.json",
    )
    assert (
        sw.resolve((sw.BATCH,), one_line.compile(), {"dp": 2}).decisions[0].rule.source
        == "s.json:1"
    )
    text = (
        "{\n"
        '  "name": "x, [y]: {z}",\n'
        '  "tensors": [\n'
        '    {"match": "a", "embed": "dp"},\n'
        '    {"match": "b",\n'
        '     "embed": "tp"}\n'
        "  ]\n"
        "}\n"
    )
    rules = Strategy.loads(text, format="json", source="s.json").compile()

    def ask(path):
        return (
            sw.resolve((sw.EMBED,), rules, {"dp": 2, "tp": 2}, role="param", path=path)
            .decisions[0]
            .rule.source
        )

    assert [ask("a"), ask("b")] == ["s.json:4", "s.json:6"]


def test_explain_shows_file_and_line() -> None:
    resolution = sw.resolve(
        (sw.BATCH, sw.HEAD),
        Strategy.loads(SMALL, source="small.toml").compile(),
        {"dp": 2, "tp": 4},
        shape=(8, 6),
    )
    lines = [" ".join(line.split()) for line in str(resolution).splitlines()]
    assert lines[3:] == [
        '0 BATCH 8 dp batch = "dp" small.toml:9 [rules]',
        "first candidate fits",
        '1 HEAD 6 - head = "tp | -" small.toml:11 [rules]',
        "tp: 6 % 4 != 0; replicated by rule",
    ]
