"""Cross-attention: equal to NumPy, equal on every mesh, and in a stack with caches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import attention_block, mlp_block, transformer_block
from shardwright.layers.placement import OPERAND, RESIDUAL
from tests.layers import blocks
from tests.raising import facts, raises

CROSS = attention_block.AttentionConfig(
    embed=16, heads=8, kv_heads=4, head_dim=4, causal=False, rope_theta=None
)
STACK = transformer_block.TransformerConfig(
    layers=2,
    attention=attention_block.AttentionConfig(embed=16, heads=8, kv_heads=4, head_dim=4),
    mlp=mlp_block.MlpConfig(embed=16, hidden=32),
    cross=CROSS,
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4, 16)).astype(np.float32)
ENCODED = RNG.normal(size=(8, 8, 16)).astype(np.float32)
# The last row of each sequence is padding.
IDS = np.repeat(np.array([[1, 1, 1, 1, 1, 1, 1, 0]]), 8, 0)
BLOCK_PARAMS = blocks.random_params(attention_block.specs(CROSS))
STACK_PARAMS = blocks.random_params(transformer_block.specs(STACK))


def block(params: Any, x: Any, encoded: Any) -> Any:
    given = {"encoded": encoded, "encoded_segment_ids": IDS}
    return attention_block.apply(CROSS, params, x, **given)[0]


def stack(params: Any, x: Any, encoded: Any, config: Any = STACK, **options: Any) -> Any:
    given = {"encoded": encoded, "encoded_segment_ids": IDS, **options}
    return transformer_block.apply(config, params, x, **given)[0]


def differentiated(f: Any) -> Any:
    return jax.jit(jax.value_and_grad(blocks.total(f), (0, 1, 2), has_aux=True))


@functools.cache
def unsharded(name: str) -> Any:
    f, params = {"block": (block, BLOCK_PARAMS), "stack": (stack, STACK_PARAMS)}[name]
    return differentiated(f)(params, X, ENCODED)


def by_numpy(params: Any, x: Any, encoded: Any, ids: Any) -> np.ndarray:
    """Return cross-attention in float64, where a token has id 1."""
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x, encoded = np.asarray(x, np.float64), np.asarray(encoded, np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["norm"]["scale"]
    q = np.einsum("ble,ehd->blhd", x, params["query"]["kernel"])
    k, v = (
        np.repeat(np.einsum("bse,ehd->bshd", encoded, params[name]["kernel"]), 2, axis=2)
        for name in ("key", "value")
    )
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 2) * (ids == 1)[:, None, None, :]
    weights /= weights.sum(-1, keepdims=True)
    rows = np.einsum("bhqk,bkhd->bqhd", weights, v)
    return np.asarray(np.einsum("bqhd,hde->bqe", rows, params["out"]["kernel"]))


def test_values_of_numpy() -> None:
    wanted = by_numpy(BLOCK_PARAMS, X, ENCODED, IDS)
    np.testing.assert_allclose(unsharded("block")[0][1], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_without_ids_every_row_is_seen() -> None:
    y = jax.jit(lambda *args: attention_block.apply(CROSS, *args, encoded=ENCODED)[0])(
        BLOCK_PARAMS, X
    )
    wanted = by_numpy(BLOCK_PARAMS, X, ENCODED, np.ones_like(IDS))
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(("preset", "kind"), blocks.CASES)
@pytest.mark.parametrize("name", ["block", "stack"])
@pytest.mark.pairwise
def test_sharded_equals_unsharded(name: str, preset: str, kind: str) -> None:
    f, params, specs = {
        "block": (block, BLOCK_PARAMS, attention_block.specs(CROSS)),
        "stack": (stack, STACK_PARAMS, transformer_block.specs(STACK)),
    }[name]
    with blocks.make_manager(preset, kind) as pm:
        stored = pm.shard(params, specs, role="param")
        got = differentiated(f)(stored, pm.shard(X, RESIDUAL), pm.shard(ENCODED, OPERAND))
    blocks.assert_close(got, unsharded(name), rtol=1e-4)
    for gradient, value in zip(jax.tree.leaves(got[1][0]), jax.tree.leaves(stored), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


@pytest.mark.full
def test_scan_equals_a_loop_over_blocks() -> None:
    def loop(params: Any, x: Any) -> Any:
        for number in range(2):
            layer = jax.tree.map(lambda w, at=number: w[at], params[0])
            x = x + attention_block.apply(STACK.attention, layer["attention"], x)[0]
            x = x + block(layer["cross"], x, ENCODED)
            x = x + mlp_block.apply(STACK.mlp, layer["mlp"], x)[0]  # type: ignore[arg-type]
        return x

    blocks.assert_close(unsharded("stack")[0][1], jax.jit(loop)(STACK_PARAMS, X))


@pytest.mark.full
def test_remat_and_dropout_with_scan_and_without() -> None:
    config = dataclasses.replace(STACK, dropout=0.5, remat="full")
    unstacked, layers = transformer_block.unstack(config, STACK_PARAMS)
    keys = {"dropout": jax.random.key(0)}
    scanned = differentiated(functools.partial(stack, config=config, keys=keys))
    looped = differentiated(functools.partial(stack, config=unstacked, keys=keys))
    (_, y), (_, *inputs) = scanned(STACK_PARAMS, X, ENCODED)
    (_, wanted), (_, *wanted_inputs) = looped(layers, X, ENCODED)
    blocks.assert_close((y, inputs), (wanted, wanted_inputs), rtol=1e-4)
    assert not np.allclose(y, unsharded("stack")[0][1], rtol=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_decode_equals_one_call(kind: str) -> None:
    config, layers = transformer_block.unstack(STACK, STACK_PARAMS)
    pm = blocks.make_manager("fsdp_tp", kind, mode="decode")

    @functools.partial(jax.jit, donate_argnums=2)
    def step(params: Any, x: Any, state: Any, encoded: Any) -> Any:
        given = {"encoded": encoded, "encoded_segment_ids": IDS}
        return transformer_block.apply(config, params, x, state=state, **given)

    with pm:
        state = transformer_block.StackState(
            caches=transformer_block.init_caches(config, batch=8, capacity=4)
        )
        stored = pm.shard(layers, transformer_block.specs(config), role="param")
        rows = []
        for at in range(4):
            y, state = step(stored, X[:, at : at + 1], state, ENCODED)
            rows.append(np.asarray(y))
    blocks.assert_close(np.concatenate(rows, 1), unsharded("stack")[0][1], rtol=1e-4)


def test_bad_input() -> None:
    cache = attention_block.init_cache(CROSS, batch=8, capacity=8)
    positions = jnp.zeros(X.shape[:2], jnp.int32)

    def change(**given: Any) -> Any:
        config = dataclasses.replace(CROSS, **given)
        return attention_block.apply(config, {}, X, encoded=ENCODED)

    def apply(**given: Any) -> Any:
        return attention_block.apply(CROSS, {}, X, **given)

    cases: list[tuple[Any, str]] = [
        (
            lambda: change(causal=True),
            facts("causal", "True", path="config", fix="AttentionConfig"),
        ),
        (
            lambda: change(rope_theta=10.0),
            facts("rope_theta", "10.0", path="config", fix="AttentionConfig"),
        ),
        (
            lambda: change(window=(3, 0)),
            facts("window", "(3, 0)", "positions", path="config", fix="AttentionConfig"),
        ),
        (
            lambda: change(recipe="delayed"),
            facts("cross", "attention", path="config", fix="current"),
        ),
        (lambda: apply(encoded=ENCODED[0]), facts("(8, 16)", path="encoded")),
        (lambda: apply(encoded_segment_ids=IDS), facts(path="encoded")),
        (lambda: apply(encoded=ENCODED, state=cache), facts("cache", path="encoded")),
        (lambda: apply(encoded=ENCODED, positions=positions), facts("positions", path="encoded")),
        (
            lambda: apply(encoded=ENCODED, segment_ids=positions),
            facts("segment_ids", path="encoded_segment_ids"),
        ),
        (
            lambda: dataclasses.replace(STACK, cross=STACK.attention),
            facts("causal", "True", path="cross", fix="AttentionConfig"),
        ),
        (
            lambda: dataclasses.replace(STACK, cross=dataclasses.replace(CROSS, embed=8)),
            facts("cross.embed", 8, "attention.embed", 16),
        ),
        (lambda: stack(STACK_PARAMS, X, None), facts("layers", "cross", path="encoded")),
        (
            lambda: stack([{}], X, ENCODED, config=dataclasses.replace(STACK, cross=None)),
            facts("layers", "cross", path="encoded", fix=("cross=", "TransformerConfig")),
        ),
    ]
    for call, message in cases:
        with raises(sw.ShardingError, message) as caught:
            call()
        assert "fix  " in str(caught.value)
