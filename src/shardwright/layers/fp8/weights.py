"""Gather quantized weights in fp8, and scatter their gradients by the transpose of this gather."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardwright import _jax
from shardwright.errors import LayerError
from shardwright.layers.fp8.quantize import Scaled, explicit_entries
from shardwright.layers.fp8.recipe import BLOCK
from shardwright.layers.placement import is_shard
from shardwright.manager.context import platform_of
from shardwright.resolution.partition_specs import entry_names
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import Role, axis_label

# The mesh axes that shard each dim of an array, with their sizes.
Shards = tuple[tuple[tuple[str, int], ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredKernel:
    """The annotation, global shape and path of a stored weight.

    Attributes:
      axes: Annotation of the weight.
      shape: Global shape of the weight.
      path: Path of the weight in the model, or None.
    """

    axes: Any
    shape: tuple[int, ...]
    path: str | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight as stored. A matmul quantizes the weight and then gathers the result.

    Attributes:
      value: The array.
      weight: Annotation, global shape and path of the weight.
    """

    value: Any
    weight: StoredKernel = dataclasses.field(metadata={"static": True})


def stored(value: Any, spec: ArraySpec, *, path: str | None = None) -> Stored:
    """Wrap a stored weight, so that the matmul that uses it quantizes and gathers it.

    Args:
      value: The array, as stored.
      spec: Spec of the weight. A leading LAYERS dim that a scan has taken away is not part of the
        spec.
      path: Path of the weight in the model, required if the strategy has `[[tensors]]` entries.
    """
    return Stored(value=value, weight=StoredKernel(axes=spec.axes, shape=spec.shape, path=path))


def store(manager: Any, x: Scaled, weight: StoredKernel) -> Scaled:
    """Constrain a quantized weight to its stored sharding, so that the gather sends fp8.

    Inside of a `shard_map`, a shard of a weight already has this sharding.
    """
    options = {"role": Role.PARAM, "path": weight.path, "manager": manager}
    if manager is None or is_shard(weight.shape, weight.axes, **options):
        return x

    def place(value: Any) -> Any:
        return manager.place(value, (weight.axes,), None, Role.PARAM, True, weight.path)

    return Scaled(
        value=_through_bits(place, x.value, manager),
        scale=x.scale if x.dim is None else place(x.scale),
        dim=x.dim,
    )


def gather(manager: Any, x: Scaled, weight: StoredKernel) -> Scaled:
    """Gather a quantized weight into the sharding of its use. Without a manager, return `x`."""
    if manager is None:
        return x

    def gathered(value: Any, shape: tuple[int, ...]) -> Any:
        return manager.gather(value, weight.axes, path=weight.path, shape=shape)

    def bits(value: Any) -> Any:
        return gathered(value, weight.shape)

    # The exponents are an array of their own: one per block along `dim`, sharded as the weight is.
    blocks = weight.shape
    if x.dim is not None:
        blocks = (*blocks[: x.dim], blocks[x.dim] // BLOCK, *blocks[x.dim + 1 :])
    return Scaled(
        value=_through_bits(bits, x.value, manager),
        scale=x.scale if x.dim is None else gathered(x.scale, blocks),
        dim=x.dim,
    )


def scatter(manager: Any, grad: Any, like: Any, weight: StoredKernel) -> Any:
    """Return the gradient of a stored weight, given the gradient of the gathered weight.

    Args:
      manager: The manager of the forward pass, or None.
      grad: Gradient of the gathered weight.
      like: The stored weight in any dtype.
      weight: Annotation, global shape and path of the weight.
    """
    if manager is None:
        return grad

    def gathered(value: Any) -> Any:
        return manager.gather(value, weight.axes, path=weight.path, shape=weight.shape)

    # Transpose the gather itself, so that the gather and its gradient follow the same rules. The
    # forward value is not used, and XLA removes it.
    (scattered,) = jax.vjp(gathered, like.astype(grad.dtype))[1](grad)
    return scattered


def _through_bits(f: Any, value: Any, manager: Any) -> Any:
    """Apply a function to an fp8 array. The function may only move data between devices.

    XLA for CPU has no fp8 collectives: it would convert the array to float16. So on CPU, the bits
    are moved as uint8. The barriers keep XLA from moving the bitcasts past the collective.
    """
    if platform_of(manager.mesh) != "cpu":
        return f(value)
    bits = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(value, jnp.uint8))
    moved = jax.lax.optimization_barrier(f(bits))
    return jax.lax.bitcast_convert_type(moved, value.dtype)


