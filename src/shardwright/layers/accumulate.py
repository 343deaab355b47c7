"""Gradient accumulation: several microbatches per step, and one sum over devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.errors import IndivisibleError, LayerError
from shardwright.layers.closures import closed_over_keys
from shardwright.layers.inputs import read_key
from shardwright.layers.placement import is_inside_shard_map
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_specs import entry_of
from shardwright.resolution.rules import AxisRules
from shardwright.trees.paths import path_text
from shardwright.vocabulary.axes import BATCH
from shardwright.vocabulary.integers import read_integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Weighted:
    """A sum of losses and the sum of their weights. The loss is `total / weight`.

    Microbatches and devices may have different weights, such as numbers of tokens. So totals and
    weights are added, never means.

    Attributes:
      total: Sum of the losses, a scalar.
      weight: Sum of their weights, a scalar. It is not differentiated.
    """

    total: Any
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The result of a step of several microbatches.

    Attributes:
      value: The loss: sum of the totals / sum of the weights, in float32 at least. 0 if all weights
        are 0.
      weight: Sum of the weights.
      grads: Sum of the gradients of the totals / sum of the weights, sharded as the parameters are
        stored, in their dtype.
      sent: The gradient of `channel` by the totals, with a leading dim of the microbatches; None
        without a channel.
      seen: What the loss returned beside its value, with a leading dim of the microbatches.
    """

    value: Any
    weight: Any
    grads: Any
    sent: Any
    seen: Any


def accumulate(
    loss: Callable[..., Any],
    n: int,
    *,
    specs: Any,
    mean_over: Literal["examples"] | None = None,
) -> Callable[..., Accumulated]:
    """Return a function of (params, batch, channel, *, key) that runs a loss on n microbatches.

    Each device adds the gradients of its microbatches, and they are summed over devices once, after
    the last one. For that the weights are gathered once, before the first one, and stay gathered,
    and the gradients are added whole, in float32 at least: this takes the memory of both.
    Microbatch i has the i-th part of the examples of each device.

    Args:
      loss: Function of (params, batch, channel) that returns (`Weighted(total, weight)`, seen) of
        these examples, such as `(cross_entropy(...).weighted, None)`. It runs inside a `shard_map`
        over the mesh axes of BATCH, so it may not contain an MoE layer. With a key, it is
        called with `key=` too. It may not close over a key: all microbatches would have the same.
      n: Number of microbatches. It divides the number of examples of a device.
      specs: The `ArraySpec`s of the parameters.
      mean_over: "examples" if the loss returns (mean, seen), where the mean is a scalar that counts
        every example the same. Defaults to none: the loss returns a `Weighted`.

    Returns:
      Function of `params`, as stored; `batch`, a tree of arrays whose dim 0 is BATCH; `channel`, of
      `fp8.new_channel(scaling, uses=n)`, or None; and `key`, a JAX key, from which each
      microbatch of each device gets its own. The leaves of `sent` and `seen` are largest values,
      over all devices. They are never added: pass them to `fp8.update`.

    Raises:
      IndivisibleError: n does not divide the examples of a device.
      LayerError: n is not a positive integer, a `shard_map` surrounds the call, or the mesh has an
        axis that BATCH is not sharded over, or Explicit axes. Or the arrays of `batch` differ in
        dim 0, `channel` has other uses than n, the loss closes over a key, or the loss does not
        return what `mean_over` says.
    """
    read_integer("n", n, error=LayerError, fix="pass the number of microbatches, such as n=4")
    if mean_over not in (None, "examples"):
        raise LayerError(
            f"mean_over={mean_over!r} is unknown",
            path="mean_over",
            fix='write "examples", or leave it out and return a Weighted',
        )

    def run(params: Any, batch: Any, channel: Any = None, *, key: Any = None) -> Accumulated:
        if is_inside_shard_map():
            raise LayerError(
                "accumulate is called inside a shard_map",
                fix="call it outside: it runs a shard_map of its own",
            )
        manager: PartitionManager | None = context.current()
        size = _batch_size(batch)
        _check_channel(channel, n)
        _check_closure(loss)
        if key is not None:
            key = read_key("key", key, fix="pass key=jax.random.key(0), another one for each step")
        if manager is not None:
            _check_mesh(manager, size)
        step = _make_step(loss, n, manager, size, mean_over=mean_over)
        if manager is None:
            return step.run(params, batch, channel, key)
        # Gathered outside of the scan. Inside of it, every microbatch would gather them again.
        weights = manager.gather(params, specs)
        result = _on_shards(step, manager)(weights, batch, channel, key)
        return dataclasses.replace(result, grads=manager.shard(result.grads, specs, role="param"))

    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AccumulationStep:
    """A step on the examples of one device.

    Attributes:
      loss: The argument of `accumulate`.
      n: Number of microbatches.
      axes: Mesh axes that shard the examples; none without a manager.
      manager: The manager inside the `shard_map`, or None.
      examples: Number of examples of a microbatch.
      is_mean: Whether the loss returns a mean over these examples.
    """

    loss: Callable[..., Any]
    n: int
    axes: tuple[str, ...]
    manager: PartitionManager | None
    examples: int
    is_mean: bool

    def run(self, weights: Any, batch: Any, channel: Any, key: Any) -> Accumulated:
        """Return the loss and the gradients of all microbatches of all devices."""
        with contextlib.nullcontext() if self.manager is None else self.manager:
            sums, (sent, seen) = self._scan(weights, batch, channel, key)
        if self.axes:
            sums = jax.lax.psum(sums, self.axes)
        loss, grads = sums
        # Without a token that counts, total and gradients are 0.
        divisor = jnp.where(loss.weight == 0, 1, loss.weight)
        grads = jax.tree.map(lambda grad, like: (grad / divisor).astype(like.dtype), grads, weights)
        sent, seen = jax.tree.map(_over_devices, (sent, seen))
        value = loss.total / divisor
        return Accumulated(value=value, weight=loss.weight, grads=grads, sent=sent, seen=seen)

    def _scan(self, weights: Any, batch: Any, channel: Any, key: Any) -> tuple[Any, Any]:
        """Return the sums of a device, and (sent, seen) of each microbatch."""
        # The gradient of a weight that varies over the devices is not summed over them.
        weights, zero = self._varying((weights, jnp.zeros(())))
        # The batch is that of a device, so the microbatches are cut without sending an example.
        parts = jax.tree.map(lambda leaf: leaf.reshape(self.n, -1, *leaf.shape[1:]), batch)
        start = Weighted(zero, zero), jax.tree.map(_zeros, weights)
        add = functools.partial(self._add, weights)
        return jax.lax.scan(add, start, (parts, channel, self._keys(key)))

    def _keys(self, key: Any) -> Any:
        """Return a key for each microbatch of this device."""
        if key is None:
            return None
        # Device d has the numbers from d * n on, so no two microbatches of the step fold in the
        # same one.
        first = jax.lax.axis_index(self.axes) * self.n if self.axes else 0
        return jax.vmap(functools.partial(jax.random.fold_in, key))(first + jnp.arange(self.n))

    def _add(self, weights: Any, sums: Any, microbatch: Any) -> tuple[Any, Any]:
        """Add the loss and the gradients of one microbatch."""
        # Gradients are those of the total: the sum of the weights is known only after the last
        # microbatch. So they, and the fp8 scales, do not depend on the mesh or on n.
        differentiated = jax.value_and_grad(self._total, (0, 2), has_aux=True)
        (total, (weight, seen)), (grads, sent) = differentiated(weights, *microbatch)
        return jax.tree.map(jnp.add, sums, (Weighted(total, weight), grads)), (sent, seen)

    def _total(self, weights: Any, part: Any, channel: Any, key: Any) -> Any:
        """Return the total of one microbatch, and (its weight, what the loss has seen)."""
        given = {} if key is None else {"key": key}
        result = self.loss(weights, part, channel, **given)
        loss: Any = result[0] if isinstance(result, tuple) and len(result) == 2 else None
        if self.is_mean and _jax.is_array(loss) and np.shape(loss) == ():
            loss = Weighted(loss * self.examples, self.examples)
        elif self.is_mean or not isinstance(loss, Weighted):
            raise _wrong_result(result, is_mean=self.is_mean)
        for name in ("total", "weight"):
            if np.shape(getattr(loss, name)) != ():
                raise LayerError(
                    f"the {name} is {_shape_text(getattr(loss, name))}, not a scalar",
                    path="loss",
                    fix="return sums over all tokens of the microbatch",
                )
        return loss.total, (jnp.asarray(loss.weight), result[1])

    def _varying(self, tree: Any) -> Any:
        if not self.axes:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, self.axes, to="varying"), tree)


