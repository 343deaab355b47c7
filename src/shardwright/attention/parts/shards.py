"""Run a kernel on the shards of a call: one `shard_map` for every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import OPERAND_DIMS, AttentionCall, KVHeads, Operands, Result
from shardwright.manager.shards import call_on_shards

Kernel = Callable[[Operands], Result]


def run_on_shards(kernel: Kernel, operands: Operands, call: AttentionCall) -> Result:
    """Return `kernel(shards)` as global arrays; `kernel(operands)` if no mesh axis shards them.

    The kernel's k and v, and their scales, hold the kv heads that its query heads read, so local
    query head h reads local kv head `h * kv_heads // heads`. (With the grouping FACTOR that holds
    once the query heads are gathered over the keys' mesh axes.) The kernel itself calls the
    collectives over `call.specs.kv_length` and other mesh axes. Its output is sharded as
    `specs.output` and `specs.lse` say. Gradients of an operand that is replicated over a mesh axis
    are summed over that axis automatically.

    Args:
      kernel: Function of local operands.
      operands: Global arrays.
      call: Their description and sharding.
    """
    if call.mesh is None or not call.specs.mesh_axes:
        return kernel(operands)

    def local(shard: Operands, heads: jax.Array, kv_heads: jax.Array) -> Result:
        return kernel(pick_kv_heads(shard, call, heads, kv_heads))

    result: Result = call_on_shards(
        local,
        (operands, *head_numbers(call)),
        (call.specs.operands(operands), *head_specs(call)),
        out_specs=result_specs(call),
        mesh=call.mesh,
    )
    return result


def shard_over(
    local: Callable[..., Any], in_specs: Any, out_specs: Any, call: AttentionCall
) -> Callable[..., Any]:
    """Turn a function of local arrays into one of global arrays on the call's mesh.

    This `shard_map` does not track over which mesh axes values vary, because Pallas prevents it.

    Args:
      local: Function of local arrays.
      in_specs: The specs of its arguments.
      out_specs: The specs of its results.
      call: The call.
    """
    mesh = None if _jax.ambient_mesh() is not None else call.mesh
    return _jax.call_shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def result_specs(call: AttentionCall) -> Result:
    """Return the specs of the arrays that a call asks for."""
    specs = call.specs
    return Result(o=specs.output, lse=specs.lse, weights=specs.weights).only(call)


def head_numbers(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Return the global numbers of the query heads and of the kv heads."""
    return jnp.arange(call.heads, dtype=jnp.int32), jnp.arange(call.kv_heads, dtype=jnp.int32)


def head_specs(call: AttentionCall) -> tuple[Any, Any]:
    """Return the specs of `head_numbers`."""
    return call.specs.spec("heads"), call.specs.spec("kv_heads")


# Reasons to refuse a call.


def lengths_are_whole(call: AttentionCall) -> tuple[str, ...]:
    """Return the reasons of a kernel that needs whole sequences on each device."""
    reasons: tuple[str, ...] = ()
    for name, axes in (("queries", call.specs.q_length), ("keys", call.specs.kv_length)):
        if axes:
            reasons += (f"the length of the {name} is sharded over {'+'.join(axes)}",)
    return reasons


def no_weights(call: AttentionCall) -> tuple[str, ...]:
    """Return the reason of a kernel that never has all weights at once."""
    if not call.return_weights:
        return ()
    return ("it never has all weights at once, and the call asks for them",)


# Heads.


def first_of_all(head_index: jax.Array, shards: int) -> jax.Array:
    """Return the number of the first head of a group of shards.

    Args:
      head_index: Global numbers of the local query heads.
      shards: Number of shards over the last mesh axes of the heads; they form the group.
    """
    count = head_index.shape[0] * shards
    return head_index[0] // count * count


def pick_kv_heads(
    shard: Operands, call: AttentionCall, head_index: jax.Array, kv_head_index: jax.Array
) -> Operands:
    """Return the operands with only the kv heads that the local query heads read.

    Args:
      shard: Local operands.
      call: The call.
      head_index: Global numbers of the local query heads.
      kv_head_index: Global numbers of the local kv heads.
    """
    specs = call.specs
    if specs.grouping is KVHeads.SAME:
        return shard
    if specs.grouping is KVHeads.FACTOR:
        # The keys serve the queries of all shards that hold a part of them.
        shards = call.shards(tuple([axis for axis in specs.heads if axis in specs.kv_length]))
        numbers = jnp.arange(head_index.shape[0] * shards, dtype=jnp.int32)
        head_index = first_of_all(head_index, shards) + numbers
    read = head_index * call.kv_heads // call.heads - kv_head_index[0]
    group, local = call.heads // call.kv_heads, head_index.shape[0]
    changed = {}
    for name, dims in OPERAND_DIMS.items():
        array = getattr(shard, name)
        if "kv_heads" not in dims or array is None:
            continue
        if group % local == 0:  # all local query heads read one kv head
            changed[name] = jax.lax.dynamic_slice_in_dim(array, read[0], 1, 2)
        elif local % group == 0:  # they form whole groups
            changed[name] = jax.lax.dynamic_slice_in_dim(array, read[0], local // group, 2)
        else:
            changed[name] = jnp.take(array, read, axis=2)
    return shard.replace(**changed)
