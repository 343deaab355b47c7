"""Decode on GPUs: a few queries per sequence, by a Pallas kernel that Triton compiles.

A cache stores the rows of all heads side by side. XLA for GPUs cannot multiply by the keys of one
head in this layout, so it first writes transposed copies of the whole cache. This kernel reads each
row once, and writes no copies. Blocks that no query of the sequence sees are not read. The visible
blocks of a sequence are divided among several programs, whose partial softmaxes are then combined
(Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.call import Arithmetic, AttentionCall, Operands, Result
from shardwright.attention.kernels import blockwise
from shardwright.attention.masks import pair_attends
from shardwright.attention.parts.derivatives import differentiable
from shardwright.attention.parts.online_softmax import Running
from shardwright.attention.parts.shards import (
    IN_A_PLAN,
    inside_shard_map,
    lengths_are_whole,
    no_weights,
    run_opaque,
)
from shardwright.manager import context
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE

# The largest number of queries of one kv head in a Triton program, the smallest number of rows that
# a matrix unit multiplies, and the number of keys that a program reads at a time.
_MOST_QUERIES, _LEAST_ROWS, _BLOCK = 64, 16, 128
# Number of programs: two for each of the more than 100 multiprocessors of a GPU. On an H200, 512
# programs took 1.02 to 1.15 times as long, for 1 to 64 sequences of 2,048 to 32,768 rows.
_PROGRAMS = 256


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: split sequences, many queries, or a missing feature."""
    return (*lengths_are_whole(call), *not_in_triton(call), *inside_shard_map(call))


