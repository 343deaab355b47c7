"""Quantized dot products: integers of 4 to 8 bits, one scale per channel, and exact sums.

    x ~ value * scale
    scale = max|x| / (2^(bits-1) - 1), with the maximum over the contracted dims
    value = round(x / scale)
    dot(x, y) ~ dot(x.value, y.value) * x.scale * y.scale

Quantization is symmetric (zero stays zero) and rounds to nearest, ties to even. The error of an
element is at most scale / 2. All products of one sum have the same two scales, so scales are
applied once, after the sum. The sum runs on the hardware's int8 unit and is exact, sharded or not,
up to 132,104 products; longer sums are added as floats.

Gradients are straight-through (Bengio et al., arXiv:1308.3432): rounding is differentiated as the
identity. The backward dots use integers too. The gradient of x is dot(g * y.scale, y.value), where
g * y.scale is quantized over the contracted dims of this dot. So the backward pass reuses the 8-bit
operands of the forward pass, and no operand is quantized twice. Gradients are also rounded to
nearest, not stochastically, so that the same step gives the same bits.

If a contracted dim is sharded, there is one all-reduce of int32 sums (as many bytes as float32),
and one all-reduce of the scales of each operand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import LayerError
from shardwright.layers.fp8.quantize import explicit_entries
from shardwright.trees.factored_weights import Quantized
from shardwright.vocabulary.integers import read_integer

MIN_BITS: Final = 4
MAX_BITS: Final = 8

# Contracting and batch dims of both operands, as `jax.lax.dot_general` takes them.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def check_bits(bits: object) -> int:
    """Return a number of bits as a Python int.

    Raises:
      LayerError: The number is not an integer from 4 to 8.
    """
    fix = f"pass {MIN_BITS} to {MAX_BITS} bits, or None for a dot of floats"
    return read_integer("bits", bits, error=LayerError, least=MIN_BITS, most=MAX_BITS, fix=fix)


def quantize(x: Any, *, shared: Sequence[int], bits: int = 8) -> Quantized:
    """Quantize a float array. Elements along the `shared` dims share one scale.

    The integers are int8 for any number of bits: with fewer bits they are coarser, but take as much
    memory. The scales are float32 (float64 for float64), with size 1 along the shared dims. If a
    value is not finite, the scale of its channel is not finite either, and neither is any result
    computed from that scale.

    Args:
      x: Floats.
      shared: The dims that a dot will contract; 0 for a `[in, out]` weight.
      bits: 4 to 8.

    Raises:
      LayerError: `x` is not an array of floats, or `bits` is not from 4 to 8.

    >>> quantize(jnp.array([[1.0, -4.0], [0.5, 2.0]]), shared=(0,)).value
    Array([[ 127, -127],
           [  64,   64]], dtype=int8)
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise LayerError(
            f"a quantized dot takes floats, got {x.dtype}",
            fix="cast the operand, or use jax.lax.dot_general",
        )
    largest = _largest(check_bits(bits))
    # bfloat16 and fp8 are too coarse for the quotient that is rounded.
    wide = x.astype(_wide(x.dtype))
    amax = jnp.max(jnp.abs(wide), axis=tuple(shared), keepdims=True, initial=0)
    # A channel of zeros gets the smallest scale, because 0 / 0 is not a number.
    scale = jnp.maximum(amax, largest * jnp.finfo(wide.dtype).tiny) / largest
    value = jnp.clip(jnp.round(wide / scale), -largest, largest).astype(jnp.int8)
    return Quantized(value=value, scale=scale)


def _wide(dtype: Any) -> Any:
    """Return the dtype of scales.

    `jax.numpy.promote_types` cannot choose this dtype, because JAX does not promote 8-bit floats.
    """
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32)


