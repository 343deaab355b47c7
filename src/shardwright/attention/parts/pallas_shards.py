"""Run a kernel that JAX cannot differentiate, such as a Pallas kernel, on the shards of a call.

`shard_map` cannot track through such a kernel which devices hold equal values. The transpose of
`shard_map` would sum every gradient, in the operand's dtype, over all mesh axes that do not shard
the operand, even unused ones. The backward pass in this module is therefore a second `shard_map`.
It sums gradients in float32, over the mesh axes that split the work on an operand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.attention.call import AttentionCall, Operands, Result
from shardwright.attention.parts.derivatives import refuse_tangents, without_tangents
from shardwright.attention.parts.sequence import split_floats
from shardwright.attention.parts.shards import (
    head_numbers,
    head_specs,
    pick_kv_heads,
    shard_over,
)
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.partition_specs import entry_names, spec_of

_WHAT = "a kernel that JAX cannot look into, such as splash or cudnn,"
# These are in the call's dtype. The other operands with gradients are float32.
_HALF = ("q", "k", "v")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    """The static part.

    Attributes:
      kernel: Function of local operands.
      call: The call.
      floats: The specs of the operands that have gradients, by name.
      others: The specs of the rest: operands without floats, and the numbers of the heads.
    """

    kernel: Callable[[Operands], Result]
    call: AttentionCall
    floats: dict[str, PartitionSpec]
    others: Any


def run_opaque(
    kernel: Callable[[Operands], Result], operands: Operands, call: AttentionCall
) -> Result:
    """Return `kernel(shards)` as global arrays; `kernel(operands)` without a mesh.

    The kernel gets the operands that `shards.run_on_shards` passes. It returns an output, and the
    logsumexp if the call asks for it. The result is differentiable in reverse mode if the kernel
    is. Forward mode is refused. Beside what the kernel sends, only gradients are sent: those of kv
    heads that several shards read, and those of sinks and biases that several shards of the batch
    or the sequence share.

    Args:
      kernel: Function of local operands.
      operands: Global arrays.
      call: Their description and sharding.
    """
    named, rest = split_floats(operands)
    named = refuse_tangents(named, _WHAT)
    if call.mesh is None:
        unsharded: Result = _without_mesh(kernel, named, rest)
        return unsharded
    floats = {
        name: x if name in _HALF else x.astype(jnp.float32)
        for name, x in named.items()
        if x is not None
    }
    specs = call.specs.operands(operands)
    job = _Job(
        kernel=kernel,
        call=call,
        floats={name: getattr(specs, name) for name in floats},
        others=(call.specs.operands(rest), *head_specs(call)),
    )
    # Place the arrays outside of the custom_vjp: cotangents are sharded like its arguments.
    placed = place_for_shard_map(
        (floats, (rest, *head_numbers(call))), (job.floats, job.others), mesh=call.mesh
    )
    result: Result = _run(job, *placed)
    return result


def inside_shard_map() -> tuple[str, ...]:
    """Return the reason to refuse a call inside a `shard_map`; empty outside of one.

    That `shard_map` may track varying mesh axes, which it cannot do through the kernel.
    """
    ambient = _jax.ambient_mesh()
    manual = "+".join(ambient.manual_axes) if ambient is not None else ""
    if not manual:
        return ()
    return (f"its kernel cannot run inside a shard_map, and the call is inside one over {manual}",)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(job: _Job, floats: dict[str, Any], others: Any) -> Any:
    def local(floats: dict[str, Any], others: Any) -> Any:
        return job.kernel(_read(job, floats, others))

    return _over(job, local, (job.floats, job.others), _out_specs(job))(floats, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_mesh(
    kernel: Callable[[Operands], Result], floats: dict[str, Any], rest: Operands
) -> Any:
    return kernel(rest.replace(**floats))


def _without_mesh_forward(
    kernel: Callable[[Operands], Result], floats: dict[str, Any], rest: Operands
) -> Any:
    def result_and_pull_back(floats: dict[str, Any], rest: Operands) -> Any:
        return jax.vjp(lambda floats: kernel(rest.replace(**floats)), floats)

    return without_tangents(result_and_pull_back, _WHAT)(floats, rest)


def _without_mesh_backward(
    kernel: Callable[[Operands], Result], pull_back: Any, do: jax.Array
) -> Any:
    del kernel
    return (*without_tangents(lambda pull_back, do: pull_back(do), _WHAT)(pull_back, do), None)


_without_mesh.defvjp(_without_mesh_forward, _without_mesh_backward)


def _run_forward(job: _Job, floats: dict[str, Any], others: Any) -> Any:
    """Return the output, and the kernel's residuals with a leading dim of shards."""

    def local(floats: dict[str, Any], others: Any) -> Any:
        read, rest = split_floats(_read(job, floats, others))
        # Keep gradients in float32 until they are summed. The casts of the operands cancel.
        wide = {name: x if x is None else x.astype(jnp.float32) for name, x in read.items()}
        result, pull_back = jax.vjp(lambda wide: job.kernel(rest.replace(**_as(wide, read))), wide)
        return result, jax.tree.map(lambda residual: residual[None], pull_back)

    result, pull_back = _over(
        job, local, (job.floats, job.others), (_out_specs(job), _by_shard(job))
    )(floats, others)
    return result, (pull_back, others)


