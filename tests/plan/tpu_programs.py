"""Programs in bfloat16 for tests that compile for TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw
from shardwright.plan import Program

HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INNER = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)


def forward_program(*, batch: int = 16, length: int = 256, embed: int = 1024) -> Program:
    """Return an MLP's forward pass."""
    specs = {
        "up": sw.ArraySpec((embed, 4 * embed), jnp.bfloat16, (sw.EMBED, sw.MLP_INTERMEDIATE)),
        "down": sw.ArraySpec((4 * embed, embed), jnp.bfloat16, (sw.MLP_INTERMEDIATE, sw.EMBED)),
    }

    def forward(params: Any, x: Any) -> Any:
        w = sw.gather(params, specs)
        inner = sw.shard(jax.nn.silu(sw.shard(x, HIDDEN) @ w["up"]), INNER)
        return sw.shard(inner @ w["down"], HIDDEN)

    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}
    x = jax.ShapeDtypeStruct((batch, length, embed), jnp.bfloat16)
    return Program(forward, (params, x), (specs, HIDDEN), HIDDEN)


def large_program() -> Program:
    """Return a program that needs more memory than a v5e has: 32 GiB of hidden states a device."""
    return forward_program(batch=2**12, length=2**12, embed=2**11)
