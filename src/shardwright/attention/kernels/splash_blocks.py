"""Splash on local arrays: the functions of `blockwise`, by the kernels of `splash_kernel`.

Before a kernel runs, a table says which blocks of keys each block of queries visits, and whether
all pairs of a block attend. The table is computed from the smallest and largest position and
segment id of each block. If positions are known before the program runs, the grid of the kernel has
only as many steps as the largest number of visits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.attention.call import Arithmetic, Operands
from shardwright.attention.kernels import blockwise, splash_kernel
from shardwright.attention.kernels.blockwise import Gradients
from shardwright.attention.kernels.splash_kernel import EMPTY, FULL, KINDS, PARTLY, Plan, Rows
from shardwright.attention.kernels.splash_tiles import block_rows, whole_lanes
from shardwright.attention.masks import block_is_empty, block_is_full
from shardwright.attention.parts import online_softmax
from shardwright.attention.parts.derivatives import differentiable
from shardwright.attention.parts.online_softmax import Running

_HIGHEST = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplashBlocks:
    """The functions `forward`, `backward`, `finish` and `attend` of `blockwise`. Hashable.

    Attributes:
      interpret: Whether the kernels run in the interpreter, as on a CPU.
      first_rows: The position of the first query of each shard; None if positions are arrays.
    """

    interpret: bool
    first_rows: tuple[int, ...] | None = None

    def forward(
        self, operands: Operands, recipe: Arithmetic, *, state: Running | None = None
    ) -> Running:
        """Return the running state after the operands' keys; see `blockwise.forward`."""
        block = _Local.of(operands, recipe, self)
        before = (
            None
            if state is None
            else (
                block.pad_rows(state.o),
                block.pad_numbers(state.m),
                block.pad_numbers(state.l),
            )
        )
        table = block.table(keys_outside=False)
        o, top, total = splash_kernel.run_forward(
            block.plan, table, block.rows, block.qkv, state=before
        )
        rows = slice(0, block.q_length)
        return Running(o=o[:, :, rows], m=top[:, :, 0, rows], l=total[:, :, 0, rows])

    def backward(
        self,
        operands: Operands,
        recipe: Arithmetic,
        *,
        lse: jax.Array,
        do: jax.Array,
        delta: jax.Array,
        onto: Gradients | None = None,
        lse_error: jax.Array | None = None,
        dtype: Any = jnp.float32,
    ) -> Gradients:
        """Return what the operands' keys contribute to gradients; see `blockwise.backward`.

        Args:
          operands: Local arrays.
          recipe: Static settings of the computation.
          lse: As in `blockwise.backward`.
          do: As in `blockwise.backward`.
          delta: As in `blockwise.backward`.
          onto: As in `blockwise.backward`.
          lse_error: None, because there is no bias.
          dtype: Dtype of the gradients. They stay float32 until they are complete.
        """
        assert lse_error is None
        block = _Local.of(operands, recipe, self)
        # A row without keys has the constant lse = -inf, so the cotangent of that lse has no
        # effect.
        no_keys = jnp.isneginf(lse)
        lse, delta = jnp.where(no_keys, 0.0, lse), jnp.where(no_keys, 0.0, delta)
        cotangents = (
            block.pad_rows(jnp.swapaxes(do, 1, 2)),
            block.pad_numbers(lse),
            block.pad_numbers(delta),
        )
        dq_onto = None if onto is None else block.pad_rows(jnp.swapaxes(onto.q, 1, 2))
        kv_onto = (
            None
            if onto is None
            else tuple(block.pad_keys(jnp.swapaxes(x, 1, 2)) for x in (onto.k, onto.v))
        )
        plan, ints, qkv = block.plan, block.rows, block.qkv
        dq = splash_kernel.run_queries(
            plan, block.table(keys_outside=False), ints, qkv, cotangents, dtype=dtype, onto=dq_onto
        )
        dk, dv = splash_kernel.run_keys(
            plan, block.table(keys_outside=True), ints, qkv, cotangents, dtype=dtype, onto=kv_onto
        )
        dq, dk, dv = (jnp.swapaxes(x, 1, 2) for x in (dq, dk, dv))
        return Gradients(
            q=dq[:, : block.q_length], k=dk[:, : block.kv_length], v=dv[:, : block.kv_length]
        )

    def finish(self, state: Running, operands: Operands) -> tuple[jax.Array, jax.Array, None]:
        """Return the output and the logsumexp; see `blockwise.finish`."""
        o, lse, _ = blockwise.finish(state, operands)
        return o, lse, None

    def attend(self, operands: Operands, recipe: Arithmetic) -> tuple[jax.Array, jax.Array, None]:
        """Return the output and the logsumexp; see `blockwise.attend`. Differentiable."""
        floats = {name: getattr(operands, name) for name in ("q", "k", "v", "sinks")}
        o, lse = _attend((self, recipe), floats, operands.replace(**dict.fromkeys(floats)))
        return o, lse, None


