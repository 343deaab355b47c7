"""Patterns of paths: they mean the same as in `re`, and a search takes linear time."""

from __future__ import annotations

import pickle
import random
import re

import pytest

import shardwright as sw
from shardwright.resolution import path_patterns
from shardwright.resolution.path_patterns import MOST_STEPS, PathPattern
from shardwright.resolution.rules import TensorRules, parse_rule

PATHS = [
    "",
    "lm_head/kernel",
    "blocks/0/attn/q_proj/kernel",
    "blocks/12/mlp/up/bias",
    "ünïcode/é",
    "a\n",
    "a\nb",
    "A",
    "x{2}",
]
USUAL = [
    *(
        "lm_head/.*",
        "lm_head",
        ".*",
        "",
        "^embed",
        "kernel$",
        r"\Ablocks",
        r"bias\Z",
        r"blocks/\d+/(attn|mlp)/",
        "(q|k|v)_proj/kernel$",
    ),
    *(
        r"\bq_proj\b",
        r"\Battn",
        "[a-z_]+/[^/]*$",
        "[]a]",
        "[^]]",
        r"[\w-]+",
        "blocks/(0|1[0-2])/",
        "(?i)LM_HEAD",
        "(?P<n>up|down)/",
    ),
    *(
        "(?:attn|mlp)/.*?kernel",
        "a$",
        "a\\Z",
        "^a$",
        "x{2}",
        "x[{]2}",
        "a{,2}/",
        "l{1,}m",
        "b{}",
        "(|q)_proj",
        "()*k",
        "é",
        r"\x61",
        "(?s)a.b",
    ),
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_equal_re(pattern: str) -> None:
    compiled = PathPattern(pattern)
    assert [compiled.matches(path) for path in PATHS] == [
        re.search(pattern, path) is not None for path in PATHS
    ]


def random_pattern(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if depth == 0 or kind < 0.35:
        return draw.choice(
            [
                *"ab/.^$A",
                "[ab]",
                "[^a]",
                r"\w",
                r"\d",
                r"\.",
                r"\b",
                r"\B",
                "ab",
                "[a-c]",
                r"\Z",
                r"\s",
            ]
        )
    if kind < 0.6:
        return random_pattern(draw, depth - 1) + random_pattern(draw, depth - 1)
    if kind < 0.75:
        return f"({random_pattern(draw, depth - 1)}|{random_pattern(draw, depth - 1)})"
    counts = ["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?", "??", "{,2}", ""]
    return f"(?:{random_pattern(draw, depth - 1)}){draw.choice(counts)}"


def test_random_patterns_equal_re() -> None:
    draw = random.Random(16)
    wrong, compared = [], 0
    while compared < 8000:
        pattern = draw.choice(["", "", "", "(?i)"]) + random_pattern(draw, 4)
        compiled = PathPattern(pattern)
        for _ in range(8):
            path = "".join(draw.choice("aabb/c.1 A\n") for _ in range(draw.randint(1, 9)))
            compared += 1
            if compiled.matches(path) != (re.search(pattern, path) is not None):
                wrong.append((pattern, path))
    assert wrong == []


# Each takes `re` seconds to centuries.
HOSTILE = [
    *(
        "(a+)+b",
        "(a|a)*b",
        "(a*)*b",
        "(.*)*x",
        "(a|aa)+$",
        "(a?){24}a{24}b",
        "(.*.*.*.*)=",
        ".*.*.*.*.*.*.*.*x",
        "(a|b|ab)*c",
    ),
    *("(?:(?:a?){9}){9}b", "([a-z]+)*!", "^(a|a?)+$", "(x+x+)+y"),
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_search_does_linear_work(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a search follows each instruction once at most."""
    compiled = PathPattern(pattern)
    steps = 0
    following = PathPattern._threads

    def counted(self: PathPattern, *args: object) -> object:
        nonlocal steps
        steps += 1
        return following(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PathPattern, "_threads", counted)
    path = "a" * 1000 + "x" * 1000 + "!b=cy"
    assert compiled.matches(path) in (True, False)
    assert 0 < steps <= len(path) + 1
    assert compiled.steps <= MOST_STEPS


def test_cache_is_bounded() -> None:
    compiled = PathPattern("(a|b)*a(a|b){9}x")
    draw = random.Random(3)
    for _ in range(300):
        path = "x" + "".join(draw.choice("ab") for _ in range(40)) + chr(draw.randint(200, 60000))
        assert not compiled.matches(path)
    assert len(compiled._states) <= path_patterns._MOST_STATES
    assert all(
        len(state.following) <= path_patterns._MOST_SYMBOLS for state in compiled._states.values()
    )
    assert all(len(known) <= path_patterns._MOST_SYMBOLS for known in compiled._taken)
    assert compiled.matches("a" * 10 + "x")


REFUSED = {
    r"^(?!embed).*kernel": (
        r"the pattern looks ahead or behind, .*\n  \^\(\?!embed\)\.\*kernel\n   \^\n"
        r"  fix   write the exception as a \[\[tensors\]\] entry"
    ),
    r"(?=a)b": "looks ahead or behind",
    r"(?<=a)b": "looks ahead or behind",
    r"(?<!a)b": "looks ahead or behind",
    r"(a)\1": "refers back to a group",
    r"(?P<n>a)(?P=n)": "refers back to a group",
    r"(a)?(?(1)b|c)": "refers back to a group",
    r"(?>a)b": r"has an atomic group, .*\n(.|\n)*fix   write \(\?:",
    r"a++b": "has a possessive repetition",
    r"a{2}+b": "has a possessive repetition",
    r"a(?#note)b": "has a comment",
    r"a(?i:b)": r"changes flags, .*\n(.|\n)*fix   write \(\?i\) at the very start",
    r"(?x) a": r"changes flags, .*\n(.|\n)*fix   of the flags only",
    "(": r"not a regular expression: missing \), unterminated subpattern",
    "a" * 1001: "the pattern has 1001 characters, at most 1000 are read",
    "(a{50}){50}": "the pattern has more than 1000 steps, counted with its repetitions written out",
    "a{4000000000}": "the pattern has more than 1000 steps",
    "(" * 33 + ")" * 33: "has more than 32 groups within each other",
}


@pytest.mark.parametrize("pattern", REFUSED, ids=range(len(REFUSED)))
def test_unsupported_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(sw.StrategyError, match=REFUSED[pattern]) as caught:
        PathPattern(pattern)
    assert caught.value.fix
    with pytest.raises(sw.StrategyError, match=r"tensors\.0\.match: (?s:.)*" + REFUSED[pattern]):
        sw.Strategy(tensors=[{"match": pattern, "embed": "-"}])


def test_empty_parts_may_be_counted() -> None:
    assert PathPattern("(){4000000000}a").matches("a")


def test_patterns_in_python_use_re() -> None:
    matched = sw.match_paths(
        {"embed": 0, "up": 0}, [("^(?!embed)", (sw.EMBED,)), ("embed", (sw.VOCAB,))]
    )
    assert matched.annotations == {"embed": (sw.VOCAB,), "up": (sw.EMBED,)}


def test_an_entry_is_pickled_and_compared_by_its_text() -> None:
    entry = TensorRules(match="lm_head", rules=((sw.EMBED, parse_rule("-")),))
    again = pickle.loads(pickle.dumps(entry))
    assert (again, hash(again)) == (entry, hash(entry))
    assert again.matches("lm_head/kernel")
    assert not again.matches("up")
