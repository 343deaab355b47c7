"""Decoding equals the forward pass over all tokens, where TransformerEngine's does not."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.raising import raises

pytest.importorskip("flax.linen")

import flax.linen as nn

import shardwright as sw
from shardwright.errors import CacheError
from shardwright.interop.transformer_engine import flax as te

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 8)), jnp.float32)
CAUSAL = jnp.asarray(np.triu(np.ones((2, 1, 7, 7), np.uint8), 1))


def decoded(module: Any, x: Any, **options: Any) -> Any:
    """Return the parameters, the cache, and the outputs of one call per token."""
    dim = 0 if module.transpose_batch_sequence else 1
    fixed = {"decode": True, "deterministic": True}
    variables = jax.jit(lambda x: nn.unbox(module.init(jax.random.key(0), x, x, **fixed)))(x)

    @jax.jit
    def step(cache: Any, token: Any) -> Any:
        own = {"params": variables["params"], "cache": cache}
        (row, _), state = module.apply(own, token, token, mutable=["cache"], **fixed, **options)
        return row, state["cache"]

    cache, rows = variables["cache"], []
    for at in range(x.shape[dim]):
        row, cache = step(cache, jax.lax.slice_in_dim(x, at, at + 1, axis=dim))
        rows.append(row)
    return variables["params"], cache, np.concatenate(rows, axis=dim)


def at_once(module: Any, params: Any, x: Any, *mask: Any) -> Any:
    """Return the outputs of one call for all tokens, without a cache."""

    @jax.jit
    def run(params: Any, x: Any) -> Any:
        return module.apply({"params": params}, x, x, *mask, deterministic=True)[0]

    return run(params, x)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_rotary_pos_emb": True},
        {"num_gqa_groups": 1, "fuse_qkv_params": False},
        {"window_size": (2, 0)},
    ],
)
@pytest.mark.full
def test_decode_equals_causal_forward(fields: Any) -> None:
    """TransformerEngine rotates each token as the first one, and loses the mask of the cache."""
    module = te.MultiHeadAttention(4, 2, transpose_batch_sequence=False, **fields)
    params, cache, rows = decoded(module, X)
    np.testing.assert_allclose(rows, at_once(module, params, X), atol=1e-5)
    assert int(cache["cache_index"]) == 7
    assert cache["cached_key"].shape == (2, 7, module.num_gqa_groups, 4)


@pytest.mark.full
def test_decode_with_a_padding_mask() -> None:
    """The mask hides keys in addition to those after the token."""
    options = {"attn_mask_type": "padding", "transpose_batch_sequence": False}
    mask = jnp.zeros((2, 1, 1, 7), jnp.uint8).at[0, 0, 0, 0].set(1)
    module = te.MultiHeadAttention(4, 2, **options)
    params, _, rows = decoded(module, X, mask=mask)
    causal = jnp.asarray(np.triu(np.ones((7, 7), np.uint8), 1))
    expected = at_once(module, params, X, jnp.maximum(mask, causal))
    np.testing.assert_allclose(rows[:, 1:], expected[:, 1:], atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"enable_rotary_pos_emb": True, "enable_relative_embedding": False},
        {"window_size": (2, 1)},
    ],
)
@pytest.mark.ci
def test_decoder_layer_decodes(fields: Any) -> None:
    """Cross-attention too has the position of the token, for its rotation and its window."""
    layer = te.TransformerLayer(
        hidden_size=8,
        mlp_hidden_size=12,
        num_attention_heads=2,
        layer_type=te.TransformerLayerType.DECODER,
        **fields,
    )
    encoded, cross = X[:, :5], jnp.zeros((2, 1, 7, 5), jnp.uint8).at[0, :, :, 4].set(1)
    fixed = {"deterministic": True, "max_decode_length": 7}
    init = functools.partial(layer.init, decode=True, **fixed)
    variables = nn.unbox(jax.jit(init)(jax.random.key(0), X, encoded, None, cross))
    step = functools.partial(layer.apply, decode=True, mutable=["cache"], **fixed)
    step, whole = jax.jit(step), jax.jit(functools.partial(layer.apply, deterministic=True))
    params, cache, rows = variables["params"], variables["cache"], []
    for at in range(7):
        own = {"params": params, "cache": cache}
        row, state = step(own, X[:, at : at + 1], encoded, None, cross[:, :, :1])
        cache = state["cache"]
        rows.append(row)
    expected = whole({"params": params}, X, encoded, None, cross)
    np.testing.assert_allclose(jnp.concatenate(rows, axis=1), expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.ci
def test_decode_past_the_cache() -> None:
    module = te.MultiHeadAttention(4, 2, transpose_batch_sequence=False)
    init = jax.jit(lambda x: nn.unbox(module.init(jax.random.key(0), x, x, decode=True)))
    variables = init(X)
    variables["cache"]["cache_index"] = jnp.array(7, jnp.int32)
    token = X[:, :1]

    def step(variables: Any) -> Any:
        return module.apply(variables, token, token, decode=True, mutable=["cache"])[0][0]

    with raises(CacheError, 7, 1, path="cache_index"):
        step(variables)
    assert np.isnan(jax.jit(step)(variables)).all()


@pytest.mark.full
def test_decode_of_a_layer_past_the_cache() -> None:
    layer = te.TransformerLayer(
        hidden_size=8,
        mlp_hidden_size=12,
        num_attention_heads=2,
        layer_type=te.TransformerLayerType.DECODER,
    )
    fixed = {"deterministic": True, "max_decode_length": 7, "decode": True}
    encoded, cross = X[:, :5], jnp.zeros((2, 1, 7, 5), jnp.uint8)
    init = lambda x: layer.init(jax.random.key(0), x, encoded, None, cross, **fixed)  # noqa: E731
    variables = nn.unbox(jax.jit(init)(X))
    variables["cache"] = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, 7) if leaf.ndim == 0 else leaf, variables["cache"]
    )

    def step(variables: Any) -> Any:
        given = (X[:, :1], encoded, None, cross[:, :, :1])
        return layer.apply(variables, *given, mutable=["cache"], **fixed)[0]

    with raises(CacheError, 7, 1, path="cache_index"):
        step(variables)
    assert np.isnan(jax.jit(step)(variables)).all()


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("mask_type", ["padding", "causal", "padding_causal"])
@pytest.mark.full(but=["padding-False"])
def test_decode_with_every_mask_type(mask_type: str, is_masked: bool) -> None:
    """TransformerEngine differs by up to 4.2, except for "padding" without a mask."""
    module = te.MultiHeadAttention(4, 2, attn_mask_type=mask_type, transpose_batch_sequence=False)
    nothing_hidden = jnp.zeros((2, 1, 1, 7), jnp.uint8)
    params, _, rows = decoded(module, X, mask=nothing_hidden if is_masked else None)
    np.testing.assert_allclose(rows, at_once(module, params, X, CAUSAL), atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{"layernorm_type": "rmsnorm", "use_bias": True}, {"softmax_type": "off_by_one"}],
)
@pytest.mark.full
def test_decode_with_length_first(fields: Any) -> None:
    module = te.MultiHeadAttention(
        4, 2, transpose_batch_sequence=True, enable_rotary_pos_emb=True, **fields
    )
    x = X.swapaxes(0, 1)
    params, _, rows = decoded(module, x)
    np.testing.assert_allclose(rows, at_once(module, params, x), atol=1e-5)


def test_wrong_mask_of_a_cache() -> None:
    module = te.MultiHeadAttention(4, 2, attn_mask_type="padding", transpose_batch_sequence=False)
    mask = jnp.zeros((2, 7, 7), jnp.uint8)
    with raises(sw.RankMismatchError, "(2, 7, 7)", "(2, 2, 7, 7)", path="mask", fix="q_length"):
        jax.eval_shape(lambda x: module.init(jax.random.key(0), x, x, mask, decode=True), X)
