"""Attention in blocks of queries and keys: memory linear in length (Dao et al. 2022).

`run` needs whole sequences on each device; the batch and the heads may be sharded. Other kernels
build on the pure functions of this module. They take local arrays, and a kernel calls them for each
shard of keys inside `shard_map`:

- `forward(operands, recipe, state=...)` adds a set of keys to a running state;
- `finish` adds the sinks and returns output and logsumexp;
- `delta(o, do, dlse)` is computed once per row. `backward(operands, recipe, lse=..., do=...,
  delta=...)` then returns what a set of keys contributes to the gradients, in float32. The caller
  adds the contributions of all sets;
- `sinks_gradient(sinks, lse, delta)` is computed once;
- `attend(operands, recipe)` does all of this if all keys are local, and is differentiable.

Blocks in which no query sees a key are skipped. Quantized keys and values are converted one block
at a time, and have no backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright import _jax
from shardwright.attention.call import Arithmetic, AttentionCall, Operands, Result
from shardwright.attention.parts import blocks, online_softmax
from shardwright.attention.parts.blocks import Grid
from shardwright.attention.parts.derivatives import differentiable
from shardwright.attention.parts.dropout import keep_factors
from shardwright.attention.parts.online_softmax import Running
from shardwright.attention.parts.shards import lengths_are_whole, no_weights, run_on_shards

# The operands that have gradients. `custom_vjp` takes them separately: cotangents of integers would
# have the dtype float0.
_FLOATS = ("q", "k", "v", "bias", "sinks")
_NO_FLOATS = dict.fromkeys(_FLOATS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """Float32 cotangents, in the shapes of the operands. `bias` is None if there is no bias."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None = None


# The implementation.


def supports(call: AttentionCall) -> tuple[str, ...]:
    """Return why a call cannot be served: a length is sharded, or the call asks for weights."""
    return (*lengths_are_whole(call), *no_weights(call))


def run(operands: Operands, call: AttentionCall) -> Result:
    """Attend on every shard of batch and heads."""
    return run_on_shards(functools.partial(_attend_shard, call), operands, call)


def _attend_shard(call: AttentionCall, shard: Operands) -> Result:
    o, lse, lse_error = _attend((call.recipe, call.dtype), *split(_jax.vary_together(shard)))
    return Result(o=o, lse=lse, kept=(lse_error,))


def split(operands: Operands) -> tuple[dict[str, Any], Operands]:
    """Return the operands that have gradients, by name; and the other operands."""
    return {name: getattr(operands, name) for name in _FLOATS}, operands.replace(**_NO_FLOATS)


