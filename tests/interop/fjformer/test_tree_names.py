"""Trees by path."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright as sw
from shardwright.interop.fjformer import (
    flatten_tree,
    get_weight_decay_mask,
    named_tree_map,
    tree_apply,
    tree_path_to_string,
)
from tests.raising import raises


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: Any
    params: Any


TREE = State(step=0, params={"blocks": [{"q": 1}, {"q": 2}], "norm": 3})


def test_star_import_gives_functions_alone() -> None:
    names: dict[str, Any] = {}
    exec("from shardwright.interop.fjformer import *", names)
    del names["__builtins__"]
    assert len(names) == 13
    assert {value.__module__.partition(".")[0] for value in names.values()} == {"shardwright"}


def test_path_of_every_kind_of_key() -> None:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(TREE)[0]]
    assert [tree_path_to_string(path) for path in paths] == [
        ("step",),
        ("params", "blocks", "0", "q"),
        ("params", "blocks", "1", "q"),
        ("params", "norm"),
    ]
    assert tree_path_to_string(paths[1], sep="/") == "params/blocks/0/q"
    assert tree_path_to_string(paths[1], ".") == "params.blocks.0.q"
    assert tree_path_to_string((jax.tree_util.FlattenedIndexKey(2), jax.tree_util.DictKey(7))) == (
        "2",
        "7",
    )
    assert tree_path_to_string((), sep="/") == ""


def test_flatten_keeps_every_leaf() -> None:
    assert flatten_tree(TREE, sep="/") == {
        "step": 0,
        "params/blocks/0/q": 1,
        "params/blocks/1/q": 2,
        "params/norm": 3,
    }
    assert flatten_tree({"a": {"b": 1}}) == {("a", "b"): 1}
    assert flatten_tree({"a": (1, 2)}, is_leaf=lambda node: isinstance(node, tuple), sep="/") == {
        "a": (1, 2)
    }


def test_duplicate_names_are_an_error() -> None:
    clash = {"a/b": 1, "a": {"b": 2}}
    with raises(sw.StrategyError, "a/b"):
        flatten_tree(clash, sep="/")
    assert flatten_tree(clash, sep="|") == {"a/b": 1, "a|b": 2}


def test_named_map_of_several_trees() -> None:
    actual = named_tree_map(
        lambda name, x, y: (name, x + y), {"a": 1, "b": [2]}, {"a": 10, "b": [20]}, sep="/"
    )
    assert actual == {"a": ("a", 11), "b": [("b/0", 22)]}
    assert named_tree_map(lambda name, x: name, {"a": [1]}) == {"a": [("a", "0")]}
    assert named_tree_map(
        lambda name, x: len(x), {"a": [1, 2]}, is_leaf=lambda node: isinstance(node, list)
    ) == {"a": 2}


def test_tree_apply() -> None:
    fns = State(
        step=lambda x: x + 1, params={"blocks": [{"q": str}, {"q": float}], "norm": lambda x: -x}
    )
    assert tree_apply(fns, TREE) == State(
        step=1, params={"blocks": [{"q": "1"}, {"q": 2.0}], "norm": -3}
    )


@pytest.mark.parametrize(
    ("fns", "tree", "says"),
    [
        ({"a": str, "b": str}, {"a": 1, "c": 2}, "pytree structure error"),
        ({"a": str}, {"a": {"b": 1}}, "pytree structure error"),
        ([str], (1,), "pytree structure error"),
        ({}, dict.fromkeys("abcde", 1), "pytree structure error"),
    ],
)
def test_tree_apply_structure_mismatch(fns: Any, tree: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tree_apply(fns, tree)


PARAMS = {
    "dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
    "norm": {"scale": jnp.ones(2)},
}


def test_weight_decay_mask() -> None:
    mask = get_weight_decay_mask(["bias$", "norm/.*scale"])
    assert mask(PARAMS) == {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    assert get_weight_decay_mask([])(PARAMS) == {
        "dense": {"kernel": True, "bias": True},
        "norm": {"scale": True},
    }


def test_weight_decay_mask_in_optax() -> None:
    tx = optax.add_decayed_weights(0.5, mask=get_weight_decay_mask(("bias", "norm")))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), tx.init(PARAMS), PARAMS)
    np.testing.assert_array_equal(updates["dense"]["kernel"], np.full((2, 2), 0.5))
    np.testing.assert_array_equal(updates["dense"]["bias"], np.zeros(2))
    np.testing.assert_array_equal(updates["norm"]["scale"], np.zeros(2))


def test_invalid_exclusions() -> None:
    with raises(sw.StrategyError, "bias", fix="bias"):
        get_weight_decay_mask("bias")
    with raises(sw.StrategyError, "regular", "expression"):
        get_weight_decay_mask(["bias", "(norm"])
