"""All-gather the keys and values, and keep the queries sharded (Dubey et al. 2024, §3.3.2).

One collective sends as many bytes as a ring does. Each device holds all keys in memory. The
backward pass gathers again, so that only shards are kept between the two passes. It then
reduce-scatters the gradients of keys and values in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import Arithmetic, AttentionCall, Operands, Result
from shardwright.attention.kernels import blockwise
from shardwright.attention.parts import inner_kernel, sequence, shards
from shardwright.attention.parts.derivatives import differentiable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Gathering:
    """The static part of the kernel.

    Attributes:
      recipe: Static settings of the computation.
      axes: The mesh axes over which keys are gathered.
      ranks: Number of shards over these mesh axes.
      kernel: `blockwise`, or a value with the same functions.
    """

    recipe: Arithmetic
    axes: tuple[str, ...]
    ranks: int
    kernel: Any

    def whole(self, operands: Operands) -> Operands:
        """Return the operands with all keys and values."""
        kv = sequence.pack(operands.k, operands.v)
        gathered = tuple(sequence.gather(array, self.axes, dim=array.ndim - 3) for array in kv)
        k, v = sequence.unpack(gathered, head_dim=operands.q.shape[-1])
        return operands.replace(k=k, v=v)

    def scatter(
        self, dk: jax.Array, dv: jax.Array, *, head_dim: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradients of this rank's keys and values, summed over ranks."""
        local = tuple(self._scatter(array) for array in sequence.pack(dk, dv))
        return sequence.unpack(local, head_dim=head_dim)

    def _scatter(self, array: jax.Array) -> jax.Array:
        *first, length, heads, dim = array.shape
        by_rank = jnp.moveaxis(
            array.reshape(*first, self.ranks, length // self.ranks, heads, dim), len(first), 0
        )
        # Scatter over the leading dim. For an inner dim of stacked arrays, XLA for TPUs all-reduces
        # the whole array in bfloat16 and then takes a part.
        part: jax.Array = jax.lax.psum_scatter(by_rank, self.axes)
        return part


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served.

    The reasons: a mesh axis shards only the keys, or the call asks for weights.
    """
    rest = [axis for axis in call.specs.kv_length if axis not in call.specs.q_length]
    if not rest:
        return shards.no_weights(call)
    same = (
        f"the length of the keys is sharded over {rest[0]} and that of the queries is not: "
        f"all devices along {rest[0]} would compute the same"
    )
    return (*shards.no_weights(call), same)


def inner(call: AttentionCall) -> str:
    """Return which kernel runs on each shard."""
    return inner_kernel.explained(_inner_of(call), call)


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend with one `shard_map` over all mesh axes of the call."""
    return inner_kernel.run_inner(_inner_of(call), _run, operands, call)


def _inner_of(call: AttentionCall) -> inner_kernel.Inner:
    return inner_kernel.inner_kernel(call, q_shards=call.shards(call.specs.q_length))


def _run(shard: Operands, *, call: AttentionCall, inner: inner_kernel.Inner) -> Result:
    axes = call.specs.kv_length
    rows = inner_kernel.first_rows(call, shards=call.shards(call.specs.q_length))
    kernel = inner_kernel.blocks_of(inner, call, first_rows=rows)
    if call.shards(axes) == 1:
        o, lse, lse_error = kernel.attend(shard, call.recipe)
    else:
        recipe = inner_kernel.recipe_of(inner, shard, call)
        gathering = _Gathering(recipe=recipe, axes=axes, ranks=call.shards(axes), kernel=kernel)
        o, lse, lse_error = _attend(
            gathering,
            *sequence.split_floats(_jax.vary_together(sequence.with_whole_rows(shard, call))),
        )
    return Result(o=o, lse=lse, kept=(lse_error,))


def _values(
    gathering: _Gathering, floats: dict[str, Any], others: Operands
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    operands = others.replace(**floats)
    state = gathering.kernel.forward(gathering.whole(operands), gathering.recipe)
    o, lse, lse_error = gathering.kernel.finish(state, operands)
    return o.astype(operands.q.dtype), lse, lse_error


def _backward_pass(gathering: _Gathering, residuals: Any, cotangents: Any) -> dict[str, Any]:
    floats, others, (o, lse, lse_error) = residuals
    do, dlse, _ = cotangents
    operands, do = sequence.sent_again(others.replace(**floats), do)
    delta = blockwise.delta(o, do, dlse)
    whole = gathering.whole(operands)
    grads = gathering.kernel.backward(
        whole, gathering.recipe, lse=lse, do=do, delta=delta, lse_error=lse_error
    )
    dk, dv = gathering.scatter(grads.k, grads.v, head_dim=operands.q.shape[-1])
    sinks = (
        None
        if operands.sinks is None
        else blockwise.sinks_gradient(operands.sinks, lse=lse, delta=delta, lse_error=lse_error)
    )
    return sequence.cotangents(floats, q=grads.q, k=dk, v=dv, bias=grads.bias, sinks=sinks)


_attend = differentiable(_values, _backward_pass)
