"""Choose the kernel that runs on each shard if the sequence is sharded.

It is the platform's own kernel if that kernel can serve the call, else `blockwise`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from shardwright.attention.call import Arithmetic, AttentionCall, Operands, Result
from shardwright.attention.kernels import blockwise, cudnn
from shardwright.attention.kernels.splash import not_in_splash
from shardwright.attention.parts import sequence, shards


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A kernel that runs on each shard.

    Attributes:
      name: "splash", "cudnn" or "blockwise".
      refused: The platform's own kernel if it cannot serve the call, else empty.
      reasons: Why the platform's own kernel cannot serve the call.
    """

    name: str
    refused: str = ""
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f"; {self.refused} cannot: {'; '.join(self.reasons)}" if self.refused else ""
        return f"{self.name} on each shard{why}"


def inner_kernel(
    call: AttentionCall, *, q_shards: int = 1, kv_shards: int = 1, whole: bool = False
) -> Inner:
    """Return the kernel for the shards of a call.

    Args:
      call: The call.
      q_shards: Number of shards of the queries' length. The kernel sees one shard.
      kv_shards: As `q_shards`, for the keys.
      whole: Whether the kernel sees whole sequences, which cuDNN needs.
    """
    platform_kernel, reasons = "", tuple[str, ...]()
    if call.platform == "tpu":
        platform_kernel = "splash"
        reasons = not_in_splash(call, q_shards=q_shards, kv_shards=kv_shards)
    # cuDNN takes no running state, so it cannot continue with the keys of the next shard.
    elif call.platform == "gpu" and whole:
        platform_kernel, reasons = "cudnn", cudnn.not_in_cudnn(call)
    if platform_kernel and not reasons:
        return Inner(name=platform_kernel)
    return Inner(name="blockwise", refused=platform_kernel, reasons=reasons)


def blocks_of(
    inner: Inner, call: AttentionCall, *, first_rows: tuple[int, ...] | None = None
) -> Any:
    """Return a hashable value that has `forward`, `backward`, `finish` and `attend` of the kernel.

    Args:
      inner: "splash" or "blockwise".
      call: The call.
      first_rows: The position of the first query of each shard; the first key has position 0. None
        if the positions are not known.
    """
    if inner.name == "blockwise":
        return blockwise
    from shardwright.attention.kernels import splash_blocks

    return splash_blocks.SplashBlocks(interpret=call.on_cpus, first_rows=first_rows)


def explained(inner: Inner, call: AttentionCall) -> str:
    """Return a line about an inner kernel; empty on a platform without kernels of its own."""
    return "" if call.platform == "cpu" else str(inner)


def recipe_of(inner: Inner, shard: Operands, call: AttentionCall) -> Arithmetic:
    """Return the recipe with block sizes for a shard.

    `blockwise` gets smaller blocks, because it writes the logits of a block to memory. Splash does
    not write logits to memory.
    """
    if inner.name == "blockwise":
        return sequence.blocks(call.recipe, shard, call)
    return sequence.within_halves(call.recipe, shard, call)


def attend_whole(inner: Inner, call: AttentionCall) -> Callable[..., Any]:
    """Return a function like `blockwise.attend`, of whole local sequences and a recipe.

    With cuDNN, the function returns None as the logsumexp.
    """
    if inner.name == "cudnn":
        # cuDNN reads the recipe from `call`, and not from the argument.
        return lambda whole, recipe: (cudnn.attend(whole, call=call).o, None, None)
    attend: Callable[..., Any] = blocks_of(inner, call, first_rows=first_rows(call)).attend
    return attend


def first_rows(call: AttentionCall, *, shards: int = 1) -> tuple[int, ...] | None:
    """Return the position of the first query of each shard; None if positions are arrays."""
    if call.q_offset is None:
        return None
    rows = call.q_length // shards
    return tuple(call.q_offset + shard * rows for shard in range(shards))


def run_inner(
    inner: Inner, kernel: Callable[..., Result], operands: Operands, call: AttentionCall
) -> Result:
    """Run `kernel(shard, call=call, inner=inner)` on every shard. Return global arrays."""
    # JAX cannot look into splash and cuDNN, so they run as opaque kernels.
    run = shards.run_on_shards if inner.name == "blockwise" else shards.run_opaque
    return run(functools.partial(kernel, call=call, inner=inner), operands, call)
