"""cuDNN's flash attention for GPUs, on every shard of the batch and the heads.

Memory is linear in length. Each device must hold whole sequences. The result of cuDNN is undefined
for a query that sees no key; here the output of that query is exactly 0. A small program is
compiled once per process to find out whether cuDNN works on the machine.
"""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.call import AttentionCall, Operands, Result
from shardwright.attention.kernels.sdpa import missing_arguments, or_zero
from shardwright.attention.parts.shards import (
    IN_A_PLAN,
    inside_shard_map,
    lengths_are_whole,
    no_weights,
    run_opaque,
)
from shardwright.manager import context


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: the platform, the call, or a broken cuDNN."""
    if call.platform != "gpu":
        return (f"it runs on GPUs, and the platform is {call.platform}",)
    return not_in_cudnn(call, (*lengths_are_whole(call), *no_weights(call)))


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend on every shard of batch and heads."""
    return run_opaque(functools.partial(attend, call=call), operands, call)


def not_in_cudnn(call: AttentionCall, before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return why cuDNN cannot serve a call, given that every device holds whole sequences.

    Args:
      call: The call.
      before: Reasons that are known already. If there are any reasons, cuDNN is not tried on the
        machine.
    """
    reasons = (*before, *missing_arguments(call), *_limits(call), *inside_shard_map(call))
    if reasons:
        return reasons
    if context.TARGET.value is not None:
        # A plan must not depend on whether this machine has cuDNN.
        return (IN_A_PLAN,)
    # Try cuDNN last, because that starts a backend and compiles.
    failure = failure_on(jax.local_devices()[0].device_kind)
    return (failure,) if failure else ()


@functools.cache
def failure_on(device_kind: str) -> str:
    """Return why cuDNN does not work on this process's GPUs; empty if it works."""
    del device_kind
    # Try cuDNN in a new thread, in which no mesh is ambient and nothing is traced.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_cudnn).result()


def attend(shard: Operands, *, call: AttentionCall) -> Result:
    """Return the output of local operands that hold whole sequences."""
    left, right = call.recipe.mask.bounds
    lengths = shard.lengths
    o = jax.nn.dot_product_attention(
        shard.q,
        shard.k,
        shard.v,
        scale=call.recipe.scale,
        is_causal=right == 0,
        local_window_size=None if left is None else (left, 0),
        # Without any key, cuDNN's softmax is 0 / 0. Show one key, and zero the output below.
        key_value_seq_lengths=None if lengths is None else jnp.maximum(lengths, 1),
        implementation="cudnn",
    )
    return Result(o=o if lengths is None else or_zero(o, (lengths > 0)[:, None, None]))


def _limits(call: AttentionCall) -> tuple[str, ...]:
    """Return why cuDNN's kernel cannot compute a call, or why its result would be different."""
    rules, dim = call.recipe.mask, call.head_dim
    left, right = rules.bounds
    window = left is not None
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "0.0"))
    # From Hopper on (compute capability 9.0), head_dim may be up to 256; on older GPUs, up to 128.
    largest = 256 if int(capability.partition(".")[0]) >= 9 else 128
    reasons = {
        f"it computes in bfloat16 and float16, and the call is in {call.dtype}": (
            call.dtype == "float32"
        ),
        f"its head_dim is a multiple of 8 up to {largest}, and head_dim is {dim}": (
            dim % 8 != 0 or dim > largest
        ),
        "it takes no segments": call.segments,
        "it adds a dense mask to the logits, and the sums overflow": call.mask_shape is not None,
        "its gradient of a bias depends on the shape of the bias": call.bias_shape is not None,
        f"it does not compute in chunks, and chunk is {rules.chunk}": rules.chunk is not None,
        f"its window ends at the query, and window is {rules.window}": (
            right not in (None, 0) or (window and right is None)
        ),
        "its masks count rows, and positions are arrays": call.q_offset is None,
        f"its first query is at position 0, and that of the call is at {call.q_offset}": (
            rules.positional and call.q_offset not in (None, 0)
        ),
        "with a window and lengths a query may see no key, and its result is undefined": (
            window and call.lengths
        ),
    }
    return tuple([reason for reason, holds in reasons.items() if holds])


def _try_cudnn() -> str:
    if jax.default_backend() != "gpu":
        return f"this process has no GPU; its backend is {jax.default_backend()}"
    # Compute a gradient too: cuDNN's backward kernel may fail although its forward kernel works.
    row = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def loss(q: Any, k: Any, v: Any) -> Any:
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(o.astype(jnp.float32))

    try:
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(row, row, row).compile()
    except (RuntimeError, ValueError) as err:  # raised by the plugin, cuDNN or XLA
        text = str(err).strip()
        why = text.splitlines()[0] if text else type(err).__name__
        return f"cuDNN does not work on this machine: {why}"
    return ""