def attend(
    operands: Operands, recipe: Arithmetic, *, dtype: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the output, the logsumexp and, if there is a bias, the logsumexp's rounding error.

    The function is differentiable.

    Args:
      operands: Local arrays.
      recipe: Static settings of the computation.
      dtype: Dtype of the output. Defaults to that of q.

    Returns:
      The output, `[batch, q_length, heads, v_dim]`, the logsumexp and its rounding error, both
      `[batch, heads, q_length]`; see `online_softmax.lse_error_of`.
    """
    operands = _jax.vary_together(operands)
    results: tuple[jax.Array, jax.Array, jax.Array | None] = _attend(
        (recipe, dtype or str(operands.q.dtype)), *split(operands)
    )
    return results


def _values(
    static: tuple[Arithmetic, str], floats: dict[str, Any], others: Operands
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    (recipe, dtype), operands = static, others.replace(**floats)
    o, lse, lse_error = finish(forward(operands, recipe), operands)
    return o.astype(dtype), lse, lse_error


def backward_pass(
    static: tuple[Arithmetic, str], residuals: Any, cotangents: Any
) -> dict[str, Any]:
    """Return the cotangents of the operands that have gradients; see `derivatives.Backward`."""
    recipe, _ = static
    floats, others, (o, lse, lse_error) = residuals
    # The rounding error of the logsumexp is behind `stop_gradient`, so its cotangent is 0.
    do, dlse, _ = cotangents
    operands = others.replace(**floats)
    rows = delta(o, do, dlse)
    grads = backward(operands, recipe, lse=lse, do=do, delta=rows, lse_error=lse_error)
    by_name = {name: getattr(grads, name) for name in ("q", "k", "v", "bias")}
    by_name["sinks"] = None
    if operands.sinks is not None:
        by_name["sinks"] = sinks_gradient(operands.sinks, lse=lse, delta=rows, lse_error=lse_error)
    return {
        name: None if grad is None else grad.astype(floats[name].dtype)
        for name, grad in by_name.items()
    }


_attend = differentiable(_values, backward_pass)


# Forward.


def forward(operands: Operands, recipe: Arithmetic, *, state: Running | None = None) -> Running:
    """Return the running state after the operands' keys.

    Args:
      operands: Local arrays.
      recipe: Static settings of the computation.
      state: The state of the same queries after earlier keys. Defaults to the state before any key.
    """
    operands, state = _jax.vary_together((operands, state))
    grid = blocks.grid_of(operands, recipe)
    padded = blocks.pad_queries(operands, grid)
    rows = grid.q_count * grid.q_block
    before = jax.tree.map(lambda x: blocks.pad_dim(x, 2, rows), state)

    # The two functions below are bodies of loops: `(carry, index of the block) -> (carry, result)`.
    def attend_rows(_: None, i: Any) -> tuple[None, Running]:
        row = blocks.query_block(padded, i, grid)
        if before is None:
            state = online_softmax.start(row.q, row.v)
        else:
            first = i * grid.q_block
            state = jax.tree.map(lambda x: blocks.slice_dim(x, 2, first, grid.q_block), before)

        def add_keys(state: Running, j: Any) -> tuple[Running, None]:
            block = blocks.key_block(row, j, recipe, grid)
            # If no mask can hide the whole block, a conditional would only cost time.
            if not blocks.may_be_empty(block, recipe):
                return _add(recipe, block, state), None
            # XLA runs only one branch of `cond`, so a hidden block costs no matmul. Its keys and
            # values are sliced before the `cond`, so XLA may still read them.
            empty, add = blocks.is_empty(block, recipe), functools.partial(_add, recipe, block)
            return jax.lax.cond(empty, lambda state: state, add, state), None

        if grid.kv_count == 1:
            return None, add_keys(state, 0)[0]
        # Use `scan`: derivatives of gradients need a reverse-mode derivative of this loop, and a
        # `while_loop` has none.
        return None, jax.lax.scan(add_keys, state, jnp.arange(grid.kv_count, dtype=jnp.int32))[0]

    if grid.q_count == 1:
        return attend_rows(None, 0)[1]
    _, by_block = jax.lax.scan(attend_rows, None, jnp.arange(grid.q_count, dtype=jnp.int32))
    joined: Running = jax.tree.map(lambda x: _join(x)[:, :, : grid.q_length], by_block)
    return joined


def finish(state: Running, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the output, the logsumexp and, with a bias, the rounding error of the logsumexp.

    See `online_softmax.lse_error_of`.
    """
    if operands.sinks is not None:
        state = online_softmax.add_sinks(state, operands.sinks)
    o, lse = online_softmax.finish(state)
    return o, lse, None if operands.bias is None else online_softmax.lse_error_of(state, lse)


def _add(recipe: Arithmetic, block: Operands, state: Running) -> Running:
    """Return the state after a block of keys."""
    if block.k_scale is not None:
        # If q is float16, convert v to float32: a weight times the scale of v can be too small for
        # float16.
        wide = jnp.float32 if block.q.dtype == jnp.float16 else block.q.dtype
        block = block.replace(k=block.k.astype(block.q.dtype), v=block.v.astype(wide))
    # A step of the inner loop of FlashAttention-2 (Dao 2023, algorithm 1).
    seen, bias = online_softmax.visible(block, recipe.mask)
    logits = online_softmax.logits_of(
        online_softmax.scores_of(block.q, block.k),
        scale=recipe.scale,
        softcap=recipe.softcap,
        bias=bias,
        k_scale=block.k_scale,
    )
    keep = keep_factors(block, recipe.dropout) if recipe.dropout else None
    return online_softmax.update(state, logits, seen, block.v, v_scale=block.v_scale, keep=keep)


def _join(by_block: jax.Array) -> Any:
    """Return blocks `[count, batch, heads, q_block, ...]` as `[batch, heads, q_length, ...]`."""
    moved = jnp.moveaxis(by_block, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])


# Backward.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BackwardRows:
    """The arrays that a backward pass reads for each row of queries; see `backward`."""

    do: jax.Array
    lse: jax.Array
    delta: jax.Array
    lse_error: jax.Array | None

    def padded(self, rows: int) -> _BackwardRows:
        return self._map(lambda array, dim: blocks.pad_dim(array, dim, rows))

    def block(self, start: jax.Array, size: int) -> _BackwardRows:
        return self._map(lambda array, dim: blocks.slice_dim(array, dim, start, size))

    def _map(self, change: Any) -> _BackwardRows:
        error = None if self.lse_error is None else change(self.lse_error, 2)
        return _BackwardRows(
            do=change(self.do, 1),
            lse=change(self.lse, 2),
            delta=change(self.delta, 2),
            lse_error=error,
        )


