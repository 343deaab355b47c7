"""The attention block: equal to NumPy, equal on every mesh, equal token by token with a cache."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import RopeFrequencies, attention_block
from shardwright.layers.dtypes import Dtypes
from shardwright.layers.norm import RMS
from shardwright.layers.placement import RESIDUAL
from tests.layers import blocks
from tests.raising import facts, raises

CONFIG = attention_block.AttentionConfig(
    embed=16, heads=8, kv_heads=4, head_dim=4, qk_norm=RMS, window=(5, 0), softcap=5.0
)
X = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)
# Two packed sequences and a third of one token, with positions that start again.
SEGMENTS = np.repeat(np.array([[0, 0, 0, 1, 1, 1, 1, 2]]), 8, 0)
POSITIONS = np.repeat(np.array([[0, 1, 2, 0, 1, 2, 3, 0]]), 8, 0)


def init(config: attention_block.AttentionConfig) -> Any:
    return blocks.random_params(attention_block.specs(config))


def packed(params: Any, x: Any) -> Any:
    return attention_block.apply(CONFIG, params, x, segment_ids=SEGMENTS, positions=POSITIONS)[0]


@functools.cache
def unsharded() -> Any:
    return blocks.values_and_gradients(packed, init(CONFIG), X)


def by_numpy(params: Any, x: Any) -> np.ndarray:
    """Return the packed block in float64, head by head."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)

    def norm(x: Any, scale: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def rotate(x: Any) -> Any:
        angles = POSITIONS[..., None, None] * 10_000.0 ** (-np.arange(2) / 2)
        turned = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], -1)

    x = norm(np.asarray(x, np.float64), params["norm"]["scale"])
    q, k, v = (
        np.einsum("ble,ehd->blhd", x, params[n]["kernel"]) for n in ("query", "key", "value")
    )
    q = rotate(norm(q, params["query_norm"]["scale"]))
    k = np.repeat(rotate(norm(k, params["key_norm"]["scale"])), 2, axis=2)
    scores = 5 * np.tanh(np.einsum("bqhd,bkhd->bhqk", q, k) / 2 / 5)
    distance = POSITIONS[:, :, None] - POSITIONS[:, None, :]
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (distance >= 0) & (distance <= 5)
    weights = np.exp(scores) * visible[:, None]
    weights /= weights.sum(-1, keepdims=True)
    rows = np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(v, 2, axis=2))
    return np.einsum("bqhd,hde->bqe", rows, params["out"]["kernel"])


def test_values_of_numpy() -> None:
    np.testing.assert_allclose(unsharded()[0][1], by_numpy(init(CONFIG), X), rtol=2e-5, atol=2e-5)


@blocks.cases()
@pytest.mark.alternate
def test_sharded_equals_unsharded(preset: str, kind: str) -> None:
    inputs = (init(CONFIG), attention_block.specs(CONFIG), X, RESIDUAL)
    y = blocks.check_sharded("attention_block", packed, inputs, unsharded(), preset, kind)
    with blocks.make_manager(preset, kind) as pm:
        assert y.sharding.is_equivalent_to(pm.sharding(RESIDUAL, shape=X.shape), 3)


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("fsdp_tp_sp", "explicit"),
        pytest.param("fsdp_tp_sp", "auto", marks=pytest.mark.full),
        pytest.param("fsdp_tp", "mixed", marks=pytest.mark.full),
        pytest.param("tensor", "auto", marks=pytest.mark.full),
    ],
)
def test_prefill_and_decode_equal_one_call(preset: str, kind: str) -> None:
    """Five tokens at once, one of them padding in each slot, then the others one by one."""
    params = init(CONFIG)
    whole = np.asarray(jax.jit(lambda p, x: attention_block.apply(CONFIG, p, x)[0])(params, X))
    pm = blocks.make_manager(preset, kind, mode="prefill")
    decode = pm.for_mode("decode")
    valid = np.ones((8, 5), bool)
    valid[:, 4] = False  # the last row of the prompt is padding

    def step(params: Any, x: Any, cache: Any, valid: Any = None) -> Any:
        return attention_block.apply(CONFIG, params, x, state=cache, valid=valid)

    with decode:
        cache = attention_block.init_cache(CONFIG, batch=8, capacity=12)
    with pm:
        stored = pm.shard(params, attention_block.specs(CONFIG), role="param")
        y, cache = jax.jit(step)(stored, X[:, :5], cache, valid)
        rows = [np.asarray(y)[:, :4]]
    with decode:
        run = jax.jit(step, donate_argnums=2)
        for at in range(4, 8):
            y, cache = run(stored, X[:, at : at + 1], cache)
            rows.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(rows, 1), whole, rtol=2e-5, atol=2e-5)
    assert cache.length.tolist() == [8] * 8


def test_dtypes_of_result_and_cache() -> None:
    dtypes = Dtypes(compute="bfloat16", output="float32", cache="float16")
    config = attention_block.AttentionConfig(
        embed=16, heads=2, rope_theta=None, norm=None, bias=True, dtypes=dtypes
    )
    params = init(config)
    assert params["key"]["bias"].shape == (2, 8)
    cache = attention_block.init_cache(config, batch=8, capacity=8)
    assert cache.buffers["k"].dtype == np.float16

    @jax.jit
    def both(params: Any, x: Any, cache: Any) -> Any:
        with_cache, _ = attention_block.apply(config, params, x, state=cache)
        return attention_block.apply(config, params, x)[0], with_cache

    y, with_cache = both(params, X, cache)
    assert y.dtype == with_cache.dtype == np.float32
    blocks.assert_close(with_cache, y, rtol=3e-2)


def test_dropout_needs_a_key() -> None:
    config = attention_block.AttentionConfig(embed=16, heads=2, dropout=0.5)

    @jax.jit
    def both(params: Any, x: Any) -> Any:
        keys = {"dropout": jax.random.key(0)}
        dropped, _ = attention_block.apply(config, params, x, keys=keys)
        return attention_block.apply(config, params, x)[0], dropped

    y, dropped = both(init(config), X)
    assert not np.allclose(y, dropped)


def test_bad_input() -> None:
    make = attention_block.AttentionConfig
    cache = attention_block.init_cache(CONFIG, batch=8, capacity=8)

    def apply(**given: Any) -> Any:
        return attention_block.apply(CONFIG, {}, X, **given)

    cases: list[tuple[Any, str]] = [
        (lambda: make(embed=16, heads=3), facts("heads", 3, "embed", 16, fix="head_dim")),
        (
            lambda: make(embed=4, heads=5, rope_theta=RopeFrequencies(values=(1.0,) * 9)),
            facts("heads", 5, "embed", 4, count=1),
        ),
        (lambda: make(embed=16, heads=4, kv_heads=3), facts("kv_heads", 3, "heads", 4)),
        (lambda: make(embed=16, heads=0), facts(0, path="heads", fix="heads")),
        (lambda: make(embed=16, heads=4, dropout=2), facts(2, "[0, 1)", path="dropout")),
        (lambda: attention_block.apply(CONFIG, {}, X[..., :4]), facts("(8, 8, 4)", path="x")),
        (
            lambda: apply(state=cache, segment_ids=SEGMENTS),
            facts("cache", path="segment_ids"),
        ),
        (
            lambda: apply(state=cache, keys={"dropout": jax.random.key(1)}),
            facts("keys", "dropout", "cache", path='keys["dropout"]'),
        ),
        (lambda: apply(valid=SEGMENTS == 0), facts("cache", path="valid", fix="segment_ids")),
        (
            lambda: apply(state={}),
            facts("dict", path="state", fix="attention_block.init_cache"),
        ),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
