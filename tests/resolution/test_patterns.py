"""Patterns of `[[tensors]]` entries and of path rules are those of Python's `re`."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.resolution.rules import TensorRules, parse_rule
from shardwright.strategy.limits import LONGEST_PATTERN
from tests.raising import raises


def entry(pattern: str) -> TensorRules:
    return TensorRules(match=pattern, rules=((sw.EMBED, parse_rule("-")),))


def test_pattern_is_searched_in_the_whole_path() -> None:
    assert entry("attn|mlp").matches("blocks/0/mlp/up")
    assert not entry("^mlp").matches("blocks/0/mlp/up")
    assert entry("^(?!embed).*kernel").matches("up/kernel")
    assert not entry("^(?!embed).*kernel").matches("embed/kernel")
    assert entry("(?i)LM_HEAD").matches("lm_head")


def test_file_uses_lookahead() -> None:
    text = """
    mesh = { tp = 2 }
    rules = { embed = "tp" }
    [[tensors]]
    match = "^(?!embed).*kernel"
    embed = "-"
    """
    pm = sw.PartitionManager(sw.Strategy.loads(text), mesh=sw.abstract_mesh("tp:2"))
    assert pm.resolve(sw.EMBED, role="param", path="embed/kernel") == P("tp")
    assert pm.resolve(sw.EMBED, role="param", path="up/kernel") == P()


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "not a regular expression: missing ), unterminated subpattern"),
        ("a{99999999999}", "not a regular expression: the repetition number is too large"),
        ("a" * (LONGEST_PATTERN + 1), "the pattern has 1001 characters, at most 1000 are read"),
    ],
    ids=["syntax", "count", "length"],
)
def test_bad_pattern_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(sw.StrategyError) as caught:
        sw.Strategy(tensors=[{"match": pattern, "embed": "-"}])
    assert caught.value.what == says
    assert "tensors.0.match" in caught.value.path
    assert caught.value.fix


@pytest.mark.parametrize("pattern", [re.compile("a"), b"a", None])
def test_only_text_is_a_pattern(pattern: Any) -> None:
    """The text of a rule is its key in the caches, and the `repr` of a compiled pattern is cut."""
    with raises(sw.StrategyError, "a" if pattern else "None", fix="text"):
        entry(pattern)


def test_patterns_of_match_paths_are_the_same() -> None:
    rules = [("^(?!embed)", (sw.EMBED,)), ("embed", (sw.VOCAB,))]
    matched = sw.match_paths({"embed": 0, "up": 0}, rules)
    assert matched.annotations == {"embed": (sw.VOCAB,), "up": (sw.EMBED,)}


def test_an_entry_is_pickled_and_compared_by_its_text() -> None:
    head = entry("lm_head")
    again = pickle.loads(pickle.dumps(head))
    assert (again, hash(again)) == (head, hash(head))
    assert again.matches("lm_head/kernel")
    assert not again.matches("up")
