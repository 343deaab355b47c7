"""The specs of a whole layer under every preset, compared with golden files."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.testing.golden import Golden
from tests.golden import layer, specs


@pytest.mark.parametrize("preset", sw.Strategy.presets())
def test_layer_specs_equal_golden(preset: str, golden: Golden) -> None:
    golden(specs.render(preset), preset)


def test_equal_modes_share_a_row() -> None:
    tensor = next(tensor for tensor in layer.ACTIVATIONS if tensor.name == "tokens")
    answers = {"train": ("a",), "prefill": ("a",), "decode": ("b",), "insert": ("a",)}
    rows = specs.collapsed(tensor, answers)
    assert rows == [
        ("tokens", "16 4096", "(BATCH, LENGTH)", "train prefill insert", "a"),
        ("", "16 1", "", "decode", "b"),
    ]
