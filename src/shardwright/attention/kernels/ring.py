"""Ring attention: keys and values travel around the shards of the sequence (Liu et al. 2023).

At any time, a rank holds the keys of only a few shards. Each rank attends to the keys that arrive
and passes them on. With n ranks, each rank sends a shard of keys n - 1 times in the forward pass.
In the backward pass, it sends keys n - 1 times again, and gradients of keys n times: the last
time, the gradients return to the rank that stores their keys. Masks compare positions, so
contiguous shards and the zigzag order need no special code. Blocks in which no query sees a key are
skipped. Under a causal mask in zigzag order, this halves the work of every rank.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import Arithmetic, AttentionCall, Operands, Result
from shardwright.attention.kernels import blockwise
from shardwright.attention.masks import block_is_empty
from shardwright.attention.parts import inner_kernel, online_softmax, sequence, shards
from shardwright.attention.parts.derivatives import differentiable
from shardwright.attention.parts.online_softmax import Running

KV = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """The static part of a ring.

    Attributes:
      recipe: Static settings of the computation.
      axes: The mesh axes of the ring, major first.
      size: Number of ranks.
      steps: The shards that a rank reads: step i is the shard of the rank that is i ranks back. The
        rank's own shard, 0, is first.
      loop: Whether the steps are a `lax.scan`.
      kernel: `blockwise`, or a value with the same functions.
    """

    recipe: Arithmetic
    axes: tuple[str, ...]
    size: int
    steps: tuple[int, ...]
    loop: bool
    kernel: Any

    @property
    def hops(self) -> tuple[int, ...]:
        """Number of ranks by which the keys move between two steps."""
        return tuple(
            after - before for before, after in zip(self.steps, self.steps[1:], strict=False)
        )

    def send(self, arrays: Any, hop: int) -> Any:
        """Return the arrays of the rank that is `hop` ranks back."""
        if hop % self.size == 0:
            return arrays
        pairs = [(rank, (rank + hop) % self.size) for rank in range(self.size)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, self.axes, pairs), arrays)

    def start(self, operands: Operands, step: Any) -> Any:
        """Return the row of the whole sequence where the keys of a step start."""
        return (jax.lax.axis_index(self.axes) - step) % self.size * operands.k.shape[1]

    def read(self, operands: Operands, kv: KV, step: Any) -> Operands:
        """Return the operands of a step."""
        k, v = sequence.unpack(kv, head_dim=operands.q.shape[-1])
        return sequence.keys_at(operands, self.start(operands, step), k=k, v=v)


def steps_of(call: AttentionCall) -> tuple[int, ...]:
    """Return the steps of a ring (see `_Ring`) in which at least one rank must read keys.

    If positions are arrays, every shard is read. If positions count from an offset, a causal window
    of w tokens over shards of s rows leaves `1 + ceil((w - 1) / s)` steps.
    """
    ranks = call.shards(call.specs.kv_length)
    if call.q_offset is None:
        return tuple(range(ranks))
    q_rows, kv_rows = call.q_length // ranks, call.kv_length // ranks
    q_starts = [call.q_offset + rank * q_rows for rank in range(ranks)]

    def is_unread(step: int) -> bool:
        pairs = ((q, (rank - step) % ranks * kv_rows) for rank, q in enumerate(q_starts))
        return all(
            block_is_empty(call.recipe.mask, (q, q + q_rows - 1), (kv, kv + kv_rows - 1))
            for q, kv in pairs
        )

    return (0, *(step for step in range(1, ranks) if not is_unread(step)))


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served.

    The reasons: queries and keys have different mesh axes, or the call asks for weights.
    """
    return (*shards.no_weights(call), *sequence.different_axes(call))


