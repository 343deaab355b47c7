"""Attention in blocks of queries and keys: memory linear in length, forward and backward (Dao et al. 2022).

What other kernels build on, as pure functions of local arrays, to be called per shard of keys inside `shard_map`:

- `forward(operands, recipe, state=...) -> Running` adds a set of keys to a running state;
- `online_softmax.merge` and `online_softmax.finish`, which adds the sinks, end it: output and logsumexp;
- `delta(o, do, dlse)` once per row, then `backward(operands, recipe, lse=..., do=..., delta=...) -> Gradients`, the part that
  this set of keys contributes, float32, to be summed over sets;
- `sinks_gradient(sinks, lse, delta)` once;
- `attend(operands, recipe) -> (o, lse)` is all of that for keys that are all here, differentiable.

Tails are masked by position: a key that does not exist, or that an earlier block had, stands at -1. Blocks that no pair of
attends are skipped. Quantised keys and values are converted one block at a time, and have no backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout as layouts

from shardwright import _jax
from shardwright.attention.call import (
    LSE_NAME,
    OUTPUT_NAME,
    AttentionCall,
    Layout,
    Operands,
    Recipe,
)
from shardwright.attention.masks import block_is_empty
from shardwright.attention.parts import online_softmax
from shardwright.attention.parts.derivatives import differentiable
from shardwright.attention.parts.dropout import keep_factors
from shardwright.attention.parts.online_softmax import Running
from shardwright.attention.parts.shards import lengths_are_whole, no_weights, run_on_shards
from shardwright.attention.registry import AttentionImpl, AttentionRegistry, Result

# A dim that is no multiple of the lanes is not the minor one in a TPU's memory by default, nor the next one where it fills no sublane.
_LANES, _SUBLANE_BYTES = 128, 4
# The dim of each operand that counts queries, and the one that counts keys.
_Q_DIM = {"q": 1, "q_positions": 1, "q_segment_ids": 1, "mask": 2, "bias": 2}
_KV_DIM = {
    "k": 1,
    "v": 1,
    "k_scale": 1,
    "v_scale": 1,
    "kv_positions": 1,
    "kv_segment_ids": 1,
    "mask": 3,
    "bias": 3,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """Cotangents of the operands, float32, in their shapes. `bias` is None without a bias."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """How many blocks of which size; the last of each may have rows that do not exist."""

    q_length: int
    kv_length: int
    q_block: int
    kv_block: int

    @property
    def q_count(self) -> int:
        return -(-self.q_length // self.q_block)

    @property
    def kv_count(self) -> int:
        return -(-self.kv_length // self.kv_block)


def forward(operands: Operands, recipe: Recipe, *, state: Running | None = None) -> Running:
    """Return the running state after the operands' keys.

    Args:
      operands: local arrays.
      recipe: the static part.
      state: what was attended before, of the same queries; None to start.
    """
    operands, state = _jax.vary_together((operands, state))
    grid = _grid(operands, recipe)
    padded = _pad(operands, grid, keys=False)
    before = None if state is None else _pad_running(state, grid)

    def one_q(i: jax.Array) -> Any:
        row = _q_rows(padded, i, grid)
        read = functools.partial(_read_keys, row, recipe=recipe, grid=grid)
        init = (
            online_softmax.start(row.q, row.v) if before is None else _running_rows(before, i, grid)
        )
        return _over(
            grid.kv_count,
            lambda j, held: _visit(read(j), recipe, held, functools.partial(_add, recipe)),
            init,
        )

    if grid.q_count == 1:
        only: Running = one_q(jnp.int32(0))
        return only
    _, rows = jax.lax.scan(
        lambda carry, i: (carry, one_q(i)), None, jnp.arange(grid.q_count, dtype=jnp.int32)
    )
    found: Running = jax.tree.map(lambda blocks: _join(blocks, dim=2)[:, :, : grid.q_length], rows)
    return found


def backward(
    operands: Operands,
    recipe: Recipe,
    *,
    lse: jax.Array,
    do: jax.Array,
    delta: jax.Array,
    onto: Gradients | None = None,
    lse_error: jax.Array | None = None,
) -> Gradients:
    """Return what the operands' keys contribute to the gradients of q, k, v and the bias.

    Args:
      operands: local arrays, as in the forward pass.
      recipe: the static part.
      lse: `[batch, heads, q_length]`, of all keys and the sinks.
      do: `[batch, q_length, heads, v_dim]`, the cotangent of the output.
      delta: `[batch, heads, q_length]`, see `delta`.
      onto: what to add it to, in place where the compiler can; None for nothing.
      lse_error: what float32 lost of the logsumexp, see `online_softmax.lse_error_of`; None for nothing, as where no bias is large.
    """
    operands, lse, do, delta, onto, lse_error = _jax.vary_together(
        (operands, lse, do, delta, onto, lse_error)
    )
    grid = _grid(operands, recipe)
    padded = _pad(operands, grid)
    by_row = [
        rows if rows is None else _pad_dim(rows, 2, grid.q_count * grid.q_block, 0)
        for rows in (lse, lse_error, delta)
    ]
    do = _pad_dim(do, 1, grid.q_count * grid.q_block, 0)
    shapes = {
        name: array
        for name in ("q", "k", "v", "bias")
        if (array := getattr(padded, name)) is not None
    }
    if onto is None:
        held = Gradients(
            **{name: jnp.zeros_like(array, dtype=jnp.float32) for name, array in shapes.items()}
        )
    else:
        held = Gradients(
            **{name: _pad_to(getattr(onto, name), array.shape) for name, array in shapes.items()}
        )

    def one_kv(j: jax.Array, held: Gradients) -> Gradients:
        column, first = _kv_rows(padded, j, grid), j * grid.kv_block

        def one_q(i: jax.Array, held: Any) -> Any:
            block = _q_rows(column, i, grid)
            at = i * grid.q_block
            rows = [one if one is None else _slice(one, 2, at, grid.q_block) for one in by_row]
            rows.append(_slice(do, 1, at, grid.q_block))
            return _visit(
                block,
                recipe,
                held,
                lambda block, held: _add_gradients(block, recipe, rows, held, i, j, grid),
            )

        dk, dv = (_slice(array, 1, first, grid.kv_block) for array in (held.k, held.v))
        dq, dbias, dk, dv = _over(grid.q_count, one_q, (held.q, held.bias, dk, dv))
        dk, dv = (
            jax.lax.dynamic_update_slice_in_dim(array, part, first, 1)
            for array, part in ((held.k, dk), (held.v, dv))
        )
        return Gradients(q=dq, k=dk, v=dv, bias=dbias)

    found = _over(grid.kv_count, one_kv, held)
    cut = {
        name: jax.lax.slice(getattr(found, name), (0,) * 4, getattr(operands, name).shape)
        for name in shapes
    }
    return Gradients(**cut)


def delta(o: jax.Array, do: jax.Array, dlse: jax.Array | None = None) -> jax.Array:
    """Return the sum over `v_dim` of output times cotangent, less the cotangent of the logsumexp, `[batch, heads, q_length]`.

    Args:
      o: `[batch, q_length, heads, v_dim]`.
      do: its cotangent.
      dlse: cotangent of the logsumexp `[batch, heads, q_length]`, or None.
    """
    rows: jax.Array = jnp.einsum("bthd,bthd->bht", o.astype(jnp.float32), do.astype(jnp.float32))
    return rows if dlse is None else rows - dlse


def sinks_gradient(
    sinks: jax.Array, *, lse: jax.Array, delta: jax.Array, lse_error: jax.Array | None = None
) -> jax.Array:
    """Return the gradient of the sinks `[heads]`, float32; see `backward`."""
    above = sinks.astype(jnp.float32)[None, :, None] - lse
    share = jnp.exp(above if lse_error is None else above - lse_error)
    return -jnp.sum(share * delta, axis=(0, 2))


def attend(
    operands: Operands, recipe: Recipe, *, dtype: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the output `[batch, q_length, heads, v_dim]` and the logsumexp of local arrays. Differentiable.

    Args:
      operands: local arrays.
      recipe: the static part.
      dtype: of the output; absent: that of v.
    """
    o, lse, _ = attend_exactly(operands, recipe, dtype=dtype)
    return o, lse


