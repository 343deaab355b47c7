"""Splash attention, JAX's Pallas kernel for TPUs, on every shard of the batch and the heads.

Its masks are made when the program is, from rules by position, so positions are row numbers. On a CPU the kernel is
interpreted: correct and slow, for tests.

The kernel takes multiples of 128 rows and its operands by head, forward and backward. Such lengths cost nothing; others are
padded on the way. With 4000 rows in place of 4096 what surrounds the kernel moves 16% more bytes and a step holds 43% more
temporary memory (batch 8, 8 heads of 128 and 2 kv heads per device, as compiled for a TPU).
"""

from __future__ import annotations

import functools

from shardwright.attention._opaque import inside_shard_map, run_opaque
from shardwright.attention._shards import lengths_are_whole, no_weights
from shardwright.attention.call import AttentionCall, Operands
from shardwright.attention.registry import AttentionImpl, AttentionRegistry, Result


@AttentionRegistry.register
class SplashAttention(AttentionImpl):
    """JAX's flash kernel for TPUs: memory linear in length, the batch and the heads may be sharded, the lengths not."""

    @classmethod
    def get_impl_name(cls) -> str:
        """Return "splash"."""
        return "splash"

    @classmethod
    def supports(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return why a call cannot be served: a GPU, sharded lengths, or what the kernel does not know."""
        recipe = call.recipe
        found = {
            "its kernel is for TPUs, and the platform is gpu": call.platform == "gpu",
            "its logsumexp has no gradient": call.return_lse,
            "positions are arrays, and its masks are made when the program is": call.q_offset is None,
            "it takes no dense mask": call.mask_shape is not None,
            "it takes no bias": call.bias_shape is not None,
            f"it has no dropout, and dropout is {recipe.dropout}": bool(recipe.dropout),
            "TPUs do not compute in float16": call.dtype == "float16",
        }
        return (*lengths_are_whole(call), *no_weights(call), *(reason for reason, holds in found.items() if holds), *inside_shard_map())

    @classmethod
    def forward_native(cls, operands: Operands, call: AttentionCall) -> Result:
        """Attend with the kernel interpreted."""
        return _run(operands, call, interpret=True)

    @classmethod
    def forward_tpu(cls, operands: Operands, call: AttentionCall) -> Result:
        """Attend on every shard of batch and heads."""
        return _run(operands, call, interpret=False)


def _run(operands: Operands, call: AttentionCall, *, interpret: bool) -> Result:
    from shardwright.attention import _splash_kernel  # brings Pallas, half a second

    return run_opaque(functools.partial(_splash_kernel.attend, call=call, interpret=interpret), operands, call)
