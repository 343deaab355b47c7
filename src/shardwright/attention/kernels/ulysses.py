"""Ulysses: all-to-alls turn shards of the sequence into shards of the heads (Jacobs et al. 2023).

There are four all-to-alls forward (q, k, v and the output) and four backward. In between, each rank
has whole sequences of its heads, so any mask works. The query heads must divide over the ranks. kv
heads that do not divide over the ranks are repeated until they do.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import AttentionCall, Operands, Result, default_positions
from shardwright.attention.parts import inner_kernel, sequence, shards


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: mesh axes that differ, or heads that do not divide."""
    reasons = (*shards.no_weights(call), *sequence.different_axes(call))
    heads, ranks = call.heads // call.shards(call.specs.heads), call.shards(call.specs.q_length)
    if heads % ranks:
        over = f"{'+'.join(call.specs.q_length)}={ranks}"
        reasons = (*reasons, f"{heads} query heads per device do not divide over {over}")
    return reasons


def inner(call: AttentionCall) -> str:
    """Return which kernel runs on each shard."""
    return inner_kernel.explained(_inner_of(call), call)


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend with one `shard_map` over all mesh axes of the call."""
    return inner_kernel.run_inner(_inner_of(call), _run, operands, call)


def _inner_of(call: AttentionCall) -> inner_kernel.Inner:
    return inner_kernel.inner_kernel(call, whole=True)


def _run(shard: Operands, *, call: AttentionCall, inner: inner_kernel.Inner) -> Result:
    axes, attend = call.specs.kv_length, inner_kernel.attend_whole(inner, call)
    if call.shards(axes) == 1:
        o, lse, lse_error = attend(shard, call.recipe)
        return Result(o=o, lse=lse, kept=(lse_error,))
    whole = _with_some_heads(_jax.vary_together(_with_all_rows(shard, call)), call)
    o, lse, lse_error = attend(whole, sequence.within_halves(call.recipe, shard, call))
    return Result(
        o=_swap(o, axes, split=1, join=2),
        lse=_swap(lse, axes, split=2, join=1) if call.return_lse else None,
        kept=(o, lse, lse_error),
    )


def _with_all_rows(shard: Operands, call: AttentionCall) -> Operands:
    """Return the operands with positions and segment ids of all queries and keys."""
    axes = call.specs.kv_length
    changed: dict[str, jax.Array] = {}
    if call.segments:
        changed |= {
            name: sequence.gather(getattr(shard, name), axes, dim=1)
            for name in ("q_segment_ids", "kv_segment_ids")
        }
    if call.q_offset is None:
        changed |= {
            name: sequence.gather(getattr(shard, name), axes, dim=1)
            for name in ("q_positions", "kv_positions")
        }
    else:
        changed["q_positions"] = default_positions(call.q_length, offset=call.q_offset)
        changed["kv_positions"] = default_positions(call.kv_length)
    return shard.replace(**changed)


def _with_some_heads(shard: Operands, call: AttentionCall) -> Operands:
    """Return the operands with all rows of this rank's heads."""
    axes = call.specs.kv_length
    ranks, rank = call.shards(axes), jax.lax.axis_index(axes)
    # The least number of kv heads that divides over the ranks and keeps the groups of query heads.
    kv_heads = math.lcm(shard.k.shape[2], ranks)
    swap = functools.partial(_swap, axes=axes, split=2, join=1)
    changed = {
        "q": swap(shard.q),
        "k": swap(_repeat(shard.k, kv_heads)),
        "v": swap(_repeat(shard.v, kv_heads)),
    }
    for name in ("sinks", "head_index"):
        if (array := getattr(shard, name)) is not None:
            changed[name] = _local_part(array, rank, ranks, dim=0)
    for name, shape in (("mask", call.mask_shape), ("bias", call.bias_shape)):
        if shape is None:
            continue
        array = getattr(shard, name)
        # The sharded dim is dim 2 (queries) if the array has a row per query, else dim 3 (keys).
        rows = next((dim for dim in (2, 3) if shape[dim] > 1), None)
        if rows is not None and shape[1] > 1:
            array = _swap(array, axes, split=1, join=rows)
        elif rows is not None:
            array = sequence.gather(array, axes, dim=rows)
        elif shape[1] > 1:
            array = _local_part(array, rank, ranks, dim=1)
        changed[name] = array
    return shard.replace(**changed)


def _swap(array: jax.Array, axes: tuple[str, ...], *, split: int, join: int) -> jax.Array:
    swapped: jax.Array = jax.lax.all_to_all(
        array, axes, split_axis=split, concat_axis=join, tiled=True
    )
    return swapped


def _local_part(array: jax.Array, rank: jax.Array, ranks: int, *, dim: int) -> jax.Array:
    size = array.shape[dim] // ranks
    return jax.lax.dynamic_slice_in_dim(array, rank * size, size, dim)


def _repeat(array: jax.Array, kv_heads: int) -> jax.Array:
    """Return `[batch, length, kv_heads, dim]`, each head repeated in adjacent copies."""
    batch, length, heads, dim = array.shape
    copies = jnp.broadcast_to(array[:, :, :, None], (batch, length, heads, kv_heads // heads, dim))
    return copies.reshape(batch, length, kv_heads, dim)
