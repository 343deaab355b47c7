"""Rematerialization policies by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardwright as sw
from shardwright.interop.easydel import get_gradient_checkpoint_policy
from tests.raising import raises


def kept(policy: Any) -> list[tuple[int, ...]]:
    """Return the shapes that a block of two matrix products keeps, without its arguments."""

    def block(x: Any, w: Any) -> Any:
        inner = checkpoint_name(jnp.sin(x @ w), "inner")
        return jnp.sin(inner @ w.T)

    x, w = jnp.ones((3, 4)), jnp.ones((4, 5))
    _, pullback = jax.vjp(jax.checkpoint(block, policy=policy), x, w)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback) if getattr(leaf, "ndim", 0) == 2]
    return sorted(
        shape for shape in shapes if shape not in {(3, 4), (4, 5)} or shapes.count(shape) > 1
    )


@pytest.mark.parametrize(
    "name",
    [
        "dots_saveable",
        "checkpoint_dots",
        "dots_with_no_batch_dims_saveable",
        "checkpoint_dots_with_no_batch_dims",
    ],
)
def test_policies_of_dots(name: str) -> None:
    assert (3, 5) in kept(get_gradient_checkpoint_policy(name))


def test_nothing_and_everything() -> None:
    assert (3, 5) not in kept(get_gradient_checkpoint_policy("nothing_saveable"))
    assert (3, 5) in kept(get_gradient_checkpoint_policy("everything_saveable"))


def test_policy_factories() -> None:
    only = get_gradient_checkpoint_policy("save_only_these_names")
    assert (3, 5) in kept(only("inner"))
    assert (3, 5) not in kept(only("another"))
    both = get_gradient_checkpoint_policy("save_from_both_policies")
    assert (3, 5) in kept(both(only("inner"), get_gradient_checkpoint_policy("nothing_saveable")))
    assert (3, 5) not in kept(get_gradient_checkpoint_policy("save_any_names_but_these")("inner"))
    assert callable(get_gradient_checkpoint_policy("save_anything_except_these_names")("inner"))


def test_unknown_policy() -> None:
    with raises(sw.LayerError, "checkpoint", "policy", "nothing_savable", fix="nothing_saveable"):
        get_gradient_checkpoint_policy("nothing_savable")
    with raises(sw.LayerError, "checkpoint", "policy", fix="everything_saveable"):
        get_gradient_checkpoint_policy("")
