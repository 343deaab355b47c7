"""Attend to sharded keys: each shard attends to its own keys, then the results are combined.

See Dao et al. 2023. The bytes sent grow with the queries and never with the keys. One or two
collectives send the partial results:

- Few queries take one all-gather of the shards' float32 outputs and logsumexps, which every shard
  combines. That sends more bytes than two collectives, but saves the time to start a second
  collective.
- Many queries take two collectives. In an all-to-all, each shard receives the partial results of
  some heads from all shards, and combines them. Each shard sends `(n - 1) / n` of its own partial
  results. An all-gather then replicates the output. (One all-reduce would send more bytes, because
  it would replicate float32 sums.) If the heads do not divide over the shards, the two collectives
  are a maximum and a sum over the shards.
- If the output's heads are sharded over the keys' mesh axes, the all-to-all suffices. The query
  heads are gathered over these mesh axes first.
- If the queries are sharded over all mesh axes of the keys, as in a prefill chunk, their rows are
  gathered first. The all-to-all then returns to each shard the partial results of its own rows.

JAX differentiates this implementation. If the output is replicated over mesh axes of the keys, the
backward pass runs the forward pass again.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from shardwright.attention.call import (
    AttentionCall,
    JointSpecs,
    KVHeads,
    Operands,
    Result,
    default_positions,
)
from shardwright.attention.kernels import blockwise
from shardwright.attention.parts import online_softmax, sequence, shards
from shardwright.attention.parts.online_softmax import Running
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE

# Sending this many more bytes takes about a microsecond over a link of at least 50 GB/s. That is
# less than the time to start a second collective.
_FEW_BYTES = 64 * 2**10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """How the partial results of the shards are combined into the output. All fields are static.

    Attributes:
      row_axes: The mesh axes of the keys if they shard the length of the queries too, else (). The
        rows of the queries are gathered over these mesh axes. The output stays sharded over them.
      head_axes: The mesh axes of the keys that shard the query heads too, in the order of the query
        heads. The query heads are gathered over these mesh axes. The output stays sharded over
        them.
      rest: The other mesh axes of the keys. The output is replicated over them.
      head_shards: Number of shards over `head_axes`.
      shards: Number of shards of the keys.
      return_lse: Whether the call asks for the logsumexp.
    """

    row_axes: tuple[str, ...]
    head_axes: tuple[str, ...]
    rest: tuple[str, ...]
    head_shards: int
    shards: int
    return_lse: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the keys, major first: rank r over them combines part r of a dim."""
        return (*self.row_axes, *self.head_axes, *self.rest)

    def with_all_heads(self, shard: Operands) -> Operands:
        """Return the operands with the query heads of all shards over `head_axes`."""
        if not self.head_axes:
            return shard
        q = sequence.gather(shard.q, self.head_axes, dim=2)
        changed = {}
        for name in ("mask", "bias"):
            array = getattr(shard, name)
            if array is not None and array.shape[1] > 1:
                changed[name] = sequence.gather(array, self.head_axes, dim=1)
        first = (
            None
            if shard.head_index is None
            else shards.first_of_all(shard.head_index, self.head_shards)
        )
        head_index = None if first is None else first + jnp.arange(q.shape[2], dtype=jnp.int32)
        return shard.replace(q=q, head_index=head_index, **changed)

    def __call__(
        self,
        o: jax.Array,
        lse: jax.Array,
        *,
        sinks: jax.Array | None,
        dtype: str,
        lse_error: jax.Array | None = None,
    ) -> Result:
        """Return the output and the logsumexp of all keys.

        Args:
          o: `[batch, q_length, heads, v_dim]` float32, of the shard's keys, with all heads.
          lse: `[batch, heads, q_length]` float32.
          sinks: The sinks of the heads that the shard returns, or None.
          dtype: Dtype of the output.
          lse_error: With a bias, the rounding error of the logsumexp, which is sent too; else None.
        """
        columns = [column[..., None] for column in (lse, lse_error) if column is not None]
        partial = jnp.concatenate([jnp.swapaxes(o, 1, 2), *columns], axis=-1)
        v_dim = o.shape[-1]
        if self.row_axes:
            return self._by_rows(partial, v_dim, sinks, dtype)
        if self._fits_one_gather(partial, v_dim, dtype):
            every = jax.lax.all_gather(partial, self.axes, to="invarying")
            o, lse = online_softmax.finish(_combined(every, v_dim), sinks=sinks)
            return Result(o=o.astype(dtype), lse=lse)
        if partial.shape[1] % self.shards:
            return self._summed(partial, v_dim, sinks, dtype)
        return self._swapped(partial, v_dim, sinks, dtype)

    def _fits_one_gather(self, partial: jax.Array, v_dim: int, dtype: str) -> bool:
        """Tell whether one gather sends only a few more bytes than two collectives."""
        if self.head_axes:
            return False
        output = partial.size // partial.shape[-1] * v_dim * jnp.dtype(dtype).itemsize
        # A gather sends (n - 1) * partial bytes. Two collectives send (n - 1) / n of the partial
        # results and (n - 1) / n of the output.
        parts = self.shards - 1
        two_collectives = parts * (partial.nbytes + output) // self.shards
        return parts * partial.nbytes - two_collectives <= _FEW_BYTES

    def _by_rows(
        self, partial: jax.Array, v_dim: int, sinks: jax.Array | None, dtype: str
    ) -> Result:
        pieces = self._pieces(partial, dim=2)
        o, lse = online_softmax.finish(_combined(pieces, v_dim), sinks=sinks)
        return Result(o=o.astype(dtype), lse=lse)

    def _swapped(
        self, partial: jax.Array, v_dim: int, sinks: jax.Array | None, dtype: str
    ) -> Result:
        heads = partial.shape[1] // self.shards
        pieces = self._pieces(partial, dim=1)
        local_sinks = None if sinks is None else _local_part(sinks, self.rest, heads)
        o, lse = online_softmax.finish(_combined(pieces, v_dim), sinks=local_sinks)
        return self._gathered(o, lse, dtype)

    def _pieces(self, partial: jax.Array, *, dim: int) -> jax.Array:
        """Return the partial results of all shards for this shard's part of a dim.

        Dim 0 of the result has one entry per shard.
        """
        before, size, after = partial.shape[:dim], partial.shape[dim], partial.shape[dim + 1 :]
        by_rank = jnp.moveaxis(
            partial.reshape(*before, self.shards, size // self.shards, *after), dim, 0
        )
        # Exchange a leading dim: for an inner dim, XLA for TPUs copies the array before and after
        # the all-to-all.
        pieces: jax.Array = jax.lax.all_to_all(by_rank, self.axes, split_axis=0, concat_axis=0)
        return pieces

    def _gathered(self, o: jax.Array, lse: jax.Array, dtype: str) -> Result:
        if not self.rest:
            return Result(o=o.astype(dtype), lse=lse)
        if not self.return_lse:
            return Result(o=_gather(o.astype(dtype), self.rest, dim=2))
        joined = _gather(
            jnp.concatenate([o, jnp.swapaxes(lse, 1, 2)[..., None]], axis=-1), self.rest, dim=2
        )
        return Result(o=joined[..., :-1].astype(dtype), lse=jnp.swapaxes(joined[..., -1], 1, 2))

    def _summed(
        self, partial: jax.Array, v_dim: int, sinks: jax.Array | None, dtype: str
    ) -> Result:
        o, lse = partial[..., :v_dim], partial[..., v_dim]
        # Weights relative to the largest logsumexp are at most 1, so the sum cannot overflow.
        top = _top(jax.lax.pmax(jax.lax.stop_gradient(lse), self.axes))
        weights = _weights(partial, top, v_dim)[..., None]
        total = jax.lax.psum(jnp.concatenate([o * weights, weights], axis=-1), self.axes)
        heads = partial.shape[1] // self.head_shards
        total, top = (_local_part(array, self.head_axes, heads, dim=1) for array in (total, top))
        state = Running(o=total[..., :-1], m=top, l=total[..., -1])
        o, lse = online_softmax.finish(state, sinks=sinks)
        return Result(o=o.astype(dtype), lse=lse)


def combination(specs: JointSpecs, call: AttentionCall) -> Combination:
    """Return how the partial results of a call are combined under these specs."""
    head_axes = tuple(axis for axis in specs.heads if axis in specs.kv_length)
    row_axes = tuple(axis for axis in specs.kv_length if axis in specs.q_length)
    return Combination(
        row_axes=row_axes,
        head_axes=head_axes,
        rest=tuple(axis for axis in specs.kv_length if axis not in (*head_axes, *row_axes)),
        head_shards=call.shards(head_axes),
        shards=call.shards(specs.kv_length),
        return_lse=call.return_lse,
    )


def return_sequences(state: Running, axes: tuple[str, ...], count: int) -> Running:
    """Return the state of a shard's own sequences after the keys of all shards over `axes`.

    Args:
      state: The state of the sequences of all shards over `axes`, after only the keys of this
        shard.
      axes: The mesh axes.
      count: Number of shards over these mesh axes.
    """
    partial = jnp.concatenate([state.o, state.m[..., None], state.l[..., None]], axis=-1)
    by_rank = partial.reshape(count, -1, *partial.shape[1:])
    pieces = jax.lax.all_to_all(by_rank, axes, split_axis=0, concat_axis=0)
    states = [Running(o=piece[..., :-2], m=piece[..., -2], l=piece[..., -1]) for piece in pieces]
    return functools.reduce(online_softmax.merge, states)


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served.

    The reasons: the call asks for weights, or mesh axes of the keys also shard queries or heads in
    a way that is not supported.
    """
    specs = call.specs
    reasons = [*shards.no_weights(call)]
    shared = [axis for axis in specs.kv_length if axis in specs.q_length]
    alone = [axis for axis in specs.kv_length if axis not in specs.q_length]
    if shared and alone:
        reasons.append(
            f"{shared[0]} shards the lengths of the keys and of the queries, and {alone[0]} only "
            "that of the keys: it needs all mesh axes of the keys to shard the queries, or none"
        )
    return (*reasons, *factored(call))


def bytes_sent_by_rows(call: AttentionCall) -> int:
    """Return the bytes that a device sends if the queries are sharded over the keys' mesh axes."""
    specs = call.specs
    others = tuple(axis for axis in specs.q_length if axis not in specs.kv_length)
    rows = call.batch * call.q_length * call.heads
    rows //= call.shards(specs.batch) * call.shards(specs.heads) * call.shards(others)
    columns = call.v_dim + (1 if call.bias_shape is None else 2)
    ranks = call.shards(specs.kv_length)
    query = call.head_dim * jnp.dtype(call.dtype).itemsize
    return rows * (query + 4 * columns) * (ranks - 1) // ranks


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend with one `shard_map` over all mesh axes of the call."""
    return shards.run_on_shards(functools.partial(_run, call=call), operands, call)


def factored(call: AttentionCall) -> tuple[str, ...]:
    """Return the reasons to refuse a mesh axis that shards both the query heads and the keys."""
    specs = call.specs
    if specs.grouping is not KVHeads.FACTOR:
        return ()
    shared = tuple(axis for axis in specs.heads if axis in specs.kv_length)
    reasons = []
    if shared != specs.heads[-len(shared) :]:
        axes = f"the heads' mesh axes {'+'.join(specs.heads)}"
        reasons.append(f"{shared[0]} shards the keys too, and is not the last of {axes}")
    for name, shape in (("mask", call.mask_shape), ("bias", call.bias_shape)):
        if shape is not None and shape[1] > 1 and shape[3] > 1:
            reasons.append(f"{shared[0]} shards both the heads and the keys of the {name}")
    return tuple(reasons)


def _run(shard: Operands, *, call: AttentionCall) -> Result:
    if not call.specs.kv_length:
        o, lse, lse_error = blockwise.attend(shard, call.recipe)
        return Result(o=o, lse=lse, kept=(lse_error,))
    combine = combination(call.specs, call)
    all_rows = _with_all_rows(shard, combine.row_axes, call)
    operands = combine.with_all_heads(all_rows).replace(sinks=None)
    o, lse, lse_error = blockwise.attend(operands, call.recipe, dtype="float32")
    return combine(o, lse, sinks=shard.sinks, dtype=call.dtype, lse_error=lse_error)


def _with_all_rows(shard: Operands, axes: tuple[str, ...], call: AttentionCall) -> Operands:
    """Return the operands with the rows of the queries gathered over some mesh axes."""
    if not axes:
        return shard
    names = ["q", *(["q_segment_ids"] if call.segments else [])]
    changed = {}
    if call.q_offset is not None and axes == call.specs.q_length:
        changed["q_positions"] = default_positions(call.q_length, offset=call.q_offset)
    else:
        names.append("q_positions")
    changed |= {name: sequence.gather(getattr(shard, name), axes, dim=1) for name in names}
    for name, shape in (("mask", call.mask_shape), ("bias", call.bias_shape)):
        array = getattr(shard, name)
        if shape is None or shape[2] == 1:
            continue
        if shape[3] == 1:
            changed[name] = sequence.gather(array, axes, dim=2)
        else:
            # A shard holds all columns of its own rows. It needs its own columns of all rows.
            changed[name] = jax.lax.all_to_all(array, axes, split_axis=3, concat_axis=2, tiled=True)
    return shard.replace(**changed)


def _combined(pieces: jax.Array, v_dim: int) -> Running:
    """Return the state of all keys, combined from the partial results of all shards.

    Args:
      pieces: `[shards, batch, heads, q_length, v_dim + 1 or 2]`: outputs, logsumexps and, with a
        bias, their rounding errors.
      v_dim: Number of columns of the output.
    """
    o = pieces[..., :v_dim]
    top = _top(jnp.max(pieces[..., v_dim], axis=0))
    # A normalized output and its logsumexp are the running state o, m = lse, l = 1.
    weights = _weights(pieces, top, v_dim)
    return Running(o=jnp.sum(o * weights[..., None], axis=0), m=top, l=jnp.sum(weights, axis=0))


def _weights(pieces: jax.Array, top: jax.Array, v_dim: int) -> jax.Array:
    """Return the factor of each shard's partial output, relative to the logsumexp `top`."""
    above = pieces[..., v_dim] - top
    return jnp.exp(above + pieces[..., v_dim + 1] if pieces.shape[-1] > v_dim + 1 else above)


def _top(lse: jax.Array) -> jax.Array:
    # Keep `top` finite for a row without keys. The result does not depend on `top`, so stop its
    # gradient.
    return jax.lax.stop_gradient(jnp.maximum(lse, DEFAULT_MASK_VALUE))


def _local_part(array: jax.Array, axes: tuple[str, ...], size: int, *, dim: int = 0) -> jax.Array:
    if not axes or array.shape[dim] == size:
        return array
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * size, size, dim)


def _gather(array: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    whole: jax.Array = jax.lax.all_gather(array, axes, axis=dim, tiled=True, to="invarying")
    return whole