def _run_backward(job: _Job, residuals: Any, cotangents: Result) -> Any:
    def local(pull_back: Any, others: Any, cotangents: Result) -> Any:
        (read,) = jax.tree.map(lambda residual: residual[0], pull_back)(cotangents)
        grads = _of_all_kv_heads(job, read, others)
        return {name: _sum(job, name, grads[name]) for name in job.floats}

    return _over(job, local, (_by_shard(job), job.others, _out_specs(job)), job.floats)(
        *residuals, cotangents
    ), None


_run.defvjp(_run_forward, _run_backward)


def _over(
    job: _Job, local: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return without_tangents(shard_over(local, in_specs, out_specs, job.call), _WHAT)


def _out_specs(job: _Job) -> Result:
    specs = job.call.specs
    return Result(o=specs.output, lse=specs.lse if job.call.return_lse else None)


def _by_shard(job: _Job) -> PartitionSpec:
    return spec_of(job.call.specs.mesh_axes)


def _read(job: _Job, floats: dict[str, Any], others: Any) -> Operands:
    """Return the local operands, with the kv heads that the local query heads read."""
    rest, *heads = others
    return pick_kv_heads(rest.replace(**floats), job.call, *heads)


def _as(values: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    return {name: x if x is None else x.astype(like[name].dtype) for name, x in values.items()}


def _of_all_kv_heads(job: _Job, grads: dict[str, Any], others: Any) -> dict[str, Any]:
    """Return the gradients of all local kv heads, from those of the kv heads that were read."""
    call, (_, *heads) = job.call, others
    local_heads = call.kv_heads // call.shards(call.specs.kv_heads)

    def pick(k: jax.Array, v: jax.Array) -> Any:
        shard = pick_kv_heads(
            Operands(q=None, k=k, v=v, q_positions=None, kv_positions=None), call, *heads
        )
        return shard.k, shard.v

    shapes = [
        jax.ShapeDtypeStruct((*x.shape[:2], local_heads, x.shape[3]), x.dtype)
        for x in (grads["k"], grads["v"])
    ]
    dk, dv = jax.linear_transpose(pick, *shapes)((grads["k"], grads["v"]))
    return {**grads, "k": dk, "v": dv}


def _sum(job: _Job, name: str, grad: jax.Array) -> jax.Array:
    """Return a gradient in its operand's dtype, summed over the mesh axes that do not shard it."""
    own = {axis for entry in job.floats[name] for axis in entry_names(entry)}
    over = tuple(axis for axis in job.call.specs.mesh_axes if axis not in own)
    dtype = jnp.dtype(job.call.dtype if name in _HALF else jnp.float32)
    if over:
        # Round explicitly. XLA for TPUs turns a float32 sum with a cast into a sum in bfloat16.
        kind = jnp.finfo(dtype)
        grad = jax.lax.reduce_precision(
            jax.lax.psum(grad, over), exponent_bits=kind.nexp, mantissa_bits=kind.nmant
        )
    return grad.astype(dtype)
