"""Gradient accumulation: several microbatches per step, and one sum over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.errors import IndivisibleError, LayerError
from shardwright.layers.placement import is_inside_shard_map
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_specs import entry_of
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.axes import BATCH
from shardwright.vocabulary.integers import read_integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The result of a step of several microbatches.

    Attributes:
      value: Mean of the losses.
      grads: Mean of the gradients of the parameters, sharded as these are stored.
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
    and the gradients are added whole: this takes the memory of both. Microbatch i has the i-th part
    of the examples of each device.

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
        axis that BATCH is not sharded over, or Explicit axes.
    """
    read_integer("n", n, error=LayerError, fix="pass the number of microbatches, such as n=4")

    def run(params: Any, batch: Any, channel: Any = None) -> Accumulated:
        if is_inside_shard_map():
            raise LayerError(
                "accumulate is called inside a shard_map",
                fix="call it outside: it runs a shard_map of its own",
            )
        manager: PartitionManager | None = context.current()
        size = jax.tree.leaves(batch)[0].shape[0]
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
        value, grads = jax.tree.map(lambda leaf: leaf / (self.n * self.shards), sums)
        sent, seen = jax.tree.map(_over_devices, (sent, seen))
        return Accumulated(value=value, grads=grads, sent=sent, seen=seen)

    def _scan(self, weights: Any, batch: Any, channel: Any) -> tuple[Any, Any]:
        """Return the sums of loss and gradients, and (sent, seen) of each microbatch."""
        # The gradient of a weight that varies over the devices is not summed over them.
        weights, zero = self._varying((weights, jnp.zeros(())))
        parts = jax.tree.map(lambda leaf: leaf.reshape(self.n, -1, *leaf.shape[1:]), batch)
        start = zero, jax.tree.map(jnp.zeros_like, weights)
        return jax.lax.scan(functools.partial(self._add, weights), start, (parts, channel))

    def _add(self, weights: Any, sums: Any, microbatch: Any) -> tuple[Any, Any]:
        """Add the loss and the gradients of one microbatch."""
        part, channel = microbatch
        differentiated = jax.value_and_grad(self.loss, (0, 2), has_aux=True)
        (value, seen), (grads, sent) = differentiated(weights, part, channel)
        return jax.tree.map(jnp.add, sums, (value, grads)), (sent, seen)

    def _varying(self, tree: Any) -> Any:
        if not self.axes:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, self.axes, to="varying"), tree)


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
