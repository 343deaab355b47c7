"""The sizes of the model, and its parameters as data: shape, dtype, axes, initializer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of the model. The vocabulary is the 256 bytes."""

    layers: int = 2
    embed: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    mlp: int = 384
    vocab: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32


@functools.cache
def decoder_specs(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters as a tree of `ArraySpec`s; nothing is allocated."""
    embedding = jax.nn.initializers.variance_scaling(
        0.1, "fan_out", "uniform", in_axis=0, out_axis=1
    )
    return {
        "embedding": sw.ArraySpec(
            (config.vocab, config.embed), config.dtype, (sw.VOCAB, sw.EMBED), embedding
        ),
        "layers": [layer_specs(config) for _ in range(config.layers)],
        "norm": norm_spec(config),
        "lm_head": sw.ArraySpec(
            (config.embed, config.vocab),
            config.dtype,
            (sw.EMBED, sw.VOCAB),
            jax.nn.initializers.lecun_uniform(),
        ),
    }


def layer_specs(config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters of one layer."""
    embed, heads, kv_heads, head_dim, mlp = (
        config.embed,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.mlp,
    )

    def kernel(shape: tuple[int, ...], axes: tuple[str, ...], *, inputs: int = 1) -> sw.ArraySpec:
        dims = range(len(shape))
        init = jax.nn.initializers.lecun_uniform(
            in_axis=tuple(dims[:inputs]), out_axis=tuple(dims[inputs:])
        )
        return sw.ArraySpec(shape, config.dtype, axes, init)

    return {
        "attention": {
            "norm": norm_spec(config),
            "q": kernel((embed, heads, head_dim), (sw.EMBED, sw.HEAD, sw.HEAD_DIM)),
            "k": kernel((embed, kv_heads, head_dim), (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
            "v": kernel((embed, kv_heads, head_dim), (sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
            "o": kernel((heads, head_dim, embed), (sw.HEAD, sw.HEAD_DIM, sw.EMBED), inputs=2),
        },
        "mlp": {
            "norm": norm_spec(config),
            "gate": kernel((embed, mlp), (sw.EMBED, sw.MLP_INTERMEDIATE)),
            "up": kernel((embed, mlp), (sw.EMBED, sw.MLP_INTERMEDIATE)),
            "down": kernel((mlp, embed), (sw.MLP_INTERMEDIATE, sw.EMBED)),
        },
    }


def norm_spec(config: DecoderConfig) -> sw.ArraySpec:
    """Return the scale of one RMSNorm."""
    return sw.ArraySpec((config.embed,), config.dtype, (sw.NORM,), jax.nn.initializers.ones)
