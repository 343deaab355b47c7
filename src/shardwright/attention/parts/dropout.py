"""Dropout by a hash: the seed and the global position of a weight decide whether it is dropped.

The batch row, the head, the positions and the segment enter the hash. The dropped weights are
therefore the same on every mesh, under every permutation of the sequence and in every kernel. A
backward pass computes the hash again, so no dropout mask is stored.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.attention.call import Operands


def keep_factors(block: Operands, rate: float) -> jax.Array:
    """Return the factors of the weights: 0 for a dropped weight, else `1 / (1 - rate)`.

    Args:
      block: Local operands, or a block of them.
      rate: Probability of dropping a weight.

    Returns:
      `[batch, heads, q_length, kv_length]` float32.
    """
    q = _rows(block.q_positions, block.q_segment_ids)
    kv = _rows(block.kv_positions, block.kv_segment_ids)
    # 0x9E3779B9 is 2**32 / golden ratio (Fibonacci hashing; Knuth, vol. 3, §6.4): adjacent heads
    # differ in many bits.
    heads = _mix(block.seed ^ (block.head_index.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)))
    batch_and_head = _mix(block.batch_index.astype(jnp.uint32)[:, None] + heads[None, :])
    # Only `bits` is as large as the logits. The other arrays have one number per row or key.
    row = _mix(batch_and_head[:, :, None] ^ q[:, None, :])
    bits = _mix(row[:, :, :, None] + _mix(kv)[:, None, None, :])
    threshold = jnp.uint32(min(int(rate * 2**32), 2**32 - 1))
    return jnp.where(bits >= threshold, jnp.float32(1.0 / (1.0 - rate)), jnp.float32(0.0))


def _rows(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    rows = positions.astype(jnp.uint32)
    # Mix in the segment ids, because positions may start again in every segment.
    return rows if segment_ids is None else rows + _mix(segment_ids.astype(jnp.uint32))


def _mix(x: jax.Array) -> jax.Array:
    """Mix 32 bits (Ellis, "lowbias32", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
