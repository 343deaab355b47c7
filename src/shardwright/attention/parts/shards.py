"""Run a kernel on the shards of a call: one `shard_map` for every implementation, the kv heads picked per shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.attention.call import AttentionCall, KVHeads, Operands, Result
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.partition_specs import spec_of


def run_on_shards(
    kernel: Callable[[Operands], Result], operands: Operands, call: AttentionCall
) -> Result:
    """Return `kernel(shards)` as global arrays; without a mesh, or over none of its axes, simply `kernel(operands)`.

    The kernel's k and v, and their scales, hold the kv heads that its query heads read, so that local query head h reads local kv head
    `h * kv_heads // heads` (grouping FACTOR: once the query heads are gathered over the keys' mesh axes). Collectives over
    `call.specs.kv_length` and the like are its own. Its output lies as `specs.output` and `specs.lse` say. Gradients of what
    is replicated over a mesh axis are summed over it by themselves.

    Args:
      kernel: function of local operands.
      operands: global arrays.
      call: what they are and where they lie.
    """
    if call.mesh is None or not call.specs.mesh_axes:
        return kernel(operands)
    arguments, in_specs, structure = flat_with_heads(operands, call)

    def local(*leaves: Any) -> Result:
        shard, heads = jax.tree.unflatten(structure, leaves)
        return kernel(pick_kv_heads(shard, call, *heads))

    return over_shards(local, arguments, in_specs, call)


def flat_with_heads(
    operands: Operands, call: AttentionCall
) -> tuple[list[Any], list[PartitionSpec], Any]:
    """Return operands and the global numbers of the query heads and of the kv heads: arrays, where each lies, the structure."""
    specs = call.specs
    heads = (jnp.arange(call.heads, dtype=jnp.int32), jnp.arange(call.kv_heads, dtype=jnp.int32))
    arguments, structure = jax.tree.flatten((operands, heads))
    in_specs = jax.tree.leaves(
        (specs.operands(operands), (spec_of(specs.heads), spec_of(specs.kv_heads))),
        is_leaf=_is_spec,
    )
    assert len(arguments) == len(in_specs)
    return arguments, in_specs, structure


def over_shards(
    local: Callable[..., Result],
    arguments: list[Any],
    in_specs: list[PartitionSpec],
    call: AttentionCall,
) -> Result:
    """Return `local(*shards)` as global arrays that lie as the call's output does.

    Args:
      local: function of local arrays.
      arguments: global arrays.
      in_specs: where each lies.
      call: what they are.
    """
    lse = call.specs.lse if call.return_lse else None
    out_specs = Result(
        o=call.specs.output, lse=lse, weights=weights_spec(call) if call.return_weights else None
    )
    result: Result = shard_over(local, tuple(in_specs), out_specs, call)(
        *place_all(arguments, in_specs, call)
    )
    return result


def place_all(
    arguments: list[Any], in_specs: list[PartitionSpec], call: AttentionCall
) -> list[Any]:
    """Return global arrays that lie as `shard_map` wants them: over Explicit mesh axes it moves nothing by itself."""
    assert call.mesh is not None
    return list(place_for_shard_map(arguments, in_specs, mesh=call.mesh))


def shard_over(
    local: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    call: AttentionCall,
    *,
    checked: bool = True,
) -> Callable[..., Any]:
    """Return a function of global arrays, on the call's mesh, from one of local arrays.

    Args:
      local: function of local arrays.
      in_specs: where each of its arguments lies.
      out_specs: where its results lie.
      call: what they are.
      checked: whether `shard_map` tracks what varies over which mesh axis; it cannot look into Pallas.
    """
    mesh = None if _jax.ambient_mesh() is not None else call.mesh
    return _jax.call_shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked
    )


def lengths_are_whole(call: AttentionCall) -> tuple[str, ...]:
    """Return the reasons of a kernel that needs all queries and keys of a sequence in one place."""
    named = (("queries", call.specs.q_length), ("keys", call.specs.kv_length))
    return tuple(
        f"the length of the {name} lies over {'+'.join(axes)}" for name, axes in named if axes
    )


def no_weights(call: AttentionCall) -> tuple[str, ...]:
    """Return the reason of a kernel that never has all weights at once."""
    return (
        ("it never has all weights at once, and they are asked for",) if call.return_weights else ()
    )


def weights_spec(call: AttentionCall) -> PartitionSpec:
    """Return the spec of the attention weights, `[batch, heads, q_length, kv_length]`."""
    specs = call.specs
    return spec_of(
        specs.batch,
        specs.heads,
        specs.q_length,
        tuple(axis for axis in specs.kv_length if axis not in specs.q_length),
    )


def asked(result: Result, call: AttentionCall) -> Result:
    """Return a result with only what the call asks for."""
    return dataclasses.replace(
        result,
        lse=result.lse if call.return_lse else None,
        weights=result.weights if call.return_weights else None,
    )


def first_of_all(head_index: jax.Array, shards: int) -> jax.Array:
    """Return the first of the heads of all shards over the last mesh axes of the heads, of which there are `shards`."""
    count = head_index.shape[0] * shards
    return head_index[0] // count * count


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def pick_kv_heads(
    shard: Operands, call: AttentionCall, head_index: jax.Array, kv_head_index: jax.Array
) -> Operands:
    """Return the operands with the kv heads that the local query heads read, by the global map `h * kv_heads // heads`."""
    if call.specs.grouping is KVHeads.SAME:
        return shard
    if (
        call.specs.grouping is KVHeads.FACTOR
    ):  # the keys go to the queries of all shards that hold a part of them
        shards = call.shards(
            tuple(axis for axis in call.specs.heads if axis in call.specs.kv_length)
        )
        head_index = first_of_all(head_index, shards) + jnp.arange(
            head_index.shape[0] * shards, dtype=jnp.int32
        )
    names = [name for name in ("k", "v", "k_scale", "v_scale") if getattr(shard, name) is not None]
    read = head_index * call.kv_heads // call.heads - kv_head_index[0]
    group = call.heads // call.kv_heads
    local = head_index.shape[0]
    if group % local == 0:  # all of them read one
        return shard.replace(
            **{
                name: jax.lax.dynamic_slice_in_dim(getattr(shard, name), read[0], 1, 2)
                for name in names
            }
        )
    if local % group == 0:  # whole groups
        count = local // group
        return shard.replace(
            **{
                name: jax.lax.dynamic_slice_in_dim(getattr(shard, name), read[0], count, 2)
                for name in names
            }
        )
    return shard.replace(**{name: jnp.take(getattr(shard, name), read, axis=2) for name in names})
