"""Common parts of the implementations that shard the keys' length.

These functions gather positions and segment ids, pack k and v into one array, and choose sizes of
blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.call import Arithmetic, AttentionCall, Operands, default_positions

# The operands that have gradients.
FLOATS = ("q", "k", "v", "bias", "sinks")
# Blocks are halved only while the larger side has more rows than this.
_SMALL = 128


def split_floats(operands: Operands) -> tuple[dict[str, Any], Operands]:
    """Return the operands that have gradients, by name; and the other operands."""
    floats = {name: getattr(operands, name) for name in FLOATS}
    return floats, operands.replace(**dict.fromkeys(FLOATS))


def with_whole_rows(shard: Operands, call: AttentionCall) -> Operands:
    """Return local operands with positions and segment ids of all keys, and all mask columns.

    Positions that count from an offset are computed. Positions and segment ids that are arrays are
    gathered once: `4 * kv_length` bytes per array and sequence.
    """
    axes = call.specs.kv_length
    rows: dict[str, jax.Array] = {"kv_segment_ids": shard.kv_segment_ids} if call.segments else {}
    changed: dict[str, jax.Array] = {}
    if call.q_offset is None:
        rows["kv_positions"] = shard.kv_positions
    else:
        changed["kv_positions"] = default_positions(call.kv_length)
    changed |= {name: gather(array, axes, dim=1) for name, array in rows.items()}
    for name, shape in (("mask", call.mask_shape), ("bias", call.bias_shape)):
        # If all queries share one row of a mask or a bias, the columns of this row are sharded, so
        # gather them.
        if shape is not None and shape[2] == 1 and shape[3] > 1:
            changed[name] = gather(getattr(shard, name), axes, dim=3)
    return shard.replace(**changed)


def gather(array: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """Return the shards of all ranks, concatenated along a dim."""
    whole: jax.Array = jax.lax.all_gather(array, axes, axis=dim, tiled=True)
    return whole


def keys_at(operands: Operands, start: Any, *, k: jax.Array, v: jax.Array) -> Operands:
    """Return the operands with k and v as their keys and values.

    k and v start at row `start` of the whole sequence. Positions, segment ids, mask and bias are
    sliced to the same rows.
    """
    length = k.shape[1]
    dims = {"kv_positions": 1, "kv_segment_ids": 1, "mask": 3, "bias": 3}
    changed = {}
    for name, dim in dims.items():
        array = getattr(operands, name)
        if array is not None and array.shape[dim] > 1:
            changed[name] = jax.lax.dynamic_slice_in_dim(array, start, length, dim)
    return operands.replace(k=k, v=v, **changed)


def pack(k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays to send for k and v: one if their dtypes are equal, else two."""
    if k.dtype != v.dtype:
        return k, v
    return (jnp.stack([k, v]) if k.shape == v.shape else jnp.concatenate([k, v], axis=-1),)


def unpack(packed: Sequence[jax.Array], *, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return k and v; see `pack`."""
    if len(packed) == 2:
        return packed[0], packed[1]
    (kv,) = packed
    return (kv[0], kv[1]) if kv.ndim == 5 else (kv[..., :head_dim], kv[..., head_dim:])


def blocks(recipe: Arithmetic, shard: Operands, call: AttentionCall) -> Arithmetic:
    """Return the recipe with blocks whose logits take no more bytes than the keys and values."""
    limit = shard.k.nbytes + shard.v.nbytes
    q_block, kv_block = (
        min(recipe.q_block, shard.q.shape[1]),
        min(recipe.kv_block, shard.k.shape[1]),
    )
    rows = 4 * shard.q.shape[0] * shard.q.shape[2]
    while rows * q_block * kv_block > limit and max(q_block, kv_block) > _SMALL:
        # Halve the larger side: of all blocks with the same number of logits, a square block reads
        # the fewest rows.
        if q_block > kv_block:
            q_block = -(-q_block // 2)
        else:
            kv_block = -(-kv_block // 2)
    return within_halves(
        dataclasses.replace(recipe, q_block=q_block, kv_block=kv_block), shard, call
    )


def within_halves(recipe: Arithmetic, shard: Operands, call: AttentionCall) -> Arithmetic:
    """Return a recipe whose blocks do not cross the middle of a shard, if positions are arrays.

    In zigzag order the positions of the two halves are far apart, and a block with rows of both
    halves could never be skipped.
    """
    if call.q_offset is not None or not recipe.mask.positional:
        return recipe
    q_block, kv_block = (
        _within_half(recipe.q_block, shard.q.shape[1]),
        _within_half(recipe.kv_block, shard.k.shape[1]),
    )
    return dataclasses.replace(recipe, q_block=q_block, kv_block=kv_block)


def _within_half(block: int, length: int) -> int:
    half = -(-length // 2)  # with an odd length, one half is a row longer
    return -(-half // -(-half // block))


def add_columns(whole: jax.Array | None, part: jax.Array | None, start: Any) -> jax.Array | None:
    """Return the gradient of a bias, after adding `part` to the columns from `start` on."""
    if whole is None or part is None:
        return None
    if whole.shape == part.shape:
        return whole + part
    old = jax.lax.dynamic_slice_in_dim(whole, start, part.shape[3], 3)
    return jax.lax.dynamic_update_slice_in_dim(whole, old + part, start, 3)


def cotangents(floats: dict[str, Any], **grads: jax.Array | None) -> dict[str, Any]:
    """Return gradients in the dtypes of their operands."""
    return {
        name: None if grad is None else grad.astype(floats[name].dtype)
        for name, grad in grads.items()
    }


def sent_again(operands: Operands, do: jax.Array) -> tuple[Operands, jax.Array]:
    """Return the operands and the output's cotangent behind an optimization barrier.

    The backward pass sends the keys again. Without the barrier, XLA would merge this send with that
    of the forward pass, and every layer would hold the keys of other ranks until its backward pass.
    """
    k, v, do = jax.lax.optimization_barrier((operands.k, operands.v, do))
    return operands.replace(k=k, v=v), do


def different_axes(call: AttentionCall) -> tuple[str, ...]:
    """Return why a kernel that needs queries and keys over the same mesh axes refuses a call."""
    if call.specs.q_length == call.specs.kv_length:
        return ()
    q, kv = (
        "+".join(axes) or "no mesh axis" for axes in (call.specs.q_length, call.specs.kv_length)
    )
    lengths = f"the length of the queries is sharded over {q}, that of the keys over {kv}"
    return (f"{lengths}; it needs both over the same mesh axes",)
