"""A small model of `ArraySpec`s, and a manager that shards it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright.testing import cpu_mesh

normal, ones = jax.nn.initializers.normal(0.02), jax.nn.initializers.ones
KERNEL = (sw.EMBED, sw.MLP_INTERMEDIATE)


def manager(preset: str = "fsdp_tp", sizes: str = "fsdp:4,tp:2") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=cpu_mesh(sizes))


def specs(embed: int = 16, hidden: int = 32) -> dict[str, Any]:
    """A table, two layers' kernels, a norm."""
    return {
        "embed": sw.ArraySpec((64, embed), jnp.float32, (sw.VOCAB, sw.EMBED), normal),
        "blocks": [
            {"up": sw.ArraySpec((embed, hidden), jnp.float32, KERNEL, normal)},
            {"up": sw.ArraySpec((embed, hidden), jnp.bfloat16, KERNEL, normal)},
        ],
        "norm": sw.ArraySpec((embed,), jnp.float32, (sw.NORM,), ones),
    }


def spec_tree(shardings: Any) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, shardings)
