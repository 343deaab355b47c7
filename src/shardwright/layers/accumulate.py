"""Gradient accumulation: several microbatches per step, and one sum over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.errors import IndivisibleError, LayerError
from shardwright.layers.placement import is_inside_shard_map
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_specs import entry_of
from shardwright.resolution.rules import AxisRules
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import BATCH
from shardwright.vocabulary.integers import read_integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The result of a step of several microbatches.

    Attributes:
      value: Mean of the losses, in float32 at least.
      grads: Mean of the gradients of the parameters, sharded as these are stored, in their dtype.
      sent: The gradient of `channel`, with a leading dim of the microbatches; None without one.
      seen: What the loss returned beside its value, with a leading dim of the microbatches.
    """

    value: Any
    grads: Any
    sent: Any
    seen: Any


def accumulate(loss: Callable[..., Any], n: int, *, specs: Any) -> Callable[..., Accumulated]:
    """Return a function of (params, batch, channel) that runs a loss on n microbatches.

    Each device adds the gradients of its microbatches, and they are summed over devices once, after
    the last one. For that the weights are gathered once, before the first one, and stay gathered,
    and the gradients are added whole, in float32 at least: this takes the memory of both.
    Microbatch i has the i-th part of the examples of each device.

    Args:
      loss: Function of (params, batch, channel) that returns (mean loss of these examples, seen).
        It runs inside a `shard_map` over the mesh axes of BATCH, so it may not contain a mixture of
        experts. Each part of the examples counts the same in the mean.
      n: Number of microbatches. It divides the number of examples of a device.
      specs: The `ArraySpec`s of the parameters.

    Returns:
      Function of `params`, as stored; `batch`, a tree of arrays whose dim 0 is BATCH; and
      `channel`, of `eight_bits.new_channel(scaling, uses=n)`, or None. The leaves of `sent` and
      `seen` are largest values, over all devices. They are never added: pass them to
      `eight_bits.update`.

    Raises:
      IndivisibleError: n does not divide the examples of a device.
      LayerError: n is not a positive integer, a `shard_map` surrounds the call, or the mesh has an
        axis that BATCH is not sharded over, or Explicit axes. Or the arrays of `batch` differ in
        dim 0, `channel` has other uses than n, or the loss does not return (mean loss, seen).
    """
    read_integer("n", n, error=LayerError, fix="pass the number of microbatches, such as n=4")

    def run(params: Any, batch: Any, channel: Any = None) -> Accumulated:
        if is_inside_shard_map():
            raise LayerError(
                "accumulate is called inside a shard_map",
                fix="call it outside: it runs a shard_map of its own",
            )
        manager: PartitionManager | None = context.current()
        size = _batch_size(batch)
        _check_channel(channel, n)
        if manager is not None:
            _check_mesh(manager, size)
        step = _make_step(loss, n, manager, size)
        if manager is None:
            return step.run(params, batch, channel)
        weights = manager.gather(params, specs)
        result = _on_shards(step, manager)(weights, batch, channel)
        return dataclasses.replace(result, grads=manager.shard(result.grads, specs, role="param"))

    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step on the examples of one device.

    Attributes:
      loss: The argument of `accumulate`.
      n: Number of microbatches.
      axes: Mesh axes that shard the examples; none without a manager.
      shards: Number of devices over these axes.
      manager: The manager inside the `shard_map`, or None.
    """

    loss: Callable[..., Any]
    n: int
    axes: tuple[str, ...]
    shards: int
    manager: PartitionManager | None

    def run(self, weights: Any, batch: Any, channel: Any) -> Accumulated:
        """Return the means over all microbatches of all devices."""
        with contextlib.nullcontext() if self.manager is None else self.manager:
            sums, (sent, seen) = self._scan(weights, batch, channel)
        if self.axes:
            sums = jax.lax.psum(sums, self.axes)
        value, grads = sums
        grads = jax.tree.map(lambda grad, weight: grad.astype(weight.dtype), grads, weights)
        sent, seen = jax.tree.map(_over_devices, (sent, seen))
        return Accumulated(value=value, grads=grads, sent=sent, seen=seen)

    def _scan(self, weights: Any, batch: Any, channel: Any) -> tuple[Any, Any]:
        """Return the parts of means that a device adds, and (sent, seen) of each microbatch."""
        # The gradient of a weight that varies over the devices is not summed over them.
        weights, zero = self._varying((weights, jnp.zeros(())))
        parts = jax.tree.map(lambda leaf: leaf.reshape(self.n, -1, *leaf.shape[1:]), batch)
        start = zero, jax.tree.map(_zeros, weights)
        return jax.lax.scan(functools.partial(self._add, weights), start, (parts, channel))

    def _add(self, weights: Any, sums: Any, microbatch: Any) -> tuple[Any, Any]:
        """Add the loss and the gradients of one microbatch."""
        part, channel = microbatch
        differentiated = jax.value_and_grad(self._checked_loss, (0, 2), has_aux=True)
        (value, seen), (grads, sent) = differentiated(weights, part, channel)
        return jax.tree.map(jnp.add, sums, (value, grads)), (sent, seen)

    def _checked_loss(self, weights: Any, part: Any, channel: Any) -> Any:
        result = self.loss(weights, part, channel)
        fix = "return (mean, None), where mean is a scalar"
        if not isinstance(result, tuple) or len(result) != 2:
            raise LayerError(
                f"it returned {_shape_text(result)}, not (mean loss, seen)", path="loss", fix=fix
            )
        if np.shape(result[0]) != ():
            raise LayerError(
                f"the mean loss is {_shape_text(result[0])}, not a scalar", path="loss", fix=fix
            )
        # Each gradient is a part of the mean, of the same size as without microbatches. So the
        # scales of eight bits do not depend on the mesh or on n.
        return result[0] / (self.n * self.shards), result[1]

    def _varying(self, tree: Any) -> Any:
        if not self.axes:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, self.axes, to="varying"), tree)


def _shape_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {shape}"


def _zeros(weight: Any) -> Any:
    """Return zeros that gradients are added to; bfloat16 would lose those of later microbatches."""
    return jnp.zeros_like(weight, dtype=jnp.promote_types(weight.dtype, jnp.float32))


def _batch_size(batch: Any) -> int:
    """Return the size of dim 0, which all arrays of the batch have.

    Raises:
      LayerError: The sizes differ, an array has no dims, or the batch is empty.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    shapes = {path_text(path): np.shape(leaf) for path, leaf in leaves}
    sizes = [shape[0] if shape else None for shape in shapes.values()]
    if len(set(sizes)) > 1 or None in sizes:
        each = ", ".join(f"{path or 'batch'} has shape {shape}" for path, shape in shapes.items())
        raise LayerError(
            f"the arrays differ in dim 0, which is BATCH: {each}",
            path="batch",
            fix="close over an array that does not have one entry per example in the loss",
        )
    size: int = sizes[0] if sizes and sizes[0] else 0
    if not size:
        raise LayerError("the batch has no examples", path="batch", fix="pass arrays [batch, ...]")
    return size


