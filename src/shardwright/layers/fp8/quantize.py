"""Casts of arrays to fp8, with one scale per tensor or one per block.

Tensor: `scale = largest / amax`, where `largest` is the largest value of the fp8 format, and `amax`
is the largest absolute value of the whole array. Then `value = cast(clip(float32(x) * scale))`, and
`x ~ value * inverse` with `inverse = 1 / scale`.

Block (OCP Microscaling Formats, MX 1.0): 32 elements along one dim share the scale `2^exponent`,
which is `amax / largest` rounded up to a power of two. So no element of a block is clipped.

A tensor scale may come from earlier steps, so elements of the array may be too large for it. Such
elements, and infinities, saturate. NaN stays NaN. In a block, a value that is not finite makes the
whole block NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.layers.fp8.recipe import BLOCK, largest
from shardwright.manager import context
from shardwright.vocabulary.axes import PIPELINE_PARALLEL

_BIAS: Final = 127  # bias of the exponents of float32, and of stored exponents
_MOST: Final = 2.0**126  # largest scale: backends flush the inverse of a larger one to 0
_NAN: Final = 255  # the stored exponent of a block with a value that is not finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """An array in fp8.

    Attributes:
      value: float8 values.
      scale: Without blocks, float32, called `inverse` above: the array is about `value * scale`.
        With blocks, uint8: the exponent of each block plus 127. The size of `scale` along `dim` is
        1/32 of that of `value`.
      dim: The dim along which the blocks lie, or None if the array has one scale.
    """

    value: Any
    scale: Any
    dim: int | None = dataclasses.field(metadata={"static": True})


def largest_absolute(x: Any, *, pipeline: tuple[str, ...] | None = None) -> jax.Array:
    """Return the largest absolute value of an array over all its shards, float32.

    Inside `shard_map` the value is a maximum over all mesh axes that `x` varies over, except those
    of the pipeline, whose stages have different layers.

    Args:
      x: Floats.
      pipeline: Mesh axes of the pipeline. Defaults to those of the ambient manager's rules; without
        a manager, to `pp`.
    """
    # `jnp.max` refuses an array without elements.
    amax = (jnp.max(jnp.abs(x)) if x.size else jnp.zeros_like(x, shape=())).astype(jnp.float32)
    varying = _jax.varying_axes(amax)
    # Outside of `shard_map` the shape is global, and XLA adds the all-reduce.
    if not varying:
        return amax
    mesh = _jax.ambient_mesh()
    assert mesh is not None
    skipped = pipeline_axes() if pipeline is None else pipeline
    # List the axes in the order of the mesh, so that every process builds the same program.
    axes = tuple(axis for axis in mesh.axis_names if axis in varying and axis not in skipped)
    # JAX cannot differentiate `pmax`. All callers are inside of custom VJPs.
    whole: jax.Array = jax.lax.pmax(amax, axes) if axes else amax
    return whole


def pipeline_axes() -> tuple[str, ...]:
    """Return the mesh axes of the pipeline by the ambient rules; without a manager, `pp`."""
    manager = context.current()
    return ("pp",) if manager is None else tuple(manager.mesh_axes(PIPELINE_PARALLEL))


def scale_of(amax: Any, dtype: Any, *, margin: int = 0, old: Any = None) -> jax.Array:
    """Return `largest value of the format / amax / 2^margin`, or `old` if amax is 0 or not finite.

    A quotient above the largest float32 becomes the largest float32, as in TransformerEngine's
    `compute_scale_from_amax`.

    Args:
      amax: Largest absolute values, float32.
      dtype: The fp8 format, or an array with the largest value of the format for each `amax`.
      margin: The scale is divided by 2^margin.
      old: The scales to keep where amax is 0 or not finite. Defaults to 1.
    """
    limit = dtype if isinstance(dtype, jax.Array) else jnp.float32(largest(dtype))
    kept = jnp.ones_like(amax) if old is None else old
    scale = jnp.minimum(limit / amax / 2**margin, jnp.finfo(jnp.float32).max)
    new: jax.Array = jnp.where((amax > 0) & jnp.isfinite(amax), scale, kept)
    return new


def quantize_tensor(x: Any, scale: Any, dtype: Any) -> Scaled:
    """Quantize an array with a given scale, a float32 scalar that is limited to 2^126."""
    limit, scale = largest(dtype), jnp.minimum(scale, _MOST)
    value = jnp.clip(x.astype(jnp.float32) * scale, -limit, limit).astype(dtype)
    return Scaled(value=value, scale=1.0 / scale, dim=None)


def quantize_blocks(x: Any, dim: int, dtype: Any) -> Scaled:
    """Quantize an array in blocks of 32 along a dim, whose size is a multiple of 32."""
    limit = largest(dtype)
    wide = _split(x, dim).astype(jnp.float32)
    amax = jnp.max(jnp.abs(wide), axis=dim + 1, keepdims=True)
    exponent = _round_up(amax / limit)
    # The inverse of the scale 2^(e - 127) has the exponent bits 254 - e. It is exact, and normal.
    factor = _with_exponent(2 * _BIAS - exponent)
    factor = jnp.where(exponent == _NAN, jnp.nan, factor)
    value = jnp.clip(wide * factor, -limit, limit).astype(dtype)
    return Scaled(
        value=_joined(value, x, dim),
        scale=jnp.squeeze(exponent, dim + 1).astype(jnp.uint8),
        dim=dim,
    )


def dequantize(x: Scaled, dtype: Any) -> Any:
    """Return the array in `dtype`.

    With a scale per block, the result is exact in bfloat16 and float32.
    """
    if x.dim is None:
        return (x.value.astype(jnp.float32) * x.scale).astype(dtype)
    exponent = jnp.expand_dims(x.scale.astype(jnp.uint32), x.dim + 1)
    factor = jnp.where(exponent == _NAN, jnp.nan, _with_exponent(jnp.maximum(exponent, 1)))
    # 2^-127 is subnormal, and backends flush it to zero, so multiply by 2^-1 and by 2^-126.
    wide = _split(x.value, x.dim).astype(jnp.float32) * jnp.where(exponent == 0, 0.5, 1.0) * factor
    return _joined(wide, x.value, x.dim).astype(dtype)


def _round_up(scale: Any) -> jax.Array:
    """Round float32 scales up to powers of two; return their exponents plus 127, as uint32.

    0 means 2^-127, the smallest scale.
    """
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    # float32 has 8 bits of exponent and 23 of mantissa. The next power of two has the next
    # exponent.
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal number is mantissa * 2^-149, so 0x400000 is 2^-127. A larger subnormal number
    # becomes 2^-126.
    small = (exponent == 0) & (mantissa <= 0x400000)
    up = (mantissa > 0) & (exponent < _NAN) & ~small
    return exponent + up.astype(jnp.uint32)


def _with_exponent(exponent: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint32) << 23, jnp.float32)


def _split(x: Any, dim: int) -> jax.Array:
    """Return an array with `dim` split in two: a dim of blocks, and a dim of 32 elements."""
    sizes = (*x.shape[:dim], x.shape[dim] // BLOCK, BLOCK, *x.shape[dim + 1 :])
    entries = explicit_entries(x)
    # A block stays on one device: the mesh axes of `dim` go to the dim of blocks.
    return _reshape(x, sizes, entries and (*entries[: dim + 1], None, *entries[dim + 1 :]))


def _joined(x: Any, like: Any, dim: int) -> jax.Array:
    """Undo `_split`."""
    return _reshape(x, like.shape, explicit_entries(like))


def _reshape(x: Any, sizes: tuple[int, ...], entries: Any) -> jax.Array:
    # Over Explicit axes, JAX does not choose the sharding of a dim that a reshape splits.
    spec = None if entries is None else PartitionSpec(*entries)
    return jax.lax.reshape(x, sizes, out_sharding=spec)


def explicit_entries(x: Any) -> tuple[Any, ...] | None:
    """Return the entries of an array's spec, one per dim; None if no mesh axis is Explicit."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return (*sharding.spec.partitions, *[None] * x.ndim)[: x.ndim]
