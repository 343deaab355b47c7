"""Rotary scaling and sinks: equal to `transformers`, alone and in the attention block."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import LayerError, RankMismatchError
from shardwright.layers import RopeFrequencies, attention_block, rope, rope_frequencies
from shardwright.layers.norm import RMS
from shardwright.layers.placement import RESIDUAL
from tests.layers import blocks
from tests.layers.transformers_attention import (
    CASES,
    EMBED,
    GOLDEN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTH,
    weights,
)
from tests.raising import Facts, facts, raises


@functools.cache
def golden() -> Any:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]


def frequencies(name: str) -> RopeFrequencies:
    _, scaling, longest, _, _ = CASES[name]
    return rope_frequencies(HEAD_DIM, scaling=scaling, longest=longest, length=LENGTH)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_of_transformers(name: str) -> None:
    wanted, own = golden()[name], frequencies(name)
    np.testing.assert_allclose(own.values, wanted["frequencies"], rtol=2e-6)
    np.testing.assert_allclose(own.scale, wanted["scale"], rtol=1e-12)


def block(name: str) -> tuple[attention_block.AttentionConfig, Any, Any]:
    """Return the config and the parameters of a case, and its input."""
    kind, _, _, layer, options = CASES[name]
    window = options.get("sliding_window") if layer == 0 else None
    x, own = weights(name)
    center = 1.0 if kind == "gemma3_text" else 0.0  # a Gemma stores the scale minus 1
    config = attention_block.AttentionConfig(
        embed=EMBED,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        window=None if window is None else (window - 1, 0),
        rope_theta=frequencies(name),
        norm=None,
        qk_norm=RMS if "q_norm.weight" in own else None,
        bias="q_proj.bias" in own,
        sinks="sinks" in own,
    )
    params: dict[str, Any] = {}
    for key, each in (("query", "q"), ("key", "k"), ("value", "v")):
        params[key] = {"kernel": own[f"{each}_proj.weight"].T.reshape(EMBED, -1, HEAD_DIM)}
        if config.bias:
            params[key]["bias"] = own[f"{each}_proj.bias"].reshape(-1, HEAD_DIM)
    params["out"] = {"kernel": own["o_proj.weight"].T.reshape(HEADS, HEAD_DIM, EMBED)}
    if config.bias:
        params["out"]["bias"] = own["o_proj.bias"]
    if config.qk_norm is not None:
        params["query_norm"] = {"scale": center + own["q_norm.weight"]}
        params["key_norm"] = {"scale": center + own["k_norm.weight"]}
    if config.sinks:
        params["sinks"] = {"logits": own["sinks"]}
    return config, params, x


@pytest.mark.parametrize("name", CASES)
def test_attention_of_transformers(name: str) -> None:
    config, params, x = block(name)
    y, _ = attention_block.apply(config, params, x)
    wanted = np.asarray(golden()[name]["y"])
    np.testing.assert_allclose(y[0, ::3], wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt_oss", "longrope long"])
def test_decode_with_sinks_and_frequencies(name: str) -> None:
    """A prefill and single tokens give what one call gives."""
    config, params, x = block(name)
    run = jax.jit(functools.partial(attention_block.apply, config))
    whole, _ = run(params, x)
    cache = attention_block.init_cache(config, batch=1, capacity=LENGTH)
    parts = []
    for first, last in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
        y, cache = run(params, x[:, first:last], state=cache)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=5e-5)


SINKS = dataclasses.replace(block("gpt_oss")[0], heads=8, kv_heads=4)
X = np.random.default_rng(0).normal(size=(8, LENGTH, EMBED)).astype(np.float32)


def with_sinks(params: Any, x: Any) -> Any:
    return attention_block.apply(SINKS, params, x)[0]


@functools.cache
def unsharded() -> Any:
    params = blocks.random_params(attention_block.specs(SINKS))
    return params, blocks.values_and_gradients(with_sinks, params, X)


@blocks.cases()
@pytest.mark.alternate
def test_sinks_sharded_equal_unsharded(preset: str, kind: str) -> None:
    specs, (params, wanted) = attention_block.specs(SINKS), unsharded()
    with blocks.make_manager(preset, kind) as pm:
        stored, x = pm.shard(params, specs, role="param"), pm.shard(X, RESIDUAL)
        got = blocks.values_and_gradients(with_sinks, stored, x)
    assert np.any(np.asarray(got[1][0]["sinks"]["logits"]))
    blocks.assert_close(got, wanted)


def test_part_of_a_head_is_rotated() -> None:
    x = X[:, :, None]
    positions = jnp.arange(LENGTH)[None]
    values = 100.0 ** (-np.arange(8) / 8)
    y = rope(x, positions, frequencies=values, scale=2.0)
    np.testing.assert_array_equal(y[..., 16:], x[..., 16:])
    np.testing.assert_allclose(
        y[..., :16], 2 * rope(x[..., :16], positions, theta=100.0), rtol=1e-6
    )
    part = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 100.0}
    np.testing.assert_allclose(rope_frequencies(EMBED, scaling=part).values, values)


YARN = {"factor": 2.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", **YARN}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: rope_frequencies(8, scaling={"rope_type": "lama3"}),
            facts("rope_type", "lama3", path="rope_type", fix="llama3"),
        ),
        (
            lambda: rope_frequencies(8, scaling={"rope_type": "linear"}),
            facts("scaling has no factor", path="scaling", fix="config.json"),
        ),
        (
            lambda: rope_frequencies(8, scaling={"rope_type": "llama3", "factor": 8.0}),
            facts("scaling has no original_max_position_embeddings", path="scaling"),
        ),
        (
            lambda: rope_frequencies(
                8, scaling={"rope_type": "yarn", "original_max_position_embeddings": 8}
            ),
            facts("scaling has no factor", path="scaling"),
        ),
        (
            lambda: rope_frequencies(4, length=2, scaling={**LONG, "short_factor": None}),
            facts("scaling has no short_factor", path="scaling", fix="config.json"),
        ),
        (
            lambda: rope_frequencies(8, scaling={"rope_type": "default", "factor": 2.0}),
            facts("factor", path="scaling"),
        ),
        (
            lambda: rope_frequencies(8, theta=1e6, scaling={"rope_theta": 1e4}),
            facts("theta", "1000000.0", "rope_theta", "10000.0"),
        ),
        (
            lambda: rope_frequencies(16, scaling=CASES["longrope long"][1]),
            facts(16, fix="pass length="),
        ),
        (
            lambda: rope_frequencies(8, scaling={"rope_type": ["x"]}),
            facts("rope_type", "x", path="rope_type", fix="llama3"),
        ),
        (
            lambda: rope_frequencies(8, scaling={"partial_rotary_factor": "a"}),
            facts("a", path="partial_rotary_factor", fix="config.json"),
        ),
        (
            lambda: rope_frequencies(8, theta=1.0, scaling={**YARN, "rope_type": "yarn"}),
            facts("theta", "1.0", fix="theta"),
        ),
        (
            lambda: rope_frequencies(4, length=2, scaling={**LONG, "short_factor": ["a", "b"]}),
            facts("a", path="short_factor", fix="config.json"),
        ),
        (
            lambda: rope_frequencies(8, scaling=CASES["longrope long"][1], longest=128, length=9),
            facts("short_factor", "(8,)", 4, path="scaling"),
        ),
        (lambda: RopeFrequencies(values=(1.0, np.nan)), facts("nan", path="frequencies")),
        (
            lambda: attention_block.AttentionConfig(
                embed=8, heads=2, rope_theta=RopeFrequencies(values=(1.0,) * 3)
            ),
            facts(3, "head_dim", 4, path="rope_theta"),
        ),
        (
            lambda: rope(X[:, :, None], jnp.arange(LENGTH)[None], theta=1e4, frequencies=(1.0,)),
            facts("frequencies", "decides", path="theta"),
        ),
        (
            lambda: rope(X[:, :, None], jnp.arange(LENGTH)[None], scale=0.0),
            facts("0.0", path="scale"),
        ),
        (
            lambda: rope(X[:, :, None], jnp.arange(LENGTH)[None], frequencies=np.ones(33)),
            facts("(33,)", path="frequencies", fix="head_dim"),
        ),
    ],
)
def test_bad_input(make: Any, message: Facts) -> None:
    with raises((LayerError, RankMismatchError), message) as caught:
        make()
    assert "fix  " in str(caught.value)
