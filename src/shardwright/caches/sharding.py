"""How the arrays of a cache are sharded: the manager's specs, in the mode of the cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.caches.spec import RowOrder
from shardwright.errors import CacheError
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.manager.shards import call_on_shards
from shardwright.resolution.partition_specs import entry_names
from shardwright.vocabulary.axes import KV_LENGTH, AxisNames, Role
from shardwright.vocabulary.modes import parse_mode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSharding:
    """The specs of a cache's arrays under the ambient manager.

    Attributes:
      manager: The manager. None if the cache is not sharded, or if the caller shards it.
      mode: Runtime mode of the cache.
    """

    manager: PartitionManager | None
    mode: str | None

    def spec(
        self, axes: AxisNames, shape: Sequence[int], *, name: str | None = None
    ) -> PartitionSpec:
        """Return the spec of an array.

        Args:
          axes: Its annotation.
          shape: Its shape.
          name: Name of the array, for errors.

        Raises:
          ShardingError: The rules do not fit the sizes, or a rule is `?`.
          CacheError: A `shard_map` around the call has split a dimension of the array.
        """
        if self.manager is None:
            return PartitionSpec()
        spec: PartitionSpec = self.manager.sharding(
            axes, mode=self.mode, role=Role.ACTIVATION, shape=tuple(shape), path=name
        ).spec
        # Refuse an array that a shard_map has split: it has the size of a shard, so slot and row
        # numbers would need an offset.
        manual = self.manager.manual_axes(_jax.ambient_mesh())
        split = [name for entry in spec.partitions for name in entry_names(entry) if name in manual]
        if split:
            raise CacheError(
                f"a shard_map around the call has split the cache over {split[0]}, and slots "
                "and rows have global numbers",
                mesh_axes=tuple(split),
                fix="call the cache outside of that shard_map",
            )
        return spec

    def check_order(self, order: RowOrder, axes: AxisNames, shape: Sequence[int]) -> None:
        """Check that a row order gives every shard the same number of rows.

        Otherwise some shards would fill before others.

        Args:
          order: The order of the rows.
          axes: The annotation of an array. If KV_LENGTH is not in it, the array has no rows, and
            nothing is checked.
          shape: Its shape.

        Raises:
          CacheError: The number of shards of the rows does not divide the number of shards of the
            order.
        """
        if self.manager is None or order.block is None or KV_LENGTH not in axes:
            return
        mesh_axes = axes_by_dim(self.spec(axes, shape), len(axes))[axes.index(KV_LENGTH)]
        # `order` may have more shards than the mesh. Each device then has several shards of the
        # order.
        parts = self.shards(mesh_axes)
        if order.shards % parts:
            raise CacheError(
                f"order distributes the rows over {order.shards} shards, but the rows have "
                f"{parts} shards, over {'+'.join(mesh_axes)}",
                path="order",
                mesh_axes=mesh_axes,
                fix=f"create the cache with RowOrder(block={order.block}, "
                f"shards={math.lcm(order.shards, parts)})",
            )

    def shards(self, mesh_axes: Sequence[str]) -> int:
        """Return the number of shards over some mesh axes."""
        if self.manager is None:
            return 1
        return math.prod(self.manager.mesh.shape[name] for name in mesh_axes)

    def place(self, x: jax.Array, axes: AxisNames) -> jax.Array:
        """Return an array with the sharding that its annotation resolves to."""
        return self.place_as(x, self.spec(axes, x.shape))

    def place_as(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return an array with the sharding of a spec."""
        if self.manager is None:
            return x
        placed: jax.Array = constraint.place(
            x, constraint.make_placement(spec, self.manager.mesh, _jax.ambient_mesh())
        )
        return placed

    def with_specs(
        self, arrays: Mapping[str, jax.Array], axes: Mapping[str, AxisNames]
    ) -> PlacedArrays:
        """Return arrays together with their specs.

        Args:
          arrays: Arrays by name.
          axes: The annotation of each array, by the same names.
        """
        specs = {name: self.spec(axes[name], array.shape) for name, array in arrays.items()}
        return PlacedArrays(arrays=dict(arrays), specs=specs, sharding=self)

    def run(
        self,
        local: Callable[..., Any],
        arguments: Sequence[Any],
        in_specs: Sequence[Any],
        *,
        out_specs: Any,
    ) -> Any:
        """Run a function on the shards of its arguments or, without a manager, on whole arguments.

        Args:
          local: Function of trees of local arrays.
          arguments: Trees of global arrays.
          in_specs: Trees of specs, one per argument.
          out_specs: A tree of specs.
        """
        if self.manager is None:
            return local(*arguments)
        return call_on_shards(
            local, arguments, in_specs, out_specs=out_specs, mesh=self.manager.mesh
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedArrays:
    """Arrays of a cache and how they are sharded.

    Attributes:
      arrays: Arrays by name.
      specs: The spec of each array, by the same names.
      sharding: The sharding of the cache, whose `run` runs functions on the shards.
    """

    arrays: dict[str, jax.Array]
    specs: dict[str, PartitionSpec]
    sharding: CacheSharding

    def leading_axes(self) -> tuple[str, ...]:
        """Return the mesh axes of dimension 0, which are the same for all arrays of a cache."""
        return axes_by_dim(next(iter(self.specs.values())), 1)[0]

    def run(
        self, local: Callable[..., dict[str, jax.Array]], *arguments: Any, specs: Sequence[Any]
    ) -> dict[str, jax.Array]:
        """Run `local(arrays, *arguments)` on every shard. Return new arrays, sharded as before.

        Args:
          local: Function of local arrays by name, and of local arguments.
          *arguments: Trees of global arrays.
          specs: The specs of the arguments.
        """
        results: dict[str, jax.Array] = self.sharding.run(
            local, (self.arrays, *arguments), (self.specs, *specs), out_specs=self.specs
        )
        return results


def ambient_sharding(mode: str | None) -> CacheSharding:
    """Return how a cache of a mode is sharded under the ambient manager.

    Args:
      mode: None for a cache that was created without a manager: such a cache is not sharded.
    """
    return CacheSharding(manager=None if mode is None else context.current(), mode=mode)


def read_mode(
    mode: str | None, manager: PartitionManager | None, saved: str | None = None
) -> str | None:
    """Return the mode whose sharding a cache gets; None if it is not sharded.

    The mode is that of the call, else that of the manager, else that of a saved cache.

    Raises:
      CacheError: The call, the manager and the saved cache have no mode.
      StrategyError: The mode is unknown.
    """
    if manager is None:
        if mode is not None:
            parse_mode(mode)  # a misspelled mode is an error here too
        return None
    mode = (manager.mode or saved) if mode is None else mode
    if mode is None:
        raise CacheError(
            "a cache is sharded by mode, and neither the call nor the manager has a mode",
            path="mode",
            fix='use a manager that has one, with pm.for_mode("decode"): ..., or pass '
            'mode="decode"',
        )
    return parse_mode(mode)


def axes_by_dim(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes of every dimension."""
    by_dim = tuple(entry_names(entry) for entry in spec.partitions)
    return by_dim + ((),) * (rank - len(by_dim))


def local_numbers(numbers: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
    """Return global slot, row or page numbers as this shard's local ones. Call it in `shard_map`.

    Args:
      numbers: Global numbers.
      axes: Mesh axes that shard the slots, rows or pages.
      size: How many slots, rows or pages a shard has. The number of a slot, row or page of another
        shard becomes `size`, which is out of range, so a scatter with `mode="drop"` skips it. A
        negative number would not be skipped: JAX counts it from the end.
    """
    local = numbers - jax.lax.axis_index(axes) * size if axes else numbers
    return jnp.where((local >= 0) & (local < size), local, size)
