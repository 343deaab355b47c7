"""Layouts in messages, and layouts that do not fit."""

from __future__ import annotations

import jax
import pytest

import shardwright as sw
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.lowering import describe, lower, mode_of_layout
from tests.raising import raises


def test_layout_class_without_axes_has_its_name() -> None:
    assert describe(sw.DynamicShardingAxes) == "DynamicShardingAxes"


def test_fix_for_a_layout_of_one_dim() -> None:
    """Its name ends in a parenthesis, and is still not a tuple of axes."""
    layout = sw.DynamicShardingAxes([sw.BATCH], sw.MODE_TRAIN)
    with pytest.raises(sw.RankMismatchError) as caught:
        lower(layout, (2, 3))
    assert caught.value.fix.endswith("use stacked(DynamicShardingAxes(BATCH))")
    with pytest.raises(sw.RankMismatchError) as caught:
        lower((sw.BATCH,), (2, 3))
    assert caught.value.fix.endswith("use stacked((BATCH,))")


def test_layout_whose_means_do_not_fit() -> None:
    """Every dim is lowered, or none: a dim without a meaning is not dropped."""

    class Wrong(sw.DynamicShardingAxes, role="param"):
        axes = (sw.TP, sw.FSDP)
        semantic_axes = (sw.MLP_INTERMEDIATE,)

    with pytest.raises(ValueError, match="shorter"):
        lower(Wrong)


def test_mode_by_a_symbolic_size() -> None:
    """Whether `b` is 1 is not known, so no mode can be picked; `b + 1` is more than 1."""
    first, several = jax.export.symbolic_shape("b, b + 1")
    with raises(sw.ShapeRequiredError, 1) as caught:
        mode_of_layout(1, (4, first))
    assert caught.value.fix == "pass mode="
    assert mode_of_layout(1, (4, several)) == sw.MODE_TRAIN


def test_stacked_spec_with_an_initializer_is_a_key() -> None:
    spec = sw.ArraySpec((4,), "float32", (sw.EMBED,), jax.nn.initializers.zeros)
    assert hash(sw.stacked(spec, layers=2)) == hash(sw.stacked(spec, layers=2))
    assert sw.stacked(spec, layers=2) == sw.stacked(spec, layers=2)


def test_part_without_a_path() -> None:
    assert PartOf(annotation=(sw.EMBED,), shape=(4,), dims=(0,)).path == ""
