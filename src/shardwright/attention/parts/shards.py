"""Run a kernel on the shards of a call: one `shard_map` forward, and another one backward.

JAX can differentiate a `shard_map`, but not in every program. Inside another `shard_map`, as in
gradient accumulation, the residuals between the two passes get shardings that XLA refuses. In a
`lax.scan` over layers, JAX 0.10 moves computations that depend on no array of the layer, such as
masks, out of the loop. This splits the forward pass, and stores the masks of all blocks. So the
`custom_vjp` in this module is outside of the `shard_map`, and its forward pass is one
`jax.checkpoint`, which JAX does not split. The backward pass is a second `shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.attention.call import (
    LSE_NAME,
    OPERAND_DIMS,
    OUTPUT_NAME,
    AttentionCall,
    KVHeads,
    Operands,
    Result,
)
from shardwright.attention.parts.derivatives import not_differentiable
from shardwright.attention.parts.online_softmax import rounded
from shardwright.attention.parts.sequence import split_floats
from shardwright.manager.shards import place_for_shard_map
from shardwright.resolution.partition_specs import entry_names, spec_of

Kernel = Callable[[Operands], Result]
_OPAQUE = "a kernel that JAX cannot look into, such as splash, cudnn or triton_decode,"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShardedKernel:
    """The static part of a run on shards.

    Attributes:
      kernel: Function of local operands.
      call: The call.
      floats: The specs of the operands that have gradients, by name.
      others: The specs of the other arguments: the operands without gradients, and the indices of
        the heads.
      opaque: Whether JAX cannot look into the kernel.
    """

    kernel: Kernel
    call: AttentionCall
    floats: dict[str, PartitionSpec]
    others: Any
    opaque: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard any array of the call."""
        return self.call.specs.mesh_axes

    @property
    def results(self) -> Result:
        """The specs of the results."""
        specs = self.call.specs
        return Result(o=specs.output, lse=specs.lse, weights=specs.weights)

    @property
    def runs_again(self) -> bool:
        """Whether the backward pass runs the kernel again instead of reading residuals.

        It runs the kernel again if the output is replicated over some mesh axes of the call, as in
        `flash_decode`. In that case, shards share residuals, but the second `shard_map` would get
        them as if each shard had its own.
        """
        return not self.opaque and bool(set(self.axes) - _names(self.call.specs.output))

    def shared_over(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes over which `_sum` sums a gradient; () if JAX sums it itself."""
        if self.runs_again:
            return ()
        own = _names(self.floats[name])
        return tuple(axis for axis in self.axes if axis not in own)

    def map(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return a function of global arrays that runs `local` on every shard."""
        call, mapped = self.call, local
        if call.mesh is not None and (self.axes or self.opaque):
            # Turn check_vma off for Pallas: JAX cannot track which devices hold equal values.
            mapped = _jax.call_shard_map(
                local,
                mesh=call.mesh if _jax.ambient_mesh() is None else None,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=not self.opaque,
            )
        if not self.opaque:
            return mapped

        def tracked_outside(*arguments: Any) -> Any:
            # In an enclosing shard_map, the results vary over the mesh axes of the arguments.
            return _jax.vary_as(mapped(*arguments), arguments)

        return not_differentiable(tracked_outside, _OPAQUE)

    def vary(self, arrays: Any) -> Any:
        """Cast local arrays so that each varies over all mesh axes, as the output does."""
        if self.opaque:
            return _jax.untracked(arrays)
        return arrays if self.runs_again else _jax.vary_together(arrays, over=self.axes)

    def read(self, floats: dict[str, Any], others: Any) -> Operands:
        """Return the operands that the kernel reads, made of the local arrays."""
        rest, *heads = others
        return pick_kv_heads(rest.replace(**floats), self.call, *heads)


def run_on_shards(
    kernel: Kernel, operands: Operands, call: AttentionCall, *, opaque: bool = False
) -> Result:
    """Run a kernel on every shard, and return global arrays. Without a mesh, run it on `operands`.

    The kernel's k and v, and their scales, hold the kv heads that its query heads read, so local
    query head h reads local kv head `h * kv_heads // heads`. (With the grouping FACTOR, this holds
    only after the query heads are gathered over the keys' mesh axes.) The kernel itself calls the
    collectives over `call.specs.kv_length` and other mesh axes. Its output is sharded as
    `specs.output` and `specs.lse` say. Gradients of an operand that is replicated over a mesh axis
    are summed over that axis, in float32.

    The result is differentiable in reverse mode if the kernel is. Remat policies may save the
    output and the logsumexp by their names. What the kernel returns as `kept` is saved with the
    logsumexp.

    Args:
      kernel: Function of local operands. It returns an output, and a logsumexp if the call asks for
        it. It may return a logsumexp in any case: then its backward pass reads this result, and no
        copy is kept.
      operands: Global arrays.
      call: Description and sharding of the operands.
      opaque: Whether JAX cannot look into the kernel; see `run_opaque`.
    """
    floats, rest = split_floats(operands)
    floats = {name: x for name, x in floats.items() if x is not None}
    specs = call.specs.operands(operands)
    job = _ShardedKernel(
        kernel=kernel,
        call=call,
        floats={name: getattr(specs, name) for name in floats},
        others=(call.specs.operands(rest), *head_specs(call)),
        opaque=opaque,
    )
    # Inside another shard_map, and over Explicit mesh axes, a cotangent must have the type of its
    # argument. The casts are outside of the custom_vjp, so JAX transposes them.
    arguments = _jax.vary_together((floats, (rest, *head_numbers(call))))
    if call.mesh is not None:
        arguments = place_for_shard_map(arguments, (job.floats, job.others), mesh=call.mesh)
    result: Result = _run(job, *arguments)
    return result.only(call)


def run_opaque(kernel: Kernel, operands: Operands, call: AttentionCall) -> Result:
    """Like `run_on_shards`, for a kernel that JAX cannot look into, such as a Pallas kernel.

    Derivatives of gradients are refused.

    Args:
      kernel: Function of local operands, differentiable in reverse mode.
      operands: Global arrays.
      call: Description and sharding of the operands.
    """
    return run_on_shards(kernel, operands, call, opaque=True)


def inside_shard_map(call: AttentionCall) -> tuple[str, ...]:
    """Return the reason to refuse an opaque kernel inside a `shard_map` over all mesh axes.

    If that `shard_map` tracks varying mesh axes, it cannot track them through the kernel. If the
    `shard_map` leaves out a mesh axis, nothing is refused: over that mesh axis, `run_opaque` calls
    another `shard_map`, which does not track varying mesh axes.
    """
    ambient = _jax.ambient_mesh()
    if ambient is None or not ambient.manual_axes or not _jax.tracks_varying():
        return ()
    manual = ambient.manual_axes
    if call.mesh is not None and set(ambient.axis_names) > set(manual):
        return ()
    return (f"it cannot run inside a shard_map over all mesh axes, {'+'.join(manual)}",)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(job: _ShardedKernel, floats: dict[str, Any], others: Any) -> Result:
    def local(floats: dict[str, Any], others: Any) -> Result:
        result = job.kernel(job.read(*job.vary((floats, others))))
        return dataclasses.replace(result, kept=())

    result: Result = job.map(local, (job.floats, job.others), job.results)(floats, others)
    return result


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Residuals:
    """What the backward pass reads in addition to the operands and the results.

    Attributes:
      arrays: Residuals of the kernel that are neither operands nor results, with a leading dim of
        shards.
      where: For each residual of the kernel, its index among the operands and results; None if it
        is one of `arrays`.
      structure: The structure of the kernel's residuals.
    """

    arrays: Any = ()
    where: Any = dataclasses.field(default=(), metadata={"static": True})
    structure: Any = dataclasses.field(default=None, metadata={"static": True})


def _forward(job: _ShardedKernel, floats: dict[str, Any], others: Any) -> Any:
    where: list[int | None] = []
    is_kept: list[bool] = []
    structure: Any = None

    def local(floats: dict[str, Any], others: Any) -> Any:
        nonlocal structure
        floats, others = job.vary((floats, others))
        result, pull_back, kept = _pull_back(job, floats, others)
        residuals, structure = jax.tree.flatten(() if job.runs_again else pull_back)
        known = {id(x): at for at, x in enumerate(jax.tree.leaves((floats, others, result)))}
        # Do not return an operand or a result a second time: it would leave the `shard_map` as a
        # new array, and the backward pass would keep both arrays.
        where[:] = [known.get(id(x)) for x in residuals]
        arrays = [x for x, at in zip(residuals, where, strict=True) if at is None]
        names = set(map(id, kept))
        is_kept[:] = [id(x) in names for x in arrays]
        return result, [x[None] for x in arrays]

    specs = (job.results, spec_of(job.axes))
    result, arrays = jax.checkpoint(job.map(local, (job.floats, job.others), specs))(floats, others)
    result = Result(
        o=checkpoint_name(result.o, OUTPUT_NAME),
        lse=None if result.lse is None else checkpoint_name(result.lse, LSE_NAME),
        weights=result.weights,
    )
    arrays = [
        checkpoint_name(x, LSE_NAME) if kept else x for x, kept in zip(arrays, is_kept, strict=True)
    ]
    residuals = _Residuals(arrays=arrays, where=tuple(where), structure=structure)
    return result, (floats, others, result, residuals)


def _backward(job: _ShardedKernel, saved: Any, cotangents: Result) -> Any:
    residuals: _Residuals = saved[-1]

    def local(
        floats: dict[str, Any], others: Any, result: Result, arrays: Any, cotangents: Result
    ) -> Any:
        floats, others = job.vary((floats, others))
        if job.runs_again:
            result, pull_back, _ = _pull_back(job, floats, others)
        else:
            known, rest = jax.tree.leaves((floats, others, result)), iter(x[0] for x in arrays)
            pull_back = jax.tree.unflatten(
                residuals.structure,
                [next(rest) if at is None else known[at] for at in residuals.where],
            )
        (grads,) = pull_back(
            _jax.untracked(cotangents)
            if job.opaque
            else jax.tree.map(_jax.vary_as, cotangents, result)
        )
        return {name: _sum(job, name, grads[name], floats[name].dtype) for name in job.floats}

    specs = (job.floats, job.others, job.results, spec_of(job.axes), job.results)
    floats, others, result, _ = saved
    grads = job.map(local, specs, job.floats)(floats, others, result, residuals.arrays, cotangents)
    return grads, None


_run.defvjp(_forward, _backward)


def _pull_back(job: _ShardedKernel, floats: dict[str, Any], others: Any) -> tuple[Result, Any, Any]:
    """Return the result, the pull-back and the kept arrays of the kernel, from local arrays."""
    # Gradients of operands that several shards share stay in float32 until they are summed.
    wide = {
        name: x.astype(jnp.float32) if job.shared_over(name) else x for name, x in floats.items()
    }

    def kernel(wide: dict[str, Any]) -> tuple[Result, Any]:
        narrow = {name: x.astype(floats[name].dtype) for name, x in wide.items()}
        result = job.kernel(job.read(narrow, others))
        return dataclasses.replace(result, kept=()), result.kept

    return jax.vjp(kernel, wide, has_aux=True)


def _sum(job: _ShardedKernel, name: str, grad: jax.Array, dtype: Any) -> jax.Array:
    """Return a gradient in its operand's dtype, summed over the shards that share the operand."""
    if over := job.shared_over(name):
        # Round explicitly: if a cast followed the float32 sum, XLA for TPUs would sum in bfloat16.
        grad = rounded(jax.lax.psum(grad, over), dtype)
    return grad.astype(dtype)


def _names(spec: PartitionSpec) -> set[str]:
    return {axis for entry in spec for axis in entry_names(entry)}


def head_numbers(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Return the global indices of the query heads and of the kv heads."""
    return jnp.arange(call.heads, dtype=jnp.int32), jnp.arange(call.kv_heads, dtype=jnp.int32)


def head_specs(call: AttentionCall) -> tuple[Any, Any]:
    """Return the specs of `head_numbers`."""
    return call.specs.spec("heads"), call.specs.spec("kv_heads")


# If a named implementation refuses a call only for this reason, `choose` returns another
# implementation, which the plan counts in its place.
IN_A_PLAN: Final = "a plan cannot see into it, and counts another implementation"


def lengths_are_whole(call: AttentionCall) -> tuple[str, ...]:
    """Return why a kernel that needs whole sequences on each device refuses a call."""
    reasons: tuple[str, ...] = ()
    for name, axes in (("queries", call.specs.q_length), ("keys", call.specs.kv_length)):
        if axes:
            reasons += (f"the length of the {name} is sharded over {'+'.join(axes)}",)
    return reasons


def no_weights(call: AttentionCall) -> tuple[str, ...]:
    """Return why a kernel that never has all weights at once refuses a call."""
    if not call.return_weights:
        return ()
    return ("it never has all weights at once, and the call asks for them",)


# Heads.


def first_of_all(head_index: jax.Array, shards: int) -> jax.Array:
    """Return the index of the first head of a group of shards.

    Args:
      head_index: Global indices of the local query heads.
      shards: Number of shards in the group. Their heads are adjacent: the shards differ only along
        the last of the mesh axes that shard the heads.
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
      head_index: Global indices of the local query heads.
      kv_head_index: Global indices of the local kv heads.
    """
    specs = call.specs
    if specs.grouping is KVHeads.SAME:
        return shard
    if specs.grouping is KVHeads.FACTOR:
        # Some mesh axes shard both the heads of q and the length of k. So a shard of keys serves
        # the query heads of all shards over these mesh axes.
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
        elif local % group == 0:  # local query heads form whole groups
            changed[name] = jax.lax.dynamic_slice_in_dim(array, read[0], local // group, 2)
        else:
            # A group is split between shards, such as groups of 4 query heads over shards of 6:
            # copy the kv head of each query head.
            changed[name] = jnp.take(array, read, axis=2)
    return shard.replace(**changed)