def check_blocks(
    manager: Any,
    annotation: Any,
    shape: tuple[int, ...],
    dim: int,
    *,
    name: str,
    role: Role,
    mode: str | None = None,
    path: str | None = None,
    array: Any = None,
    shards: Shards | None = None,
) -> None:
    """Check that each device's part of a contracted dim is a multiple of 32.

    Args:
      manager: The ambient manager, or None.
      annotation: Annotation of the array, or None.
      shape: Global shape. Inside `shard_map`, the local shape.
      dim: The contracted dim.
      name: Name of the array, for the message.
      role: Activation or param.
      mode: Runtime mode.
      path: Path of a weight.
      array: The array. Without a manager or an annotation, its type says which Explicit axes shard
        the dim.
      shards: The Auto mesh axes that shard each dim. If annotation, array and `shards` are all
        missing, the dim is assumed to be whole.

    Raises:
      LayerError: The part of a device is not a multiple of 32. The error names the dim and the mesh
        axes.
    """
    if manager is not None and annotation is not None:
        axes = _mesh_axes(manager, annotation, shape, dim, role=role, mode=mode, path=path)
        sizes = {axis: manager.mesh.shape[axis] for axis in axes}
    else:
        sizes = _sizes_of_dim(array, dim, shards)
    # Over Manual mesh axes, the shape is already the shape of one shard.
    ambient = _jax.ambient_mesh()
    manual = () if ambient is None else ambient.manual_axes
    count = math.prod(size for axis, size in sizes.items() if axis not in manual)
    if not shape[dim] % (count * BLOCK):
        return
    label = axis_label(annotation[dim]) if isinstance(annotation, tuple) else ""
    over = "+".join(f"{axis}={size}" for axis, size in sizes.items())
    part = f"each device's part over {over}" if sizes else "the size"
    raise LayerError(
        f"{name} has shape {shape}, and its matmul contracts this dim in blocks of {BLOCK}: "
        f"{part} is {shape[dim] / count:g}, not a multiple of {BLOCK}",
        path=path or "",
        dim=dim,
        axis=label,
        size=shape[dim],
        mesh_axes=tuple(sizes),
        fix=f"choose sizes whose parts are multiples of {BLOCK}, shard the dim over fewer devices, "
        'or use recipe="current"',
    )


def _sizes_of_dim(array: Any, dim: int, shards: Shards | None) -> dict[str, int]:
    """Return the mesh axes of a dim: by the array's type if they are Explicit, else by `shards`."""
    known = dict(shards[dim]) if shards else {}
    entries = None if array is None else explicit_entries(array)
    if entries is None:
        return known
    mesh = jax.typeof(array).sharding.mesh
    explicit = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    own = {axis: mesh.shape[axis] for axis in entry_names(entries[dim])}
    return own | {axis: size for axis, size in known.items() if axis not in explicit}


def _mesh_axes(
    manager: Any,
    annotation: Any,
    shape: tuple[int, ...],
    dim: int,
    *,
    role: Role,
    mode: str | None,
    path: str | None,
) -> tuple[str, ...]:
    """Return the mesh axes that a dim is sharded over."""
    # Inside a `shard_map` the shape is that of a shard over the Manual mesh axes.
    manual = manager.manual_axes(_jax.ambient_mesh())
    request = ShardingRequest(annotation, shape, mode, role, path, manual)
    resolution = manager.answer(request)
    mesh_axes: tuple[str, ...] = resolution.decisions[dim].mesh_axes if resolution.ok else ()
    return mesh_axes