def backward(
    operands: Operands,
    recipe: Arithmetic,
    *,
    lse: jax.Array,
    do: jax.Array,
    delta: jax.Array,
    onto: Gradients | None = None,
    lse_error: jax.Array | None = None,
) -> Gradients:
    """Return what the operands' keys contribute to the gradients of q, k, v and the bias.

    Args:
      operands: Local arrays, as in the forward pass.
      recipe: Static settings of the computation.
      lse: `[batch, heads, q_length]`, the logsumexp of all keys and the sinks.
      do: `[batch, q_length, heads, v_dim]`, the cotangent of the output.
      delta: `[batch, heads, q_length]`; see `delta`.
      onto: Gradients to add the result to, in place if the compiler can. Defaults to zeros.
      lse_error: The rounding error of the logsumexp, see `online_softmax.lse_error_of`. None
        without a bias.
    """
    operands, lse, do, delta, onto, lse_error = _jax.vary_together(
        (operands, lse, do, delta, onto, lse_error)
    )
    grid = blocks.grid_of(operands, recipe)
    padded = blocks.pad_keys(blocks.pad_queries(operands, grid), grid)
    rows = _BackwardRows(do=do, lse=lse, delta=delta, lse_error=lse_error)
    rows = rows.padded(grid.q_count * grid.q_block)

    # As in FlashAttention-2 (Dao 2023, algorithm 2), keys are the outer loop: dk and dv of a block
    # are the carry of the inner loop, and only dq is read and written in every step.
    def add_columns(j: jax.Array, gradients: Gradients) -> Gradients:
        column, first = blocks.padded_key_block(padded, j, grid), j * grid.kv_block

        def add_rows(i: jax.Array, gradients: Any) -> Any:
            block = blocks.query_block(column, i, grid)
            row = rows.block(i * grid.q_block, grid.q_block)
            add = functools.partial(_add_gradients, recipe, grid, row, i, j, block)
            if not blocks.may_be_empty(block, recipe):
                return add(gradients)
            return jax.lax.cond(
                blocks.is_empty(block, recipe), lambda gradients: gradients, add, gradients
            )

        dk, dv = (blocks.slice_dim(x, 1, first, grid.kv_block) for x in (gradients.k, gradients.v))
        dq, dbias, dk, dv = blocks.repeat(
            grid.q_count, add_rows, (gradients.q, gradients.bias, dk, dv)
        )
        dk, dv = (
            jax.lax.dynamic_update_slice_in_dim(whole, part, first, 1)
            for whole, part in ((gradients.k, dk), (gradients.v, dv))
        )
        return Gradients(q=dq, k=dk, v=dv, bias=dbias)

    names = ["q", "k", "v"] if padded.bias is None else ["q", "k", "v", "bias"]
    start = {}
    for name in names:
        array = getattr(padded, name)
        if onto is None:
            start[name] = jnp.zeros_like(array, dtype=jnp.float32)
        else:
            start[name] = blocks.pad_to(getattr(onto, name), array.shape)
    grads = blocks.repeat(grid.kv_count, add_columns, Gradients(**start))
    shapes = {name: getattr(operands, name).shape for name in names}
    return Gradients(
        **{name: jax.lax.slice(getattr(grads, name), (0,) * 4, shapes[name]) for name in names}
    )


def delta(o: jax.Array, do: jax.Array, dlse: jax.Array | None = None) -> jax.Array:
    """Return `sum(o * do)` over `v_dim`, minus the cotangent of the logsumexp.

    Args:
      o: `[batch, q_length, heads, v_dim]`, the output.
      do: Its cotangent.
      dlse: The cotangent of the logsumexp, `[batch, heads, q_length]`, or None.

    Returns:
      `[batch, heads, q_length]` float32.
    """
    # D of FlashAttention (Dao et al. 2022, algorithm 4). The derivative of the logsumexp by the
    # logits is the weights, so `dlse` must be added to `dp`. The callers compute `dp - delta`, so
    # `dlse` is subtracted from delta here.
    wide = do.astype(jnp.float32)
    if do.dtype != jnp.float32:
        # XLA may skip the rounding of `do` here (its "excess precision"), but never for the operand
        # of the matmul with the values. Both uses of `do` must be rounded alike, because in `dp -
        # delta` a difference in rounding would be larger than small gradients. On an H200 with
        # large logits, this difference caused an error of 1.5 % instead of 0.25 %.
        wide = online_softmax.rounded(wide, do.dtype)
    rows: jax.Array = jnp.einsum("bthd,bthd->bht", o.astype(jnp.float32), wide)
    return rows if dlse is None else rows - dlse


