"""The choices of the file format equal those of the rules. pydantic needs them written out."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

import pytest

from shardwright.resolution.rules import (
    POLICY_PRESETS,
    Attention,
    Conflict,
    Indivisible,
    Missing,
    Rank,
)
from shardwright.strategy.model import AttentionTable, PolicyTable, Shipped, Strategy
from shardwright.vocabulary.modes import MODE_NAMES


def choices(annotation: Any) -> tuple[str, ...]:
    """The texts of a Literal, or of `Literal[...] | None`."""
    actual = get_args(annotation)
    return actual if all(isinstance(argument, str) for argument in actual) else choices(actual[0])


def test_file_has_every_attention_implementation() -> None:
    assert choices(Shipped) == tuple(Attention)


@pytest.mark.parametrize(
    ("key", "kind"),
    [("indivisible", Indivisible), ("conflict", Conflict), ("missing", Missing), ("rank", Rank)],
    ids=str,
)
def test_file_has_every_policy_choice(key: str, kind: type[StrEnum]) -> None:
    assert choices(PolicyTable.model_fields[key].annotation) == tuple(kind)


def test_file_names_every_policy_and_mode() -> None:
    assert choices(PolicyTable.model_fields["preset"].annotation) == tuple(POLICY_PRESETS)
    assert choices(get_args(Strategy.model_fields["modes"].annotation)[0]) == MODE_NAMES
    assert set(AttentionTable.model_fields) == {"default", *MODE_NAMES} - {"insert"}
