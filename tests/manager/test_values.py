"""Values that can be placed: JAX and NumPy arrays of any dtype and size, numbers, and trees."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.manager.programs import AXIS_TYPES, assert_like, make_manager, numbers, sharded_over
from tests.raising import raises

Pair = collections.namedtuple("Pair", ["first", "second"])  # noqa: PYI024  JAX knows this type


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Any
    weights: Any
    step: Any = None


LEAVES = {
    "float32": numbers(8, 8),
    "bfloat16": jnp.asarray(numbers(8, 8), jnp.bfloat16),
    "int32": np.arange(64, dtype=np.int32).reshape(8, 8),
    "uint8": np.arange(64, dtype=np.uint8).reshape(8, 8),
    "bool": np.arange(64).reshape(8, 8) % 3 == 0,
    "complex64": (numbers(8, 8) + 1j).astype(np.complex64),
    "fortran order": np.asfortranarray(numbers(8, 8)),
}


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("leaf", list(LEAVES))
@pytest.mark.full(
    but=[
        "float32-auto-jit",
        "float32-explicit-jit",
        "bfloat16-auto-eager",
        "bfloat16-explicit-eager",
        "int32-explicit-jit",
        "uint8-auto-eager",
        "uint8-explicit-eager",
        "bool-explicit-jit",
        "complex64-explicit-eager",
        "fortran order-explicit-jit",
    ]
)
@pytest.mark.pairwise
def test_every_kind_of_array(leaf: str, kind: str, jit: bool) -> None:
    pm = make_manager(kind)
    value = LEAVES[leaf]
    with pm:

        def place(x):
            return sw.shard(x, sw.BATCH, sw.EMBED)

        actual = (jax.jit(place) if jit else place)(value)
    assert actual.dtype == value.dtype
    assert sharded_over(actual, pm.mesh, "dp", "tp")
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(value))


@pytest.mark.full(but=["auto-shape1", "explicit-shape2", "auto-shape0"])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_arrays_without_elements(kind: str, shape: tuple[int, ...]) -> None:
    """A dim of size 0 divides. XLA places such outputs, so the jitted part ends in a sum."""
    pm = make_manager(kind)
    actual = pm.shard(np.zeros(shape, np.int32), sw.BATCH, sw.EMBED)
    assert sharded_over(actual, pm.mesh, "dp", "tp")
    assert np.asarray(actual).shape == shape
    for wide in (np.int64, np.float64):  # their values are checked, and there are none
        assert pm.shard(np.zeros(shape, wide), sw.BATCH, sw.EMBED).shape == shape
    with pm:
        assert jax.jit(lambda x: sw.shard(x, sw.BATCH, sw.EMBED).sum())(actual) == 0
        assert jax.eval_shape(lambda x: sw.shard(x, sw.BATCH, sw.EMBED), actual).shape == shape


@pytest.mark.parametrize("operation", ["shard", "hint", "gather"])
@pytest.mark.parametrize(
    "value",
    [1.5, 3, True, np.float32(2.5), np.int8(4), np.array(7), jnp.asarray(1, jnp.bfloat16)],
    ids=repr,
)
@pytest.mark.full(
    but=[
        "1.5-shard",
        "1.5-gather",
        "3-gather",
        "True-hint",
        "np.float32(2.5)-hint",
        "np.int8(4)-hint",
        "array(7)-shard",
        "Array(1, dtype=bfloat16)-shard",
    ]
)
def test_scalars_and_numbers(value: Any, operation: str) -> None:
    pm = make_manager()
    place = getattr(pm, operation)
    for actual in (place(value, ()), jax.jit(lambda x: place(x, ()))(value)):
        assert actual.shape == ()
        assert actual == value
    with raises(sw.RankMismatchError, "BATCH", 1, 0, fix="EMPTY"):
        place(value, (sw.BATCH,))


def test_numpy_leaf_is_not_changed_nor_aliased() -> None:
    pm = make_manager()
    value = numbers(8, 8)
    kept = value.copy()
    actual = pm.shard(value, sw.BATCH, sw.EMBED)
    value[:] = 0
    np.testing.assert_array_equal(actual, kept)


@pytest.mark.parametrize("kind", list(AXIS_TYPES))
def test_placed_array_is_returned(kind: str) -> None:
    pm = make_manager(kind)
    once = pm.shard(numbers(8, 8), sw.BATCH, sw.EMBED)
    assert pm.shard(once, sw.BATCH, sw.EMBED) is once
    assert pm.hint(once, sw.BATCH, sw.EMBED) is once
    with pm:
        assert sw.shard(once, sw.BATCH, sw.EMBED) is once
    spelled_otherwise = jax.device_put(numbers(8, 8), jax.NamedSharding(pm.mesh, jax.P("dp", None)))
    assert pm.shard(spelled_otherwise, sw.BATCH, sw.EMPTY) is spelled_otherwise


TREES: dict[str, tuple[Any, Any]] = {
    "dict": ({"a": numbers(8, 4), "b": numbers(4)}, {"a": (sw.BATCH, sw.EMBED), "b": (sw.EMBED,)}),
    "list": ([numbers(8, 4), numbers(4)], [(sw.BATCH, sw.EMBED), (sw.EMBED,)]),
    "tuple": ((numbers(8, 4), numbers(8, 8)), (sw.BATCH, sw.EMBED)),
    "namedtuple": (Pair(numbers(8, 4), numbers(4)), Pair((sw.BATCH, sw.EMBED), (sw.EMBED,))),
    "dataclass": (Batch(numbers(8, 4), numbers(4)), Batch((sw.BATCH, sw.EMBED), (sw.EMBED,))),
    "one annotation for all": ({"a": numbers(8, 4), "b": [numbers(2, 8)]}, (sw.BATCH, sw.EMBED)),
    "prefix": (
        {"a": [numbers(8, 4), numbers(2, 8)], "b": numbers(4)},
        {"a": (sw.BATCH, sw.EMBED), "b": (sw.EMBED,)},
    ),
    "layout for all": ({"a": numbers(8, 4), "b": [numbers(2)]}, sw.Replicated),
    "None leaves": ({"a": numbers(8, 4), "b": None}, {"a": (sw.BATCH, sw.EMBED), "b": None}),
    "scalar beside arrays": (
        Batch(numbers(8, 4), numbers(4), np.int32(3)),
        Batch((sw.BATCH, sw.EMBED), (sw.EMBED,), ()),
    ),
    "empty tree": ({}, {}),
}


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("case", list(TREES))
@pytest.mark.full(
    but=[
        "dict-auto-jit",
        "dict-explicit-jit",
        "list-auto-eager",
        "tuple-explicit-jit",
        "namedtuple-auto-eager",
        "dataclass-explicit-jit",
        "one annotation for all-explicit-eager",
        "prefix-explicit-jit",
        "layout for all-explicit-eager",
        "None leaves-explicit-jit",
        "scalar beside arrays-auto-jit",
        "scalar beside arrays-explicit-eager",
    ]
)
@pytest.mark.pairwise
def test_trees(case: str, kind: str, jit: bool) -> None:
    tree, annotations = TREES[case]
    pm = make_manager(kind)
    with pm:

        def place(tree):
            return sw.shard(tree, annotations)

        actual = (jax.jit(place) if jit else place)(tree)
    assert_like(actual, jax.tree.map(jnp.asarray, tree))
    for leaf in jax.tree.leaves(actual):
        spec = ((), ("tp",), ("dp", "tp"))[leaf.ndim] if annotations is not sw.Replicated else ()
        assert sharded_over(leaf, pm.mesh, *spec), leaf.sharding


def test_prefix_annotation_over_axis_strings() -> None:
    pm = make_manager()
    actual = pm.shard({"a": numbers(8, 4), "b": numbers(2, 8)}, sw.BATCH, sw.EMBED)
    assert [leaf.sharding.spec for leaf in actual.values()] == [jax.P("dp", "tp")] * 2


def test_tree_reports_every_leaf_at_once() -> None:
    pm = make_manager()
    tree = {"good": numbers(8, 4), "odd": [numbers(8, 6), numbers(7, 4)], "flat": numbers(3)}
    with raises(
        sw.RankMismatchError, "BATCH", "EMBED", 2, 1, path="flat", fix="EMPTY", count=3
    ) as caught:
        pm.shard(tree, (sw.BATCH, sw.EMBED))
    assert [(p.path, p.error.__name__) for p in caught.value.problems] == [
        ("flat", "RankMismatchError"),
        ("odd/0", "IndivisibleError"),
        ("odd/1", "IndivisibleError"),
    ]


def test_structures_must_agree() -> None:
    pm = make_manager()
    with raises(sw.StrategyError, "tree", path="a", count=2):
        pm.shard({"a": numbers(8, 4)}, {"b": (sw.BATCH, sw.EMBED)})
    with raises(sw.StrategyError, "tree", "(8, 4)", path="a"):
        pm.shard({"a": numbers(8, 4)}, {"a": None})


def test_array_specs_bring_their_own_axes() -> None:
    pm = make_manager()
    spec = sw.ArraySpec((8, 4), np.float32, (sw.BATCH, sw.EMBED))
    assert pm.shard(numbers(8, 4), spec, role="activation").sharding.spec == jax.P("dp", "tp")
    stored = sw.ArraySpec((8, 4), np.float32, (sw.EMBED, sw.HEAD))
    assert pm.shard(numbers(8, 4), stored).sharding.spec == pm.shardings(stored).spec, (
        "a spec is a stored parameter"
    )
    with raises(sw.RankMismatchError, "(8, 8)", "ArraySpec", "(8, 4)"):
        pm.shard(numbers(8, 8), spec)