def sinks_gradient(
    sinks: jax.Array, *, lse: jax.Array, delta: jax.Array, lse_error: jax.Array | None = None
) -> jax.Array:
    """Return the gradient of the sinks, `[heads]` float32; see `backward`."""
    # A sink is a logit whose value is 0, so its dp is 0 and ds is -p * delta.
    above = sinks.astype(jnp.float32)[None, :, None] - lse
    share = jnp.exp(above if lse_error is None else above - lse_error)
    return -jnp.sum(share * delta, axis=(0, 2))


def _add_gradients(
    recipe: Arithmetic,
    grid: Grid,
    rows: _BackwardRows,
    i: jax.Array,
    j: jax.Array,
    block: Operands,
    gradients: Any,
) -> Any:
    """Add the gradients of block `i` of the queries and block `j` of the keys.

    `gradients` has the gradients of all queries, of the bias, and of this block of keys.
    """
    dq, dbias, dk, dv = gradients
    first = i * grid.q_block
    ds, weights = _logit_gradients(block, recipe, rows)
    if dbias is not None:
        dbias = _add_bias(dbias, ds, block.bias, first, j * grid.kv_block)
    # The bias is added after the scale, so the gradient of the bias is `ds` without the scale.
    scaled = ds * recipe.scale
    own = blocks.slice_dim(dq, 1, first, grid.q_block)
    own = own + online_softmax.queries_of(scaled, block.k)
    kv_heads = block.k.shape[2]
    return (
        jax.lax.dynamic_update_slice_in_dim(dq, own, first, 1),
        dbias,
        dk + online_softmax.keys_of(scaled, block.q, kv_heads),
        dv + online_softmax.keys_of(weights, rows.do, kv_heads),
    )


def _logit_gradients(
    block: Operands, recipe: Arithmetic, rows: _BackwardRows
) -> tuple[jax.Array, jax.Array]:
    """Return the cotangent of the biased logits, and the weights after dropout.

    Both are `[batch, heads, q_length, kv_length]`.
    """
    seen, bias = online_softmax.visible(block, recipe.mask)
    scores = online_softmax.scores_of(block.q, block.k)
    logits = online_softmax.logits_of(scores, scale=recipe.scale, softcap=recipe.softcap, bias=bias)
    # A row without keys has the constant lse = -inf, so the cotangent of that lse has no effect.
    no_keys = jnp.isneginf(rows.lse)
    lse, delta_rows = jnp.where(no_keys, 0.0, rows.lse), jnp.where(no_keys, 0.0, rows.delta)
    above = logits - lse[..., None]
    if rows.lse_error is not None:
        above = above - rows.lse_error[..., None]
    # Mask the exponent and not the exponential. The exponential could overflow, and its derivative
    # would then be NaN.
    p = jnp.exp(jnp.where(seen, above, -jnp.inf))
    # The backward pass stores no weights: it computes them again from the logsumexp.
    dp = online_softmax.scores_of(rows.do, block.v)
    keep = keep_factors(block, recipe.dropout) if recipe.dropout else None
    ds = p * ((dp if keep is None else dp * keep) - delta_rows[..., None])
    if recipe.softcap is not None:
        # The derivative of c tanh(x / c) is 1 - tanh(x / c)^2, and these logits are capped already.
        ds = ds * (1.0 - jnp.square(logits / recipe.softcap))
    return ds, p if keep is None else p * keep


def _add_bias(
    dbias: jax.Array, ds: jax.Array, bias: jax.Array, q_start: jax.Array, kv_start: jax.Array
) -> Any:
    """Add the gradient of a block, summed over broadcast dims, to the gradient of the bias."""
    # A dim of size 1 was broadcast, and the transpose of a broadcast is a sum.
    shared = tuple(dim for dim in range(4) if bias.shape[dim] == 1)
    part = jnp.sum(ds, axis=shared, keepdims=True)
    at = (0, 0, q_start if dbias.shape[2] > 1 else 0, kv_start if dbias.shape[3] > 1 else 0)
    old = jax.lax.dynamic_slice(dbias, at, part.shape)
    return jax.lax.dynamic_update_slice(dbias, old + part, at)
