"""Softmax in pieces: one running state and one merge for every kernel. All in float32.

For each piece of keys, with the logits `s` and the values `v` (Rabe and Staats 2021; Dao et al.
2022):

- `m' = max(m, max s)`
- `p = where(mask, exp(s - m'), 0)`
- `l = l exp(m - m') + sum p`
- `o = o exp(m - m') + p v`

`m` starts at a finite number, so `m - m'` is never `-inf - -inf`, which is NaN. A row without keys
therefore keeps `l = 0` and `o = 0`, and `finish` returns 0 for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.attention.call import Arithmetic, Operands
from shardwright.attention.masks import MaskRules, allowed
from shardwright.vocabulary.axes import DEFAULT_MASK_VALUE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Running:
    """The state between two pieces of keys.

    Attributes:
      o: `[batch, heads, q_length, v_dim]`, the weighted sum so far, not normalized.
      m: `[batch, heads, q_length]`, the largest logit so far.
      l: `[batch, heads, q_length]`, the sum of exponentials so far, relative to `m`.
    """

    o: jax.Array
    m: jax.Array
    l: jax.Array  # noqa: E741  the name that the literature has


def start(q: jax.Array, v: jax.Array) -> Running:
    """Return the state before any key.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
    """
    # Use zeros_like and not zeros: inside shard_map the carry of a scan must vary over the same
    # mesh axes as the blocks that are added to the carry.
    batch, length, heads, _ = q.shape
    row = jnp.zeros_like(q, shape=(batch, heads, length), dtype=jnp.float32)
    row = row + jnp.zeros_like(v, shape=(), dtype=jnp.float32)
    return Running(
        o=jnp.broadcast_to(row[..., None], (*row.shape, v.shape[-1])),
        m=row + DEFAULT_MASK_VALUE,
        l=row,
    )


def update(
    state: Running,
    logits: jax.Array,
    seen: jax.Array,
    v: jax.Array,
    *,
    v_scale: jax.Array | None = None,
    keep: jax.Array | None = None,
) -> Running:
    """Return the state after a piece of keys.

    Args:
      state: The state before.
      logits: `[batch, heads, q_length, kv_length]` float32.
      seen: The mask, broadcastable to the logits.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      v_scale: `[batch, kv_length, kv_heads]`, or None. A value is `v * v_scale`.
      keep: Dropout factors of the weights, in the logits' shape; or None.
    """
    top = jnp.maximum(
        state.m,
        jnp.max(jnp.where(seen, logits, DEFAULT_MASK_VALUE), axis=-1, initial=DEFAULT_MASK_VALUE),
    )
    # Mask the exponent and not the exponential: a hidden logit may be far above `top`, and the
    # derivative of an overflow would be NaN.
    p = jnp.exp(jnp.where(seen, logits - top[..., None], -jnp.inf))
    # `shrink` is at most 1: `top` is at least `state.m`. The same holds in `merge` and `add_sinks`.
    shrink = jnp.exp(state.m - top)
    # Dropout follows the softmax: the sum `l` counts the dropped weights too.
    dropped = p if keep is None else p * keep
    return Running(
        o=state.o * shrink[..., None] + weighted_sum(dropped, v, v_scale=v_scale),
        m=top,
        l=state.l * shrink + jnp.sum(p, axis=-1),
    )


def merge(a: Running, b: Running) -> Running:
    """Return the state of two disjoint sets of keys."""
    top = jnp.maximum(a.m, b.m)
    wa, wb = jnp.exp(a.m - top), jnp.exp(b.m - top)
    return Running(o=a.o * wa[..., None] + b.o * wb[..., None], m=top, l=a.l * wa + b.l * wb)


def add_sinks(state: Running, sinks: jax.Array) -> Running:
    """Return the state with the sinks added.

    The sink of a head is a logit that takes part in the softmax but has no value. Call this
    function once per row.
    """
    sink = sinks.astype(jnp.float32)[None, :, None]
    top = jnp.maximum(state.m, sink)
    shrink = jnp.exp(state.m - top)
    return Running(o=state.o * shrink[..., None], m=top, l=state.l * shrink + jnp.exp(sink - top))


def finish(state: Running, *, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Return the output and the logsumexp, float32.

    The output of a row without keys is exactly 0. The logsumexp of such a row is -inf, or the sink
    of the head if there are sinks.

    Args:
      state: The state after all keys.
      sinks: `[heads]`; None if there are none, or if `add_sinks` has added them.

    Returns:
      `[batch, q_length, heads, v_dim]` and `[batch, heads, q_length]`.
    """
    if sinks is not None:
        state = add_sinks(state, sinks)
    no_keys = state.l == 0.0
    total = jnp.where(no_keys, 1.0, state.l)
    lse = jnp.where(no_keys, -jnp.inf, state.m + jnp.log(total))
    return jnp.swapaxes(state.o / total[..., None], 1, 2), lse


