"""Runtime modes: their strings and their short names."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.vocabulary.modes import MODE_NAMES, MODES, mode_name, parse_mode
from tests.raising import raises


def test_mode_names_follow_the_modes() -> None:
    assert MODE_NAMES == ("train", "prefill", "decode", "insert") == tuple(map(mode_name, MODES))
    assert tuple(map(parse_mode, MODE_NAMES)) == tuple(map(parse_mode, MODES)) == MODES


@pytest.mark.parametrize("mode", ["decoding", "Decode", "", None, 1])
def test_unknown_mode(mode: object) -> None:
    with raises(sw.StrategyError, "mode", fix="decode"):
        parse_mode(mode)  # type: ignore[arg-type]
