"""Sharded = unsharded for every block, preset, mesh, kind of mesh axes, and mode.

`make test` runs one case of each test and `make test-full` five; `-m product` runs the others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright.layers import (
    attention_block,
    embedding,
    loss,
    mlp_block,
    moe,
    moe_block,
    transformer_block,
)
from shardwright.layers.placement import RESIDUAL
from shardwright.testing import cpu_mesh
from tests.layers import blocks
from tests.raising import Facts, facts, raises

VOCAB, EMBED = 32, 16
# The two largest axes of each preset, or its only one.
AXES = {
    "single": ("dp",),
    "ddp": ("dp",),
    "fsdp": ("fsdp",),
    "tensor": ("dp", "tp"),
    "fsdp_tp": ("fsdp", "tp"),
    "fsdp_tp_sp": ("fsdp", "tp"),
    "sequence": ("fsdp", "sp"),
    "moe_ep": ("fsdp", "ep"),
    "serve_tp": ("dp", "tp"),
    "serve_long_context": ("sp", "tp"),
}
MESHES = [
    (preset, ",".join(f"{axis}:{size}" for axis, size in zip(axes, sizes, strict=True)), kind)
    for preset, axes in AXES.items()
    for sizes in ([(2, 4), (4, 2)] if len(axes) == 2 else [(8,)])
    # A mesh with one axis is not mixed.
    for kind in (["auto", "explicit", "mixed"] if len(axes) == 2 else ["auto", "explicit"])
]
# This preset shards the tokens over sp, and has no slots for them there.
REFUSAL = facts("CAPACITY", "sp", fix="sp")
# These presets shard keys over sp. One token without a cache attends to one key.
LONG = ("sequence", "serve_long_context")
MODES = ("train", "prefill", "decode", "insert")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 8, EMBED)).astype(np.float32)
TOKENS = RNG.integers(0, VOCAB, (8, 8))
MLP = mlp_block.MlpConfig(embed=EMBED, hidden=32)
ATTENTION = attention_block.AttentionConfig(embed=EMBED, heads=8, kv_heads=4, head_dim=4)
CROSS = dataclasses.replace(ATTENTION, causal=False, rope_theta=None)
ENCODED = RNG.normal(size=(8, 16, EMBED)).astype(np.float32)
MOE = moe_block.MoEBlockConfig(
    moe=moe.MoEConfig(embed=EMBED, hidden=8, experts=8, per_token=2, shared=1, balance_loss=0.1)
)
STACK = transformer_block.TransformerConfig(layers=2, attention=ATTENTION, mlp=(MLP, MOE))


def moe_block_of(params: Any, x: Any) -> Any:
    y, state = moe_block.apply(MOE, params, x)
    assert state.stats is not None
    return y, state.stats.aux


def stack(params: Any, x: Any) -> Any:
    y, state = transformer_block.apply(STACK, params, x)
    return y, state.aux


# Name -> (specs, function of the parameters and the input, input, axes of the input)
BLOCKS: dict[str, tuple[Any, Any, Any, Any]] = {
    "mlp": (mlp_block.specs(MLP), lambda p, x: mlp_block.apply(MLP, p, x)[0], X, RESIDUAL),
    "attention": (
        attention_block.specs(ATTENTION),
        lambda p, x: attention_block.apply(ATTENTION, p, x)[0],
        X,
        RESIDUAL,
    ),
    "cross": (
        attention_block.specs(CROSS),
        lambda p, x: attention_block.apply(CROSS, p, x, encoded=ENCODED)[0],
        X,
        RESIDUAL,
    ),
    "moe": (moe_block.specs(MOE), moe_block_of, X, RESIDUAL),
    "embedding": (
        embedding.specs(VOCAB, EMBED),
        embedding.apply,
        TOKENS,
        (sw.BATCH, sw.QUERY_LENGTH),
    ),
    "loss": (
        loss.specs(VOCAB, EMBED),
        lambda p, x: loss.cross_entropy(x, p, TOKENS[:, : x.shape[1]]).mean,
        X,
        RESIDUAL,
    ),
    "stack": (transformer_block.specs(STACK), stack, X, RESIDUAL),
}


def make_manager(preset: str, mesh: str, kind: str, mode: str) -> sw.PartitionManager:
    # One Explicit axis. In a dim that both axes shard, JAX wants it first.
    own = AXES[preset][0 if preset in ("moe_ep", "sequence") else -1]
    types: Any = {own: "explicit"} if kind == "mixed" else kind
    return sw.PartitionManager(
        sw.Strategy.preset(preset), mesh=cpu_mesh(mesh, axis_types=types), mode=mode
    )


def refused(preset: str, block: str, mode: str) -> Facts | None:
    """Return the facts of what is refused; None if it runs."""
    if mode == "insert" and block in ("attention", "cross", "stack"):
        return facts("insert", path=..., fix="decode")
    if mode == "decode" and preset in LONG and block in ("attention", "stack"):
        return facts(path=..., axis="KV_LENGTH", size=1)
    if preset == "serve_long_context" and block in ("moe", "stack"):
        return REFUSAL if mode in ("train", "prefill") else None
    return None


@functools.cache
def unsharded(block: str, length: int) -> Any:
    specs, f, x, _ = BLOCKS[block]
    return blocks.values_and_gradients(f, blocks.random_params(specs), x[:, :length])


@pytest.mark.product(
    but=[
        "single-dp:8-auto-mlp-train",
        "tensor-dp:2,tp:4-mixed-cross-prefill",
        "fsdp_tp_sp-fsdp:4,tp:2-auto-loss-decode",
        "moe_ep-fsdp:2,ep:4-auto-mlp-insert",
        "serve_long_context-sp:2,tp:4-explicit-embedding-train",
    ]
)
@pytest.mark.full(but=["single-dp:8-auto-mlp-train"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("preset", "mesh", "kind"), MESHES)
def test_sharded_equals_unsharded(preset: str, mesh: str, kind: str, block: str, mode: str) -> None:
    """Values and all gradients; a gradient is sharded as its parameter."""
    specs, f, x, axes = BLOCKS[block]
    length = 1 if mode == "decode" else x.shape[1]
    with make_manager(preset, mesh, kind, mode) as pm:
        stored = pm.shard(blocks.random_params(specs), specs, role="param")
        if refusal := refused(preset, block, mode):
            with raises(sw.ShardingError, refusal):
                f(stored, pm.shard(x[:, :length], axes))
            return
        got = blocks.values_and_gradients(f, stored, pm.shard(x[:, :length], axes))
    blocks.assert_close(got, unsharded(block, length), rtol=1e-4)
    for gradient, value in zip(jax.tree.leaves(got[1][0]), jax.tree.leaves(stored), strict=True):
        assert gradient.sharding.is_equivalent_to(value.sharding, value.ndim)


@functools.cache
def whole_call() -> Any:
    layers = transformer_block.unstack(STACK, blocks.random_params(BLOCKS["stack"][0]))
    return layers, jax.jit(functools.partial(transformer_block.apply, layers[0]))(layers[1], X)[0]


@pytest.mark.full
@pytest.mark.product(
    but=[
        "single-dp:8-auto",
        "fsdp_tp-fsdp:2,tp:4-explicit",
        "sequence-fsdp:2,sp:4-mixed",
        "moe_ep-fsdp:4,ep:2-explicit",
        "serve_long_context-sp:4,tp:2-mixed",
    ]
)
@pytest.mark.parametrize(("preset", "mesh", "kind"), MESHES)
def test_prefill_and_decode_equal_one_call(preset: str, mesh: str, kind: str) -> None:
    """A stack with caches: four tokens at once, then two one by one."""
    (config, params), whole = whole_call()
    prefill = make_manager(preset, mesh, kind, "prefill")
    decode = prefill.for_mode("decode")

    def step(params: Any, x: Any, caches: Any) -> Any:
        state = transformer_block.StackState(caches=caches)
        y, after = transformer_block.apply(config, params, x, state=state)
        return y, after.caches

    with decode:
        caches = transformer_block.init_caches(config, batch=8, capacity=8)
    with prefill:
        stored = prefill.shard(params, transformer_block.specs(config), role="param")
        if preset == "serve_long_context":
            with raises(sw.StrategyError, REFUSAL):
                jax.eval_shape(step, stored, X[:, :4], caches)
            return
        y, caches = jax.jit(step)(stored, X[:, :4], caches)
        rows = [np.asarray(y)]
    with decode:
        run = jax.jit(step, donate_argnums=2)
        for at in (4, 5):
            y, caches = run(stored, X[:, at : at + 1], caches)
            rows.append(np.asarray(y))
    blocks.assert_close(np.concatenate(rows, 1), np.asarray(whole)[:, :6], rtol=1e-4)
