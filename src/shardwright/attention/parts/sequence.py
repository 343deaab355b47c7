"""What implementations that shard the length of the keys share: rows of the whole sequence, and k and v as one array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.call import AttentionCall, Operands, Recipe, default_positions

# What is None in an Operands that only holds what is not differentiated.
FLOATS = ("q", "k", "v", "bias", "sinks")
_SMALL = 128


def split_floats(operands: Operands) -> tuple[dict[str, Any], Operands]:
    """Return the operands that have gradients, by name, and the rest."""
    return {name: getattr(operands, name) for name in FLOATS}, operands.replace(
        **dict.fromkeys(FLOATS)
    )


def with_whole_rows(shard: Operands, call: AttentionCall) -> Operands:
    """Return the local operands with the positions and segment ids of all keys, and with all columns of a mask and a bias.

    Positions that count from an offset are computed. What is an array is gathered, once and small: `4 * kv_length` bytes per row.
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
        # One row for all queries: its columns are the ones that are sharded.
        if shape is not None and shape[2] == 1 and shape[3] > 1:
            changed[name] = gather(getattr(shard, name), axes, dim=3)
    return shard.replace(**changed)


def gather(array: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """Return the shards of all ranks, joined along a dim."""
    whole: jax.Array = jax.lax.all_gather(array, axes, axis=dim, tiled=True)
    return whole


def keys_at(operands: Operands, start: Any, *, k: jax.Array, v: jax.Array) -> Operands:
    """Return operands with whole rows, narrowed to the keys k and v that start at row `start`."""
    length = k.shape[1]
    dims = {"kv_positions": 1, "kv_segment_ids": 1, "mask": 3, "bias": 3}
    changed = {}
    for name, dim in dims.items():
        array = getattr(operands, name)
        if array is not None and array.shape[dim] > 1:
            changed[name] = jax.lax.dynamic_slice_in_dim(array, start, length, dim)
    return operands.replace(k=k, v=v, **changed)


def pack(k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Return k and v as one array to send, where dtypes allow: one on top of the other, or head by head if sizes differ."""
    if k.dtype != v.dtype:
        return k, v
    return (jnp.stack([k, v]) if k.shape == v.shape else jnp.concatenate([k, v], axis=-1),)


def unpack(packed: Sequence[jax.Array], *, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return k and v; see `pack`."""
    if len(packed) == 2:
        return packed[0], packed[1]
    (both,) = packed
    return (both[0], both[1]) if both.ndim == 5 else (both[..., :head_dim], both[..., head_dim:])


def blocks(recipe: Recipe, shard: Operands, call: AttentionCall) -> Recipe:
    """Return a recipe whose blocks suit a shard: logits of a block no larger than its keys and values, down to 128 rows."""
    limit = shard.k.nbytes + shard.v.nbytes
    q_block, kv_block = (
        min(recipe.q_block, shard.q.shape[1]),
        min(recipe.kv_block, shard.k.shape[1]),
    )
    while (
        4 * shard.q.shape[0] * shard.q.shape[2] * q_block * kv_block > limit
        and max(q_block, kv_block) > _SMALL
    ):
        q_block, kv_block = (
            (-(-q_block // 2), kv_block) if q_block > kv_block else (q_block, -(-kv_block // 2))
        )
    return within_halves(
        dataclasses.replace(recipe, q_block=q_block, kv_block=kv_block), shard, call
    )


def within_halves(recipe: Recipe, shard: Operands, call: AttentionCall) -> Recipe:
    """Return a recipe none of whose blocks lies in two halves of a shard, where positions are arrays.

    In zigzag order the halves stand far apart: a block with rows of both could never be skipped.
    """
    if call.q_offset is not None or not recipe.mask.positional:
        return recipe
    q_block, kv_block = (
        _within_half(recipe.q_block, shard.q.shape[1]),
        _within_half(recipe.kv_block, shard.k.shape[1]),
    )
    return dataclasses.replace(recipe, q_block=q_block, kv_block=kv_block)


def _within_half(block: int, length: int) -> int:
    half = -(-length // 2)  # of an odd length one half is a row longer
    return -(-half // -(-half // block))


def add_columns(whole: jax.Array | None, part: jax.Array | None, start: Any) -> jax.Array | None:
    """Return a bias's gradient with that of the keys from row `start` added."""
    if whole is None or part is None:
        return None
    if whole.shape == part.shape:
        return whole + part
    old = jax.lax.dynamic_slice_in_dim(whole, start, part.shape[3], 3)
    return jax.lax.dynamic_update_slice_in_dim(whole, old + part, start, 3)


def cotangents(floats: dict[str, Any], **found: jax.Array | None) -> dict[str, Any]:
    """Return gradients in the dtypes of what they are of."""
    return {
        name: None if one is None else one.astype(floats[name].dtype) for name, one in found.items()
    }


def sent_again(operands: Operands, do: jax.Array) -> tuple[Operands, jax.Array]:
    """Return the operands and the output's cotangent, so that a compiler keeps nothing of what the forward pass received.

    What sends the same keys twice would else be merged, and every layer hold the keys of other ranks until its backward pass.
    """
    k, v, do = jax.lax.optimization_barrier((operands.k, operands.v, do))
    return operands.replace(k=k, v=v), do


def apart(call: AttentionCall) -> tuple[str, ...]:
    """Return the reason of a kernel that needs the lengths of queries and keys over the same mesh axes."""
    q, kv = (
        "+".join(axes) or "no mesh axis" for axes in (call.specs.q_length, call.specs.kv_length)
    )
    return (
        ()
        if q == kv
        else (
            f"the length of the queries is sharded over {q}, that of the keys over {kv}; it needs both over the same",
        )
    )