def lse_error_of(state: Running, lse: jax.Array) -> jax.Array:
    """Return the rounding error of a logsumexp, `[batch, heads, q_length]`, to be added to it.

    For example, if the largest logit is -1e9 and the logarithm of the sum is 3, float32 keeps only
    -1e9, and weights relative to it would sum to 20 instead of 1. The error of a row without keys
    is 0.

    Args:
      state: The state after all keys, and after the sinks if there are any.
      lse: The logsumexp that `finish` returned for this state.
    """
    no_keys = state.l == 0.0
    error = (state.m - jnp.where(no_keys, 0.0, lse)) + jnp.log(jnp.where(no_keys, 1.0, state.l))
    return jax.lax.stop_gradient(jnp.where(no_keys, 0.0, error))


def without_remains(operands: Operands, recipe: Arithmetic) -> Operands:
    """Return operands whose values are 0 in rows that hold no key.

    Those rows may hold NaN from an earlier sequence, and 0 times NaN is not 0.
    """
    if not recipe.partly_filled:
        return operands
    lengths, positions = operands.lengths, operands.kv_positions
    holds_key = positions >= 0
    if lengths is not None:
        holds_key = holds_key & (positions < lengths[:, None])
    # NaN in keys may stay, because a hidden logit is replaced, and not multiplied by 0.
    v, v_scale = operands.v, operands.v_scale
    return operands.replace(
        v=jnp.where(holds_key[:, :, None, None], v, jnp.zeros((), v.dtype)),
        v_scale=None if v_scale is None else jnp.where(holds_key[:, :, None], v_scale, 0),
    )


def visible(operands: Operands, rules: MaskRules) -> tuple[jax.Array, jax.Array | None]:
    """Return which pairs of query and key attend, and the bias to add.

    Every kernel that takes a bias calls this function, so a bias hides the same pairs in all
    kernels. The returned bias is 0 for a hidden pair, so that no hidden value reaches a gradient.

    Args:
      operands: Local arrays, or a block of them.
      rules: The static part of the mask.

    Returns:
      Bool, broadcastable to `[batch, heads, q_length, kv_length]`; and the bias, broadcastable in
      the same way, or None.
    """
    bias = operands.bias
    seen = allowed(
        rules,
        operands.q_positions,
        operands.kv_positions,
        q_segment_ids=operands.q_segment_ids,
        kv_segment_ids=operands.kv_segment_ids,
        lengths=operands.lengths,
        dense=operands.mask,
        bias=bias,
    )
    return seen, None if bias is None else jnp.where(seen, bias, jnp.zeros((), bias.dtype))


