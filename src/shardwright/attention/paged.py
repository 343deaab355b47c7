"""Attend to a paged cache: a row of a table lists the pages of a sequence (Kwon et al. 2023).

Sequences have any number of keys and queries, so one call serves prefill and decode together. A
loop over the tables reads a few pages per sequence at a time, so the keys of a sequence are never
copied as a whole. If pages are sharded by kv head, nothing is sent. If they are sharded by page,
each shard reads the pages that it has, and partial softmaxes are combined as in `flash_decode`. If
pages and batch are sharded over the same mesh axes, the queries of these shards are gathered first,
and an all-to-all returns the partial softmaxes of each sequence to the shard of the sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.attention.call import AttentionCall, JointSpecs, KVHeads, Operands, Result
from shardwright.attention.checks import check_dims, check_integers, check_range, check_scale
from shardwright.attention.inputs import describe, read_options
from shardwright.attention.kernels import blockwise, flash_decode, triton_decode
from shardwright.attention.parts import online_softmax, sequence, shards
from shardwright.attention.parts.shards import IN_A_PLAN
from shardwright.attention.sharding import resolve_pages
from shardwright.errors import AttentionError
from shardwright.manager import context
from shardwright.manager.shards import call_on_shards
from shardwright.resolution.partition_specs import spec_of
from shardwright.resolution.rules import Attention
from shardwright.vocabulary.modes import MODE_DECODE

# Number of keys of a sequence that the loop reads at a time. A larger page is read whole.
_ROWS = 128


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    block_tables: Any,
    lengths: Any,
    q_lengths: Any = None,
    positions: Any = None,
    k_scale_pages: Any = None,
    v_scale_pages: Any = None,
    mode: str | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend as `dot_product_attention` does, to keys and values in pages. Has no gradient.

    Key j of sequence b is row `j % page_size` of page `block_tables[b, j // page_size]`, for j
    below `lengths[b]`. The queries of a sequence are its last tokens: query i is at position
    `lengths[b] - q_lengths[b] + i`. Rows of q from `q_lengths[b]` on are padding, and their output
    is exactly 0.

    Under an ambient manager, q is sharded by (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM), and the pages
    by (PAGE, EMPTY, KV_HEAD, KV_HEAD_DIM), as the rules of the mode resolve them. Tables and
    lengths are sharded like the batch, or replicated if the pages are sharded over the mesh axes of
    the batch. Page numbers are global, even if the pages are sharded. On GPUs, `triton_decode`
    reads the pages if it can, unless the line of the mode under `[attention]` names another
    implementation. If that line names `triton_decode`, and `triton_decode` cannot read the pages,
    the call raises an error.

    If lengths and tables are NumPy arrays, their values are checked. The values of JAX arrays are
    not checked: a page number that is out of range adds no keys, and neither does a length beyond
    the table. Unused entries of a table may hold any number.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k_pages: `[pages, page_size, kv_heads, head_dim]`. Query head h reads kv head
        `h * kv_heads // heads`.
      v_pages: `[pages, page_size, kv_heads, v_dim]`.
      block_tables: `[batch, pages_per_sequence]` int.
      lengths: `[batch]` int, the number of keys of each sequence, including the keys of its
        queries.
      q_lengths: `[batch]` int, the number of queries of each sequence. Defaults to `q_length`.
      positions: `[batch, q_length]` int, in place of `q_lengths`: the position of each row of the
        queries, negative for padding.
      k_scale_pages: `[pages, page_size, kv_heads]` float32 for int8 or float8 pages; see `k_scale`
        of `dot_product_attention`.
      v_scale_pages: Likewise for the values.
      mode: Runtime mode, for the sharding. Defaults to the manager's.
      causal: Whether a query sees only keys up to its own position.
      window: As in `dot_product_attention`.
      chunk: As in `dot_product_attention`.
      sinks: `[heads]`, as in `dot_product_attention`.
      softcap: As in `dot_product_attention`.
      scale: Factor of the scores, q · k. Defaults to `1 / sqrt(head_dim)`.
      return_lse: Whether to return a `Result` with the logsumexp, `[batch, heads, q_length]`
        float32.

    Returns:
      The output `[batch, q_length, heads, v_dim]`, or a `Result`.

    Raises:
      AttentionError: The arguments do not fit each other, or the result is differentiated.
      ShardingError: The rules of the manager do not fit the arrays.
    """
    check_dims("q", q, "pass [batch, q_length, heads, head_dim]")
    check_dims("k_pages", k_pages, "pass [pages, page_size, kv_heads, head_dim]")
    check_dims("v_pages", v_pages, "pass [pages, page_size, kv_heads, v_dim]")
    if k_pages.shape[:3] != v_pages.shape[:3]:
        what = f"v_pages has shape {v_pages.shape}, and k_pages {k_pages.shape}"
        raise AttentionError(
            what,
            path="v_pages",
            fix="give k_pages and v_pages equal numbers of pages, rows and heads",
        )
    _check_tables(block_tables, lengths, q_lengths, q, k_pages)
    keywords = {name: value for name, value in locals().items() if name in _ARITHMETIC}
    scales = {"k_scale": k_scale_pages, "v_scale": v_scale_pages}
    rows = block_tables.shape[1] * k_pages.shape[1]
    keywords |= {"mode": mode, "lengths": lengths}
    call = _call_of(q, k_pages, v_pages, scales, rows, keywords)
    if positions is None:
        q_positions = _positions(lengths, q_lengths, q.shape[:2])
    elif q_lengths is not None:
        raise AttentionError(
            "positions and q_lengths both give the positions of the queries",
            path="positions",
            fix="pass either positions or q_lengths",
        )
    else:
        check_integers("positions", positions, q.shape[:2])
        fix = "pass int32 positions; negative for padding"
        check_range("positions", positions, -(2**31), 2**31 - 1, fix)
        q_positions = _integers(positions)
    operands = Operands(
        q=jnp.asarray(q),
        k=jnp.asarray(k_pages),
        v=jnp.asarray(v_pages),
        k_scale=None if k_scale_pages is None else jnp.asarray(k_scale_pages),
        v_scale=None if v_scale_pages is None else jnp.asarray(v_scale_pages),
        q_positions=q_positions,
        kv_positions=None,
        lengths=_integers(lengths),
        sinks=None if sinks is None else jnp.asarray(sinks),
    )
    result = (_run if _jax.in_trace() else _jitted)(operands, _integers(block_tables), call)
    return result if return_lse else result.o


