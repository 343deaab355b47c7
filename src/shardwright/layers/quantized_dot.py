"""Dot products on integers: operands rounded to a few bits with a scale per channel, exact integer sums.

    x ~ value * scale,  scale = max|x| / (2^(bits-1) - 1) over the contracted dims,  value = round(x / scale)
    dot(x, y) ~ dot(x.value, y.value) * x.scale * y.scale

Symmetric (zero stays zero), to nearest, ties to even. What is contracted shares a scale, so the scales come out of the sum,
which runs on the hardware's int8 unit and is exact, sharded or not (up to 132,104 products; more are added as floats). The
error of an operand is at most scale / 2 per element.

Training is straight-through (Bengio et al., arXiv:1308.3432): rounding counts as the identity, and the backward dots run on
integers too. The gradient of x is dot(g * y.scale, y.value), where g * y.scale is quantised
over the dims that this dot contracts; so the forward pass keeps 8-bit operands, and nothing is quantised twice. Gradients are
rounded to nearest too, not stochastically: the same step gives the same bits.

A dim contracted over mesh axes costs an all-reduce of int32 (the bytes of float32) and one of each operand's scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.errors import LayerError
from shardwright.trees.factored_weights import Quantized
from shardwright.vocabulary.integers import read_integer

MIN_BITS: Final = 4
MAX_BITS: Final = 8

# Contracting and batch dims of both operands, as `jax.lax.dot_general` takes them.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def check_bits(bits: object) -> int:
    """Return a number of bits that a quantised dot has.

    Raises:
      LayerError: another than 4 to 8.
    """
    fix = f"pass {MIN_BITS} to {MAX_BITS} bits, or None for a dot of floats"
    return read_integer("bits", bits, error=LayerError, least=MIN_BITS, most=MAX_BITS, fix=fix)


def quantise(x: Any, *, shared: Sequence[int], bits: int = 8) -> Quantized:
    """Quantise a float array, with one scale along the `shared` dims and one each along the others.

    The integers are int8 whatever the bits: fewer are coarser, not smaller. The scales are float32 (float64 for float64), with
    size 1 along the shared dims. Values that are not finite stay so: their channel's scale is not finite, and so is all that is
    computed from it.

    Args:
      x: floats.
      shared: the dims that a dot will contract; of a `[in, out]` weight, 0.
      bits: 4 to 8.

    Raises:
      LayerError: no floats, or other bits.

    >>> quantise(jnp.array([[1.0, -4.0], [0.5, 2.0]]), shared=(0,)).value
    Array([[ 127, -127],
           [  64,   64]], dtype=int8)
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise LayerError(
            f"a quantised dot of {x.dtype}, not of floats",
            fix="cast the operand, or use jax.lax.dot_general",
        )
    largest = _largest(check_bits(bits))
    wide = x.astype(_wide(x.dtype))
    amax = jnp.max(jnp.abs(wide), axis=tuple(shared), keepdims=True, initial=0)
    # A channel of zeros has the smallest scale rather than 0 / 0.
    scale = jnp.maximum(amax, largest * jnp.finfo(wide.dtype).tiny) / largest
    value = jnp.clip(jnp.round(wide / scale), -largest, largest).astype(jnp.int8)
    return Quantized(value=value, scale=scale)


