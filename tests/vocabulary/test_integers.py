"""The one reader of integers: every room accepts NumPy's integers as well as Python's."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright import attention, caches, serving
from shardwright.attention import masks
from shardwright.errors import LayerError, ShardingError
from shardwright.mesh.text import parse_mesh, resolve_sizes
from shardwright.testing import virtual_devices
from shardwright.vocabulary.annotations import PartOf
from shardwright.vocabulary.integers import as_integer, quoted, read_integer
from tests.raising import raises

SPEC = sw.ArraySpec((8, 4), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE))
CACHE = {"batch": 2, "capacity": 8, "kv_heads": 2, "head_dim": 4}

# What takes an integer, and returns something that shows it.
READERS: dict[str, Callable[[Any], Any]] = {
    "merged": lambda four: sw.merged((sw.HEAD, four)),
    "stacked": lambda four: sw.stacked(SPEC, four),
    "part": lambda four: PartOf(
        annotation=(sw.LAYERS, *[sw.EMPTY] * 4), shape=(8,) * 5, dims=(four, None)
    ),
    "mesh text": lambda four: parse_mesh({"tp": four}),
    "devices": lambda four: resolve_sizes(parse_mesh("tp:-1"), four),
    "strategy": lambda four: sw.Strategy(mesh={"tp": four}, rules={"head": "tp"}).to_data(),
    "layout mode": lambda four: sw.DynamicShardingAxes([sw.BATCH] * 5, mode=four),
    "chunk": lambda four: masks.chunk(four).rules,
    "window": lambda four: masks.window(left=four).rules,
    "cache": lambda four: caches.init("dense", **CACHE | {"batch": four}).spec,
    "row order": lambda four: caches.init("dense", **CACHE, order=caches.RowOrder(block=four)).spec,
    "pages": lambda four: caches.init("paged", **CACHE, page_size=four, pages=four).spec,
    "reorder": lambda four: (
        caches.init("dense", **CACHE | {"batch": 4}).reorder([0] * 4, group=four).refused.tolist()
    ),
    "next_positions": lambda four: attention.next_positions(
        caches.init("dense", **CACHE), q_length=four
    ).tolist(),
    "sampling": lambda four: serving.Sampling(top_k=four, seed=four),
    "request": lambda four: serving.Request(prompt=[1], max_new_tokens=four),
    "virtual devices": virtual_devices,
}


@pytest.mark.parametrize("name", READERS)
def test_numpy_integers_are_integers(name: str) -> None:
    expected = READERS[name](4)
    for kind in (np.int32, np.int64, np.uint8):
        given = READERS[name](kind(4))
        assert given == expected
        # A NumPy integer left inside would print as np.int32(4).
        assert repr(given) == repr(expected)


@pytest.mark.parametrize("name", READERS)
def test_bools_are_not_integers(name: str) -> None:
    with pytest.raises(ShardingError):
        READERS[name](True)


def test_arrays_are_not_integers() -> None:
    for value in (np.array(4), jnp.int32(4), np.array([4]), np.True_, 4.0, "4", None):
        assert as_integer(value) is None
    with raises(LayerError, "int32", fix="size"):
        jax.jit(lambda size: read_integer("size", size, error=LayerError))(4)


@pytest.mark.parametrize(
    ("value", "limits", "says"),
    [
        (2.5, {}, "size must be a positive integer, got 2.5\n  fix   pass size=2"),
        (np.float32(8), {}, "got np.float32(8.0)\n  fix   pass size=8"),
        (Fraction(7, 2), {}, "got Fraction(7, 2)\n  fix   pass size=3"),
        (Decimal(3), {}, "got Decimal('3')\n  fix   pass size=1"),
        ("16", {}, "got '16'\n  fix   pass size=16"),
        ("9" * 5000, {}, "fix   pass size=1"),
        ("four", {}, "got 'four'\n  fix   pass size=1"),
        (float("nan"), {}, "got nan\n  fix   pass size=1"),
        (-3, {}, "got -3\n  fix   pass size=1"),
        (True, {}, "got True\n  fix   pass size=1"),
        (-1, {"least": 0}, "size must be a non-negative integer, got -1\n  fix   pass size=0"),
        (1, {"least": 2}, "size must be an integer of at least 2, got 1\n  fix   pass size=2"),
        (9, {"most": 8}, "size must be an integer from 1 to 8, got 9\n  fix   pass size=8"),
        (0, {"fix": "pass the batch"}, "got 0\n  fix   pass the batch"),
    ],
)
def test_message_names_the_nearest_integer(value: Any, limits: Any, says: str) -> None:
    with pytest.raises(LayerError) as caught:
        read_integer("size", value, error=LayerError, **limits)
    assert str(caught.value).endswith(says)


def test_long_values_are_cut() -> None:
    with raises(LayerError, "a word", fix="size") as caught:
        read_integer("size", ["a word"] * 1000, error=LayerError)
    assert caught.value.problems[0].error is LayerError
    assert quoted("x" * 100) == f"'{'x' * 74}[...]"
