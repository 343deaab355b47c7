"""Lowering: ranks, repeated axes, composites, and the mode of a layout."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwright as sw
from shardwright.vocabulary.lowering import Dim, describe, lower, mode_of_layout
from tests.raising import raises


class TestRank:
    def test_a_weight_layout_takes_its_rank_or_one_more(self) -> None:
        assert [dim.label for dim in lower(sw.ColumnWise, (4, 8)).dims] == [
            "FSDP+SP (EMBED)",
            "TP (MLP_INTERMEDIATE)",
        ]
        assert [dim.label for dim in lower(sw.ColumnWise, (2, 4, 8)).dims] == [
            "LAYERS",
            "FSDP+SP (EMBED)",
            "TP (MLP_INTERMEDIATE)",
        ]

    @pytest.mark.parametrize("shape", [(), (4,), (1, 2, 3, 4)])
    def test_weight_layout_refuses_other_ranks(self, shape: tuple[int, ...]) -> None:
        with raises(sw.RankMismatchError, len(shape), "ColumnWise", 2):
            lower(sw.ColumnWise, shape)

    def test_an_activation_layout_takes_its_rank_only(self) -> None:
        with raises(sw.RankMismatchError, "HiddenStateSharding", 3, 4, "(1, 2, 3, 4)", fix="EMPTY"):
            lower(sw.HiddenStateSharding, (1, 2, 3, 4))

    @pytest.mark.parametrize("rank", range(5))
    def test_replicated_takes_any_rank(self, rank: int) -> None:
        assert lower(sw.Replicated, (2,) * rank).dims == (Dim(axes=()),) * rank

    @pytest.mark.parametrize(
        ("layout", "shape", "fix"),
        [
            (
                sw.ColumnWise,
                (8,),
                (
                    "for its bias use ColumnWise.bias; for a bias stacked over layers, "
                    "stacked(ColumnWise.bias)"
                ),
            ),
            (sw.RowWise(), (8,), "for its bias use RowWise.bias"),
            (sw.ExpertColumnWiseAlt, (2, 8), "for its bias use ExpertColumnWiseAlt.bias"),
            (
                sw.HiddenStateSharding,
                (1, 2, 3, 4),
                "for a stack of layers use stacked(HiddenStateSharding)",
            ),
            ((sw.EMBED,), (2, 3), "for a stack of layers use stacked((EMBED,))"),
            ((sw.EMBED,), (), "write one axis per dim, EMPTY where a dim is not sharded"),
        ],
    )
    def test_the_error_says_what_to_write(
        self, layout: Any, shape: tuple[int, ...], fix: str
    ) -> None:
        with raises(sw.RankMismatchError, "rank") as caught:
            lower(layout, shape)
        assert fix in caught.value.fix

    def test_a_literal_spec_may_be_short_but_not_long(self) -> None:
        assert len(lower(P("dp"), (2, 3, 4)).dims) == 3
        with raises(sw.RankMismatchError, "dp", "tp", 2, 1):
            lower(P("dp", "tp"), (2,))

    def test_an_array_spec_checks_itself(self) -> None:
        with raises(sw.RankMismatchError, "EMBED", 1, 2, "(2, 3)", fix="EMPTY"):
            sw.ArraySpec((2, 3), jnp.float32, (sw.EMBED,))


class TestLowering:
    @pytest.mark.parametrize("dim", [(sw.HEAD, sw.EMPTY), (sw.EMPTY, sw.EMPTY), (sw.EMPTY,)])
    def test_empty_inside_a_composite_is_refused(self, dim: Any) -> None:
        with raises(sw.StrategyError, "EMPTY", "dim", dim=1, fix="EMPTY"):
            lower((sw.BATCH, dim))

    def test_a_composite_of_nothing_is_empty(self) -> None:
        assert lower(((),)) == lower((sw.EMPTY,))

    def test_a_composite_keeps_the_order_of_its_members(self) -> None:
        assert lower(((sw.HEAD, sw.EMBED),)).dims[0].axes == (sw.HEAD, sw.EMBED)

    @pytest.mark.parametrize("axis", [sw.EMPTY, sw.HEAD, "window"])
    def test_an_axis_may_repeat(self, axis: str) -> None:
        assert lower((axis, axis, axis)).dims == lower((axis,)).dims * 3

    @pytest.mark.parametrize(
        ("annotation", "text"),
        [
            ((sw.BATCH, sw.EMPTY, (sw.HEAD, sw.EMBED)), "(BATCH, _, HEAD+EMBED)"),
            ((), "()"),
            (sw.ColumnWise(), "ColumnWise"),
            (sw.stacked(sw.ColumnWise), "stacked(ColumnWise)"),
            ((sw.merged((sw.HEAD, 2), (sw.HEAD_DIM, 3)),), "(HEAD*HEAD_DIM)"),
            (sw.ArraySpec((4,), jnp.float32, (sw.NORM,)), "(NORM)"),
        ],
    )
    def test_describe(self, annotation: Any, text: str) -> None:
        assert describe(annotation) == text


class TestModeOfALayout:
    @pytest.mark.parametrize(
        ("mode", "shape", "found"),
        [
            (1, (4, 1, 8), sw.MODE_DECODE),
            (1, (4, 2, 8), sw.MODE_TRAIN),
            (1, (1, 2, 1), sw.MODE_TRAIN),
            (-1, (4, 1), sw.MODE_DECODE),
            (0, (0,), sw.MODE_TRAIN),
            (sw.MODE_PREFILL, None, sw.MODE_PREFILL),
        ],
    )
    def test_an_integer_means_decode_where_that_dim_is_one(
        self, mode: Any, shape: Any, found: str
    ) -> None:
        assert mode_of_layout(mode, shape) == found

    def test_an_integer_needs_a_shape(self) -> None:
        with raises(sw.ShapeRequiredError, "dim", 1, "layout", fix="mode"):
            mode_of_layout(1, None)

    @pytest.mark.parametrize("mode", [2, 5, -3, -5])
    def test_an_integer_needs_its_dim(self, mode: int) -> None:
        with raises(sw.RankMismatchError, mode, "dim", "layout", "(4, 8)", fix="mode"):
            mode_of_layout(mode, (4, 8))
        assert mode_of_layout(-2, (1, 8)) == sw.MODE_DECODE