def attend_exactly(
    operands: Operands, recipe: Recipe, *, dtype: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return what `attend` does and, where there is a bias, what float32 lost of the logsumexp; see `online_softmax.lse_error_of`."""
    operands = _jax.vary_together(operands)
    floats = {name: getattr(operands, name) for name in ("q", "k", "v", "bias", "sinks")}
    others = operands.replace(**dict.fromkeys(floats))
    found: tuple[jax.Array, jax.Array, jax.Array | None] = _attend(
        (recipe, dtype or str(operands.q.dtype)), floats, others
    )
    return found


def _values(
    static: tuple[Recipe, str], floats: dict[str, Any], others: Operands
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    (recipe, dtype), operands = static, others.replace(**floats)
    o, lse, lse_error = finish(forward(operands, recipe), operands)
    return o.astype(dtype), lse, lse_error


def finish(state: Running, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the output, the logsumexp and, where there is a bias, what float32 lost of it; see `online_softmax.lse_error_of`."""
    if operands.sinks is not None:
        state = online_softmax.add_sinks(state, operands.sinks)
    o, lse = online_softmax.finish(state)
    return o, lse, None if operands.bias is None else online_softmax.lse_error_of(state, lse)


def _backward_pass(static: tuple[Recipe, str], kept: Any, cotangents: Any) -> dict[str, Any]:
    recipe, _ = static
    floats, others, (o, lse, lse_error) = kept
    do, dlse, _ = cotangents
    operands = others.replace(**floats)
    rows = delta(o, do, dlse)
    found = backward(operands, recipe, lse=lse, do=do, delta=rows, lse_error=lse_error)
    sinks = (
        None
        if operands.sinks is None
        else sinks_gradient(operands.sinks, lse=lse, delta=rows, lse_error=lse_error)
    )
    grads = {"q": found.q, "k": found.k, "v": found.v, "bias": found.bias, "sinks": sinks}
    return {
        name: None if one is None else one.astype(floats[name].dtype) for name, one in grads.items()
    }


_attend = differentiable(_values, _backward_pass, names=(OUTPUT_NAME, LSE_NAME))


@AttentionRegistry.register
class BlockwiseAttention(AttentionImpl):
    """Blocks on every device by itself: the batch and the heads may be sharded, the lengths not."""

    takes_scales = True

    @classmethod
    def get_impl_name(cls) -> str:
        """Return "blockwise"."""
        return "blockwise"

    @classmethod
    def supports(cls, call: AttentionCall) -> tuple[str, ...]:
        """Return why a call cannot be served: sharded lengths, or weights."""
        return (*lengths_are_whole(call), *no_weights(call))

    @classmethod
    def forward_native(cls, operands: Operands, call: AttentionCall) -> Result:
        """Attend on every shard of batch and heads."""

        def kernel(shard: Operands) -> Result:
            o, lse = attend(shard, call.recipe)
            return Result(o=o, lse=lse if call.return_lse else None)

        return run_on_shards(kernel, operands, call)


# One block.


def _visit(block: Operands, recipe: Recipe, held: Any, step: Any) -> Any:
    """Return `step(block, held)`, or what was held where no pair of the block attends."""
    if not recipe.mask.positional and block.lengths is None and block.q_segment_ids is None:
        return step(block, held)
    return jax.lax.cond(_empty(block, recipe), lambda: held, lambda: step(block, held))


def _empty(block: Operands, recipe: Recipe) -> jax.Array:
    kv = block.kv_positions
    kv_low, kv_high = jnp.min(jnp.where(kv < 0, jnp.iinfo(jnp.int32).max, kv)), jnp.max(kv)
    empty: jax.Array = block_is_empty(
        recipe.mask, (jnp.min(block.q_positions), jnp.max(block.q_positions)), (kv_low, kv_high)
    )
    if block.lengths is not None:
        empty = empty | (kv_low >= jnp.max(block.lengths))
    if block.q_segment_ids is not None:
        q, kv = block.q_segment_ids, block.kv_segment_ids
        empty = empty | (jnp.max(kv) < jnp.min(q)) | (jnp.min(kv) > jnp.max(q))
    return empty


def _logits(block: Operands, recipe: Recipe) -> tuple[jax.Array, jax.Array]:
    """Return the logits of a block, and which of them are seen."""
    seen, bias = online_softmax.visible(block, recipe.mask)
    return online_softmax.logits_of(
        block.q,
        block.k,
        scale=recipe.scale,
        softcap=recipe.softcap,
        bias=bias,
        k_scale=block.k_scale,
    ), seen


def _keep(block: Operands, recipe: Recipe) -> jax.Array | None:
    return keep_factors(block, recipe.dropout) if recipe.dropout else None


def _add(recipe: Recipe, block: Operands, state: Running) -> Running:
    block = _converted(block)
    return online_softmax.update(
        state, *_logits(block, recipe), block.v, v_scale=block.v_scale, keep=_keep(block, recipe)
    )


def _converted(block: Operands) -> Operands:
    """Return a block with its quantised keys and values in a dtype that multiplies, still to be scaled."""
    if block.k_scale is None:
        return block
    # The weights times the scales of values can be smaller than float16 holds.
    wide = jnp.float32 if block.q.dtype == jnp.float16 else block.q.dtype
    return block.replace(k=block.k.astype(block.q.dtype), v=block.v.astype(wide))


def _add_gradients(
    block: Operands, recipe: Recipe, rows: Any, held: Any, i: jax.Array, j: jax.Array, grid: _Grid
) -> Any:
    lse, lse_error, delta_rows, do = rows
    dq, dbias, dk, dv = held
    ds, weights = _logit_gradients(block, recipe, lse, do, delta_rows, lse_error)
    if dbias is not None:
        dbias = _add_bias(dbias, ds, block.bias, i * grid.q_block, j * grid.kv_block)
    scaled = ds * recipe.scale
    at = i * grid.q_block
    dq = jax.lax.dynamic_update_slice_in_dim(
        dq, _slice(dq, 1, at, grid.q_block) + online_softmax.queries_of(scaled, block.k), at, 1
    )
    kv_heads = block.k.shape[2]
    return (
        dq,
        dbias,
        dk + online_softmax.keys_of(scaled, block.q, kv_heads),
        dv + online_softmax.keys_of(weights, do, kv_heads),
    )


def _logit_gradients(
    block: Operands,
    recipe: Recipe,
    lse: jax.Array,
    do: jax.Array,
    delta_rows: jax.Array,
    lse_error: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangent of the biased logits, and the weights after dropout; `[batch, heads, q_length, kv_length]`."""
    logits, seen = _logits(block, recipe)
    # A row without keys has lse = -inf, which depends on nothing: neither does its cotangent count.
    none = jnp.isneginf(lse)
    lse, delta_rows = jnp.where(none, 0.0, lse), jnp.where(none, 0.0, delta_rows)
    above = logits - lse[..., None]
    # The exponent and not the exponential is masked: the derivative of what overflows would be NaN.
    p = jnp.exp(
        jnp.where(seen, above if lse_error is None else above - lse_error[..., None], -jnp.inf)
    )
    dp = online_softmax.products_of(do, block.v)
    keep = _keep(block, recipe)
    ds = p * ((dp if keep is None else dp * keep) - delta_rows[..., None])
    if recipe.softcap is not None:
        ds = ds * (1.0 - jnp.square(logits / recipe.softcap))
    return ds, p if keep is None else p * keep


def _add_bias(
    dbias: jax.Array, ds: jax.Array, bias: jax.Array, q_at: jax.Array, kv_at: jax.Array
) -> Any:
    shared = tuple(dim for dim in range(4) if bias.shape[dim] == 1 and ds.shape[dim] != 1)
    part = jnp.sum(ds, axis=shared, keepdims=True) if shared else ds
    at = (0, 0, q_at if dbias.shape[2] > 1 else 0, kv_at if dbias.shape[3] > 1 else 0)
    old = jax.lax.dynamic_slice(dbias, at, part.shape)
    return jax.lax.dynamic_update_slice(dbias, old + part, at)


# Blocks of arrays.


def _grid(operands: Operands, recipe: Recipe) -> _Grid:
    q_length, kv_length = operands.q.shape[1], operands.k.shape[1]
    return _Grid(
        q_length=q_length,
        kv_length=kv_length,
        q_block=max(1, min(recipe.q_block, q_length)),
        kv_block=max(1, min(recipe.kv_block, kv_length)),
    )


def _over(count: int, step: Any, init: Any) -> Any:
    """Return `init` after `step(0, ·)`, `step(1, ·)`, …"""
    if count == 1:
        return step(jnp.int32(0), init)
    return jax.lax.scan(
        lambda held, i: (step(i, held), None), init, jnp.arange(count, dtype=jnp.int32)
    )[0]


def _pad(operands: Operands, grid: _Grid, *, keys: bool = True) -> Operands:
    """Return the operands with whole blocks of queries, and of keys: those that do not exist stand at -1."""
    changed: dict[str, Any] = {}
    tails = [(_Q_DIM, grid.q_length, grid.q_count * grid.q_block)]
    tails += [(_KV_DIM, grid.kv_length, grid.kv_count * grid.kv_block)] if keys else []
    for dims, length, size in tails:
        for name, dim in dims.items():
            array = changed.get(name, getattr(operands, name))
            if size != length and array is not None and array.shape[dim] == length:
                value = -1 if name == "kv_positions" else "edge" if array.dtype == jnp.int32 else 0
                changed[name] = _pad_dim(array, dim, size, value)
    return operands.replace(**changed) if changed else operands


def _pad_dim(array: jax.Array, dim: int, size: int, value: Any) -> jax.Array:
    widths = [(0, size - have if at == dim else 0) for at, have in enumerate(array.shape)]
    if size == array.shape[dim]:
        return array
    return (
        jnp.pad(array, widths, mode="edge")
        if value == "edge"
        else jnp.pad(array, widths, constant_values=value)
    )


def _pad_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (
        array
        if array.shape == shape
        else jnp.pad(
            array, [(0, size - have) for size, have in zip(shape, array.shape, strict=True)]
        )
    )


def _slice(array: jax.Array, dim: int, at: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, at, size, dim) if array.shape[dim] > size else array


def _q_rows(operands: Operands, i: jax.Array, grid: _Grid) -> Operands:
    return _block(operands, _Q_DIM, i * grid.q_block, grid.q_block)


def _kv_rows(operands: Operands, j: jax.Array, grid: _Grid) -> Operands:
    return _block(operands, _KV_DIM, j * grid.kv_block, grid.kv_block)


def _read_keys(operands: Operands, j: jax.Array, *, recipe: Recipe, grid: _Grid) -> Operands:
    """Return a block of keys without a copy of all: the last starts early, and hides the rows that an earlier block had."""
    first = j * grid.kv_block
    start = jnp.minimum(first, grid.kv_length - grid.kv_block)
    block = _block(operands, _KV_DIM, start, grid.kv_block)
    if grid.kv_length % grid.kv_block:
        again = start + jnp.arange(grid.kv_block, dtype=jnp.int32) < first
        block = block.replace(kv_positions=jnp.where(again[None], -1, block.kv_positions))
    return online_softmax.without_remains(
        block if recipe.cached is None else _as_it_lies(block, recipe.cached), recipe
    )


def _as_it_lies(block: Operands, layout: Layout) -> Operands:
    """Return a block of a cache in the order in which TPUs hold one unless told otherwise.

    XLA would make a copy of the whole cache, in every call, in the order that the product of one block prefers.
    """
    changed: dict[str, Any] = {}
    for name in ("k", "v"):
        rows = getattr(block, name)
        heads, dim = rows.shape[2:]
        order = (0, 1, 2, 3)
        if dim % _LANES:
            order = (0, 2, 3, 1)
        elif layout is Layout.BHTD or heads * rows.dtype.itemsize % _SUBLANE_BYTES:
            order = (0, 2, 1, 3)
        changed[name] = layouts.with_layout_constraint(rows, layouts.Layout(order))
    for name in ("k_scale", "v_scale"):
        if (scale := getattr(block, name)) is not None:
            changed[name] = layouts.with_layout_constraint(scale, layouts.Layout((0, 2, 1)))
    return block.replace(**changed)


def _block(operands: Operands, dims: dict[str, int], at: jax.Array, size: int) -> Operands:
    present = {
        name: (getattr(operands, name), dim)
        for name, dim in dims.items()
        if getattr(operands, name) is not None
    }
    return operands.replace(
        **{name: _slice(array, dim, at, size) for name, (array, dim) in present.items()}
    )


def _join(blocks: jax.Array, *, dim: int) -> Any:
    """Return blocks `[count, ...]` as one array, joined along a dim of a block."""
    moved = jnp.moveaxis(blocks, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])


def _pad_running(state: Running, grid: _Grid) -> Any:
    return jax.tree.map(lambda rows: _pad_dim(rows, 2, grid.q_count * grid.q_block, 0), state)


def _running_rows(state: Running, i: jax.Array, grid: _Grid) -> Any:
    return jax.tree.map(lambda rows: _slice(rows, 2, i * grid.q_block, grid.q_block), state)