def _values(
    static: tuple[SplashBlocks, Arithmetic], floats: dict[str, Any], rest: Operands
) -> tuple[jax.Array, jax.Array]:
    splash, recipe = static
    block = _Local.of(rest.replace(**floats), recipe, splash)
    sinks = None if floats["sinks"] is None else floats["sinks"].astype(jnp.float32)
    table = block.table(keys_outside=False)
    o, lse = splash_kernel.run_forward(
        block.plan, table, block.rows, block.qkv, sinks=sinks, dtype=floats["q"].dtype
    )
    return jnp.swapaxes(o, 1, 2)[:, : block.q_length], lse[:, :, 0, : block.q_length]


def _backward_pass(
    static: tuple[SplashBlocks, Arithmetic], residuals: Any, cotangents: Any
) -> dict[str, Any]:
    splash, recipe = static
    floats, rest, (o, lse) = residuals
    do, dlse = cotangents
    delta = blockwise.delta(o, do, dlse)
    own = splash.backward(
        rest.replace(**floats), recipe, lse=lse, do=do, delta=delta, dtype=floats["q"].dtype
    )
    grads = {"q": own.q, "k": own.k, "v": own.v, "sinks": None}
    if floats["sinks"] is not None:
        grads["sinks"] = blockwise.sinks_gradient(floats["sinks"], lse=lse, delta=delta)
    return {
        name: None if grad is None else grad.astype(floats[name].dtype)
        for name, grad in grads.items()
    }


_attend = differentiable(_values, _backward_pass)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Local:
    """Local operands as the kernels read them: ordered by head, padded to whole blocks."""

    plan: Plan
    rows: Rows
    qkv: tuple[jax.Array, jax.Array, jax.Array]
    q_length: int
    kv_length: int
    first_rows: tuple[int, ...] | None

    @classmethod
    def of(cls, operands: Operands, recipe: Arithmetic, splash: SplashBlocks) -> _Local:
        operands = online_softmax.without_remains(operands, recipe)
        lengths = operands.q.shape[1], operands.k.shape[1]
        q_rows, kv_rows = (whole_lanes(length) for length in lengths)
        plan = Plan(
            rules=recipe.mask,
            scale=recipe.scale,
            softcap=recipe.softcap,
            q_block=block_rows(recipe.q_block, q_rows),
            kv_block=block_rows(recipe.kv_block, kv_rows),
            interpret=splash.interpret,
        )
        q, k, v = (
            _pad(jnp.swapaxes(x, 1, 2), 2, size)
            for x, size in ((operands.q, q_rows), (operands.k, kv_rows), (operands.v, kv_rows))
        )
        return cls(
            plan=plan,
            rows=_rows(operands, q_rows, kv_rows),
            qkv=(q, k, v),
            q_length=lengths[0],
            kv_length=lengths[1],
            first_rows=splash.first_rows,
        )

    def pad_rows(self, array: jax.Array) -> jax.Array:
        """Pad `[batch, heads, q_length, dim]` to whole blocks."""
        padded: jax.Array = _pad(array, 2, self.qkv[0].shape[2])
        return padded

    def pad_numbers(self, array: jax.Array) -> jax.Array:
        """Pad `[batch, heads, q_length]` to whole blocks, and return `[batch, heads, 1, rows]`."""
        padded: jax.Array = _pad(array, 2, self.qkv[0].shape[2])
        return padded[:, :, None]

    def pad_keys(self, array: jax.Array) -> jax.Array:
        """Pad `[batch, heads, kv_length, dim]` to whole blocks."""
        padded: jax.Array = _pad(array, 2, self.qkv[1].shape[2])
        return padded

    def table(self, *, keys_outside: bool) -> jax.Array:
        """Return the blocks to visit, `[batch or 1, outer blocks, visits]`.

        The outer blocks are those of the keys if `keys_outside`, else those of the queries. An
        entry is `KINDS` times the index of the block to visit, plus the kind of that block. The
        remaining entries repeat the last block with the kind EMPTY, so nothing is read for them.
        """
        kinds = _kinds(self.plan, self.rows)
        kinds = jnp.swapaxes(kinds, 1, 2) if keys_outside else kinds
        empty = kinds == EMPTY
        # False sorts before True, and the sort is stable. So the blocks to visit come first, in
        # their own order.
        order = jnp.argsort(empty, axis=2, stable=True).astype(jnp.int32)
        last = jnp.maximum(jnp.sum(~empty, axis=2, keepdims=True, dtype=jnp.int32) - 1, 0)
        visits = jnp.minimum(jnp.arange(kinds.shape[2], dtype=jnp.int32), last)
        visited = jnp.take_along_axis(order, visits, axis=2)
        table = visited * KINDS + jnp.take_along_axis(kinds, order, axis=2)
        # The grid of a kernel is static, so cut only the steps that are EMPTY for every row.
        return table[:, :, : self._most_visits(keys_outside=keys_outside)]

    def _most_visits(self, *, keys_outside: bool) -> int:
        """Return an upper bound of the number of inner blocks that an outer block visits."""
        q_blocks, kv_blocks = (
            self.qkv[0].shape[2] // self.plan.q_block,
            self.qkv[1].shape[2] // self.plan.kv_block,
        )
        if self.first_rows is None:
            return q_blocks if keys_outside else kv_blocks
        seen = np.zeros((q_blocks, kv_blocks), bool)
        most = 1
        for first in self.first_rows:
            q = _ranges(first, self.q_length, self.plan.q_block)
            kv = _ranges(0, self.kv_length, self.plan.kv_block)
            q_rows, kv_columns = tuple(x[:, None] for x in q), tuple(x[None] for x in kv)
            seen = ~block_is_empty(self.plan.rules, q_rows, kv_columns)  # type: ignore[arg-type]
            seen = np.broadcast_to(seen, (q_blocks, kv_blocks))
            most = max(most, int(seen.sum(axis=0 if keys_outside else 1).max()))
        return most


