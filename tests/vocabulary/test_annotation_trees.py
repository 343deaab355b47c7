"""One annotation or a tree of them, annotations as code, and shapes with symbolic sizes."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import shardwright as sw
from shardwright.vocabulary.annotations import (
    is_axes_list,
    is_tuple_of_annotations,
    tree_of_annotations,
)
from shardwright.vocabulary.lowering import as_shape, spelled
from tests.raising import raises

B, E, H, D = sw.BATCH, sw.EMBED, sw.HEAD, sw.HEAD_DIM
MERGED = sw.merged((H, 2), (D, 4))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (((B, E), (H,)), True),
        (((B, E), ()), True),
        ((), False),
        ((B, E), False),
        (((B, E), H), False),
        (((B, E), MERGED), False),
        (((B, E), (H, 3)), False),
        (((B, E), (H, MERGED)), False),
        ([(B, E), (H,)], False),
        (sw.ColumnWise, False),
    ],
    ids=repr,
)
def test_tuple_of_annotations(value: Any, expected: bool) -> None:
    assert is_tuple_of_annotations(value) is expected


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (((B, sw.QUERY_LENGTH), E), "((BATCH, QUERY_LENGTH), EMBED)"),
        ((B,), "(BATCH,)"),
        (((B,), E), "((BATCH,), EMBED)"),
        ((), "()"),
        (sw.ColumnWise, "ColumnWise"),
    ],
)
def test_annotations_as_code_spells_them(annotation: Any, text: str) -> None:
    assert spelled(annotation) == text


TREE = {"w": (B, E)}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ((), None),
        ((B,), (B,)),
        ((B, E), (B, E)),
        ((MERGED,), (MERGED,)),
        ((MERGED, E), (MERGED, E)),
        (((B, E), H), ((B, E), H)),
        (([B, [H, D]],), (B, (H, D))),
        (([MERGED],), (MERGED,)),
        (((B, E),), (B, E)),
        ((TREE,), TREE),
        (([(B, E), sw.ColumnWise],), [(B, E), sw.ColumnWise]),
    ],
    ids=repr,
)
def test_axes_as_a_tree_of_annotations(axes: Any, expected: Any) -> None:
    assert tree_of_annotations(axes) == expected


def test_axes_that_are_not_a_tree() -> None:
    with raises(sw.StrategyError, "__BATCH__", 3, "tuple", fix="BATCH"):
        tree_of_annotations((B, 3))


@pytest.mark.parametrize(
    ("value", "expected"),
    [([B], True), ([None, MERGED], True), ([], False), ([(B,)], False), ((B,), False)],
    ids=repr,
)
def test_list_that_is_one_annotation(value: Any, expected: bool) -> None:
    assert is_axes_list(value) is expected


def test_symbolic_sizes_stay_as_they_are() -> None:
    """Also one whose sign depends on its value."""
    sizes = jax.export.symbolic_shape("b, b - 8")
    assert as_shape((*sizes, 4)) == (*sizes, 4)


def test_merged_member_needs_an_axis_first() -> None:
    with raises(sw.StrategyError, "(3, 8)", "axis", fix="KV_HEAD"):
        sw.merged((3, 8))  # type: ignore[arg-type]
