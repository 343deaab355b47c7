"""Orders of rows are permutations, and interleaved ones fill the shards evenly."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.caches import RowOrder
from shardwright.errors import CacheError
from tests.raising import Facts, facts, raises

ORDERS = [
    RowOrder(),
    RowOrder(block=1, shards=4),
    RowOrder(block=3, shards=2),
    RowOrder(block=12, shards=1),
    RowOrder(block=2, shards=3),
]


@pytest.mark.parametrize("order", ORDERS)
def test_row_and_place_are_inverse(order: RowOrder) -> None:
    order.check(12)
    places = np.arange(12)
    rows = np.asarray(order.row(jnp.asarray(places), 12))
    assert sorted(rows) == list(places)
    np.testing.assert_array_equal(order.place(jnp.asarray(rows), 12), places)
    assert [order.row(place, 12) for place in range(12)] == rows.tolist()


def test_contiguous_rows_are_positions() -> None:
    assert [RowOrder().row(place, 5) for place in range(5)] == [0, 1, 2, 3, 4]


def test_blocks_go_to_the_shards_in_turn() -> None:
    order = RowOrder(block=2, shards=3)
    assert [order.row(place, 12) // 4 for place in range(12)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    for length in range(13):
        rows = np.array([order.row(place, 12) for place in range(length)], int)
        on_shards = np.bincount(rows // 4, minlength=3)
        assert on_shards.max() - on_shards.min() <= 2


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            RowOrder(block=5, shards=2),
            facts(12, 5, 2, path="order", fix="5"),
        ),
        (RowOrder(block=0, shards=2), facts("block", 0, fix="block")),
        (RowOrder(block=1, shards=0), facts("shards", 0, fix="shards")),
    ],
)
def test_rows_that_do_not_divide(order: RowOrder, message: Facts) -> None:
    with raises(CacheError, message):
        order.check(12)