def _ranges(first: int, length: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest position of each block of consecutive rows."""
    low = np.arange(first, first + length, block)
    return low, np.minimum(low + block - 1, first + length - 1)


def _rows(operands: Operands, q_rows: int, kv_rows: int) -> Rows:
    kv_positions = operands.kv_positions
    if operands.lengths is not None:
        # Set the positions of keys past the length of their sequence to -1. Then the kernels need
        # no lengths.
        kv_positions = jnp.where(kv_positions < operands.lengths[:, None], kv_positions, -1)
    padded = (
        _pad(operands.q_positions, 1, q_rows, "edge"),
        _pad(kv_positions, 1, kv_rows, -1),
        _pad(operands.q_segment_ids, 1, q_rows, "edge"),
        _pad(operands.kv_segment_ids, 1, kv_rows, "edge"),
    )
    batch = max(1 if x is None else x.shape[0] for x in padded)
    q, kv, q_ids, kv_ids = (
        None if x is None else jnp.broadcast_to(x, (batch, x.shape[1])).astype(jnp.int32)[:, None]
        for x in padded
    )
    assert q is not None
    assert kv is not None
    return Rows(q_positions=q, kv_positions=kv, q_segments=q_ids, kv_segments=kv_ids)


def _kinds(plan: Plan, rows: Rows) -> jax.Array:
    """Return the kind of every block, `[batch or 1, blocks of queries, blocks of keys]`."""
    q = _low_and_high(rows.q_positions, plan.q_block, -1)
    kv_low = _low_and_high(
        jnp.where(rows.kv_positions < 0, _HIGHEST, rows.kv_positions), plan.kv_block, -2
    )[0]
    # Keys that are absent have negative positions. `kv_low` leaves them out, to find empty blocks.
    # `any_low` includes them, because a block with absent keys is not full.
    any_low, kv_high = _low_and_high(rows.kv_positions, plan.kv_block, -2)
    empty = block_is_empty(plan.rules, q, (kv_low, kv_high))
    full = block_is_full(plan.rules, q, (any_low, kv_high))
    if rows.q_segments is not None:
        assert rows.kv_segments is not None
        (q_low, q_high), (k_low, k_high) = (
            _low_and_high(rows.q_segments, plan.q_block, -1),
            _low_and_high(rows.kv_segments, plan.kv_block, -2),
        )
        empty = empty | (k_high < q_low) | (k_low > q_high)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    kinds = jnp.where(empty, EMPTY, jnp.where(full, FULL, PARTLY)).astype(jnp.int32)
    batch, q_blocks, kv_blocks = q[0].shape[0], q[0].shape[1], kv_high.shape[2]
    return jnp.broadcast_to(kinds, (batch, q_blocks, kv_blocks))


def _low_and_high(row: jax.Array, block: int, dim: int) -> tuple[jax.Array, jax.Array]:
    """Return the smallest and largest value of each block, with a new dim of size 1 at `dim`."""
    blocks = row.reshape(row.shape[0], -1, block)
    low, high = jnp.min(blocks, axis=2), jnp.max(blocks, axis=2)
    return jnp.expand_dims(low, dim), jnp.expand_dims(high, dim)


def _pad(array: Any, dim: int, size: int, value: Any = 0) -> Any:
    if array is None or array.shape[dim] == size:
        return array
    widths = [(0, size - current if at == dim else 0) for at, current in enumerate(array.shape)]
    return (
        jnp.pad(array, widths, mode="edge")
        if value == "edge"
        else jnp.pad(array, widths, constant_values=value)
    )