def _check_channel(channel: Any, n: int) -> None:
    if wrong := [leaf for leaf in jax.tree.leaves(channel) if np.shape(leaf)[:1] != (n,)]:
        raise LayerError(
            f"a leaf of the channel has shape {np.shape(wrong[0])}, and there are {n} microbatches",
            path="channel",
            fix=f"pass eight_bits.new_channel(scaling, uses={n})",
        )


def _make_step(
    loss: Callable[..., Any], n: int, manager: PartitionManager | None, size: int
) -> _Step:
    axes: tuple[str, ...] = ()
    shards, inside = 1, None
    if manager is not None:
        axes, shards = tuple(manager.mesh_axes(BATCH, size)), manager.axis_size(BATCH, size)
        # Inside the shard_map, weights are stored as they are used, and BATCH is not sharded.
        inside = PartitionManager(_as_used(manager.rules), mesh=manager.mesh, mode=manager.mode)
    if size % (shards * n):
        raise IndivisibleError(
            f"n={n} does not divide the {size // shards} examples of a device",
            path="n",
            fix="choose a divisor",
        )
    return _Step(loss=loss, n=n, axes=axes, shards=shards, manager=inside)


def _on_shards(step: _Step, manager: PartitionManager) -> Callable[..., Accumulated]:
    """Return a function of (weights, batch, channel), where each device has its own examples."""
    on_shards: Callable[..., Accumulated] = jax.shard_map(
        step.run,
        mesh=manager.mesh,
        in_specs=(PartitionSpec(), PartitionSpec(entry_of(step.axes)), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(step.axes),
    )
    return on_shards


def _check_mesh(manager: PartitionManager, size: int) -> None:
    """Refuse what JAX cannot differentiate: a `shard_map` of attention over tp inside this one."""
    sharded = manager.mesh_axes(BATCH, size)
    for axis, count in manager.mesh.shape.items():
        if count > 1 and axis not in sharded:
            raise LayerError(
                f"accumulate needs BATCH sharded over all mesh axes, and {axis}={count} does not "
                "shard it",
                fix="train under ddp or fsdp, or add the gradients of several steps",
            )
    if AxisType.Explicit in manager.mesh.axis_types:
        raise LayerError(
            "accumulate needs Auto mesh axes, and the mesh has Explicit ones",
            fix='build the mesh with axis_types="auto"',
        )


def _as_used(rules: AxisRules) -> AxisRules:
    policy = dataclasses.replace(rules.policy, gather=())
    return dataclasses.replace(rules, params=rules.activations, policy=policy)


def _over_devices(leaf: Any) -> Any:
    """Return the maximum over the devices that have different values."""
    axes = tuple(sorted(_jax.varying_axes(leaf)))
    return jax.lax.pmax(leaf, axes) if axes else leaf
