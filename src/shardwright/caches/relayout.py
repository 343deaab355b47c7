"""Reshard a cache for another mode, as from prefill to decode, with the fewest bytes sent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.caches.base import CACHE, KVCache
from shardwright.caches.sharding import CacheSharding, axes_by_dim, read_mode
from shardwright.errors import CacheError
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.manager.shards import call_on_shards
from shardwright.reshard.move import move_tree
from shardwright.reshard.plan import Move, MoveKind, plan_moves
from shardwright.reshard.run import run_moves
from shardwright.vocabulary.axes import AxisNames
from shardwright.vocabulary.read import instance, read_value
from shardwright.vocabulary.shown import text_of

C = TypeVar("C", bound=KVCache)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMoves:
    """How one array of a cache is resharded.

    Attributes:
      name: Name of the array.
      source: Spec of the array before the move.
      target: Spec of the array after the move, on the same mesh.
      moves: The steps; empty if the array stays.
    """

    name: str
    source: PartitionSpec
    target: PartitionSpec
    moves: tuple[Move, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """How a cache is resharded on its mesh. Print it.

    Attributes:
      mode: Runtime mode whose sharding the cache gets.
      arrays: The steps of every array.
    """

    mode: str
    arrays: tuple[ArrayMoves, ...]

    @property
    def bytes(self) -> int:
        """Bytes that each device sends."""
        return sum(move.bytes for array in self.arrays for move in array.moves)

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return sum(move.kind is not MoveKind.SLICE for array in self.arrays for move in array.moves)

    def __str__(self) -> str:
        return text_of(self)


def plan_reshard(
    cache: KVCache, mode: str | None = None, *, manager: PartitionManager | None = None
) -> Relayout:
    """Return the steps by which `reshard` would move a cache, without moving it.

    The arrays of the cache may be `jax.ShapeDtypeStruct`s, and the mesh may be abstract.

    Args:
      cache: As for `reshard`.
      mode: As for `reshard`.
      manager: As for `reshard`.

    Raises:
      CacheError: As for `reshard`; or the cache is on another mesh or not sharded, so `reshard`
        would copy it.
      ShardingError: As for `reshard`.
    """
    manager, mode = _target(cache, mode, manager)
    sources = _sources(cache, manager)
    for name, source in sources.items():
        if source is None:
            raise CacheError(
                "the array is on another mesh, or not sharded: reshard copies it, and there are "
                "no collectives to plan",
                path=name,
                fix="call reshard, or create the cache under this manager",
            )
    specs = _target_specs(cache, manager, mode)
    sizes: Mapping[str, int] = dict(manager.mesh.shape)
    plans = []
    for name, target in specs.items():
        array, source = getattr(cache, name), sources[name]
        assert source is not None
        # A mesh axis of size 1 shards nothing, but would count as a difference between the specs.
        before, after = (
            tuple(
                tuple(axis for axis in axes if sizes[axis] > 1)
                for axes in axes_by_dim(spec, len(array.shape))
            )
            for spec in (source, target)
        )
        moves = plan_moves(
            before, after, shape=array.shape, itemsize=array.dtype.itemsize, mesh=sizes
        )
        plans.append(ArrayMoves(name=name, source=source, target=target, moves=moves))
    return Relayout(mode=mode, arrays=tuple(plans))


def reshard(
    cache: C,
    mode: str | None = None,
    *,
    manager: PartitionManager | None = None,
    donate: bool = False,
) -> C:
    """Return a cache with the same content and the sharding of another mode.

    Operations on the new cache keep that sharding.

    On the same mesh, `reshard` takes the collectives that send the fewest bytes. `plan_reshard`
    shows these collectives. If the cache is on another mesh or not sharded, JAX copies the arrays.
    Call this once between prefill and decode, never inside a layer.

    Args:
      cache: A cache of any kind.
      mode: Runtime mode. Defaults to the manager's.
      manager: Manager whose rules and mesh are used. Defaults to the ambient manager. Call later
        operations on the new cache under this manager.
      donate: Whether to free the memory of the old cache. If a device is in both meshes, JAX may
        use the buffers on this device for both caches. These buffers are freed with their last
        reference. Inside `jit`, donate the argument of the compiled function instead.

    Raises:
      CacheError: There is no mode or no manager; the mesh is abstract; the call is inside a trace,
        and the cache is on another mesh; or the order of rows is for another number of shards.
      ShardingError: The rules do not fit the sizes.
    """
    manager, mode = _target(cache, mode, manager)
    if None in _sources(cache, manager).values():
        arrays = _copy(cache, manager, mode, donate=donate)
    else:
        plan = plan_reshard(cache, mode, manager=manager)
        if isinstance(manager.mesh, AbstractMesh) and not _jax.in_trace():
            raise constraint.no_devices()
        arrays = _move(plan, manager.mesh, cache.arrays, donate=donate)
    fields: dict[str, Any] = {"spec": dataclasses.replace(cache.spec, mode=mode), **arrays}
    return dataclasses.replace(cache, **fields)


def _target(
    cache: Any, mode: str | None, manager: PartitionManager | None
) -> tuple[PartitionManager, str]:
    """Return the manager and the mode that determine the new sharding."""
    read_value("cache", cache, CACHE, error=CacheError)
    if manager is not None:
        read_value("manager", manager, instance(PartitionManager), error=CacheError)
    manager = context.current() if manager is None else manager
    if manager is None:
        raise CacheError(
            "there is no manager to shard the cache",
            path="manager",
            fix="pass manager=, or call within `with manager:`",
        )
    mode = read_mode(mode, manager)
    assert mode is not None
    return manager, mode


def _sources(cache: KVCache, manager: PartitionManager) -> dict[str, PartitionSpec | None]:
    """Return array name -> spec on the manager's mesh, or None if the array is on another mesh."""
    return {
        name: _source(getattr(cache, name), axes, cache.spec.mode, manager)
        for name, axes in cache.array_axes.items()
    }


