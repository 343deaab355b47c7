"""`jax.nn.dot_product_attention` on every shard of the batch and the heads: XLA's own attention, and cuDNN's kernel for GPUs.

Where a query sees no key JAX returns the mean of the values, and cuDNN promises nothing; both are corrected to exact zeros.
"""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.attention.call import OUTPUT_NAME, AttentionCall, Operands
from shardwright.attention.parts import online_softmax
from shardwright.attention.parts.pallas_shards import inside_shard_map, run_opaque
from shardwright.attention.parts.shards import lengths_are_whole, no_weights, run_on_shards
from shardwright.attention.registry import AttentionImpl, AttentionRegistry, Result


@AttentionRegistry.register
class SdpaAttention(AttentionImpl):
    """JAX's own attention by XLA: all logits at once, the batch and the heads may be sharded, the lengths not."""

    @classmethod
    def get_impl_name(cls) -> str:
        """Return "sdpa"."""
        return "sdpa"

    @classmethod
    def supports(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return why a call cannot be served: sharded lengths, or what `jax.nn.dot_product_attention` has no argument for."""
        return (*lengths_are_whole(call), *no_weights(call), *_no_argument(call))

    @classmethod
    def forward_native(cls, operands: Operands, call: AttentionCall) -> Result:
        """Attend on every shard of batch and heads."""
        return run_on_shards(
            functools.partial(_by_xla, call=call, dtype=call.dtype), operands, call
        )

    @classmethod
    def forward_cpu(cls, operands: Operands, call: AttentionCall) -> Result:
        """Attend in float32, as XLA for CPUs does with most products of two bfloat16s, but not with all.

        Where q, k and v are BHTD, JAX 0.12 sums weights times values in bfloat16: of 512 keys the output is off by 1.1e-2 in relative
        norm, and not by 2.3e-3, and `jax.nn.dot_product_attention` has no argument against it.
        """
        return run_on_shards(functools.partial(_by_xla, call=call, dtype="float32"), operands, call)


@AttentionRegistry.register
class CudnnAttention(AttentionImpl):
    """cuDNN's flash attention, on GPUs: memory linear in length, the batch and the heads may be sharded, the lengths not.

    Whether it works here is found out once per process by compiling a small program.
    """

    # Device kind -> why cuDNN does not work there, or empty.
    _verdicts: ClassVar[dict[str, str]] = {}

    @classmethod
    def get_impl_name(cls) -> str:
        """Return "cudnn"."""
        return "cudnn"

    @classmethod
    def supports(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return why a call cannot be served: another platform, what cuDNN cannot do, or that it does not work on this machine."""
        if call.platform != "gpu":
            return (f"it runs on GPUs, and the platform is {call.platform}",)
        return not_in_cudnn(call, (*lengths_are_whole(call), *no_weights(call)))

    @classmethod
    def probe(cls) -> str:
        """Return why cuDNN does not work on this process's GPUs, or nothing if it does."""
        kind = jax.local_devices()[0].device_kind
        if kind not in cls._verdicts:
            # In a thread of its own, where no mesh is ambient and nothing is being traced.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                cls._verdicts = {**cls._verdicts, kind: thread.submit(_try_cudnn).result()}
        return cls._verdicts[kind]

    @classmethod
    def forward_native(cls, operands: Operands, call: AttentionCall) -> Result:
        """Attend on every shard of batch and heads."""
        return run_opaque(functools.partial(attend_by_cudnn, call=call), operands, call)


def not_in_cudnn(call: AttentionCall, before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return why cuDNN cannot serve a call for a GPU whose sequences are whole where it runs, after what is known before."""
    reasons = (*before, *_no_argument(call), *_not_in_cudnn(call), *inside_shard_map())
    if reasons:  # the rest starts a backend and compiles
        return reasons
    verdict = CudnnAttention.probe()
    return (verdict,) if verdict else ()


def _no_argument(call: AttentionCall) -> tuple[str, ...]:
    """Return the reasons that JAX's signature gives."""
    recipe = call.recipe
    found = {
        f"it has no softcap, and softcap is {recipe.softcap}": recipe.softcap is not None,
        "it has no sinks": call.sinks,
        f"it has no dropout, and dropout is {recipe.dropout}": bool(recipe.dropout),
        f"keys and values have one size, and head_dim is {call.head_dim}, v_dim {call.v_dim}": call.head_dim
        != call.v_dim,
        "its logsumexp has no gradient": call.return_lse,
    }
    return tuple(reason for reason, holds in found.items() if holds)


def _not_in_cudnn(call: AttentionCall) -> tuple[str, ...]:
    """Return the reasons that cuDNN's flash attention gives, and those why it would attend to something else."""
    rules = call.recipe.mask
    left, right = rules.bounds
    window = left is not None
    most = 256 if _is_hopper() else 128
    found = {
        f"it computes in bfloat16 and float16, and the call in {call.dtype}": call.dtype
        == "float32",
        f"its head_dim is a multiple of 8 up to {most}, and head_dim is {call.head_dim}": bool(
            call.head_dim % 8
        )
        or call.head_dim > most,
        "it takes no segments": call.segments,
        "a dense mask would have to be a bias, whose sums overflow": call.mask_shape is not None,
        "the gradient of a bias depends on its shape there": call.bias_shape is not None,
        f"it has no chunks, and chunk is {rules.chunk}": rules.chunk is not None,
        f"its window ends at the query, and window is {rules.window}": right not in (None, 0)
        or (window and right is None),
        "positions are arrays, and its masks go by row": call.q_offset is None,
        f"it counts from the first row, and the first query stands at {call.q_offset}": rules.positional
        and call.q_offset not in (None, 0),
        "with a window and lengths a query may see no key, where it promises nothing": window
        and call.lengths,
    }
    return tuple(reason for reason, holds in found.items() if holds)


def _by_xla(shard: Operands, *, call: AttentionCall, dtype: str) -> Result:
    seen, bias = _visible(shard, call)
    shard = online_softmax.without_remains(shard, call.recipe)
    q, k, v = (x.astype(dtype) for x in (shard.q, shard.k, shard.v))
    with online_softmax.full_precision(call.dtype):
        o = jax.nn.dot_product_attention(
            q, k, v, bias=bias, mask=seen, scale=call.recipe.scale, implementation="xla"
        )
    o = o.astype(call.dtype)
    o = o if seen is None else _or_zero(o, jnp.any(seen, axis=-1))
    return Result(o=checkpoint_name(o, OUTPUT_NAME))


def _visible(shard: Operands, call: AttentionCall) -> tuple[jax.Array | None, jax.Array | None]:
    """Return which pairs attend, None for all of them, and the bias to add."""
    arrays = call.segments or call.lengths or call.mask_shape or call.bias_shape
    if call.q_offset is not None and not (call.recipe.mask.positional or arrays):
        return None, None
    return online_softmax.visible(shard, call.recipe.mask)


def attend_by_cudnn(shard: Operands, *, call: AttentionCall) -> Result:
    """Return the output of local operands whose sequences are whole."""
    left, right = call.recipe.mask.bounds
    lengths = shard.lengths
    o = jax.nn.dot_product_attention(
        shard.q,
        shard.k,
        shard.v,
        scale=call.recipe.scale,
        is_causal=right == 0,
        local_window_size=None if left is None else (left, 0),
        # Of no key at all cuDNN's softmax is 0 / 0; one is attended, and its row zeroed.
        key_value_seq_lengths=None if lengths is None else jnp.maximum(lengths, 1),
        implementation="cudnn",
    )
    return Result(o=o if lengths is None else _or_zero(o, (lengths > 0)[:, None, None]))


def _or_zero(o: jax.Array, some: jax.Array) -> jax.Array:
    """Return the output where a query sees some key, `[batch or 1, heads or 1, q_length or 1]`, else 0."""
    return jnp.where(jnp.swapaxes(some, 1, 2)[..., None], o, 0)


def _is_hopper() -> bool:
    capability = getattr(jax.local_devices()[0], "compute_capability", "0.0")
    return int(str(capability).partition(".")[0]) >= 9


def _try_cudnn() -> str:
    if jax.default_backend() != "gpu":
        return f"this process has no GPU; its backend is {jax.default_backend()}"
    row = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(
            jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(
                jnp.float32
            )
        )

    try:
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(row, row, row).compile()
    except (RuntimeError, ValueError) as err:  # the plugin's, cuDNN's and XLA's own
        return f"cuDNN does not work on this machine: {str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__}"
    return ""
