"""Move a cache to where another mode wants it, such as from prefill to decode, by the collectives that send least."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.caches.base import KVCache
from shardwright.caches.sharding import Shards, entries
from shardwright.errors import CacheError
from shardwright.manager import constraint, context
from shardwright.manager.manager import PartitionManager
from shardwright.manager.shards import call_on_shards
from shardwright.reshard.plan import Move, MoveKind, find_moves, run_moves
from shardwright.resolution.partition_specs import entry_names, spec_of, spec_text
from shardwright.vocabulary.modes import mode_name, parse_mode

C = TypeVar("C", bound=KVCache)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMoves:
    """How one array of a cache moves.

    Attributes:
      name: of the array.
      source: where it lies.
      target: where it will; on the same mesh.
      moves: the steps; none where it stays.
    """

    name: str
    source: PartitionSpec
    target: PartitionSpec
    moves: tuple[Move, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relayout:
    """How a cache moves on its mesh. Print it.

    Attributes:
      mode: runtime mode in whose layout it will lie.
      arrays: every array's steps.
    """

    mode: str
    arrays: tuple[ArrayMoves, ...]

    @property
    def bytes(self) -> int:
        """Bytes that a device sends."""
        return sum(move.bytes for array in self.arrays for move in array.moves)

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return sum(move.kind is not MoveKind.SLICE for array in self.arrays for move in array.moves)

    def __str__(self) -> str:
        count = f"{self.collectives} collective{'' if self.collectives == 1 else 's'}"
        lines = [f"to {mode_name(self.mode)}: {count}, {self.bytes:,} B sent by each device"]
        for array in self.arrays:
            lines.append(
                f"  {array.name}  {spec_text(array.source)} -> {spec_text(array.target)}{'' if array.moves else '  stays'}"
            )
            lines += [f"    {move}" for move in array.moves]
        return "\n".join(lines)


def plan_reshard(
    cache: KVCache, mode: str | None = None, *, manager: PartitionManager | None = None
) -> Relayout:
    """Return how `reshard` would move a cache. The cache may be of `jax.ShapeDtypeStruct`s, and the mesh abstract.

    The arguments are those of `reshard`.

    Raises:
      CacheError: as there; or the cache lies on another mesh, between which JAX copies.
      ShardingError: as there.
    """
    manager, mode = _wanted(cache, mode, manager)
    found = []
    for name, axes, array in _arrays(cache):
        source = _source(array, axes, cache.spec.mode, manager)
        if source is None:
            what = "it lies on another mesh, or on none: it is copied to where it shall lie, and no collective is planned"
            raise CacheError(
                what, path=name, fix="call reshard; or make the cache under this manager"
            )
        shards = Shards(manager=manager, mode=mode)
        shards.check_order(cache.spec.order, axes, array.shape)
        target = shards.spec(axes, array.shape)
        sizes: Mapping[str, int] = dict(manager.mesh.shape)
        dims = [entries(_without_ones(spec, sizes), len(array.shape)) for spec in (source, target)]
        moves = find_moves(*dims, shape=array.shape, itemsize=array.dtype.itemsize, mesh=sizes)
        found.append(ArrayMoves(name=name, source=source, target=target, moves=moves))
    return Relayout(mode=mode, arrays=tuple(found))


def reshard(
    cache: C,
    mode: str | None = None,
    *,
    manager: PartitionManager | None = None,
    donate: bool = False,
) -> C:
    """Return a cache with the same content, laid as another mode says; every operation then leaves it there.

    On the mesh where it lies that takes the collectives that send least, which `plan_reshard` shows; to another mesh, and from
    arrays that lie on no mesh, JAX copies. Once between prefill and decode, never inside a layer.

    Args:
      cache: of any kind.
      mode: runtime mode; absent: the manager's.
      manager: whose rules and mesh; absent: the ambient one. Under the other operations it must be the ambient one.
      donate: whether the old cache may be given up, which then holds no memory; where meshes have devices in common, JAX may share what
        stays on them, and the old arrays go when nothing refers to them. Inside `jit`, donate it there.

    Raises:
      CacheError: no mode, no manager, an abstract mesh, another mesh inside a trace, or an order of rows for other shards.
      ShardingError: what the rules say does not fit the sizes.
    """
    manager, mode = _wanted(cache, mode, manager)
    sources = [_source(array, axes, cache.spec.mode, manager) for _, axes, array in _arrays(cache)]
    spec = dataclasses.replace(cache.spec, mode=mode)
    if None in sources:
        moved = _copied(cache, manager, mode, donate=donate)
    else:
        plan = plan_reshard(cache, mode, manager=manager)
        arrays = {name: array for name, _, array in _arrays(cache)}
        if isinstance(manager.mesh, AbstractMesh) and not _jax.in_trace():
            raise constraint.no_devices()
        run = _run if _jax.in_trace() else _donating if donate else _jitted
        moved = run(plan, manager.mesh, arrays)
        if run is _donating:
            # What XLA could not write into, as shards of other sizes, it left alone.
            for name, array in arrays.items():
                if array is not moved[name] and not array.is_deleted():
                    array.delete()
    anything: Any = cache
    laid: C = dataclasses.replace(anything, spec=spec, **moved)
    return laid


def _wanted(
    cache: Any, mode: str | None, manager: PartitionManager | None
) -> tuple[PartitionManager, str]:
    if not isinstance(cache, KVCache):
        raise CacheError(
            f"cache is {type(cache).__name__}, not a cache",
            path="cache",
            fix="make one with caches.init",
        )
    if manager is not None and not isinstance(manager, PartitionManager):
        raise CacheError(
            f"manager is {type(manager).__name__}", path="manager", fix="pass a PartitionManager"
        )
    manager = context.current() if manager is None else manager
    if manager is None:
        raise CacheError(
            "no manager says where a cache lies",
            path="manager",
            fix="pass manager=, or call it within `with manager:`",
        )
    said = mode if mode is not None else manager.mode
    if said is None:
        raise CacheError(
            "neither the call nor the manager names a mode",
            path="mode",
            fix='say one, such as "decode"',
        )
    return manager, parse_mode(said)


def _arrays(cache: Any) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yield the name, the annotation and the value of every array."""
    axes = cache.axes()
    for field in dataclasses.fields(cache):
        value = getattr(cache, field.name)
        if not field.metadata.get("static") and value is not None:
            yield field.name, getattr(axes, field.name), value