def _largest(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def quantized_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    *,
    bits: int = 8,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Any:
    """Compute `jax.lax.dot_general` on integers.

    Gradients are straight-through, and quantized to the same number of bits. If `rhs` is
    `Quantized`, it is a constant: it is not rounded again and has no gradient, but `lhs` has one.

    Args:
      lhs: Floats.
      rhs: Floats, or the result of `quantize`.
      dimension_numbers: As in `jax.lax.dot_general`.
      bits: 4 to 8, forward and backward.
      preferred_element_type: dtype of the result. Defaults to that of the operands.
      out_sharding: As in `jax.lax.dot_general`, for meshes with Explicit axes.

    Raises:
      LayerError: An operand does not have floats, or `bits` is not from 4 to 8. Or the quantized
        operand has zero points, has values other than signed integers of at most 8 bits, or has
        scales that do not fit the values or differ along a contracted dim.
    """
    (left_contract, right_contract), (left_batch, right_batch) = dimension_numbers
    stored = isinstance(rhs, Quantized)
    lhs = jnp.asarray(lhs)
    rhs = _checked(rhs, right_contract) if stored else jnp.asarray(rhs)
    dims = _DotDims(
        contract=(tuple(left_contract), tuple(right_contract)),
        batch=(tuple(left_batch), tuple(right_batch)),
        ranks=(lhs.ndim, rhs.value.ndim if stored else rhs.ndim),
    )
    dtype = preferred_element_type
    if dtype is None:
        dtype = lhs.dtype if stored else jnp.result_type(lhs, rhs)
    call = _DotCall(
        dims=dims,
        bits=check_bits(bits),
        dtype=jnp.dtype(dtype),
        dtypes=(lhs.dtype, None if stored else rhs.dtype),
        out_sharding=out_sharding,
        specs=(explicit_entries(lhs), None if stored else explicit_entries(rhs)),
    )
    # Inside shard_map, the transpose of `vary_together` sums the gradients of replicated operands.
    lhs, rhs = _jax.vary_together((lhs, rhs))
    return _dot_stored(lhs, rhs, call) if stored else _dot(lhs, rhs, call)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DotDims:
    """The dims of both operands, (left, right).

    The dims of the result are the batch dims, then left's free dims, then right's free dims.
    """

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: tuple[int, int]

    def free(self, side: int) -> tuple[int, ...]:
        taken = (*self.contract[side], *self.batch[side])
        return tuple(dim for dim in range(self.ranks[side]) if dim not in taken)

    def in_result(self, side: int) -> tuple[int, ...]:
        """Return the dims of the result that come from an operand's free dims."""
        batch, left = len(self.batch[0]), len(self.free(0))
        start = batch + (left if side else 0)
        return tuple(range(start, start + len(self.free(side))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DotCall:
    """The static part of a dot.

    Attributes:
      dims: Dims of both operands.
      bits: 4 to 8.
      dtype: Dtype of the result.
      dtypes: Dtypes of the operands; None for a quantized operand.
      out_sharding: Sharding of the result.
      specs: For each operand, the entries of its spec if its mesh axes are Explicit, else None. The
        gradient of an operand must have the spec of the operand.
    """

    dims: _DotDims
    bits: int
    dtype: Any
    dtypes: tuple[Any, Any]
    out_sharding: Any
    specs: tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]


def _checked(rhs: Quantized, contract: Sequence[int]) -> Quantized:
    """Return a quantized operand, with its integers as int8."""
    value, scale = jnp.asarray(rhs.value), jnp.asarray(rhs.scale)
    is_signed = jnp.issubdtype(value.dtype, jnp.signedinteger)
    # A dim has one scale, or one per element. A contracted dim has a single scale, so that the
    # scales factor out of the sum.
    fits = scale.ndim == value.ndim and all(
        scales in ((1,) if dim in contract else (1, size))
        for dim, (scales, size) in enumerate(zip(scale.shape, value.shape, strict=True))
    )
    what = ""
    # Wider integers would overflow the sum, and floats would be truncated in it.
    if not is_signed or jax.dtypes.itemsize_bits(value.dtype) > MAX_BITS:
        what = f"holds {value.dtype}, and this dot multiplies signed integers of at most 8 bits"
    elif rhs.zero_point is not None:
        what = "has zero points, and this dot supports only symmetric quantization"
    elif not jnp.issubdtype(scale.dtype, jnp.floating):
        what = f"has scales of {scale.dtype}, not floats"
    elif not fits:
        what = f"has the shape {value.shape}, and its scales {scale.shape}"
    if what:
        fix = f"pass quantize(x, shared={tuple(contract)})"
        raise LayerError(f"the quantized operand {what}", fix=fix)
    return Quantized(value=value.astype(jnp.int8), scale=scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(lhs: Any, rhs: Any, call: _DotCall) -> Any:
    return _forward(lhs, rhs, call)[0]


def _forward(lhs: Any, rhs: Any, call: _DotCall) -> tuple[Any, tuple[Quantized, Quantized]]:
    left = quantize(lhs, shared=call.dims.contract[0], bits=call.bits)
    right = quantize(rhs, shared=call.dims.contract[1], bits=call.bits)
    return _dot_quantized(left, right, call), (left, right)


# `kept` has both operands, because the gradient of each operand needs the other operand.
_dot.defvjp(
    _forward,
    lambda call, kept, g: (_gradient(g, kept[1], 0, call), _gradient(g, kept[0], 1, call)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot_stored(lhs: Any, rhs: Quantized, call: _DotCall) -> Any:
    return _forward_stored(lhs, rhs, call)[0]


def _forward_stored(lhs: Any, rhs: Quantized, call: _DotCall) -> tuple[Any, Quantized]:
    left = quantize(lhs, shared=call.dims.contract[0], bits=call.bits)
    return _dot_quantized(left, rhs, call), rhs


_dot_stored.defvjp(_forward_stored, lambda call, rhs, g: (_gradient(g, rhs, 0, call), None))


def _dot_quantized(left: Quantized, right: Quantized, call: _DotCall) -> Any:
    # Along contracted dims, the scales of both operands have size 1, so they factor out of the sum.
    total = _integer_dot(left.value, right.value, call.dims, call.out_sharding)
    spec = call.out_sharding
    scales = _placed(_like_result(left.scale, 0, call.dims), spec) * _placed(
        _like_result(right.scale, 1, call.dims), spec
    )
    return (total.astype(scales.dtype) * scales).astype(call.dtype)


def _placed(scale: Any, spec: Any) -> Any:
    """Reshard scales like the result that they multiply.

    Otherwise the sharding of the scales may conflict with that of the result.

    Args:
      scale: Scales with the rank of the result.
      spec: Sharding of the result. If None, JAX decides it.
    """
    if spec is None:
        return scale
    entries = (spec.spec if isinstance(spec, NamedSharding) else spec).partitions
    return jax.reshard(
        scale,
        PartitionSpec(
            *[
                None if size == 1 else entry
                for entry, size in zip(entries, scale.shape, strict=False)
            ]
        ),
    )


def _like_result(scale: Any, side: int, dims: _DotDims) -> Any:
    """Return an operand's scales with the dims of the result: batch, left's free, right's free."""
    order = (*dims.batch[side], *dims.free(side), *dims.contract[side])
    kept = len(order) - len(dims.contract[side])
    moved = jax.lax.squeeze(jax.lax.transpose(scale, order), tuple(range(kept, len(order))))
    # Insert the other operand's free dims, with size 1.
    others = len(dims.free(1 - side))
    at = len(dims.batch[side]) if side else kept
    return jax.lax.expand_dims(moved, tuple(range(at, at + others)))


def _gradient(g: Any, other: Quantized, side: int, call: _DotCall) -> Any:
    """Return the cotangent of one operand from the cotangent of the result and the other operand.

    Args:
      g: Cotangent of the result.
      other: The other operand, quantized.
      side: 0 for left, 1 for right.
      call: The dot.
    """
    dims = call.dims
    # The other operand has scales along dims that this dot contracts. These scales do not factor
    # out of the sum, so multiply g by them. The integers of the other operand are used as they are.
    scaled = g.astype(
        _wide(jnp.promote_types(_wide(g.dtype), _wide(other.scale.dtype)))
    ) * _like_result(other.scale, 1 - side, dims)
    batch = tuple(range(len(dims.batch[0])))
    back = _DotDims(
        contract=(dims.in_result(1 - side), dims.free(1 - side)),
        batch=(batch, dims.batch[1 - side]),
        ranks=(g.ndim, dims.ranks[1 - side]),
    )
    quantized = quantize(scaled, shared=back.contract[0], bits=call.bits)
    # In this dot, the free dims of the other operand are the contracted dims of the forward dot.
    # They come in the order that they have in the other operand.
    contracted = dims.contract[1 - side]
    meets = [dims.contract[side][contracted.index(dim)] for dim in sorted(contracted)]
    order = (*dims.batch[side], *dims.free(side), *meets)
    spec = call.specs[side]
    sharding = None if spec is None else PartitionSpec(*[spec[dim] for dim in order])
    total = _integer_dot(quantized.value, other.value, back, sharding)
    grad = total.astype(quantized.scale.dtype) * _placed(
        _like_result(quantized.scale, 0, back), sharding
    )
    return jax.lax.transpose(grad, [order.index(dim) for dim in range(len(order))]).astype(
        call.dtypes[side]
    )


def _integer_dot(left: Any, right: Any, dims: _DotDims, out_sharding: Any) -> Any:
    """Sum products of int8: exactly in int32, or in float32 if so many products could overflow.

    `quantize` returns at most ±127, but a quantized operand of the caller may also hold −128.
    """
    products = math.prod(left.shape[dim] for dim in dims.contract[0])
    exact = products * _largest(MAX_BITS) * 2 ** (MAX_BITS - 1) <= jnp.iinfo(jnp.int32).max
    return jax.lax.dot_general(
        left,
        right,
        (dims.contract, dims.batch),
        preferred_element_type=jnp.int32 if exact else jnp.float32,
        out_sharding=out_sharding,
    )