def not_in_triton(call: AttentionCall) -> tuple[str, ...]:
    """Return why the kernel cannot serve a call, given that every device holds whole sequences."""
    queries = call.q_length * (call.heads // call.kv_heads)
    reasons = {
        IN_A_PLAN: context.TARGET.value is not None,
        "its kernel is for GPUs, and the platform is tpu": call.platform == "tpu",
        f"it computes in bfloat16 and float16, and the call is in {call.dtype}": (
            call.dtype == "float32"
        ),
        f"it holds {_MOST_QUERIES} queries per kv head at a time, and the call has {queries}": (
            queries > _MOST_QUERIES
        ),
        "it takes no segments": call.segments,
        "it takes no dense mask": call.mask_shape is not None,
        "it takes no bias": call.bias_shape is not None,
        f"it has no dropout, and dropout is {call.recipe.dropout}": bool(call.recipe.dropout),
    }
    return (*(reason for reason, holds in reasons.items() if holds), *no_weights(call))


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend on every shard of batch and heads. Outside of GPUs the kernel is interpreted."""
    return run_opaque(functools.partial(_attend_shard, call), operands, call)


def _attend_shard(call: AttentionCall, shard: Operands) -> Result:
    floats, others = blockwise.split(shard)
    o, lse, _ = _attend((call.recipe, call.dtype, is_interpreted(call)), floats, others)
    return Result(o=o, lse=lse)


def is_interpreted(call: AttentionCall) -> bool:
    """Whether the kernel is interpreted, because there is no GPU."""
    return call.platform != "gpu" or call.on_cpus


def _values(
    static: tuple[Arithmetic, str, bool], floats: dict[str, Any], others: Operands
) -> tuple[jax.Array, jax.Array, None]:
    (recipe, dtype, interpret), operands = static, others.replace(**floats)
    batch, rows = operands.k.shape[:2]
    positions = jnp.broadcast_to(operands.kv_positions, (batch, rows))
    pages = jnp.arange(batch, dtype=jnp.int32)[:, None]
    state = forward(operands, positions, pages, recipe, interpret=interpret)
    o, lse, _ = blockwise.finish(state, operands)
    return o.astype(dtype), lse, None


def _backward(static: tuple[Arithmetic, str, bool], residuals: Any, cotangents: Any) -> Any:
    return blockwise.backward_pass(static[:2], residuals, cotangents)


_attend = differentiable(_values, _backward)


def forward(
    operands: Operands,
    kv_positions: jax.Array,
    pages: jax.Array,
    recipe: Arithmetic,
    *,
    interpret: bool = False,
) -> Running:
    """Return the running state of queries after keys in pages.

    Key j of sequence b is row `j % page_size` of page `pages[b, j // page_size]`. Keys that are not
    paged are passed as one page per sequence.

    Args:
      operands: Local arrays. k, v and their scales are `[pages, page_size, kv_heads, ...]`, and
        `lengths` hide keys as in `masks.allowed`.
      kv_positions: `[batch, columns * page_size]` int32, negative for rows without a key.
      pages: `[batch, columns]` int32.
      recipe: Static settings of the computation.
      interpret: Whether to interpret the kernel, slowly, as without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    q, v = operands.q, operands.v
    (batch, q_length, heads, _), (_, page_size, kv_heads, v_dim) = q.shape, v.shape
    group = heads // kv_heads
    queries = max(_LEAST_ROWS, pl.next_power_of_2(group * q_length))
    # A block lies in one page. Rows of the block beyond the page are masked.
    block = min(_BLOCK, pl.next_power_of_2(max(page_size, _LEAST_ROWS)))
    per_page = pl.cdiv(page_size, block)
    blocks = pages.shape[1] * per_page
    splits = min(blocks, max(1, _PROGRAMS // (batch * kv_heads)))

    padding = (0, queries - q_length * group)
    if operands.lengths is not None:
        kv_positions = jnp.where(kv_positions < operands.lengths[:, None], kv_positions, -1)
    q_positions = jnp.broadcast_to(operands.q_positions, (batch, q_length))
    seen_blocks = _visible_blocks(q_positions, kv_positions, recipe, blocks, page_size, block)
    whole = functools.partial(pl.BlockSpec, index_map=lambda b, h, s: (b, 0))
    arrays = {
        "q": (
            jnp.pad(_by_kv_head(q, kv_heads), ((0, 0), (0, 0), padding, (0, 0))),
            pl.BlockSpec((None, None, queries, _wide(q)), lambda b, h, s: (b, h, 0, 0)),
        ),
        # Padded query rows get position 0. Their results are cut off.
        "q_positions": (
            jnp.pad(jnp.repeat(q_positions, group, axis=1), ((0, 0), padding)),
            whole((None, queries)),
        ),
    }
    for name, rows in (("kv_positions", kv_positions), ("pages", pages), ("blocks", seen_blocks)):
        arrays[name] = (rows, whole((None, rows.shape[1])))
    for name in ("k", "v", "k_scale", "v_scale"):
        if (paged := getattr(operands, name)) is not None:
            arrays[name] = (paged, _head_of_pages(paged))
    part = (batch, kv_heads, splits, queries)
    specs = {
        "o": pl.BlockSpec((None, None, None, queries, _wide(v)), lambda b, h, s: (b, h, s, 0, 0)),
        "m": pl.BlockSpec((None, None, None, queries), lambda b, h, s: (b, h, s, 0)),
    }
    specs["l"] = specs["m"]
    kernel = functools.partial(
        _kernel,
        names=tuple(arrays),
        recipe=recipe,
        page_size=page_size,
        block=block,
        splits=splits,
        dims=(q.shape[-1], v_dim),
    )
    row = jax.ShapeDtypeStruct(part, jnp.float32)
    o, m, l = pl.pallas_call(  # noqa: E741  the name that the literature has
        kernel,
        grid=(batch, kv_heads, splits),
        in_specs=[spec for _, spec in arrays.values()],
        out_specs=list(specs.values()),
        out_shape=[jax.ShapeDtypeStruct((*part, v_dim), jnp.float32), row, row],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="triton_decode",
    )(*(array for array, _ in arrays.values()))
    top = jnp.max(m, axis=2)
    weights = jnp.exp(m - top[:, :, None])

    def by_head(rows: jax.Array) -> jax.Array:
        return _by_head(rows[:, :, : q_length * group], q_length)

    return Running(
        o=by_head(jnp.sum(o * weights[..., None], axis=2)),
        m=by_head(top),
        l=by_head(jnp.sum(l * weights, axis=2)),
    )


def _head_of_pages(paged: jax.Array) -> Any:
    """Return the block spec that lets a program read one kv head of all pages."""
    from jax.experimental import pallas as pl

    return pl.BlockSpec(
        (*paged.shape[:2], None, *(_wide(paged) for _ in paged.shape[3:])),
        lambda b, h, s, dims=paged.ndim: (0, 0, h, 0)[:dims],
    )


def _by_kv_head(q: jax.Array, kv_heads: int) -> jax.Array:
    """Return `[batch, q_length, heads, dim]` as `[batch, kv_heads, q_length * group, dim]`."""
    batch, q_length, _, dim = q.shape
    grouped = q.reshape(batch, q_length, kv_heads, -1, dim)
    return jnp.moveaxis(grouped, 2, 1).reshape(batch, kv_heads, -1, dim)


def _by_head(rows: jax.Array, q_length: int) -> jax.Array:
    """Return `[batch, kv_heads, q_length * group, ...]` as `[batch, heads, q_length, ...]`."""
    grouped = rows.reshape(*rows.shape[:2], q_length, -1, *rows.shape[3:])
    moved = jnp.moveaxis(grouped, 2, 3)
    return moved.reshape(rows.shape[0], -1, q_length, *rows.shape[3:])


def _wide(array: jax.Array) -> int:
    """Return the size of the last dim in a program. Triton has only sizes that are powers of 2."""
    size: int = max(_LEAST_ROWS, 1 << (array.shape[-1] - 1).bit_length())
    return size


def _visible_blocks(
    q_positions: jax.Array,
    kv_positions: jax.Array,
    recipe: Arithmetic,
    blocks: int,
    page_size: int,
    block: int,
) -> jax.Array:
    """Return the range of visible blocks of each sequence: the first, and the last plus 1."""
    seen = pair_attends(recipe.mask, q_positions[:, :, None], kv_positions[:, None, :])
    in_pages = jnp.any(seen, axis=1).reshape(seen.shape[0], -1, page_size)
    padded = jnp.pad(in_pages, ((0, 0), (0, 0), (0, -page_size % block)))
    in_blocks = jnp.any(padded.reshape(seen.shape[0], blocks, block), axis=2)
    numbers = jnp.arange(blocks, dtype=jnp.int32)
    first = jnp.min(jnp.where(in_blocks, numbers, blocks), axis=1)
    last = jnp.max(jnp.where(in_blocks, numbers, -1), axis=1)
    return jnp.stack([jnp.minimum(first, last + 1), last + 1], axis=1)


def _kernel(
    *refs: Any,
    names: tuple[str, ...],
    recipe: Arithmetic,
    page_size: int,
    block: int,
    splits: int,
    dims: tuple[int, int],
) -> None:
    """Attend from the queries of one kv head to a part of the visible blocks of a sequence."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    ref = dict(zip((*names, "o", "m", "l"), refs, strict=True))
    queries, (head_dim, v_dim) = ref["q"].shape[0], dims
    per_page = pl.cdiv(page_size, block)
    q = _load(ref["q"], jnp.arange(queries) < queries, head_dim)
    q_positions = ref["q_positions"][...]
    first, end = ref["blocks"][0], ref["blocks"][1]
    # Each program takes an equal part of the visible blocks of the sequence, not of its capacity.
    count = (end - first + splits - 1) // splits
    start = first + pl.program_id(2) * count

    def add(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o, m, l = state  # noqa: E741
        page, row = ref["pages"][i // per_page], i % per_page * block
        here = row + jnp.arange(block) < page_size
        rows = pl.ds(row, block)
        at = ref["kv_positions"].at[pl.ds(i // per_page * page_size + row, block)]
        positions = triton.load(at, mask=here, other=-1)
        k = _load(ref["k"].at[page, rows], here, head_dim).astype(q.dtype)
        scores = triton.dot(q, k.T).astype(jnp.float32) * recipe.scale
        if "k_scale" in ref:
            scores *= triton.load(ref["k_scale"].at[page, rows], mask=here, other=0.0)[None, :]
        if recipe.softcap is not None:
            scores = recipe.softcap * jnp.tanh(scores / recipe.softcap)
        seen = pair_attends(recipe.mask, q_positions[:, None], positions[None, :])
        top = jnp.maximum(m, jnp.max(jnp.where(seen, scores, DEFAULT_MASK_VALUE), axis=1))
        p = jnp.where(seen, jnp.exp(scores - top[:, None]), 0.0)
        shrink = jnp.exp(m - top)
        weights, held = p, positions >= 0
        # A row without a key may hold NaN from an earlier sequence, so replace its scale and its
        # value by 0.
        if "v_scale" in ref:
            scale = triton.load(ref["v_scale"].at[page, rows], mask=here, other=0.0)
            weights *= jnp.where(held, scale, 0.0)[None, :]
        v = _load(ref["v"].at[page, rows], here, v_dim).astype(q.dtype)
        v = jnp.where(held[:, None], v, jnp.zeros((), v.dtype))
        new = triton.dot(weights.astype(v.dtype), v).astype(jnp.float32)
        return o * shrink[:, None] + new, top, l * shrink + jnp.sum(p, axis=1)

    state = (
        jnp.zeros((queries, ref["o"].shape[1]), jnp.float32),
        jnp.full((queries,), DEFAULT_MASK_VALUE, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
    )
    o, m, l = jax.lax.fori_loop(start, jnp.minimum(start + count, end), add, state)  # noqa: E741
    columns = jnp.arange(o.shape[1]) < v_dim
    triton.store(ref["o"], o, mask=jnp.broadcast_to(columns[None, :], o.shape))
    ref["m"][...] = m
    ref["l"][...] = l


def _load(rows: Any, here: jax.Array, dim: int) -> jax.Array:
    """Return rows of vectors. Rows where `here` is False, and columns from `dim` on, are 0."""
    from jax.experimental.pallas import triton

    columns = jnp.arange(rows.shape[-1]) < dim
    # Use 0.0 for floats: an integer 0 cannot become a float8.
    other = 0 if jnp.issubdtype(rows.dtype, jnp.integer) else 0.0
    loaded: jax.Array = triton.load(rows, mask=here[:, None] & columns[None, :], other=other)
    return loaded
