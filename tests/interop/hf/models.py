"""The forward passes of two models, on parameters with the names of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = Mapping[str, Any]


def linear(params: Params, name: str, x: Any) -> Any:
    y = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias


def attend(q: Any, k: Any, v: Any, visible: Any) -> Any:
    """Attend: q, k and v are [batch, length, heads, head_dim], with as many heads."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


def layer_norm(params: Params, name: str, x: Any, epsilon: float) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    normed = (x - mean) / jnp.sqrt(variance + epsilon)
    return normed * params[f"{name}.weight"] + params[f"{name}.bias"]


def bert(params: Params, config: Mapping[str, Any], tokens: Any, mask: Any) -> Any:
    """Return the hidden states of a BERT: [batch, length, embed]."""
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]
    batch, length = tokens.shape
    start = "embeddings"
    x = params[f"{start}.word_embeddings.weight"][tokens]
    x = x + params[f"{start}.position_embeddings.weight"][:length]
    x = x + params[f"{start}.token_type_embeddings.weight"][0]
    x = layer_norm(params, f"{start}.LayerNorm", x, epsilon)
    visible = mask[:, None, None, :] > 0
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        q, k, v = (
            linear(params, f"{layer}.attention.self.{name}", x).reshape(batch, length, heads, -1)
            for name in ("query", "key", "value")
        )
        attended = linear(params, f"{layer}.attention.output.dense", attend(q, k, v, visible))
        x = layer_norm(params, f"{layer}.attention.output.LayerNorm", x + attended, epsilon)
        hidden = linear(params, f"{layer}.intermediate.dense", x)
        hidden = linear(params, f"{layer}.output.dense", jax.nn.gelu(hidden, approximate=False))
        x = layer_norm(params, f"{layer}.output.LayerNorm", x + hidden, epsilon)
    return x


def rms_norm(params: Params, name: str, x: Any, epsilon: float) -> Any:
    normed = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return normed * params[f"{name}.weight"]


def rotate(x: Any, theta: float) -> Any:
    """Apply the rotary embedding of Hugging Face: the halves of a head are a pair."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def llama(params: Params, config: Mapping[str, Any], tokens: Any) -> Any:
    """Return the logits of a Llama: [batch, length, vocab]."""
    x = params["model.embed_tokens.weight"][tokens]
    return llama_head(params, config, llama_layers(params, config, x))


def llama_layers(params: Params, config: Mapping[str, Any], x: Any) -> Any:
    """Return the residual stream after all layers: [batch, length, embed]."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    epsilon, theta = config["rms_norm_eps"], config["rope_theta"]
    batch, length = x.shape[:2]
    visible = jnp.tril(jnp.ones((length, length), bool))
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        y = rms_norm(params, f"{layer}.input_layernorm", x, epsilon)
        q, k, v = (
            linear(params, f"{layer}.self_attn.{name}_proj", y).reshape(batch, length, count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (jnp.repeat(each, heads // kv_heads, 2) for each in (rotate(k, theta), v))
        attended = attend(rotate(q, theta), k, v, visible)
        x = x + linear(params, f"{layer}.self_attn.o_proj", attended)
        y = rms_norm(params, f"{layer}.post_attention_layernorm", x, epsilon)
        gate = jax.nn.silu(linear(params, f"{layer}.mlp.gate_proj", y))
        x = x + linear(
            params, f"{layer}.mlp.down_proj", gate * linear(params, f"{layer}.mlp.up_proj", y)
        )
    return x


def llama_head(params: Params, config: Mapping[str, Any], x: Any) -> Any:
    """Return the logits of the residual stream after the layers: [batch, length, vocab]."""
    x = rms_norm(params, "model.norm", x, config["rms_norm_eps"])
    head = "lm_head" if "lm_head.weight" in params else "model.embed_tokens"
    return linear(params, head, x)