def _wrong_result(result: Any, *, is_mean: bool) -> LayerError:
    parts = result if isinstance(result, tuple) else (result,)
    text = ", ".join(map(_shape_text, parts))
    if is_mean:
        wanted, fix = "(mean, seen)", "return a scalar mean and None; leave mean_over out for sums"
    else:
        wanted = "(Weighted, seen)"
        fix = (
            "return (loss.cross_entropy(...).weighted, None), or (Weighted(total, weight), None); "
            'for a mean that counts every example the same, pass mean_over="examples"'
        )
    returned = f"({text})" if isinstance(result, tuple) else text
    return LayerError(f"it returned {returned}, not {wanted}", path="loss", fix=fix)


def _shape_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {shape}"


def _zeros(weight: Any) -> Any:
    """Return zeros that gradients are added to; bfloat16 would lose those of later microbatches."""
    # The accumulator has the varying mesh axes of the weight, since a scan's carry cannot change
    # its type.
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
            fix=f"pass fp8.new_channel(scaling, uses={n})",
        )


def _check_closure(loss: Callable[..., Any]) -> None:
    if names := closed_over_keys(loss):
        raise LayerError(
            f"the loss closes over the key {names[0]}, so all microbatches and all devices would "
            "drop the same elements",
            path="loss",
            fix="pass key= to the function that accumulate returns, and take key= in the loss",
        )


def _make_step(
    loss: Callable[..., Any],
    n: int,
    manager: PartitionManager | None,
    size: int,
    *,
    mean_over: str | None,
) -> _AccumulationStep:
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
    return _AccumulationStep(
        loss=loss,
        n=n,
        axes=axes,
        manager=inside,
        examples=size // (shards * n),
        is_mean=mean_over is not None,
    )


def _on_shards(step: _AccumulationStep, manager: PartitionManager) -> Callable[..., Accumulated]:
    """Return a function of (weights, batch, channel, key) on the examples of each device."""
    whole = PartitionSpec()
    # What leaves is a sum or a maximum over the devices, so all of them return equal values.
    on_shards: Callable[..., Accumulated] = jax.shard_map(
        step.run,
        mesh=manager.mesh,
        in_specs=(whole, PartitionSpec(entry_of(step.axes)), whole, whole),
        out_specs=whole,
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
