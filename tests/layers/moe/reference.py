"""An MoE layer written out densely: every expert runs on every token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardwright as sw
from shardwright.layers import moe
from shardwright.testing import cpu_mesh

# The dispatch alone: weights are stored as they are used, so nothing is gathered.
NOTHING_GATHERED = sw.Strategy.loads('version = 1\n[params]\nembed = "-"\n[policy]\ngather = "-"\n')


def config(**changes: Any) -> moe.MoEConfig:
    sizes = {"embed": 16, "hidden": 24, "experts": 8, "per_token": 2}
    return moe.MoEConfig(**{**sizes, **changes})


def manager(preset: str, mesh: str, **options: Any) -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(mesh), **options)


def parameters(moe_config: moe.MoEConfig) -> dict[str, np.ndarray]:
    """Random parameters, the same for every seed and machine."""
    random = np.random.default_rng(0)
    return {
        name: (random.standard_normal(spec.shape) / np.sqrt(spec.shape[-2])).astype(np.float32)
        for name, spec in moe.specs(moe_config).items()
    }


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def dense(moe_config: moe.MoEConfig, params: Any, x: Any) -> Any:
    """Softmax routing without groups; the gate is a dense [tokens, experts] matrix."""
    flat = x.reshape(-1, moe_config.embed)
    logits = jnp.matmul(flat, params["router"], precision="highest")
    scores = jax.nn.softmax(logits)
    best = jnp.sort(scores)[:, -moe_config.per_token][:, None]
    gate = jnp.where(scores >= best, scores, 0)
    if moe_config.normalize:
        gate = gate / gate.sum(-1, keepdims=True)
    hidden = jnp.einsum("te,xef->txf", flat, params["up"])
    hidden = hidden * jax.nn.silu(jnp.einsum("te,xef->txf", flat, params["gate"]))
    y = jnp.einsum("txf,xfe,tx->te", hidden, params["down"], gate)
    if moe_config.shared:
        gate = jax.nn.silu(flat @ params["shared_gate"])
        y = y + (gate * (flat @ params["shared_up"])) @ params["shared_down"]
    return y.reshape(x.shape)


def error(value: Any, expected: Any) -> float:
    """max|a - b| / max|b|."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(value - expected).max() / np.abs(expected).max())
