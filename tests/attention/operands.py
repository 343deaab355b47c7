"""Operands for the tests of kernels, with every optional array; `without` removes some."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.call import Operands, default_positions

FLOATS = ("q", "k", "v", "bias", "sinks")


def make_operands(
    *,
    batch: int = 2,
    q_length: int = 13,
    kv_length: int = 21,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    v_dim: int = 6,
) -> Operands:
    """Return operands with ragged lengths, one sequence without keys, and every optional array."""
    keys = jax.random.split(jax.random.key(0), 8)
    lengths = jnp.resize(jnp.array([0, kv_length - 4, 3, kv_length], jnp.int32), (batch,))
    return Operands(
        q=jax.random.normal(keys[0], (batch, q_length, heads, head_dim)),
        k=jax.random.normal(keys[1], (batch, kv_length, kv_heads, head_dim)),
        v=jax.random.normal(keys[2], (batch, kv_length, kv_heads, v_dim)),
        q_positions=default_positions(q_length, offset=kv_length - q_length),
        kv_positions=default_positions(kv_length),
        q_segment_ids=jnp.sort(jax.random.randint(keys[3], (batch, q_length), 0, 3)),
        kv_segment_ids=jnp.sort(jax.random.randint(keys[4], (batch, kv_length), 0, 3)),
        lengths=lengths,
        mask=jax.random.bernoulli(keys[5], 0.8, (batch, 1, q_length, kv_length)),
        bias=jax.random.normal(keys[6], (1, heads, q_length, kv_length)),
        sinks=jax.random.normal(keys[7], (heads,)),
        seed=jnp.uint32(7),
        batch_index=jnp.arange(batch, dtype=jnp.int32),
        head_index=jnp.arange(heads, dtype=jnp.int32),
    )


def without(operands: Operands, *names: str) -> Operands:
    return operands.replace(**dict.fromkeys(names))


def floats(operands: Operands) -> dict[str, Any]:
    return {name: getattr(operands, name) for name in FLOATS if getattr(operands, name) is not None}
