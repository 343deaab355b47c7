"""Values that others keep as keys: frozen, without a `__dict__`, and with fields given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.attention.masks import Mask, MaskRules
from shardwright.resolution.composites import Composite, TriedCandidate
from shardwright.resolution.rules import Policy, TensorRules, parse_rule
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
    TriedCandidate(written=(), live=()),
    Composite(members=(RULE,), chains=(), ref=RULE.ref),
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


@pytest.mark.parametrize("cls", [type(value) for value in BY_NAME])
def test_fields_are_given_by_name(cls: Any) -> None:
    """A field that is added later must not change what a call means."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2"):
        cls(None)


def test_repr_of_rules_has_what_was_given() -> None:
    """What is derived would fill pages."""
    entry = TensorRules(match="mlp/*", rules=((sw.EMBED, RULE),))
    assert repr(entry) == f"TensorRules(match='mlp/*', rules={entry.rules!r})"
    text = repr(sw.Strategy(rules={"batch": "dp"}).compile())
    given = ("activations", "params", "tensors", "user_axes", "policy", "attention")
    assert all(f"{name}=" in text for name in given)
    derived = ("known_axes", "_tables", "_values", "_hash", "_cache", "_fingerprint")
    assert not any(f"{name}=" in text for name in derived)
