"""Values that others keep as keys: frozen, without a `__dict__`, and with fields given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.attention.masks import Mask, MaskRules
from shardwright.resolution.rules import AxisRules, Policy, Rule, TensorRules, parse_rule
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.lowering import Dim, Lowered

RULE = parse_rule("dp | -")
BY_NAME = [
    MaskRules(),
    Mask(),
    Policy(),
    RULE,
    TensorRules(match="mlp/*", rules=((sw.EMBED, RULE),)),
    sw.Strategy(rules={"batch": "dp"}).compile(),
    PartOf(annotation=(sw.EMBED,), shape=(4,), dims=(0,)),
    Dim(axes=(sw.EMBED,)),
    Lowered(dims=()),
]
BY_POSITION = [
    sw.merged((sw.HEAD, 2)),
    sw.ArraySpec((4,), jnp.float32, (sw.EMBED,)),
    sw.stacked(sw.ColumnWise),
]


@pytest.mark.parametrize("value", [*BY_NAME, *BY_POSITION], ids=lambda value: type(value).__name__)
def test_value_is_frozen_and_small(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize(
    "cls", [MaskRules, Mask, Policy, Rule, TensorRules, AxisRules, PartOf, Dim, Lowered]
)
def test_fields_are_given_by_name(cls: Any) -> None:
    """A field that is added later must not change what a call means."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        cls(None)
