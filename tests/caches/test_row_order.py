"""Orders of rows are permutations, and interleaved ones fill the shards evenly."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.caches import RowOrder
from shardwright.errors import CacheError
from tests.raising import raises

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


def test_rows_that_do_not_divide() -> None:
    with raises(CacheError, 12, 5, 2, path="order", fix=5):
        RowOrder(block=5, shards=2).check(12)


@pytest.mark.parametrize(
    ("name", "value"), [("block", 0), ("shards", 0), ("block", 2.0), ("block", True)]
)
def test_sizes_of_an_order(name: str, value: Any) -> None:
    with raises(CacheError, name, value, path=name, fix=name):
        RowOrder(**{name: value})