def _wide(dtype: Any) -> Any:
    """Return the dtype that scales of such values have: JAX promotes the floats of 8 bits and less to no other."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32)


def _largest(bits: int) -> int:
    return int(2 ** (bits - 1)) - 1


def quantised_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    *,
    bits: int = 8,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Any:
    """Compute `jax.lax.dot_general` on integers.

    Gradients are straight-through, and quantised to the same bits. A `Quantized` as `rhs`, integers of 8 bits or fewer
    whose scales must be shared along its contracted dims, is a constant: it is not rounded again and has no gradient;
    `lhs` has one.

    Args:
      lhs: floats.
      rhs: floats, or what `quantise` made of them.
      dimension_numbers: as in `jax.lax.dot_general`.
      bits: 4 to 8, forward and backward.
      preferred_element_type: dtype of the result; absent: that of the operands.
      out_sharding: as in `jax.lax.dot_general`, for meshes with Explicit axes.

    Raises:
      LayerError: operands that are no floats, or of dtypes that JAX does not promote; other bits; a stored operand of other
        values than signed integers of 8 bits or fewer, with zero points, or with scales that differ along a contracted dim
        or do not fit the values.
    """
    (left_contract, right_contract), (left_batch, right_batch) = dimension_numbers
    stored = isinstance(rhs, Quantized)
    lhs = jnp.asarray(lhs)
    rhs = _checked(rhs, right_contract) if stored else jnp.asarray(rhs)
    dims = _Dims(
        contract=(tuple(left_contract), tuple(right_contract)),
        batch=(tuple(left_batch), tuple(right_batch)),
        ranks=(lhs.ndim, rhs.value.ndim if stored else rhs.ndim),
    )
    call = _Call(
        dims=dims,
        bits=check_bits(bits),
        dtype=jnp.dtype(
            _common(lhs, None if stored else rhs)
            if preferred_element_type is None
            else preferred_element_type
        ),
        dtypes=(lhs.dtype, None if stored else rhs.dtype),
        out_sharding=out_sharding,
        specs=(_explicit_spec(lhs), None if stored else _explicit_spec(rhs)),
    )
    # Inside shard_map, gradients of what is replicated are summed by the transpose of this.
    lhs, rhs = _jax.vary_together((lhs, rhs))
    return _dot_stored(lhs, rhs, call) if stored else _dot(lhs, rhs, call)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Dims:
    """Which dims of the operands (left, right) meet. The result has the batch dims, then left's free dims, then right's."""

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    ranks: tuple[int, int]

    def free(self, side: int) -> tuple[int, ...]:
        taken = (*self.contract[side], *self.batch[side])
        return tuple(dim for dim in range(self.ranks[side]) if dim not in taken)

    def placed(self, side: int) -> tuple[int, ...]:
        """Return where an operand's free dims stand in the result."""
        batch, left = len(self.batch[0]), len(self.free(0))
        start = batch + (left if side else 0)
        return tuple(range(start, start + len(self.free(side))))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """All that is static about a dot. `specs` are the operands' over Explicit mesh axes, None where there are none."""

    dims: _Dims
    bits: int
    dtype: Any
    dtypes: tuple[Any, Any]
    out_sharding: Any
    specs: tuple[PartitionSpec | None, PartitionSpec | None]