def inner(call: AttentionCall) -> str:
    """Return which kernel runs on each shard."""
    return inner_kernel.explained(_inner_of(call), call)


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend with one `shard_map` over all mesh axes of the call."""
    return inner_kernel.run_inner(_inner_of(call), _run, operands, call)


def _inner_of(call: AttentionCall) -> inner_kernel.Inner:
    shards = call.shards(call.specs.kv_length)
    return inner_kernel.inner_kernel(call, q_shards=shards, kv_shards=shards)


def _run(shard: Operands, *, call: AttentionCall, inner: inner_kernel.Inner) -> Result:
    axes = call.specs.kv_length
    if call.shards(axes) == 1:
        o, lse, lse_error = inner_kernel.attend_whole(inner, call)(shard, call.recipe)
    else:
        ring = _Ring(
            recipe=inner_kernel.recipe_of(inner, shard, call),
            axes=axes,
            size=call.shards(axes),
            steps=steps_of(call),
            loop=call.loop,
            kernel=inner_kernel.blocks_of(inner, call),
        )
        o, lse, lse_error = _attend(
            ring,
            *sequence.split_floats(_jax.vary_together(sequence.with_whole_rows(shard, call))),
        )
    return Result(o=o, lse=lse, kept=(lse_error,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grads:
    """The float32 gradients so far. Those of keys and values, `kv`, travel with the keys."""

    q: jax.Array
    bias: jax.Array | None
    kv: KV


def _values(
    ring: _Ring, floats: dict[str, Any], others: Operands
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    operands = others.replace(**floats)

    def add(state: Running, kv: KV, step: Any) -> Running:
        keys = ring.read(operands, kv, step)
        added: Running = ring.kernel.forward(keys, ring.recipe, state=state)
        return added

    def attend_and_send(carry: tuple[Running, KV], step: Any, hop: int) -> tuple[Running, KV]:
        state, kv = carry
        arriving = ring.send(kv, hop)  # send first, so that sending overlaps with `add`
        return add(state, kv, step), arriving

    carry = (online_softmax.start(operands.q, operands.v), sequence.pack(operands.k, operands.v))
    state, kv = _scan_steps(ring, attend_and_send, carry)
    # The last step is outside of the loop, because the keys of this step are sent no further.
    state = add(state, kv, ring.steps[-1])
    o, lse, lse_error = ring.kernel.finish(state, operands)
    return o.astype(operands.q.dtype), lse, lse_error


def _backward_pass(ring: _Ring, residuals: Any, cotangents: Any) -> dict[str, Any]:
    floats, others, (o, lse, lse_error) = residuals
    do, dlse, _ = cotangents
    operands, do = sequence.sent_again(others.replace(**floats), do)
    delta = blockwise.delta(o, do, dlse)

    def add(grads: _Grads, kv: KV, step: Any) -> _Grads:
        read = ring.read(operands, kv, step)
        dk, dv = sequence.unpack(grads.kv, head_dim=operands.q.shape[-1])
        bias = None if read.bias is None else jnp.zeros_like(read.bias, dtype=jnp.float32)
        onto = blockwise.Gradients(q=grads.q, k=dk, v=dv, bias=bias)
        added = ring.kernel.backward(
            read, ring.recipe, lse=lse, do=do, delta=delta, onto=onto, lse_error=lse_error
        )
        bias = sequence.add_columns(grads.bias, added.bias, ring.start(operands, step))
        return _Grads(q=added.q, bias=bias, kv=sequence.pack(added.k, added.v))

    def attend_and_send(carry: tuple[_Grads, KV], step: Any, hop: int) -> tuple[_Grads, KV]:
        grads, kv = carry
        arriving = ring.send(kv, hop)
        grads = add(grads, kv, step)
        return dataclasses.replace(grads, kv=ring.send(grads.kv, hop)), arriving

    zeros = functools.partial(jnp.zeros_like, dtype=jnp.float32)
    bias = None if operands.bias is None else zeros(operands.bias)
    start = _Grads(
        q=zeros(operands.q), bias=bias, kv=sequence.pack(zeros(operands.k), zeros(operands.v))
    )
    grads, kv = _scan_steps(ring, attend_and_send, (start, sequence.pack(operands.k, operands.v)))
    grads = add(grads, kv, ring.steps[-1])
    dk, dv = sequence.unpack(grads.kv, head_dim=operands.q.shape[-1])
    # Gradients travel in float32 while they grow. The last hop sends the complete gradients in the
    # dtypes of k and v: for bfloat16, these are half of the bytes.
    complete = sequence.pack(dk.astype(operands.k.dtype), dv.astype(operands.v.dtype))
    returned = ring.send(complete, -ring.steps[-1])
    dk, dv = sequence.unpack(returned, head_dim=operands.q.shape[-1])
    sinks = (
        None
        if operands.sinks is None
        else blockwise.sinks_gradient(operands.sinks, lse=lse, delta=delta, lse_error=lse_error)
    )
    return sequence.cotangents(floats, q=grads.q, k=dk, v=dv, bias=grads.bias, sinks=sinks)


_attend = differentiable(_values, _backward_pass)


def _scan_steps(ring: _Ring, function: Any, carry: Any) -> Any:
    """Return the carry after `function(carry, step, hop)` for all steps but the last."""
    hops = ring.hops
    # The pairs of a `ppermute` are static, so a loop can only run hops of equal distance.
    if not ring.loop or len(hops) < 2 or len(set(hops)) > 1:
        for step, hop in zip(ring.steps, hops, strict=False):
            carry = function(carry, step, hop)
        return carry
    steps = jnp.asarray(ring.steps[:-1], dtype=jnp.int32)
    return jax.lax.scan(lambda carry, step: (function(carry, step, hops[0]), None), carry, steps)[0]
