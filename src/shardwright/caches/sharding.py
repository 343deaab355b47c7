"""Where a cache's arrays lie: the manager's answers, for its shapes, in the mode that the cache was made for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.caches.row_order import RowOrder
from shardwright.errors import CacheError
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.manager.shards import call_on_shards
from shardwright.resolution.partition_specs import entry_names
from shardwright.vocabulary.axes import KV_LENGTH, Role

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The specs of a cache's arrays under the ambient manager.

    Attributes:
      manager: the ambient one, or None: nothing is sharded, or whoever calls takes care of it.
      mode: runtime mode of the cache.
    """

    manager: PartitionManager | None
    mode: str | None

    def spec(self, axes: Axes, shape: Sequence[int], *, name: str | None = None) -> PartitionSpec:
        """Return where an array lies.

        Args:
          axes: its annotation.
          shape: its shape.
          name: what errors call it.

        Raises:
          ShardingError: what the rules say does not fit the sizes, or is `?`.
          CacheError: a `shard_map` around the call has split a dim of it.
        """
        if self.manager is None:
            return PartitionSpec()
        spec: PartitionSpec = self.manager.sharding(
            axes, mode=self.mode, role=Role.ACTIVATION, shape=tuple(shape), path=name
        ).spec
        manual = self.manager.manual_axes(_jax.ambient_mesh())
        split = [name for entry in spec.partitions for name in entry_names(entry) if name in manual]
        if split:
            what = f"a shard_map around the call has split it over {split[0]}, and a cache numbers slots and rows globally"
            raise CacheError(
                what, mesh_axes=tuple(split), fix="call the cache outside of that shard_map"
            )
        return spec

    def check_order(self, order: RowOrder, axes: Axes, shape: Sequence[int]) -> None:
        """Refuse an order that deals rows out to fewer shards than they lie in: some of those would fill before others.

        Args:
          order: of the rows.
          axes: the annotation of an array; one without KV_LENGTH has no rows.
          shape: its shape.

        Raises:
          CacheError: the number of shards that the rows lie in does not divide that of the order.
        """
        if self.manager is None or order.block is None or KV_LENGTH not in axes:
            return
        over = entries(self.spec(axes, shape), len(axes))[axes.index(KV_LENGTH)]
        parts = math.prod(self.manager.mesh.shape[name] for name in over)
        if order.shards % parts:
            what = f"order deals rows out to {order.shards} shards, and they lie in {parts}, over {'+'.join(over)}"
            fix = f"make the cache with RowOrder(block={order.block}, shards={math.lcm(order.shards, parts)})"
            raise CacheError(what, path="order", mesh_axes=over, fix=fix)

    def place(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Make an array lie as its annotation resolves."""
        return self.lay(x, self.spec(axes, x.shape))

    def lay(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Make an array lie as a spec says."""
        if self.manager is None:
            return x
        laid: jax.Array = constraint.place(
            x, constraint.make_placement(spec, self.manager.mesh, _jax.ambient_mesh())
        )
        return laid

    def run(
        self,
        local: Callable[..., Any],
        arguments: Sequence[Any],
        in_specs: Sequence[Any],
        *,
        out_specs: Any,
    ) -> Any:
        """Return `local(*shards)`; simply `local(*arguments)` without a manager.

        Args:
          local: function of trees of local arrays.
          arguments: trees of global arrays.
          in_specs: trees of specs like them.
          out_specs: a tree of specs.
        """
        if self.manager is None:
            return local(*arguments)
        return call_on_shards(
            local, arguments, in_specs, out_specs=out_specs, mesh=self.manager.mesh
        )


def ambient_shards(mode: str | None) -> Shards:
    """Return where the arrays of a cache of a mode lie now; nowhere for one that was made without a manager."""
    return Shards(manager=None if mode is None else context.current(), mode=mode)


def entries(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes of every dim."""
    given = tuple(entry_names(entry) for entry in spec.partitions)
    return given + ((),) * (rank - len(given))


def specs_of(
    shards: Shards, buffers: Mapping[str, jax.Array], axes: Mapping[str, Axes]
) -> dict[str, PartitionSpec]:
    """Return the specs of buffers by name."""
    return {name: shards.spec(axes[name], buffer.shape) for name, buffer in buffers.items()}
