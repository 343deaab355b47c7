"""Which kernel runs on the shards of a call whose sequence is sharded: the platform's own where it can, else blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from shardwright.attention.call import AttentionCall, Operands, Recipe, Result
from shardwright.attention.kernels import blockwise, cudnn
from shardwright.attention.kernels.splash import not_in_splash
from shardwright.attention.parts import sequence, shards
from shardwright.attention.parts.pallas_shards import run_opaque

Kernel = Callable[[Operands], Result]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A kernel that runs on each shard.

    Attributes:
      name: "splash", "cudnn" or "blockwise".
      refused: the platform's own kernel, if it is another one and cannot serve the call; else empty.
      reasons: why not.
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
    """Return the kernel for a call.

    Args:
      call: the call.
      q_shards: number of parts of the queries' length that the kernel sees one of.
      kv_shards: likewise of the keys.
      whole: whether the kernel sees whole sequences, so that cuDNN may serve.
    """
    if call.platform == "tpu":
        reasons = not_in_splash(call, q_shards=q_shards, kv_shards=kv_shards)
        return (
            Inner(name="blockwise", refused="splash", reasons=reasons)
            if reasons
            else Inner(name="splash")
        )
    if call.platform == "gpu" and whole:
        reasons = cudnn.not_in_cudnn(call)
        return (
            Inner(name="blockwise", refused="cudnn", reasons=reasons)
            if reasons
            else Inner(name="cudnn")
        )
    return Inner(name="blockwise")


def blocks_of(
    inner: Inner, call: AttentionCall, *, first_rows: tuple[int, ...] | None = None
) -> Any:
    """Return the functions `forward`, `backward`, `finish` and `attend` of an inner kernel. Hashable.

    Args:
      inner: "splash" or "blockwise".
      call: what it is for.
      first_rows: the positions at which the queries of each shard start, where keys start at 0; None if not known.
    """
    if inner.name == "blockwise":
        return blockwise
    from shardwright.attention.kernels import splash_blocks

    return splash_blocks.SplashBlocks(interpret=_on_cpus(call), first_rows=first_rows)


def explained(inner: Inner, call: AttentionCall) -> str:
    """Return a line about an inner kernel; empty on a platform that has no kernels of its own."""
    return "" if call.platform == "cpu" else str(inner)


def recipe_of(inner: Inner, shard: Operands, call: AttentionCall) -> Recipe:
    """Return the recipe with blocks that suit a shard; those of splash never leave the chip."""
    if inner.name == "blockwise":
        return sequence.blocks(call.recipe, shard, call)
    return sequence.within_halves(call.recipe, shard, call)


def attend_whole(inner: Inner, call: AttentionCall) -> Callable[..., Any]:
    """Return a function of whole local sequences and a recipe to the output and the logsumexp, which cuDNN does not give."""
    if inner.name == "cudnn":
        return functools.partial(_by_cudnn, call=call)
    found: Callable[..., Any] = blocks_of(inner, call, first_rows=first_rows(call)).attend
    return found


def first_rows(call: AttentionCall, *, shards: int = 1) -> tuple[int, ...] | None:
    """Return the positions at which the queries of each of so many shards start; None where positions are arrays."""
    if call.q_offset is None:
        return None
    rows = call.q_length // shards
    return tuple(call.q_offset + shard * rows for shard in range(shards))


def run_inner(inner: Inner, kernel: Kernel, operands: Operands, call: AttentionCall) -> Result:
    """Return `kernel(shards)` as global arrays, where the kernel calls an inner kernel: JAX cannot look into all of them."""
    run = shards.run_on_shards if inner.name == "blockwise" else run_opaque
    return run(kernel, operands, call)


def _by_cudnn(whole: Operands, recipe: Any, *, call: AttentionCall) -> tuple[Any, None]:
    del recipe  # the call's
    return cudnn.attend(whole, call=call).o, None


def _on_cpus(call: AttentionCall) -> bool:
    """Whether a call for TPUs lies on CPUs, where kernels are interpreted: for tests."""
    return isinstance(call.mesh, Mesh) and call.mesh.devices.flat[0].platform == "cpu"
