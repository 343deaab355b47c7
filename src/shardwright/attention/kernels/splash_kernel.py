"""Sparse flash attention in Pallas, for TPUs, by blocks of queries and keys.

Blocks in which no query sees a key are skipped. There are three kernels: the forward pass, the
gradient of the queries, and the gradients of keys and values. Matmuls are summed in float32 and
then scaled, so the scale is never rounded to bfloat16. Masks compare positions and segment ids.
`splash_blocks` gives these kernels the interface of `blockwise` and computes the table of blocks to
visit.

Operands are ordered by head here: `[batch, heads, length, dim]`. Positions and segment ids are
`[batch or 1, 1, length]`.

This module imports Pallas, whose import is slow, so implementations import this module late.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardwright.attention.kernels.splash_tiles import LANES
from shardwright.attention.masks import MaskRules, pair_attends
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE

# The kinds of a block in the table: no query sees a key, some do, every query sees every key.
EMPTY, PARTLY, FULL = 0, 1, 2
# An entry of the table is one int32, block * KINDS + kind, to save scalar memory. KINDS is a power
# of two.
KINDS = 4

# Contracted dims of a matmul: `_ROWS_BY_ROWS` is a @ b.T, and `_PLAIN` is a @ b.
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
_PLAIN = (((1,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The static part of the kernels.

    Attributes:
      rules: The mask by position.
      scale: Factor of the scores, q · k.
      softcap: c in `c * tanh(logits / c)`, or None.
      q_block: Number of queries in a block. It divides the number of all queries.
      kv_block: Number of keys in a block. It divides the number of all keys.
      interpret: Whether to interpret the kernels, slowly, as on a CPU.
    """

    rules: MaskRules
    scale: float
    softcap: float | None
    q_block: int
    kv_block: int
    interpret: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The arrays that the mask reads: int32 `[batch or 1, 1, length]`, with equal batch sizes.

    Attributes:
      q_positions: Positions of the queries.
      kv_positions: Positions of the keys; negative for a key that no query sees.
      q_segments: Segment ids of the queries, or None.
      kv_segments: Segment ids of the keys, or None.
    """

    q_positions: jax.Array
    kv_positions: jax.Array
    q_segments: jax.Array | None
    kv_segments: jax.Array | None

    @property
    def arrays(self) -> list[tuple[str, jax.Array]]:
        """Pairs (side, array) of the arrays that are not None. The side is "q" or "kv"."""
        named = (
            ("q", self.q_positions),
            ("kv", self.kv_positions),
            ("q", self.q_segments),
            ("kv", self.kv_segments),
        )
        return [(side, array) for side, array in named if array is not None]


def run_forward(
    plan: Plan,
    table: jax.Array,
    rows: Rows,
    qkv: Sequence[jax.Array],
    *,
    sinks: jax.Array | None = None,
    state: Sequence[jax.Array] | None = None,
    dtype: Any = None,
) -> tuple[jax.Array, ...]:
    """Return `(o, lse)`, or with `dtype=None` the running state `(o, m, l)`.

    lse, m and l are `[batch, heads, 1, length]`.

    Args:
      plan: The static part of the kernel.
      table: Blocks of keys to visit, for each block of queries.
      rows: The positions and segment ids that the mask reads.
      qkv: Queries, keys and values, by head.
      sinks: `[heads]` float32, a logit per head that takes part in the softmax but has no value; or
        None.
      state: The running state to continue from, whose memory is reused; or None.
      dtype: Dtype of a normalized output; None for the running state.
    """
    q, k, v = qkv
    grid = (*q.shape[:2], q.shape[2] // plan.q_block, table.shape[2])
    specs = _Specs(plan=plan, table=table, group=q.shape[1] // k.shape[1], queries_outside=True)
    body = functools.partial(
        _forward_body,
        plan=plan,
        shape=table.shape,
        segments=rows.q_segments is not None,
        final=dtype is not None,
    )
    o = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), dtype or jnp.float32)
    row = jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)
    outs, out_specs = [o, row], [specs.q(v.shape[3]), specs.q_row]
    if dtype is None:
        outs, out_specs = [*outs, row], [*out_specs, specs.q_row]
    before = [] if state is None else list(state)
    arrays = [q, k, v, *(array for _, array in rows.arrays)]
    in_specs = [
        specs.q(q.shape[3]),
        specs.kv(k.shape[3]),
        specs.kv(v.shape[3]),
        *(specs.ints(side) for side, _ in rows.arrays),
    ]
    scalars = [table.reshape(-1)] if sinks is None else [table.reshape(-1), sinks]
    first = len(scalars) + len(arrays)
    call = _Call(
        body=_with_grouped_refs(body, scalars=len(scalars), before=len(before)),
        grid=grid,
        scalars=len(scalars),
        in_specs=[*in_specs, *out_specs[: len(before)]],
        out_specs=out_specs,
        outs=outs,
        # A TPU pads the last dim to 128 lanes in any case, so m and l repeat their numbers along a
        # lane dim instead of being columns.
        scratch=[(plan.q_block, v.shape[3]), (plan.q_block, LANES), (plan.q_block, LANES)],
        # Update the state in place. `aliases` counts the prefetched scalars as inputs too.
        aliases={first + at: at for at in range(len(before))},
        name="splash_forward",
    )
    return call.run(plan, *scalars, *arrays, *before)


def run_queries(
    plan: Plan,
    table: jax.Array,
    rows: Rows,
    qkv: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    *,
    dtype: Any,
    onto: jax.Array | None = None,
) -> jax.Array:
    """Return the gradient of the queries.

    Args:
      plan: The static part of the kernel.
      table: Blocks of keys to visit, for each block of queries.
      rows: The positions and segment ids that the mask reads.
      qkv: Queries, keys and values, by head.
      cotangents: Cotangent of the output, by head; logsumexp and delta, `[batch, heads, 1,
        length]`.
      dtype: Dtype of the result.
      onto: Gradient to add the result to, in place; or None.
    """
    q, k, _ = qkv
    specs = _Specs(plan=plan, table=table, group=q.shape[1] // k.shape[1], queries_outside=True)
    body = functools.partial(
        _queries_body, plan=plan, shape=table.shape, segments=rows.q_segments is not None
    )
    before = [] if onto is None else [onto]
    dims = [array.shape[3] for array in qkv]
    call = _Call(
        body=_with_grouped_refs(body, scalars=1, before=len(before)),
        grid=(*q.shape[:2], q.shape[2] // plan.q_block, table.shape[2]),
        scalars=1,
        in_specs=[
            specs.q(dims[0]),
            specs.kv(dims[1]),
            specs.kv(dims[2]),
            specs.q(dims[2]),
            specs.q_row,
            specs.q_row,
            *(specs.ints(side) for side, _ in rows.arrays),
            *[specs.q(dims[0])] * len(before),
        ],
        out_specs=[specs.q(dims[0])],
        outs=[jax.ShapeDtypeStruct(q.shape, dtype)],
        scratch=[(plan.q_block, dims[0])],
        # Seven inputs come before the arrays of the mask: the table, q, k, v, do, lse and delta.
        aliases={7 + len(rows.arrays): 0} if before else {},
        name="splash_queries",
    )
    ints = (array for _, array in rows.arrays)
    return call.run(plan, table.reshape(-1), *qkv, *cotangents, *ints, *before)[0]


def run_keys(
    plan: Plan,
    table: jax.Array,
    rows: Rows,
    qkv: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    *,
    dtype: Any,
    onto: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Return the gradients of keys and values; the arguments are those of `run_queries`.

    The table has the blocks of queries to visit, for each block of keys.
    """
    q, k, v = qkv
    group = q.shape[1] // k.shape[1]
    specs = _Specs(plan=plan, table=table, group=group, queries_outside=False)
    body = functools.partial(
        _keys_body, plan=plan, shape=table.shape, segments=rows.q_segments is not None
    )
    before = [] if onto is None else list(onto)
    dims = [array.shape[3] for array in qkv]
    call = _Call(
        body=_with_grouped_refs(body, scalars=1, before=len(before)),
        # All query heads of a group add to the gradients of one kv head, so `group` is a sequential
        # dim of the grid.
        grid=(*k.shape[:2], k.shape[2] // plan.kv_block, group, table.shape[2]),
        scalars=1,
        in_specs=[
            specs.q(dims[0]),
            specs.kv(dims[1]),
            specs.kv(dims[2]),
            specs.q(dims[2]),
            specs.q_row,
            specs.q_row,
            *(specs.ints(side) for side, _ in rows.arrays),
            *[specs.kv(dims[1]), specs.kv(dims[2])][: len(before)],
        ],
        out_specs=[specs.kv(dims[1]), specs.kv(dims[2])],
        outs=[jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)],
        scratch=[(plan.kv_block, dims[1]), (plan.kv_block, dims[2])],
        aliases={7 + len(rows.arrays) + at: at for at in range(len(before))},
        name="splash_keys",
    )
    ints = (array for _, array in rows.arrays)
    return call.run(plan, table.reshape(-1), *qkv, *cotangents, *ints, *before)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """A kernel with its grid, the blocks that it reads and writes, and its scratch memory."""

    body: Callable[..., None]
    grid: tuple[int, ...]
    scalars: int
    in_specs: list[Any]
    out_specs: list[Any]
    outs: list[Any]
    scratch: list[tuple[int, int]]
    aliases: dict[int, int]
    name: str

    def run(self, plan: Plan, *arrays: Any) -> tuple[jax.Array, ...]:
        # Batch, heads and outer blocks are independent. Inner blocks add up in scratch memory.
        semantics: list[Any] = [
            "parallel" if at < 3 else "arbitrary" for at in range(len(self.grid))
        ]
        results = pl.pallas_call(
            self.body,
            out_shape=self.outs,
            # The functions that choose blocks read the table before the blocks arrive, so the table
            # must be in scalar memory before the kernel starts.
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=self.scalars,
                grid=self.grid,
                in_specs=self.in_specs,
                out_specs=self.out_specs,
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in self.scratch],
            ),
            input_output_aliases=self.aliases,
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            interpret=plan.interpret,
            name=self.name,
        )(*arrays)
        return tuple(results)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Specs:
    """Which block of an array a step of the grid reads or writes.

    If the outer loop is over the queries, the grid is (batch, heads, blocks of queries, visits). If
    it is over the keys, the grid is (batch, kv heads, blocks of keys, heads of a group, visits).
    """

    plan: Plan
    table: jax.Array
    group: int
    queries_outside: bool

    def q(self, dim: int) -> Any:
        """The spec of an array by query head."""
        return pl.BlockSpec(
            (None, None, self.plan.q_block, dim), lambda *at: (*self._at("q", *at), 0)
        )

    @property
    def q_row(self) -> Any:
        """The spec of an array `[batch, heads, 1, length]`: one number per query."""

        def index(*at: Any) -> Any:
            batch, head, block = self._at("q", *at)
            return batch, head, 0, block

        # The last two dims of a block must be multiples of (8, 128), or equal to the dims of the
        # array. Here the first of these two dims is 1 in both, so the numbers of a row lie along
        # the lanes.
        return pl.BlockSpec((None, None, 1, self.plan.q_block), index)

    def kv(self, dim: int) -> Any:
        """The spec of an array by kv head."""
        return pl.BlockSpec(
            (None, None, self.plan.kv_block, dim), lambda *at: (*self._at("kv", *at), 0)
        )

    def ints(self, side: str) -> Any:
        """The spec of positions or segment ids."""
        block = self.plan.q_block if side == "q" else self.plan.kv_block

        def index(*at: Any) -> Any:
            batch, _, which = self._at(side, *at)
            return batch if self.table.shape[0] > 1 else 0, 0, which

        return pl.BlockSpec((None, 1, block), index)

    def _at(self, side: str, *at: Any) -> tuple[Any, Any, Any]:
        """Return the batch, the head and the block of one side at a step."""
        steps = 4 if self.queries_outside else 5
        batch, head, outer, *inner = at[:steps]
        visited = _visited(at[steps], self.table.shape, batch, outer, inner[-1]) // KINDS
        if self.queries_outside:
            return (batch, head, outer) if side == "q" else (batch, head // self.group, visited)
        return (
            (batch, head * self.group + inner[0], visited) if side == "q" else (batch, head, outer)
        )


def _visited(table: Any, shape: tuple[int, ...], batch: Any, outer: Any, step: Any) -> Any:
    """Return the entry of a flat table `[batch or 1, outer blocks, visits]`."""
    row = outer if shape[0] == 1 else batch * shape[1] + outer
    return table[row * shape[2] + step]


def _with_grouped_refs(
    body: Callable[..., None], *, scalars: int, before: int
) -> Callable[..., None]:
    """Return a kernel that takes all references in order, from a body that takes them in groups."""

    def kernel(*refs: Any) -> None:
        body(refs[:scalars], refs[scalars:], before=before)

    return kernel


def _forward_body(
    scalars: Any,
    refs: Any,
    *,
    before: int,
    plan: Plan,
    shape: tuple[int, ...],
    segments: bool,
    final: bool,
) -> None:
    q_ref, k_ref, v_ref, *rest = refs
    ints, rest = rest[: 4 if segments else 2], rest[4 if segments else 2 :]
    start, rest = rest[:before], rest[before:]
    *outs, acc_ref, m_ref, l_ref = rest
    head, step, steps = pl.program_id(1), pl.program_id(3), pl.num_programs(3)

    @pl.when(step == 0)
    def _start() -> None:
        if start:
            acc_ref[...] = start[0][...]
            m_ref[...], l_ref[...] = (_column(running[0], lanes=LANES) for running in start[1:])
        else:
            # A sink is a key with the logit `sink` and the value 0: m = sink and l = exp(sink - m)
            # = 1.
            sink = scalars[1][head] if len(scalars) > 1 else DEFAULT_MASK_VALUE
            acc_ref[...] = jnp.zeros_like(acc_ref)
            m_ref[...] = jnp.full_like(m_ref, sink)
            l_ref[...] = jnp.full_like(l_ref, 1.0 if len(scalars) > 1 else 0.0)

    def add(*, masked: bool) -> None:
        logits, _ = _logits(q_ref[...], k_ref[...], plan)
        seen = _attending_pairs(ints, plan.rules, rows="q") if masked else None
        old = m_ref[...]
        hidden = logits if seen is None else jnp.where(seen, logits, DEFAULT_MASK_VALUE)
        top = jnp.maximum(old, jnp.max(hidden, axis=1, keepdims=True))
        p = jnp.exp(hidden - top[:, :1])
        # As long as a row has seen no key, `top` is the value of hidden logits. Without this mask,
        # exp(0) = 1 would count these hidden keys.
        p = p if seen is None else jnp.where(seen, p, 0.0)
        shrink = jnp.exp(old - top)
        m_ref[...] = top
        l_ref[...] = l_ref[...] * shrink + jnp.sum(p, axis=1, keepdims=True)
        v = v_ref[...]
        acc_ref[...] = acc_ref[...] * shrink[:, :1] + _matmul(p.astype(v.dtype), v, _PLAIN)

    _if_visited(scalars[0], shape, step, add)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        o_ref, *row_refs = outs
        if final:
            no_keys = l_ref[...] == 0.0
            total = jnp.where(no_keys, 1.0, l_ref[...])
            o_ref[...] = (acc_ref[...] / total[:, :1]).astype(o_ref.dtype)
            lse = jnp.where(no_keys, -jnp.inf, m_ref[...] + jnp.log(total))
            row_refs[0][...] = _row(lse)
        else:
            o_ref[...] = acc_ref[...]
            row_refs[0][...] = _row(m_ref[...])
            row_refs[1][...] = _row(l_ref[...])


def _queries_body(
    scalars: Any, refs: Any, *, before: int, plan: Plan, shape: tuple[int, ...], segments: bool
) -> None:
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *rest = refs
    ints, rest = rest[: 4 if segments else 2], rest[4 if segments else 2 :]
    start, (dq_ref, acc_ref) = rest[:before], rest[before:]
    step, steps = pl.program_id(3), pl.num_programs(3)

    @pl.when(step == 0)
    def _start() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def add(*, masked: bool) -> None:
        k = k_ref[...]
        logits, slope = _logits(q_ref[...], k, plan)
        p = jnp.exp(logits - _column(lse_ref[0]))
        if masked:
            p = jnp.where(_attending_pairs(ints, plan.rules, rows="q"), p, 0.0)
        # FlashAttention-2 (Dao 2023, algorithm 2): dS = P * (dP - D).
        dp = _matmul(do_ref[...], v_ref[...], _ROWS_BY_ROWS)
        ds = p * (dp - _column(delta_ref[0]))
        ds = ds if slope is None else ds * slope
        acc_ref[...] += _matmul(ds.astype(k.dtype), k, _PLAIN)

    _if_visited(scalars[0], shape, step, add)

    @pl.when(step == steps - 1)
    def _finish() -> None:
        # The scale is a factor of the whole sum, so it is applied once, in float32.
        dq = acc_ref[...] * plan.scale
        dq_ref[...] = (start[0][...] + dq if start else dq).astype(dq_ref.dtype)


def _keys_body(
    scalars: Any, refs: Any, *, before: int, plan: Plan, shape: tuple[int, ...], segments: bool
) -> None:
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *rest = refs
    ints, rest = rest[: 4 if segments else 2], rest[4 if segments else 2 :]
    start, (dk_ref, dv_ref, dk_acc, dv_acc) = rest[:before], rest[before:]
    head, step = pl.program_id(3), pl.program_id(4)

    @pl.when((head == 0) & (step == 0))
    def _start() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    def add(*, masked: bool) -> None:
        q, do = q_ref[...], do_ref[...]
        # Compute logits as [keys, queries], so that numbers per query stay along the lanes.
        logits, slope = _logits(k_ref[...], q, plan)
        p = jnp.exp(logits - lse_ref[...])
        if masked:
            p = jnp.where(_attending_pairs(ints, plan.rules, rows="kv"), p, 0.0)
        dv_acc[...] += _matmul(p.astype(do.dtype), do, _PLAIN)
        ds = p * (_matmul(v_ref[...], do, _ROWS_BY_ROWS) - delta_ref[...])
        ds = ds if slope is None else ds * slope
        dk_acc[...] += _matmul(ds.astype(q.dtype), q, _PLAIN)

    _if_visited(scalars[0], shape, step, add)

    @pl.when((head == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def _finish() -> None:
        grads = (dk_acc[...] * plan.scale, dv_acc[...])
        for at, (ref, grad) in enumerate(zip((dk_ref, dv_ref), grads, strict=True)):
            ref[...] = (start[at][...] + grad if start else grad).astype(ref.dtype)


def _if_visited(table: Any, shape: tuple[int, ...], step: Any, add: Callable[..., None]) -> None:
    kind = _visited(table, shape, pl.program_id(0), pl.program_id(2), step) % KINDS
    pl.when(kind == FULL)(functools.partial(add, masked=False))
    pl.when(kind == PARTLY)(functools.partial(add, masked=True))


def _logits(a: jax.Array, b: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array | None]:
    """Return the float32 logits of a's rows and b's rows, and the derivative of the softcap."""
    logits = _matmul(a, b, _ROWS_BY_ROWS) * plan.scale
    if plan.softcap is None:
        return logits, None
    capped = jnp.tanh(logits / plan.softcap)
    return capped * plan.softcap, 1.0 - capped * capped


def _matmul(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    # By default a TPU multiplies float32 in bfloat16.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    matmul: jax.Array = jax.lax.dot_general(
        a, b, dims, precision=precision, preferred_element_type=jnp.float32
    )
    return matmul


def _attending_pairs(ints: Any, rules: MaskRules, *, rows: str) -> jax.Array:
    """Return which pairs of a block attend, with queries or keys along the rows."""

    def side(ref: Any, which: str) -> jax.Array:
        return _column(ref[0]) if which == rows else ref[...]

    seen: jax.Array = pair_attends(rules, side(ints[0], "q"), side(ints[1], "kv"))
    if len(ints) > 2:
        seen = seen & (side(ints[2], "q") == side(ints[3], "kv"))
    return seen


def _column(row: jax.Array, *, lanes: int = 1) -> jax.Array:
    """Return a row `[length]` as `[length, lanes]`."""
    return jnp.broadcast_to(jnp.expand_dims(row, -1), (row.shape[0], lanes))


def _row(column: jax.Array) -> jax.Array:
    """Return `[length, lanes]`, all lanes equal, as `[1, length]`."""
    return jnp.transpose(column)[:1]