def logits_of(
    scores: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
    bias: jax.Array | None = None,
    k_scale: jax.Array | None = None,
) -> jax.Array:
    """Return float32 logits `[batch, heads, q_length, kv_length]`: scaled, biased, then capped.

    Args:
      scores: Scores of queries and keys, of the same shape; see `scores_of`.
      scale: Factor of the scores.
      softcap: c in `c * tanh(logits / c)`, or None.
      bias: Broadcastable to the logits, or None.
      k_scale: `[batch, kv_length, kv_heads]`, or None. A key is `k * k_scale`.
    """
    # Use the order of tokamax and of JAX's splash kernel: scale, bias, softcap, and the mask last.
    logits = scores * scale
    if k_scale is not None:
        logits = logits * by_head(k_scale, scores.shape[1])
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    """Return q · k by head.

    Called with queries and keys, it returns the scores. Called with the output's cotangent and the
    values, it returns the cotangent of the weights.

    Args:
      q: `[batch, q_length, heads, head_dim]`.
      k: `[batch, kv_length, kv_heads, head_dim]`.

    Returns:
      `[batch, heads, q_length, kv_length]` float32.
    """
    batch, q_length, heads, dim = q.shape
    kv_length, kv_heads = k.shape[1:3]
    # The query heads of a group are a dim of the matmul. If keys were repeated instead, a decode
    # step compiled for a TPU would read 4.8 times the bytes (32 heads, 8 kv heads).
    grouped = q.reshape(batch, q_length, kv_heads, heads // kv_heads, dim)
    return _einsum("btkgd,bskd->bkgts", grouped, k).reshape(batch, heads, q_length, kv_length)


def weighted_sum(p: jax.Array, v: jax.Array, *, v_scale: jax.Array | None = None) -> jax.Array:
    """Return the sum of `v * v_scale`, weighted by p: `[batch, heads, q_length, v_dim]`.

    Args:
      p: `[batch, heads, q_length, kv_length]`.
      v: `[batch, kv_length, kv_heads, v_dim]`.
      v_scale: `[batch, kv_length, kv_heads]`, or None.
    """
    if v_scale is not None:
        p = p * by_head(v_scale, p.shape[1])
    out = _einsum("bkgts,bskd->bkgtd", _by_kv_head(p, v), v)
    return out.reshape(*p.shape[:3], v.shape[-1])


def by_head(scale: jax.Array, heads: int) -> jax.Array:
    """Return scales `[batch, kv_length, kv_heads]` as factors `[batch, heads, 1, kv_length]`."""
    return jnp.repeat(jnp.swapaxes(scale, 1, 2), heads // scale.shape[2], axis=1)[:, :, None]


def queries_of(ds: jax.Array, k: jax.Array) -> jax.Array:
    """Return the cotangent of the queries, `[batch, q_length, heads, head_dim]`.

    Args:
      ds: Cotangent of the scores, `[batch, heads, q_length, kv_length]`.
      k: `[batch, kv_length, kv_heads, head_dim]`.
    """
    out = _einsum("bkgts,bskd->btkgd", _by_kv_head(ds, k), k)
    return out.reshape(ds.shape[0], ds.shape[2], ds.shape[1], k.shape[-1])


def keys_of(ds: jax.Array, q: jax.Array, kv_heads: int) -> jax.Array:
    """Return the cotangent of the keys, `[batch, kv_length, kv_heads, head_dim]`.

    Called with weights and the output's cotangent, it returns the cotangent of the values.

    Args:
      ds: Cotangent of the scores, `[batch, heads, q_length, kv_length]`.
      q: `[batch, q_length, heads, head_dim]`.
      kv_heads: Number of heads of the keys.
    """
    batch, q_length, heads, dim = q.shape
    grouped = q.reshape(batch, q_length, kv_heads, heads // kv_heads, dim)
    return _einsum(
        "bkgts,btkgd->bskd", ds.astype(q.dtype).reshape(batch, kv_heads, -1, *ds.shape[2:]), grouped
    )


def _by_kv_head(p: jax.Array, k: jax.Array) -> jax.Array:
    batch, heads, q_length, kv_length = p.shape
    # Weights are rounded to the dtype of the values, as in FlashAttention: an accelerator
    # multiplies two bfloat16 numbers faster than bfloat16 by float32. The sum stays float32.
    return p.astype(k.dtype).reshape(batch, k.shape[2], heads // k.shape[2], q_length, kv_length)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Return float32 numbers rounded to a dtype.

    A cast to the dtype and back is not enough, because XLA may drop both casts.
    """
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


def full_precision(dtype: str) -> Any:
    """Return a context that sets the precision of matmuls, for code that does not set it itself."""
    if dtype == "float32":
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # By default an accelerator multiplies float32 in bfloat16.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    einsum = functools.partial(
        jnp.einsum, subscripts, precision=precision, preferred_element_type=jnp.float32
    )
    if a.dtype == jnp.float32 and b.dtype == jnp.float32:
        out: jax.Array = einsum(a, b)
        return out
    # XLA for CPUs widens bfloat16 operands itself, but in some layouts it fails: "Unsupported
    # element type for DotThunk: BF16 x BF16 = F32". So on CPUs, widen the operands here.
    wide: jax.Array = jax.lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: einsum(a.astype(jnp.float32), b.astype(jnp.float32)),
        default=einsum,
    )
    return wide
