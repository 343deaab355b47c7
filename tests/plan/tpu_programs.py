"""Programs in bfloat16 for tests that compile for TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

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


def train_program() -> Program:
    """Return a training step of an MLP with Adam."""
    forward = forward_program(batch=32)
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (forward.function(params, x).astype(jnp.float32) ** 2).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, x = forward.shapes
    specs, hidden = forward.specs
    state = jax.eval_shape(optimizer.init, params)
    axes = sw.annotate_state(state, specs)
    holds = ("parameters", "optimizer", "inputs")
    return Program(step, (params, state, x), (specs, axes, hidden), (specs, axes), holds, (0, 1))


def large_program() -> Program:
    """Return a program that needs more memory than a v5e has: 32 GiB of hidden states a device."""
    return forward_program(batch=2**12, length=2**12, embed=2**11)