def _source(
    array: Any, axes: tuple[str, ...], mode: str | None, manager: PartitionManager
) -> PartitionSpec | None:
    """Return where an array lies on the manager's mesh; None where it lies elsewhere."""
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if sharding is not None:
        same = isinstance(sharding, NamedSharding) and _same_mesh(sharding.mesh, manager.mesh)
        return sharding.spec if same and isinstance(sharding, NamedSharding) else None
    ambient = context.current()
    if mode is None or (ambient is not None and not _same_mesh(ambient.mesh, manager.mesh)):
        return None
    return Shards(manager=ambient or manager, mode=mode).spec(axes, array.shape)


def _same_mesh(a: Mesh | AbstractMesh, b: Mesh | AbstractMesh) -> bool:
    if isinstance(a, Mesh) and isinstance(b, Mesh):
        return a == b
    return dict(a.shape) == dict(b.shape)


def _without_ones(spec: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec:
    return spec_of(
        *(
            tuple(name for name in entry_names(entry) if sizes[name] > 1)
            for entry in spec.partitions
        )
    )


def _copied(
    cache: KVCache, manager: PartitionManager, mode: str, *, donate: bool
) -> dict[str, jax.Array]:
    if _jax.in_trace():
        what = "a cache moves to another mesh, or from none, only outside of jit"
        raise CacheError(what, path="manager", fix="call reshard between the compiled steps")
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    shards = Shards(manager=manager, mode=mode)
    with manager:  # the cache comes from under another one, which may be the ambient one
        specs = {}
        for name, axes, array in _arrays(cache):
            shards.check_order(cache.spec.order, axes, array.shape)
            specs[name] = shards.spec(axes, array.shape)
    copied = {}
    for name, _, array in _arrays(cache):
        copied[name] = jax.device_put(array, NamedSharding(manager.mesh, specs[name]))
        # On a device that both have, the copy may be the array itself.
        if (
            donate
            and isinstance(array, jax.Array)
            and array.sharding.device_set.isdisjoint(copied[name].sharding.device_set)
        ):
            array.delete()
    return copied


def _run(
    plan: Relayout, mesh: Mesh | AbstractMesh, arrays: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    return {array.name: _move(arrays[array.name], array, mesh) for array in plan.arrays}


_jitted = functools.partial(jax.jit, static_argnums=(0, 1))(_run)
_donating = functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)(_run)


def _move(x: jax.Array, array: ArrayMoves, mesh: Mesh | AbstractMesh) -> jax.Array:
    if array.moves:
        sizes = dict(mesh.shape)
        x = call_on_shards(
            lambda shard: run_moves(shard, array.moves, sizes),
            (x,),
            (array.source,),
            out_specs=array.target,
            mesh=mesh,
        )
    laid: jax.Array = constraint.place(
        x, constraint.make_placement(array.target, mesh, _jax.ambient_mesh())
    )
    return laid