def _source(
    array: Any, axes: AxisNames, mode: str | None, manager: PartitionManager
) -> PartitionSpec | None:
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if sharding is not None:
        if isinstance(sharding, NamedSharding) and _same_mesh(sharding.mesh, manager.mesh):
            return sharding.spec
        return None
    # A traced or abstract array has the sharding of the cache's mode under the ambient manager.
    ambient = context.current()
    if mode is None or (ambient is not None and not _same_mesh(ambient.mesh, manager.mesh)):
        return None
    return CacheSharding(manager=ambient or manager, mode=mode).spec(axes, array.shape)


def _target_specs(cache: KVCache, manager: PartitionManager, mode: str) -> dict[str, PartitionSpec]:
    sharding = CacheSharding(manager=manager, mode=mode)
    specs = {}
    for name, axes in cache.array_axes.items():
        shape = getattr(cache, name).shape
        sharding.check_order(cache.spec.order, axes, shape)
        specs[name] = sharding.spec(axes, shape)
    return specs


def _same_mesh(a: Mesh | AbstractMesh, b: Mesh | AbstractMesh) -> bool:
    if isinstance(a, Mesh) and isinstance(b, Mesh):
        return a == b
    # An abstract mesh has no devices to compare.
    return dict(a.shape) == dict(b.shape)


def _copy(
    cache: KVCache, manager: PartitionManager, mode: str, *, donate: bool
) -> dict[str, jax.Array]:
    """Return the arrays, copied to the manager's mesh."""
    if _jax.in_trace():
        raise CacheError(
            "a cache is moved to another mesh, or sharded for the first time, only outside of jit",
            path="manager",
            fix="call reshard between the compiled steps",
        )
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    # Enter the new manager: the ambient one may still be that of the old mesh.
    with manager:
        specs = _target_specs(cache, manager, mode)
    copies: dict[str, jax.Array] = {}
    for name, array in cache.arrays.items():
        target = NamedSharding(manager.mesh, specs[name])
        # On a device that both meshes have, the copy may share the memory of the array. Do not
        # delete the array then.
        apart = isinstance(array, jax.Array) and array.sharding.device_set.isdisjoint(
            target.device_set
        )
        copies |= move_tree({name: array}, {name: target}, donate=donate and apart)
    return copies


def _move(
    plan: Relayout, mesh: Mesh | AbstractMesh, arrays: dict[str, jax.Array], *, donate: bool
) -> dict[str, jax.Array]:
    """Return the arrays, moved by the steps of a plan."""
    if _jax.in_trace():
        return _run(plan, mesh, arrays)
    # The plan is static, so `jit` compiles once per plan.
    run = _run_donating if donate else _run_jitted
    moved: dict[str, jax.Array] = run(plan, mesh, arrays)
    if not donate:
        return moved
    for name, array in arrays.items():
        # XLA keeps a donated array that it cannot write into, such as an array with shards of
        # another size. Delete such an array here.
        if array is not moved[name] and not array.is_deleted():
            array.delete()
    return moved


def _run(
    plan: Relayout, mesh: Mesh | AbstractMesh, arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    sizes, moved = dict(mesh.shape), {}
    for array in plan.arrays:
        x = arrays[array.name]
        if array.moves:
            x = call_on_shards(
                functools.partial(run_moves, moves=array.moves, mesh=sizes),
                (x,),
                (array.source,),
                out_specs=array.target,
                mesh=mesh,
            )
        # Place every array: even if no step moves it, its target may differ from its source by mesh
        # axes of size 1.
        placement = constraint.make_placement(array.target, mesh, _jax.ambient_mesh())
        moved[array.name] = constraint.place(x, placement)
    return moved


_run_jitted = functools.partial(jax.jit, static_argnums=(0, 1))(_run)
_run_donating = functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)(_run)
