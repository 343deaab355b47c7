"""Limits on files, so that no file takes unbounded time.

Each limit is far beyond the needs of a strategy, and its error names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.cli.tensors import read_tensors
from shardwright.errors import LONGEST_LINE, MOST_NAMES, Problem, did_you_mean
from shardwright.strategy import limits
from shardwright.strategy.files import parse
from tests.raising import Facts, facts, raises

HEAD = "version = 1\n[mesh]\ndp = 2\n"
N = 3000


def lines(pattern: str, count: int = N) -> str:
    return "".join(pattern.format(at) for at in range(count))


def rule(text: str) -> str:
    return f'{HEAD}[rules]\nbatch = "{text}"\n'


TOML: dict[str, tuple[str, Facts]] = {
    "axes": (
        HEAD + "[axes]\n" + lines('a{} = "x"\n'),
        facts(3000, 1000, path="<toml>:4 axes", fix="model"),
    ),
    "mesh": (
        "[mesh]\n" + lines("a{} = 1\n"),
        facts(3000, 1000, path="<toml>:1 mesh", fix="model"),
    ),
    "dcn": (
        HEAD + "[dcn]\n" + lines("a{} = 1\n"),
        facts(3000, 1000, path="<toml>:4 dcn", fix="model"),
    ),
    "axis types": (
        "axis_types = {" + lines('a{} = "auto", ').rstrip(", ") + "}\n" + HEAD,
        facts(3000, 1000, path="<toml>:1 axis_types", fix="model"),
    ),
    "tensors": (
        HEAD + lines('[[tensors]]\nmatch = "w{}"\nembed = "dp"\n'),
        facts(3000, 1000, path="<toml> tensors", fix="model"),
    ),
    "candidates": (
        rule(" | ".join(["dp"] * 65)),
        facts(65, 64, path="<toml>:5 rules.batch"),
    ),
    "a dotted key": (
        ".".join("a" * 100) + " = 1",
        facts(64, path="<toml> a.a.a.a..."),
    ),
    "a dotted header": (
        "\n[" + ".".join("a" * 100) + "]",
        facts(64, path="<toml> a.a.a.a..."),
    ),
    "unknown keys": (
        lines("a{} = 1\n"),
        facts("key", path="<toml>:1 a0", fix="remove", count=101),
    ),
    "unknown axes": (
        HEAD + "[rules]\n" + lines('a{} = "dp"\n'),
        facts("unknown", path=..., count=101),
    ),
    "unknown modes": (
        lines('[modes.m{}]\nbatch = "dp"\n'),
        facts("unknown", path=..., count=101),
    ),
    "rules that are not text": (HEAD + "[rules]\n" + lines("a{} = 1\n"), facts(100, count=101)),
    "a long file": (
        "# " + "x" * 1_000_000,
        facts(1000002, 1000000, path="<toml>"),
    ),
    "a deep array": ("x = " + "[" * 50_000, facts("recursion", path="<toml>", fix="file")),
}


@pytest.mark.parametrize("name", TOML)
def test_error_names_the_limit(name: str) -> None:
    text, says = TOML[name]
    with raises(sw.ShardingError, says) as caught:
        sw.Strategy.loads(text).compile()
    assert len(str(caught.value)) < 20_000


def test_values_within_limits_are_read() -> None:
    own = lines('a{} = "x"\n', 1000)
    entries = lines('[[tensors]]\nmatch = "w{}/.*"\nembed = "dp"\n', 1000)
    chain = 'batch = "' + " | ".join(["dp"] * 64) + '"\n'
    text = (
        HEAD
        + lines("b{} = 1\n", 63)
        + f"[axes]\n{own}[rules]\n"
        + lines('a{} = "dp"\n', 1000)
        + chain
        + entries
    )
    rules = sw.Strategy.loads(text).compile()
    assert (len(rules.tensors), len(rules.user_axes)) == (1000, 1000)


def test_limits_hold_for_python_and_for_overlays() -> None:
    half = sw.Strategy(version=1, tensors=[{"match": f"w{at}", "embed": "-"} for at in range(600)])
    with raises(sw.StrategyError, 1200, 1000, path="tensors", fix="model"):
        half | half
    with raises(sw.StrategyError, 1001, 1000, path="axes", fix="model"):
        sw.Strategy(axes={f"a{at}": "x" for at in range(1001)})


# A bad line is shown around its fault.

LONG_LINES: dict[str, tuple[Callable[[], object], Facts]] = {
    "TOML": (
        lambda: sw.Strategy.loads("name = " + "x" * 100_000),
        facts(path="<toml>:1"),
    ),
    "TOML, at the end": (
        lambda: sw.Strategy.loads(f'name = "{"x" * 100_000}" y'),
        facts("newline", "document", path="<toml>:1"),
    ),
    "JSON": (
        lambda: sw.Strategy.loads('{"a": ' + "x" * 100_000, format="json"),
        facts(path="<json>:1"),
    ),
    "rule": (
        lambda: sw.Strategy(rules={"batch": f"dp + {'x' * 9000} ! | dp"}),
        facts("mesh", path="rules.batch", fix="+"),
    ),
    "mesh": (lambda: sw.abstract_mesh("dp:2,tp:" + "x" * 100_000), facts("tp")),
    "pattern": (lambda: sw.match_paths({}, [("(" * 100_000, ())]), facts(0)),
    "choice": (
        lambda: sw.Strategy(policy={"indivisible": "x" * 100_000}),
        facts("unknown", path="policy.indivisible"),
    ),
    "list": (
        lambda: sw.Strategy(rules={"batch": ["dp"] * 100_000}),
        facts("dp", path="rules.batch", fix="dp"),
    ),
}


@pytest.mark.parametrize("name", LONG_LINES)
def test_long_line_is_cut(name: str) -> None:
    call, says = LONG_LINES[name]
    with raises(sw.ShardingError, says) as caught:
        call()
    assert len(str(caught.value)) < 5000
    assert max(map(len, caught.value.snippet.splitlines()), default=0) <= LONGEST_LINE + 10


def test_caret_of_a_cut_line() -> None:
    text = "x" * 5000 + "FAULT" + "x" * 5000
    shown, caret = Problem(
        error=sw.StrategyError, what="bad", snippet=f"{text}\n{' ' * 5000}^"
    ).snippet.splitlines()
    assert shown[caret.index("^") :].startswith("FAULT")
    assert shown.startswith("...x")
    assert shown.endswith("x...")


# Work that must not grow faster than the input.


def test_line_numbers_of_json_are_counted_once() -> None:
    """`str.count` sees every character of the text once, not once for each key."""

    class Counted(str):
        __slots__ = ()
        seen = 0

        def count(  # type: ignore[override]
            self, sub: str, start: int = 0, end: int | None = None
        ) -> int:
            Counted.seen += (len(self) if end is None else end) - start
            return super().count(sub, start, len(self) if end is None else end)

    text = Counted("{" + ",\n".join(f'"a{at}": 1' for at in range(N)) + "}")
    _, origin = parse(text, format="json", source="s")
    assert origin[f"a{N - 1}",] == f"s:{N}"
    assert 0 < Counted.seen <= 2 * len(text)


def test_did_you_mean_compares_few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        "shardwright.errors.difflib.SequenceMatcher.set_seq1",
        lambda self, name: compared.append(name),
    )
    monkeypatch.setattr(
        "shardwright.errors.difflib.SequenceMatcher.real_quick_ratio", lambda self: 0.0
    )
    did_you_mean("batch", (f"a{at}" for at in range(10 * MOST_NAMES)))
    assert len([name for name in compared if name]) == MOST_NAMES
    compared.clear()
    did_you_mean("b" * 1000, ["batch"])
    did_you_mean("batch", ["b" * 1000])
    assert not any(compared)


def test_products_of_shapes_stay_short() -> None:
    assert limits.has_too_many_elements([2**62, 2])
    assert not limits.has_too_many_elements([2**62] * 100_000 + [0])
    assert not limits.has_too_many_elements([2**40, 2**22])
    assert limits.has_too_many_elements([2**62] * 100_000)


def test_shape_of_many_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps({"w": {"axes": "EMBED", "shape": [2**62] * 100_000}}), encoding="utf-8"
    )
    with raises(sw.StrategyError, "many", "elements", path="t.json:1 w.shape"):
        read_tensors(str(path))


def test_tensors_file_lists_100_problems(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps({f"w{at}": {"axis": "EMBED"} for at in range(300)}), encoding="utf-8"
    )
    with raises(
        sw.StrategyError, "table", path="t.json:1 w0.axis", fix=("axes", "tensor"), count=101
    ):
        read_tensors(str(path))
