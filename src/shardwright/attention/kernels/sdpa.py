"""`jax.nn.dot_product_attention` by XLA, on every shard of the batch and the heads.

XLA computes all logits at once. Each device must hold whole sequences. For a query that sees no
key, JAX returns the mean of the values; here the output is exactly 0.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from shardwright.attention.call import AttentionCall, Operands, Result
from shardwright.attention.parts import online_softmax
from shardwright.attention.parts.shards import lengths_are_whole, no_weights, run_on_shards


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: split sequences, or arguments that JAX does not have."""
    return (*lengths_are_whole(call), *no_weights(call), *missing_arguments(call))


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend on every shard of batch and heads."""
    # XLA for CPUs computes most matmuls of two bfloat16s in float32, but not all. With q, k and v
    # in BHTD, JAX 0.12 sums weights times values in bfloat16: for 512 keys the output is off by
    # 1.1e-2 in relative norm instead of 2.3e-3, and JAX has no argument that prevents it.
    dtype = "float32" if call.platform == "cpu" else call.dtype
    return run_on_shards(functools.partial(_attend, call=call, dtype=dtype), operands, call)


def missing_arguments(call: AttentionCall) -> tuple[str, ...]:
    """Return why `jax.nn.dot_product_attention` cannot serve a call, by XLA or by cuDNN."""
    recipe = call.recipe
    sizes = f"head_dim is {call.head_dim}, v_dim {call.v_dim}"
    reasons = {
        f"it has no softcap, and softcap is {recipe.softcap}": recipe.softcap is not None,
        "it has no sinks": call.sinks,
        f"it has no dropout, and dropout is {recipe.dropout}": bool(recipe.dropout),
        f"its keys and values have one size, and {sizes}": call.head_dim != call.v_dim,
        "its logsumexp has no gradient": call.return_lse,
    }
    return tuple([reason for reason, holds in reasons.items() if holds])


def or_zero(o: jax.Array, sees_key: jax.Array) -> jax.Array:
    """Return the output, with 0 for queries that see no key.

    Args:
      o: `[batch, q_length, heads, v_dim]`.
      sees_key: Whether a query sees any key, `[batch or 1, heads or 1, q_length or 1]`.
    """
    return jnp.where(jnp.swapaxes(sees_key, 1, 2)[..., None], o, 0)


def _attend(shard: Operands, *, call: AttentionCall, dtype: str) -> Result:
    seen, bias = _visible(shard, call)
    shard = online_softmax.without_remains(shard, call.recipe)
    q, k, v = (x.astype(dtype) for x in (shard.q, shard.k, shard.v))
    with online_softmax.full_precision(call.dtype):
        o = jax.nn.dot_product_attention(
            q, k, v, bias=bias, mask=seen, scale=call.recipe.scale, implementation="xla"
        )
    o = o.astype(call.dtype)
    o = o if seen is None else or_zero(o, jnp.any(seen, axis=-1))
    return Result(o=o)


def _visible(shard: Operands, call: AttentionCall) -> tuple[jax.Array | None, jax.Array | None]:
    """Return which pairs attend (None if all do), and the bias to add."""
    arrays = call.segments or call.lengths or call.mask_shape or call.bias_shape
    if call.q_offset is not None and not (call.recipe.mask.positional or arrays):
        return None, None
    return online_softmax.visible(shard, call.recipe.mask)
