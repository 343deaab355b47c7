"""The decoder, written once for every mesh and every mode.

`sw.gather` gathers its weights, and `sw.shard` constrains its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from decoder.cache import CACHE_AXES, next_positions, write_rows
from decoder.config import DecoderConfig, decoder_specs

HIDDEN_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
QUERY_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
NEW_ROW_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM)
SCORE_AXES = (sw.BATCH, sw.HEAD, sw.QUERY_LENGTH, sw.BIAS_KV_SEQ)
MLP_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
LOGIT_AXES = (sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB)


def forward(
    params: dict[str, Any],
    tokens: jax.Array,
    config: DecoderConfig,
    *,
    cache: dict[str, Any] | None = None,
    real: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, Any] | None]:
    """Return logits `[batch, q_length, vocab]`, and the cache with the rows of the tokens.

    Args:
      params: The tree that `decoder_specs` describes.
      tokens: `[batch, q_length]`.
      config: Sizes.
      cache: The rows before the tokens. With None, the tokens attend only to each other.
      real: `[batch]`, how many of the tokens are not padding; required with a cache.
    """
    positions = next_positions(cache, tokens)

    def mix(
        q: jax.Array, k: jax.Array, v: jax.Array, held: dict[str, Any] | None
    ) -> tuple[jax.Array, dict[str, Any] | None]:
        if held is not None:
            held = {
                "k": write_rows(held["k"], k, positions, real),
                "v": write_rows(held["v"], v, positions, real),
            }
            k, v = held["k"], held["v"]
        return attend(q, k, v, positions=positions), held

    before = [None] * config.layers if cache is None else cache["layers"]
    logits, layers = blocks(params, tokens, config, positions=positions, held=before, mix=mix)
    return logits, None if cache is None else {"layers": layers, "length": cache["length"] + real}


def blocks(
    params: dict[str, Any],
    tokens: jax.Array,
    config: DecoderConfig,
    *,
    positions: jax.Array,
    held: Sequence[Any],
    mix: Callable[..., Any],
) -> tuple[jax.Array, list[Any]]:
    """Return logits `[batch, q_length, vocab]`, and the new cache of each layer.

    Args:
      params: The tree that `decoder_specs` describes.
      tokens: `[batch, q_length]`.
      config: Sizes.
      positions: Positions of the tokens, `[batch, q_length]`.
      held: The cache of each layer, or None.
      mix: `(q, k, v, held) -> (out, held)`: attention, with the cache, if there is one.
    """
    specs = decoder_specs(config)
    table = sw.gather(params["embedding"], specs["embedding"], path="embedding")
    # One-hot rows are cheap for 256 bytes. For large vocabularies, layers.embedding looks rows up.
    x = sw.shard(
        jnp.einsum("bqv,ve->bqe", jax.nn.one_hot(tokens, config.vocab, dtype=table.dtype), table),
        HIDDEN_AXES,
    )
    layers = []
    for number, (stored, axes) in enumerate(zip(params["layers"], specs["layers"], strict=True)):
        weights = sw.gather(stored, axes, path=f"layers/{number}")
        mixed, after = attention(
            weights["attention"], x, config, positions=positions, held=held[number], mix=mix
        )
        x = sw.shard(x + mixed, HIDDEN_AXES)
        x = sw.shard(x + mlp(weights["mlp"], x, config), HIDDEN_AXES)
        layers.append(after)
    x = rms_norm(x, sw.gather(params["norm"], specs["norm"], path="norm"), config)
    head = sw.gather(params["lm_head"], specs["lm_head"], path="lm_head")
    return sw.shard(jnp.einsum("bqe,ev->bqv", x, head), LOGIT_AXES), layers


def attention(
    weights: dict[str, Any],
    x: jax.Array,
    config: DecoderConfig,
    *,
    positions: jax.Array,
    held: Any,
    mix: Callable[..., Any],
) -> tuple[jax.Array, Any]:
    """Return what attention adds to `x` `[batch, q_length, embed]`, and the new cache."""
    x = rms_norm(x, weights["norm"], config)
    q = sw.shard(rope(jnp.einsum("bqe,ehd->bqhd", x, weights["q"]), positions, config), QUERY_AXES)
    k = sw.shard(
        rope(jnp.einsum("bqe,ekd->bqkd", x, weights["k"]), positions, config), NEW_ROW_AXES
    )
    v = sw.shard(jnp.einsum("bqe,ekd->bqkd", x, weights["v"]), NEW_ROW_AXES)
    out, held = mix(q, k, v, held)
    return jnp.einsum("bqhd,hde->bqe", sw.shard(out, QUERY_AXES), weights["o"]), held


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, positions: jax.Array) -> jax.Array:
    """Return causal grouped-query attention, `[batch, q_length, heads, head_dim]`.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`; row j has position j.
      v: Like `k`.
      positions: Positions of the queries, `[batch, q_length]`. A query sees the rows up to its own
        position, so it does not see rows of an earlier, longer text in the cache.
    """
    # Attention is written in plain JAX here, because a test compares the compiled program with a
    # model in plain JAX. Your own models can call `attention.dot_product_attention`.
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    # Query head h reads kv head h * kv_heads // heads.
    k, v = (jnp.repeat(sw.shard(rows, CACHE_AXES), heads // kv_heads, axis=2) for rows in (k, v))
    scores = (
        jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    )
    visible = jnp.arange(k.shape[1]) <= positions[:, None, :, None]
    scores = sw.shard(jnp.where(visible, scores, sw.DEFAULT_MASK_VALUE), SCORE_AXES)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def mlp(weights: dict[str, Any], x: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return what the SwiGLU block adds to `x` `[batch, q_length, embed]`."""
    x = rms_norm(x, weights["norm"], config)
    hidden = jax.nn.silu(jnp.einsum("bqe,em->bqm", x, weights["gate"])) * jnp.einsum(
        "bqe,em->bqm", x, weights["up"]
    )
    return jnp.einsum("bqm,me->bqe", sw.shard(hidden, MLP_AXES), weights["down"])


def rms_norm(x: jax.Array, scale: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return `x` `[..., embed]` divided by its root mean square, in float32, times the scale."""
    wide = x.astype(jnp.float32)
    return (
        wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
    ).astype(x.dtype) * scale


def rope(x: jax.Array, positions: jax.Array, config: DecoderConfig) -> jax.Array:
    """Rotate `x` `[batch, length, heads, head_dim]` by positions `[batch, length]`, in float32."""
    half = x.shape[-1] // 2
    frequencies = config.rope_theta ** (-jnp.arange(half) / half)
    angles = positions[:, :, None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def next_byte_loss(
    params: dict[str, Any], batch: dict[str, jax.Array], config: DecoderConfig
) -> jax.Array:
    """Return the mean cross entropy of the next byte, in nats."""
    logits = forward(params, batch["inputs"], config)[0].astype(jnp.float32)
    # A comparison instead of an index, so that a sharded vocabulary is not gathered.
    hit = jnp.arange(config.vocab) == batch["targets"][:, :, None]
    chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
