"""Attention by its definition, in float32, with all logits at once.

Memory is quadratic in length. On Auto mesh axes, this implementation runs under any sharding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from shardwright.attention.call import (
    LSE_NAME,
    OUTPUT_NAME,
    Arithmetic,
    AttentionCall,
    Operands,
    Result,
)
from shardwright.attention.parts import online_softmax
from shardwright.attention.parts.dropout import keep_factors
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: the partitioner does nothing over Explicit mesh axes."""
    if call.mesh is None:
        return ()
    types = dict(zip(call.mesh.axis_names, call.mesh.axis_types, strict=True))
    explicit = [axis for axis in call.specs.mesh_axes if types[axis] is AxisType.Explicit]
    if not explicit:
        return ()
    return (f"the mesh axis {explicit[0]} is Explicit, where the partitioner does nothing",)


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend. The partitioner decides what is communicated."""
    return attend(operands, call.recipe)


def attend(operands: Operands, recipe: Arithmetic) -> Result:
    """Return the output, the logsumexp and the weights of whole arrays. Differentiable."""
    dtype = operands.q.dtype
    wide = {name: getattr(operands, name).astype(jnp.float32) for name in ("q", "k", "v")}
    x = online_softmax.without_remains(operands.replace(**wide), recipe)
    seen, bias = online_softmax.visible(x, recipe.mask)
    scores = online_softmax.scores_of(x.q, x.k)
    logits = online_softmax.logits_of(
        scores, scale=recipe.scale, softcap=recipe.softcap, bias=bias, k_scale=x.k_scale
    )
    logits = jnp.where(seen, logits, DEFAULT_MASK_VALUE)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=DEFAULT_MASK_VALUE)
    if x.sinks is not None:
        sinks = x.sinks.astype(jnp.float32)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    # The result does not depend on `top`, which only prevents overflow.
    top = jax.lax.stop_gradient(top)
    p = jnp.where(seen, jnp.exp(logits - top), 0.0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if x.sinks is not None:
        total = total + jnp.exp(sinks - top)
    # In a row without keys, compute 0 / 1 instead of 0 / 0.
    no_keys = total == 0.0
    total = jnp.where(no_keys, 1.0, total)
    weights = p / total
    lse = jnp.where(no_keys, -jnp.inf, top + jnp.log(total))[..., 0]
    dropped = weights * keep_factors(x, recipe.dropout) if recipe.dropout else weights
    o = jnp.swapaxes(online_softmax.weighted_sum(dropped, x.v, v_scale=x.v_scale), 1, 2)
    o, lse = checkpoint_name(o.astype(dtype), OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return Result(o=o, lse=lse, weights=dropped.astype(dtype))
