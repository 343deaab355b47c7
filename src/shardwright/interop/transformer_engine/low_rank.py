"""Low-rank adaptation with the shapes of TransformerEngine's kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardwright.layers import dense
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
    inputs, inner = "ijklm"[:contract], "nopq"[: b.ndim - 2]
    if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        low = dense.dense(x, a, contract=contract)
        return jnp.einsum(f"...{inner}r,{inner}rt->...{inner}t", low, b) * config.scale
    # One einsum of all three operands picks the cheapest order, as TransformerEngine does.
    dims = f"...{inputs},{inputs}{inner}r,{inner}rt->...{inner}t"
    return jnp.einsum(dims, x, a, b) * config.scale