_ARITHMETIC = ("causal", "window", "chunk", "sinks", "softcap", "scale", "return_lse")


def _call_of(
    q: Any, k_pages: Any, v_pages: Any, scales: dict[str, Any], rows: int, keywords: dict[str, Any]
) -> AttentionCall:
    """Return the call, described like a call on a cache with `rows` rows per sequence.

    Args:
      q: As for `paged_attention`.
      k_pages: As for `paged_attention`.
      v_pages: As for `paged_attention`.
      scales: Scales of the pages by name, each an array or None.
      rows: Number of keys that fit into the pages of one row of the tables.
      keywords: The keywords that `paged_attention` shares with `dot_product_attention`.
    """
    for name, pages in (("k", k_pages), ("v", v_pages)):
        check_scale(
            f"{name}_scale_pages",
            scales[f"{name}_scale"],
            pages.shape[:3],
            of=f"{name}_pages",
            dtype=pages.dtype,
        )
    manager, (batch, q_length) = context.current(), q.shape[:2]
    mode = keywords["mode"] or (MODE_DECODE if manager is None else manager.mode)

    def in_rows(pages: Any) -> Any:
        if pages is None:
            return None
        return jax.ShapeDtypeStruct((batch, rows, *pages.shape[2:]), pages.dtype)

    shapes = {name: in_rows(scale) for name, scale in scales.items()}
    by_position = {
        name: jax.ShapeDtypeStruct((batch, length), jnp.int32)
        for name, length in (("positions", q_length), ("kv_positions", rows))
    }
    options = read_options({**keywords, **by_position, **shapes, "mode": mode})
    specs = JointSpecs()
    if manager is not None and mode is not None:
        specs = resolve_pages(manager, q=q.shape, k=k_pages.shape, v=v_pages.shape, mode=mode)
    call = describe(q, in_rows(k_pages), in_rows(v_pages), options, specs=specs)
    reasons = flash_decode.factored(call)
    if reasons:
        raise AttentionError(
            f"paged attention cannot serve this call: {reasons[0]}",
            path="k_pages",
            fix="put that mesh axis last in the rule of head",
        )
    return call


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _run(operands: Operands, tables: jax.Array, call: AttentionCall) -> Result:
    specs, heads = call.specs, shards.head_numbers(call)
    if call.mesh is None or not specs.mesh_axes:
        return _attend(operands, tables, *heads, call=call)
    pages = spec_of(specs.kv_length, (), specs.kv_heads)
    paged = {
        name: pages
        for name in ("k", "v", "k_scale", "v_scale")
        if getattr(operands, name) is not None
    }
    by_operand = specs.operands(operands.replace(**dict.fromkeys(paged))).replace(**paged)
    table_spec = specs.spec("batch")
    if _shared_axes(specs):
        # Each shard also reads the tables and lengths of other sequences. These arrays are small,
        # so replicate them once, instead of gathering them in every layer.
        table_spec = PartitionSpec()
        positions = spec_of((), specs.q_length)
        by_operand = by_operand.replace(q_positions=positions, lengths=table_spec)
    result: Result = call_on_shards(
        functools.partial(_attend, call=call),
        (operands, tables, *heads),
        (by_operand, table_spec, *shards.head_specs(call)),
        out_specs=Result(o=specs.output, lse=specs.lse).only(call),
        mesh=call.mesh,
        # Turn check_vma off for Pallas: JAX cannot track which devices hold equal values.
        check_vma=not _by_triton(call),
    )
    return result


