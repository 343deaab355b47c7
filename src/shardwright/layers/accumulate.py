"""Gradient accumulation: several microbatches per step, and one sum over devices."""

from __future__ import annotations

import dataclasses
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
        size = jax.tree.leaves(batch)[0].shape[0]
        manager: PartitionManager | None = context.current()
        if manager is not None:
            _check_mesh(manager, size)
        axes = () if manager is None else manager.mesh_axes(BATCH, size)
        shards = 1 if manager is None else manager.axis_size(BATCH, size)
        if size % (shards * n):
            raise IndivisibleError(
                f"n={n} does not divide the {size // shards} examples of a device",
                path="n",
                fix="choose a divisor",
            )
        if manager is None:
            return _local(loss, n, (), 1, params, batch, channel)
        weights = manager.gather(params, specs)
        # Inside, the weights are stored as they are used, and BATCH is not sharded.
        own = PartitionManager(_as_used(manager.rules), mesh=manager.mesh, mode=manager.mode)
        spec = PartitionSpec(entry_of(axes))

        def local(weights: Any, batch: Any, channel: Any) -> Accumulated:
            with own:
                return _local(loss, n, axes, shards, weights, batch, channel)

        on_shards = jax.shard_map(
            local,
            mesh=manager.mesh,
            in_specs=(PartitionSpec(), spec, PartitionSpec()),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
        )
        result = on_shards(weights, batch, channel)
        return dataclasses.replace(result, grads=manager.shard(result.grads, specs, role="param"))

    return run


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


def _local(
    loss: Callable[..., Any],
    n: int,
    axes: tuple[str, ...],
    shards: int,
    params: Any,
    batch: Any,
    channel: Any,
) -> Accumulated:
    if axes:
        # Otherwise each microbatch would sum its gradients over devices.
        params = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axes, to="varying"), params)
    parts = jax.tree.map(lambda leaf: leaf.reshape(n, -1, *leaf.shape[1:]), batch)
    differentiated = jax.value_and_grad(loss, (0, 2), has_aux=True)

    def one(total: Any, trip: Any) -> tuple[Any, Any]:
        part, own = trip
        (value, seen), (grads, sent) = differentiated(params, part, own)
        return jax.tree.map(jnp.add, total, (value, grads)), (sent, seen)

    zero = jnp.zeros(())
    if axes:
        zero = jax.lax.pcast(zero, axes, to="varying")
    start = (zero, jax.tree.map(jnp.zeros_like, params))
    total, (sent, seen) = jax.lax.scan(one, start, (parts, channel))
    if axes:
        total = jax.lax.psum(total, axes)
        sent, seen = jax.tree.map(_over_devices, (sent, seen))
    value, grads = jax.tree.map(lambda leaf: leaf / (n * shards), total)
    return Accumulated(value=value, grads=grads, sent=sent, seen=seen)


def _over_devices(leaf: Any) -> Any:
    """Return the maximum over the devices that have different values."""
    axes = tuple(sorted(_jax.varying_axes(leaf)))
    return jax.lax.pmax(leaf, axes) if axes else leaf
