"""Each wrong input is an error with a fix, in TransformerEngine's modules and in our blocks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raising import Facts, facts, raises

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
import shardwright.interop.transformer_engine as recipes
from shardwright.caches import create
from shardwright.errors import CacheError
from shardwright.interop.transformer_engine import flax as te
from shardwright.layers import attention_block, mlp_block, norm

X = jnp.ones((2, 7, 8))
BATCH_FIRST = {"transpose_batch_sequence": False}
ATTENTION = attention_block.AttentionConfig(embed=8, heads=2)


def heads(*inputs: Any, count: int = 2, **fields: Any) -> Any:
    module = te.MultiHeadAttention(4, count, **BATCH_FIRST, **fields)
    return jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))


def init(module: Any, x: Any = X) -> Any:
    return jax.eval_shape(lambda: module.init(jax.random.key(0), x))


def past_the_cache() -> Any:
    cache = create.init("dense", batch=2, capacity=4, kv_heads=2, head_dim=4)
    params = jax.tree.map(
        lambda spec: jnp.ones(spec.shape),
        attention_block.specs(ATTENTION),
        is_leaf=lambda node: isinstance(node, sw.ArraySpec),
    )
    return attention_block.apply(ATTENTION, params, X, state=cache)


# What is wrong -> (the module, the block, what the errors say).
CASES: dict[str, tuple[Any, Any, str, str]] = {
    "rank": (
        lambda: heads(X[0], X[0]),
        lambda: attention_block.apply(ATTENTION, {}, X[0]),
        facts("(7, 8)", path="inputs_q"),
        facts("(7, 8)", path="x"),
    ),
    "rank-of-keys": (
        lambda: heads(X, X[0]),
        lambda: attention_block.apply(ATTENTION, {}, X[..., 0]),
        facts("(7, 8)", path="inputs_kv"),
        facts("(2, 7)", path="x"),
    ),
    "rank-of-mlp": (
        lambda: init(te.LayerNormMLP(12), X[0, 0, 0]),
        lambda: mlp_block.apply(mlp_block.MlpConfig(embed=8, hidden=12), {}, X[0]),
        facts(path="inputs"),
        facts("(7, 8)", path="x"),
    ),
    "axis": (
        lambda: init(te.DenseGeneral(3, axis=5)),
        lambda: norm.rms_norm(X, jnp.ones(7)),
        facts(5, "(2, 7, 8)", path="axis"),
        facts("(7,)", "(2, 7, 8)", path="scale"),
    ),
    "heads": (
        lambda: heads(X, X, count=4, num_gqa_groups=3),
        lambda: attention_block.AttentionConfig(embed=8, heads=4, kv_heads=3),
        facts(3, "num_attention_heads", 4, path="num_gqa_groups"),
        facts("kv_heads", 3, "heads", 4),
    ),
    "hidden-size": (
        lambda: init(te.TransformerLayer(hidden_size=9)),
        lambda: attention_block.AttentionConfig(embed=9, heads=8),
        facts("num_attention_heads", 8, 9, path="hidden_size"),
        facts("heads", 8, "embed", 9, fix="head_dim"),
    ),
    "activation": (
        lambda: init(te.LayerNormMLP(12, activations=("gelo",))),
        lambda: mlp_block.MlpConfig(embed=8, hidden=12, activations=("gelo",)),
        facts("gelo", path="activations", fix="gelu"),
        facts("gelo", path="activations", fix="gelu"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error_of_module_and_block(name: str) -> None:
    module, block, *messages = CASES[name]
    for call, message in zip((module, block), messages, strict=True):
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)


@pytest.mark.full
def test_groups_are_positive() -> None:
    with raises(sw.AttentionError, 0, "num_attention_heads", 4, path="num_gqa_groups"):
        heads(X, X, count=4, num_gqa_groups=0)


def test_append_past_the_cache_of_a_block() -> None:
    """`test_decode.py` has the same for the module."""
    with raises(CacheError, 0, 1, 2) as caught:
        past_the_cache()
    assert "fix  " in str(caught.value)
    # A compiled program cannot raise: the cache does not grow, and the tokens add nothing.
    y, cache = jax.jit(past_the_cache)()
    assert not np.asarray(y).any()
    assert not np.asarray(cache.length).any()


Q = jnp.ones((1, 3, 2, 4))
ONES = jnp.ones((1, 1, 3, 3))


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (ONES[:, 0], facts("(1, 3, 3)", "(1, 2, 3, 3)", path="mask", fix="q_length")),
        (
            ONES[..., :2].astype(jnp.uint8),
            facts("(1, 1, 3, 2)", "(1, 2, 3, 3)", path="mask", fix="q_length"),
        ),
        (ONES * -1e9, facts("float32", path="mask")),
        (2 * ONES.astype(jnp.int32), facts(0, 1, path="mask")),
    ],
)
def test_masks_of_modules(mask: Any, says: Facts) -> None:
    module = te.DotProductAttention(4, 2, attn_mask_type="padding", **BATCH_FIRST)
    with raises(sw.ShardingError, says):
        module.apply({}, Q, Q, Q, mask)


# Module, size of its input -> what the error says. Every size but one is a multiple of 32.
ODD_SIZES: dict[str, tuple[Any, int, str]] = {
    "dense-inputs": (
        te.DenseGeneral(32),
        40,
        facts("(1, 32, 40)", 32, 40, path="kernel", dim=2, fix="current"),
    ),
    "dense-outputs": (te.DenseGeneral(40), 32, facts("(32, 40)", 32, 40, fix="current")),
    "norm-dense": (
        te.LayerNormDenseGeneral((2, 40)),
        32,
        facts("(32, 2, 40)", 32, 40, fix="current"),
    ),
    "mlp": (
        te.LayerNormMLP(40),
        32,
        facts("(1, 32, 40)", 32, 40, path="wo_kernel", dim=2, fix="current"),
    ),
    "heads": (
        te.MultiHeadAttention(20, 2, **BATCH_FIRST),
        32,
        facts("(1, 32, 40)", 32, 40, path="out/kernel", dim=2, fix="current"),
    ),
    "layer": (
        te.TransformerLayer(32, 48, 1, hidden_dropout=0.0, attention_dropout=0.0),
        32,
        facts("(1, 32, 48)", 32, 48, path="mlp/wo_kernel", dim=2, fix="current"),
    ),
}


@pytest.mark.full(but=["dense-inputs", "norm-dense", "heads"])
@pytest.mark.parametrize("name", ODD_SIZES)
def test_sizes_without_whole_blocks(name: str) -> None:
    """The error of MXFP8 names the matmul and the dim."""
    module, size, message = ODD_SIZES[name]
    inputs = (jnp.ones((1, 32, size)),) * (2 if name == "heads" else 1)

    def loss(key: Any) -> Any:
        variables = nn.unbox(module.init(key, *inputs))
        apply = lambda variables: jnp.sum(  # noqa: E731
            jnp.stack(jax.tree.leaves(module.apply(variables, *inputs)))
        )
        return jax.grad(apply)(variables)

    recipe = recipes.recipe.MXFP8BlockScaling()
    with (
        recipes.autocast(enabled=True, recipe=recipe),
        raises(sw.LayerError, message) as caught,
    ):
        jax.eval_shape(loss, jax.random.key(0))
    assert "multiples of 32" in str(caught.value)


def test_a_mask_is_never_of_both_kinds() -> None:
    """Attention of this library refuses integers, and a bool mask of a module hides where True."""
    with raises(sw.AttentionError, "uint8", path="mask", fix="bool"):
        sw.attention.dot_product_attention(Q, Q, Q, mask=ONES.astype(jnp.uint8), mode=sw.MODE_TRAIN)
    q = jnp.asarray(np.random.default_rng(1).standard_normal(Q.shape), jnp.float32)
    hidden = np.zeros((1, 1, 3, 3), bool)
    hidden[..., 1] = True
    module = te.DotProductAttention(4, 2, attn_mask_type="padding", **BATCH_FIRST)
    attend = functools.partial(sw.attention.dot_product_attention, mode=sw.MODE_TRAIN)
    ours = jax.jit(lambda q, mask: attend(q, q, q, mask=mask))(q, ~hidden)
    for mask in (hidden, hidden.astype(np.uint8)):
        own = jax.jit(lambda q, mask: module.apply({}, q, q, q, mask))(q, mask)
        np.testing.assert_allclose(own, ours, atol=1e-6)
