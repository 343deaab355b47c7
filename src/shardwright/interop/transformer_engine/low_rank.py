"""Low-rank adaptation with the shapes of TransformerEngine's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.layers import lora
from shardwright.layers.lora import LoraConfig


def low_rank(x: Any, a: Any, b: Any, *, contract: int, alpha: float | None) -> jax.Array:
    """Return what an adaptation adds: `x A B * (alpha / rank)`, one A and B per inner feature.

    Args:
      x: `[..., *inputs]`.
      a: `[*inputs, *inner, rank]`.
      b: `[*inner, rank, out]`.
      contract: Number of dims of `x` that are contracted.
      alpha: None for a factor of 1.
    """
    config = LoraConfig(rank=a.shape[-1], alpha=alpha)
    inner, inputs = b.shape[:-2], a.shape[:contract]
    flat_a = a.reshape(*inputs, -1, config.rank)
    flat_b = b.reshape(-1, *b.shape[-2:])
    parts = [
        lora.apply(
            config,
            {"a": flat_a[..., at, :], "b": flat_b[at]},
            x,
            out=None,
            inner=None,
            contract=contract,
        )
        for at in range(flat_b.shape[0])
    ]
    return jnp.stack(parts, axis=-2).reshape(*parts[0].shape[:-1], *inner, b.shape[-1])