def _explicit_spec(x: Any) -> PartitionSpec | None:
    """Return the spec in an array's type where mesh axes are Explicit: its gradient must lie so too."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


def _common(lhs: Any, rhs: Any) -> Any:
    if rhs is None:
        return lhs.dtype
    try:
        return jnp.result_type(lhs, rhs)
    except ValueError as error:
        what = f"a dot of {lhs.dtype} with {rhs.dtype}, which JAX promotes to nothing"
        raise LayerError(what, fix="pass preferred_element_type=, or cast an operand") from error


def _checked(rhs: Quantized, contract: Sequence[int]) -> Quantized:
    """Return a stored operand with its integers as int8."""
    value, scale = jnp.asarray(rhs.value), jnp.asarray(rhs.scale)
    fix = f"quantise(x, shared={tuple(contract)})"
    # Wider integers would overflow the sum, floats would be cut to integers in it.
    if not (
        jnp.issubdtype(value.dtype, jnp.signedinteger)
        and jax.dtypes.itemsize_bits(value.dtype) <= MAX_BITS
    ):
        what = f"the quantised operand holds {value.dtype}: this dot multiplies signed integers of {MAX_BITS} bits or fewer"
        raise LayerError(what, fix=f"{fix}, or value * scale and a dot of floats")
    if rhs.zero_point is not None:
        raise LayerError(
            "the quantised operand has zero points, this dot is symmetric",
            fix="quantise(x, shared=...) makes none",
        )
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise LayerError(
            f"the scales of the quantised operand are {scale.dtype}, not floats", fix=fix
        )
    if scale.ndim != value.ndim:
        raise LayerError(
            f"scales of shape {scale.shape} for a quantised operand of shape {value.shape}", fix=fix
        )
    wrong = [dim for dim in contract if scale.shape[dim] != 1]
    if wrong:
        what = f"the scales of the quantised operand, of shape {scale.shape}, differ along dim {wrong[0]}, which is contracted"
        raise LayerError(what, fix=fix)
    if any(one not in (1, size) for one, size in zip(scale.shape, value.shape, strict=True)):
        what = f"scales of shape {scale.shape} for a quantised operand of shape {value.shape}"
        raise LayerError(what, fix=f"{fix}: one scale along a dim, or one each")
    return Quantized(value=value.astype(jnp.int8), scale=scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(lhs: Any, rhs: Any, call: _Call) -> Any:
    return _forward(lhs, rhs, call)[0]


def _forward(lhs: Any, rhs: Any, call: _Call) -> tuple[Any, tuple[Quantized, Quantized]]:
    left = quantise(lhs, shared=call.dims.contract[0], bits=call.bits)
    right = quantise(rhs, shared=call.dims.contract[1], bits=call.bits)
    return _dot_quantised(left, right, call), (left, right)


def _backward(call: _Call, kept: tuple[Quantized, Quantized], g: Any) -> tuple[Any, Any]:
    left, right = kept
    return _gradient(g, right, 0, call), _gradient(g, left, 1, call)


_dot.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot_stored(lhs: Any, rhs: Quantized, call: _Call) -> Any:
    return _forward_stored(lhs, rhs, call)[0]


def _forward_stored(lhs: Any, rhs: Quantized, call: _Call) -> tuple[Any, Quantized]:
    left = quantise(lhs, shared=call.dims.contract[0], bits=call.bits)
    return _dot_quantised(left, rhs, call), rhs


def _backward_stored(call: _Call, rhs: Quantized, g: Any) -> tuple[Any, None]:
    return _gradient(g, rhs, 0, call), None


_dot_stored.defvjp(_forward_stored, _backward_stored)


def _dot_quantised(left: Quantized, right: Quantized, call: _Call) -> Any:
    total = _integer_dot(left.value, right.value, call.dims, call.out_sharding)
    spec = call.out_sharding
    scales = _lying(_beside(left.scale, 0, call.dims), spec) * _lying(
        _beside(right.scale, 1, call.dims), spec
    )
    return (total.astype(scales.dtype) * scales).astype(call.dtype)


def _lying(scale: Any, spec: Any) -> Any:
    """Lay scales as the result that they multiply, where that is said: they lie as their operand did, which may conflict."""
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


def _beside(scale: Any, side: int, dims: _Dims) -> Any:
    """Lay an operand's scales beside the result: batch dims, left's free dims, right's free dims."""
    order = (*dims.batch[side], *dims.free(side), *dims.contract[side])
    kept = len(order) - len(dims.contract[side])
    moved = jax.lax.squeeze(jax.lax.transpose(scale, order), tuple(range(kept, len(order))))
    others = len(dims.free(1 - side))
    at = len(dims.batch[side]) if side else kept
    return jax.lax.expand_dims(moved, tuple(range(at, at + others)))


def _gradient(g: Any, other: Quantized, side: int, call: _Call) -> Any:
    """Return the cotangent of one operand, from that of the result and the other operand."""
    dims = call.dims
    # The other's scales lie along the dims that are contracted now, so they go into g; its integers are used as they are.
    scaled = g.astype(_wide(jnp.promote_types(_wide(g.dtype), _wide(other.scale.dtype)))) * _beside(
        other.scale, 1 - side, dims
    )
    batch = tuple(range(len(dims.batch[0])))
    back = _Dims(
        contract=(dims.placed(1 - side), dims.free(1 - side)),
        batch=(batch, dims.batch[1 - side]),
        ranks=(g.ndim, dims.ranks[1 - side]),
    )
    quantised = quantise(scaled, shared=back.contract[0], bits=call.bits)
    # What is free of the other operand now are the dims that it was contracted over, in their order there.
    contracted = dims.contract[1 - side]
    meets = [dims.contract[side][contracted.index(dim)] for dim in sorted(contracted)]
    order = (*dims.batch[side], *dims.free(side), *meets)
    spec = call.specs[side]
    sharding = (
        None
        if spec is None
        else PartitionSpec(*[(*spec.partitions, *[None] * len(order))[dim] for dim in order])
    )
    total = _integer_dot(quantised.value, other.value, back, sharding)
    grad = total.astype(quantised.scale.dtype) * _lying(_beside(quantised.scale, 0, back), sharding)
    return jax.lax.transpose(grad, [order.index(dim) for dim in range(len(order))]).astype(
        call.dtypes[side]
    )


def _integer_dot(left: Any, right: Any, dims: _Dims, out_sharding: Any) -> Any:
    """Sum products of int8: exactly in int32, or in float32 where so many products could overflow that.

    A stored operand may hold −128, what is quantised here at most ±127.
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