@_run.defjvp
def _no_gradient(call: AttentionCall, primals: Any, tangents: Any) -> Any:
    del call, primals, tangents
    raise AttentionError(
        "paged attention reads a cache and has no gradient",
        fix="train with dot_product_attention, or pass the arguments through jax.lax.stop_gradient",
    )


_jitted = functools.partial(jax.jit, static_argnums=(2,))(_run)


# On one shard.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ShardPages:
    """The pages that a shard has, of all pages that the sequences use.

    Each array is `[batch, columns]`. In each row, the used pages come first.

    Attributes:
      pages: Local page numbers.
      ordinals: The number of each page within its sequence, from 0.
      here: Whether the entry is a used page of this shard. The rows of other entries are hidden.
    """

    pages: jax.Array
    ordinals: jax.Array
    here: jax.Array


def _attend(
    shard: Operands,
    tables: jax.Array,
    head_index: jax.Array,
    kv_head_index: jax.Array,
    *,
    call: AttentionCall,
) -> Result:
    page_size, positions = shard.k.shape[1], shard.q_positions
    shared = _shared_axes(call.specs)
    if shared:
        positions = positions[_sequences(call, ())]
        # This shard has pages of the sequences of all shards over `shared`, so read the queries and
        # the tables of all these sequences.
        sequences = _sequences(call, shared)
        tables = tables[sequences]
        shard = shard.replace(
            q=sequence.gather(shard.q, shared, dim=0),
            q_positions=shard.q_positions[sequences],
            lengths=shard.lengths[sequences],
        )
    # Over mesh axes that shard both batch and pages, `return_sequences` combines the partial
    # softmaxes. Over the other mesh axes of the pages, `combine` does.
    others = tuple(axis for axis in call.specs.kv_length if axis not in call.specs.batch)
    combine = flash_decode.combination(dataclasses.replace(call.specs, kv_length=others), call)
    operands = combine.with_all_heads(shard) if combine.axes else shard
    by_page = bool(call.specs.kv_length)
    first = jax.lax.axis_index(call.specs.kv_length) * shard.k.shape[0] if by_page else 0
    at_once = 1 if _by_triton(call) else max(1, _ROWS // page_size)
    operands, table = _jax.vary_together(
        (operands.replace(sinks=None), _compact(tables - first, shard, at_once))
    )
    recipe = dataclasses.replace(call.recipe, kv_block=at_once * page_size)

    def add(i: jax.Array, state: Any) -> Any:
        entries = jax.tree.map(
            lambda column: jax.lax.dynamic_slice_in_dim(column, i * at_once, at_once, 1), table
        )
        block = shards.pick_kv_heads(_read(operands, entries), call, head_index, kv_head_index)
        return blockwise.forward(block, recipe, state=state)

    if _by_triton(call):
        rows = _key_positions(table, page_size)
        interpret = triton_decode.is_interpreted(call)
        state = triton_decode.forward(operands, rows, table.pages, recipe, interpret=interpret)
    else:
        # The number of steps depends on the longest sequence, not on the width of the tables.
        count = jnp.max(jnp.sum(table.here, axis=1, dtype=jnp.int32))
        state = jax.lax.fori_loop(
            0, (count + at_once - 1) // at_once, add, online_softmax.start(operands.q, operands.v)
        )
    if shared:
        state = flash_decode.return_sequences(state, shared, call.shards(shared))
    if combine.axes:
        result = combine(*online_softmax.finish(state), sinks=shard.sinks, dtype=call.dtype)
    else:
        o, lse = online_softmax.finish(state, sinks=shard.sinks)
        result = Result(o=o.astype(call.dtype), lse=lse)
    tokens = positions >= 0
    o = jnp.where(tokens[:, :, None, None], result.o, 0)
    if not call.return_lse:
        return Result(o=o)
    return Result(o=o, lse=jnp.where(tokens[:, None, :], result.lse, -jnp.inf))


def _by_triton(call: AttentionCall) -> bool:
    """Tell whether Triton's kernel reads the pages: on GPUs, or if the strategy names the kernel.

    Raises:
      AttentionError: The strategy names the kernel, which cannot serve the call.
    """
    # A trace may read the rules of the ambient manager, because the rules are part of the key of
    # the trace.
    manager = context.current()
    line = None if manager is None or call.mode is None else manager.rules.attention_in(call.mode)
    reasons = triton_decode.not_in_triton(call)
    if call.specs.grouping is not KVHeads.SAME:
        reasons += ("it reads all kv heads of a page, but a shard needs only some of them",)
    if line is None or line.text == Attention.AUTO:
        return call.platform == "gpu" and not reasons
    if line.text != Attention.TRITON_DECODE or reasons == (IN_A_PLAN,):
        return False
    if reasons:
        raise AttentionError(
            f"the strategy says {line}, and {line.text} refuses to read these pages",
            snippet="\n".join(f"  not   {reason}" for reason in reasons),
            fix=f'write {line.key} = "auto": then a loop over the tables reads the pages',
        )
    return True


def _shared_axes(specs: JointSpecs) -> tuple[str, ...]:
    """Return the mesh axes of the batch that shard the pages too."""
    return tuple(axis for axis in specs.batch if axis in specs.kv_length)


def _sequences(call: AttentionCall, gathered: tuple[str, ...]) -> jax.Array:
    """Return the indices of the sequences that a shard has after a gather over some mesh axes."""
    sizes = [call.shards((axis,)) for axis in call.specs.batch]
    numbers = jnp.arange(call.batch, dtype=jnp.int32).reshape(*sizes, -1)
    # Start at the last dim, because each step removes a dim.
    for dim, axis in reversed(list(enumerate(call.specs.batch))):
        if axis not in gathered:
            at = jax.lax.axis_index(axis)
            numbers = jax.lax.dynamic_index_in_dim(numbers, at, dim, keepdims=False)
    return numbers.reshape(-1)


def _compact(pages: jax.Array, shard: Operands, at_once: int) -> _ShardPages:
    count, page_size = shard.k.shape[:2]
    ordinals = jnp.broadcast_to(jnp.arange(pages.shape[1], dtype=jnp.int32)[None], pages.shape)
    here = (pages >= 0) & (pages < count) & (ordinals * page_size < shard.lengths[:, None])
    # Put the used pages first, so that the loop ends after the last used page. A row of the table
    # lists pages of all shards, and those of this shard may be anywhere in the row.
    order = jnp.argsort(~here, axis=1, stable=True)
    table = (jnp.take_along_axis(column, order, axis=1) for column in (pages, ordinals, here))
    padding = ((0, 0), (0, -pages.shape[1] % at_once))
    pages, ordinals, here = (jnp.pad(column, padding) for column in table)
    return _ShardPages(pages=jnp.where(here, pages, 0), ordinals=ordinals, here=here)


def _read(operands: Operands, entries: _ShardPages) -> Operands:
    """Return the operands with the keys of these pages, `[batch, rows, kv_heads, head_dim]`."""
    positions, rows = _key_positions(entries, operands.k.shape[1]), {}
    for name in ("k", "v", "k_scale", "v_scale"):
        if (pages := getattr(operands, name)) is not None:
            rows[name] = pages[entries.pages].reshape(*positions.shape, *pages.shape[2:])
    return operands.replace(kv_positions=positions, **rows)


def _key_positions(entries: _ShardPages, page_size: int) -> jax.Array:
    """Return the positions of the rows of pages, `[batch, rows]`.

    An entry that is not `here` reads rows of page 0. These rows get the position -1, which hides
    them.
    """
    rows = jnp.arange(page_size, dtype=jnp.int32)[None, None]
    positions = entries.ordinals[:, :, None] * page_size + rows
    positions = jnp.where(entries.here[:, :, None], positions, -1)
    return positions.reshape(positions.shape[0], -1)


# Arguments.


def _check_tables(block_tables: Any, lengths: Any, q_lengths: Any, q: Any, k_pages: Any) -> None:
    batch, (pages, page_size) = q.shape[0], k_pages.shape[:2]
    shape = getattr(block_tables, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != batch or not shape[1]:
        raise AttentionError(
            f"block_tables has shape {shape}, not (batch, pages_per_sequence)",
            path="block_tables",
            fix=f"pass an array of integers of shape ({batch}, pages_per_sequence)",
        )
    check_integers("block_tables", block_tables, shape)
    columns = shape[1]
    check_integers("lengths", lengths, (batch,))
    most, fix = columns * page_size, "pass at most pages_per_sequence * page_size, or wider tables"
    check_range("lengths", lengths, 0, most, fix)
    if q_lengths is not None:
        check_integers("q_lengths", q_lengths, (batch,))
        check_range("q_lengths", q_lengths, 0, q.shape[1], "pass at most the number of rows of q")
    if not isinstance(lengths, np.ndarray):
        return
    if isinstance(q_lengths, np.ndarray) and (q_lengths > lengths).any():
        b = int(np.argmax(q_lengths > lengths))
        raise AttentionError(
            f"sequence {b} has {q_lengths[b]} queries and {lengths[b]} keys",
            path="q_lengths",
            fix="write the keys of the queries before attending, and count them in lengths",
        )
    if isinstance(block_tables, np.ndarray):
        used = np.arange(columns)[None] * page_size < lengths[:, None]
        wrong = used & ((block_tables < 0) | (block_tables >= pages))
        if wrong.any():
            b, j = (int(at) for at in np.argwhere(wrong)[0])
            raise AttentionError(
                f"block_tables[{b}, {j}] is page {block_tables[b, j]}, and there are "
                f"{pages} pages; sequence {b} has {lengths[b]} keys",
                path="block_tables",
                fix=f"number pages from 0 to {pages - 1}",
            )


def _integers(array: Any) -> jax.Array:
    return jnp.asarray(array).astype(jnp.int32)


def _positions(lengths: Any, q_lengths: Any, shape: tuple[int, int]) -> jax.Array:
    """Return `[batch, q_length]` positions of the queries, -1 for padding."""
    batch, q_length = shape
    counts = jnp.full(batch, q_length, jnp.int32) if q_lengths is None else _integers(q_lengths)
    rows = jnp.arange(q_length, dtype=jnp.int32)[None]
    return jnp.where(rows < counts[:, None], (_integers(lengths) - counts)[:, None] + rows, -1)
