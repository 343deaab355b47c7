"""What JAX's splash kernel gets: masks from rules, padded rows, block sizes. Imports Pallas, so `splash` imports it late."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention

from shardwright.attention import _online
from shardwright.attention.call import AttentionCall, Operands
from shardwright.attention.masks import MaskRules, pair_attends
from shardwright.attention.registry import Result

_LANES = 128
# A sink that outweighs what is masked and nothing else: a row without keys is then exactly 0, and so are its gradients,
# where the kernel alone would return the mean of the values, or divide 0 by 0.
_NO_SINK = -1e30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """Which pairs of rows attend, as the kernel asks: by row numbers, of which those past the keys do not exist."""

    rules: MaskRules
    offset: int
    keys: int

    def __call__(self, q: Any, kv: Any) -> Any:
        return pair_attends(self.rules, q + self.offset, kv) & (kv < self.keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ByRules(splash_attention.Mask):
    """A mask that the kernel computes block by block; nothing of it lies in memory. Hashable: the kernel's tables are cached by it.

    Attributes:
      size: rows of queries and of keys, whole blocks.
      mask_function: which pairs attend.
    """

    size: tuple[int, int]
    mask_function: _Pairs

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.size[0], dtype=np.int32)

    def __getitem__(self, at: Any) -> np.ndarray:
        q, kv = (np.arange(size, dtype=np.int32)[rows] for size, rows in zip(self.size, at, strict=True))
        seen = self.mask_function(q[:, None], kv[None, :])
        return np.broadcast_to(seen, (len(q), len(kv)))


def attend(shard: Operands, *, call: AttentionCall, interpret: bool) -> Result:
    """Return the output of local operands. Differentiable."""
    shard = _online.without_remains(shard, call.recipe)
    floats = {name: getattr(shard, name) for name in ("q", "k", "v", "sinks")}
    kernel = functools.partial(_by_kernel, call=call, interpret=interpret)
    return Result(o=_attend(kernel, call.dtype, floats, shard.replace(**dict.fromkeys(floats))))


# By default a TPU multiplies float32 in bfloat16, also in a backward pass, which is traced outside of any context of ours.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel: Callable[..., Any], dtype: str, floats: dict[str, Any], rest: Operands) -> Any:
    with _online.full_precision(dtype):
        return kernel(floats, rest)


def _attend_forward(kernel: Callable[..., Any], dtype: str, floats: dict[str, Any], rest: Operands) -> Any:
    with _online.full_precision(dtype):
        return jax.vjp(lambda floats: kernel(floats, rest), floats)


def _attend_backward(kernel: Callable[..., Any], dtype: str, pull_back: Any, do: jax.Array) -> Any:
    del kernel
    with _online.full_precision(dtype):
        return (*pull_back(do), None)


_attend.defvjp(_attend_forward, _attend_backward)


def _by_kernel(floats: dict[str, Any], rest: Operands, *, call: AttentionCall, interpret: bool) -> jax.Array:
    q, k, v = (floats[name] for name in ("q", "k", "v"))
    length, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    rows, columns = (-(-size // _LANES) * _LANES for size in (length, keys))
    q, k = _scaled(q, k, call.recipe.scale)
    sinks = floats["sinks"]
    kernel = splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([_mask(call, rows, columns)] * heads),
        block_sizes=_block_sizes(call, rows, columns),
        attn_logits_soft_cap=call.recipe.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    sinks = jnp.full((heads,), _NO_SINK) if sinks is None else sinks
    # One row per sequence, so that their gradients are summed here, in float32.
    sinks = _widen_gradient(jnp.broadcast_to(sinks.astype(jnp.float32), (q.shape[0], heads)))
    by_head = (jnp.swapaxes(_pad(x, size), 1, 2) for x, size in ((q, rows), (k, columns), (v, columns)))
    o = jax.vmap(kernel)(*by_head, _segments(rest, call, rows, columns), sinks)
    return jnp.swapaxes(o, 1, 2)[:, :length]


@jax.custom_vjp
def _widen_gradient(x: jax.Array) -> jax.Array:
    """Return a float32 array, to whose gradient the kernel gives the dtype of its queries."""
    return x


_widen_gradient.defvjp(lambda x: (x, None), lambda kept, grad: (grad.astype(jnp.float32),))


def _scaled(q: jax.Array, k: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys whose products are scaled, as the kernel has no scale: queries by a power of two, keys by what is left.

    Only keys are rounded, if anything: their gradients are sums over queries that are exact. With queries rounded, in bfloat16
    with one kv head on four shards, gradients of keys were off by 5.2e-3 and not 4.7e-3, in relative norm.
    """
    rest, exponent = math.frexp(scale)
    if abs(rest) in (0.0, 0.5):
        return q * jnp.asarray(scale, q.dtype), k
    return q * jnp.asarray(2.0**exponent, q.dtype), (k.astype(jnp.float32) * rest).astype(k.dtype)


def _mask(call: AttentionCall, rows: int, columns: int) -> Any:
    rules = call.recipe.mask
    if not rules.positional and columns == call.kv_length:
        return splash_attention.FullMask((rows, columns))
    assert call.q_offset is not None
    return _ByRules(size=(rows, columns), mask_function=_Pairs(rules=rules, offset=call.q_offset, keys=call.kv_length))


def _segments(rest: Operands, call: AttentionCall, rows: int, columns: int) -> Any:
    """Return segment ids that say which keys are past a sequence's length too."""
    if not (call.segments or call.lengths):
        return None
    batch = (rest.lengths if rest.q_segment_ids is None else rest.q_segment_ids).shape[0]
    q_ids = jnp.zeros((batch, call.q_length), jnp.int32) if rest.q_segment_ids is None else rest.q_segment_ids
    kv_ids = jnp.zeros((batch, call.kv_length), jnp.int32) if rest.kv_segment_ids is None else rest.kv_segment_ids
    if rest.lengths is not None:
        nobody = jnp.min(q_ids, axis=1, keepdims=True) - 1
        kv_ids = jnp.where(rest.kv_positions < rest.lengths[:, None], kv_ids, nobody)
    return splash_attention.SegmentIds(q=_pad(q_ids, rows), kv=_pad(kv_ids, columns))


def _pad(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, size - x.shape[1] if dim == 1 else 0) for dim in range(x.ndim)])


def _block_sizes(call: AttentionCall, rows: int, columns: int) -> Any:
    q, kv = _block(call.recipe.q_block, rows), _block(call.recipe.kv_block, columns)
    return splash_attention.BlockSizes(
        block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_kv_dkv_compute=kv, block_q_dq=q, block_kv_dq=kv
    )


def _block(wanted: int, size: int) -> int:
    """Return the largest multiple of 128 up to what is wanted that divides a size; at least 128."""
    return max(block for block in range(_LANES, max(wanted, _LANES) + 1, _LANES) if size % block == 0)
