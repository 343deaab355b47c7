"""Plan how a tree of arrays moves to other shardings: the bytes sent and the peak memory.

`plan_reshard` and `shardwright.reshard.move.reshard` are methods of the manager.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from shardwright.errors import Problem, ShardingError, StrategyError, raise_problems
from shardwright.manager import trees
from shardwright.manager.core import Manager
from shardwright.manager.memory import DEVICE, is_host
from shardwright.reshard import checks
from shardwright.reshard.pieces import parse_bytes
from shardwright.reshard.route import Route, Way, find_route, local_dtype
from shardwright.resolution.partition_specs import spec_text
from shardwright.trees.paths import is_array_spec, path_text
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.read import read_value
from shardwright.vocabulary.shown import data_of, text_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafMove:
    """How one array of a tree moves.

    Attributes:
      path: Path of the array in the tree.
      source: The place of the array before the move: a spec, `host`, or `one device`.
      target: Spec after the move.
      route: How the array moves.
      to_host: Whether the devices copy their shards to host memory after the move.
      tied_to: Path of the first place of the same array in the tree, or empty. The array moves
        once, and the result is at all of its places.
    """

    path: str
    source: str
    target: str
    route: Route
    to_host: bool = False
    tied_to: str = ""

    @property
    def copies(self) -> bool:
        """Whether the result has memory of its own."""
        return self.route.moves or self.to_host

    @property
    def moves(self) -> bool:
        """Whether a program runs or bytes are sent for this leaf."""
        return self.copies and not self.tied_to


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """How a tree moves. `print(plan)` shows a table. Bytes are summed over all devices.

    Attributes:
      leaves: One entry per array, in the order of the tree.
      order: Positions of the leaves in the order in which they move.
      piece: Limit of the bytes of a piece of a leaf.
      donate: Whether each source array is deleted after its leaf has moved.
    """

    leaves: tuple[LeafMove, ...]
    order: tuple[int, ...]
    piece: int
    donate: bool

    @property
    def bytes_sent(self) -> int:
        """Bytes that devices send to other devices, or that the host sends."""
        return sum(leaf.route.bytes_sent for leaf in self.leaves if leaf.moves)

    @property
    def least_bytes(self) -> int:
        """Bytes of the target shards that their devices do not hold before the move.

        No move sends fewer bytes.
        """
        return sum(leaf.route.least_bytes for leaf in self.leaves if leaf.moves)

    @property
    def bytes_to_host(self) -> int:
        """Bytes that devices copy to host memory."""
        return sum(leaf.route.target_bytes for leaf in self.leaves if leaf.to_host and leaf.moves)

    @property
    def source_bytes(self) -> int:
        """Bytes of all device arrays before the move."""
        return sum(leaf.route.source_bytes for leaf in self.leaves if not leaf.tied_to)

    @property
    def target_bytes(self) -> int:
        """Bytes of all arrays after the move."""
        return sum(leaf.route.target_bytes for leaf in self.leaves if not leaf.tied_to)

    @property
    def peak_growth(self) -> int:
        """Upper bound of the growth of the bytes on all devices together during the move."""
        return max((now for now, _ in self._growth()), default=0)

    @property
    def peak_per_device(self) -> int:
        """Upper bound of the bytes of this tree that one device holds at one time."""
        return max((int(held.max()) for _, held in self._growth()), default=0)

    @property
    def host_bytes(self) -> int:
        """Upper bound of the temporaries on the host, for leaves that move from the host."""
        sizes = [leaf.route.pieces.bytes for leaf in self.leaves if leaf.route.way is Way.UPLOAD]
        return max(sizes, default=0)

    def _growth(self) -> list[tuple[int, Any]]:
        """Return (growth of the bytes on all devices, bytes on each device) for each leaf.

        Both are upper bounds, which hold at every moment while the leaf moves.
        """
        routes = [leaf.route for leaf in self.leaves if not leaf.tied_to]
        devices = sorted({number for route in routes for number in _devices(route)})
        place = {device: at for at, device in enumerate(devices)}
        held = np.zeros(len(devices), np.int64)
        for route in routes:
            held[_at(route, place, source=True)] += _source_share(route)
        before = int(held.sum())
        peaks = [(0, held.copy())] if routes else []
        for index in self.order:
            leaf = self.leaves[index]
            if not leaf.moves:
                continue
            route = leaf.route
            ends = _at(route, place, source=False)
            arrives = route.target_bytes // len(route.target.devices) if route.moves else 0
            held[ends] += arrives
            peak = held.copy()
            peak[ends] += -(-route.temporary_bytes // len(route.target.devices))
            peaks.append((int(held.sum()) - before + route.temporary_bytes, peak))
            if leaf.to_host:
                held[ends] -= arrives
            if self.donate:
                held[_at(route, place, source=True)] -= _source_share(route)
        return peaks

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return data_of(self)

    def __str__(self) -> str:
        return text_of(self)


def _devices(route: Route) -> tuple[int, ...]:
    own = route.source.devices if route.source else ()
    return (*own, *route.target.devices)


def _at(route: Route, place: dict[int, int], *, source: bool) -> list[int]:
    grid = route.source if source else route.target
    return [place[device] for device in grid.devices] if grid else []


def _source_share(route: Route) -> int:
    return route.source_bytes // len(route.source.devices) if route.source else 0


def plan_reshard(
    manager: Manager,
    tree: Any,
    specs: Any,
    *,
    source: Any = None,
    piece: int | str = "64MiB",
    donate: bool = False,
    dtype: Any = None,
) -> ReshardPlan:
    """Return how `reshard` would move a tree; see `PartitionManager.plan_reshard`."""
    targets = target_shardings(manager, tree, specs)
    sources = None if source is None else source_shardings(source, tree, specs)
    return plan_moves_of(tree, targets, sources=sources, piece=piece, donate=donate, dtype=dtype)


def target_shardings(manager: Manager, tree: Any, specs: Any) -> Any:
    """Return the target shardings of a tree. `specs` are annotations or shardings."""
    shardings = _shardings_in(specs)
    if shardings is not None:
        return shardings
    return trees.shardings(manager, _with_shapes(tree), specs)


def source_shardings(source: Any, tree: Any, specs: Any) -> Any:
    """Return the shardings of a tree before the move. `source` is a manager or the shardings.

    Raises:
      StrategyError: `source` is neither a manager nor shardings, or `source` is a manager and
        `specs` are shardings.
    """
    if isinstance(source, Manager):
        if _shardings_in(specs) is not None:
            raise StrategyError(
                "specs are shardings, so source= cannot be a manager",
                path="source",
                fix="pass the shardings of the source, or annotations as specs",
            )
        return trees.shardings(source, _with_shapes(tree), specs)
    shardings = _shardings_in(source)
    if shardings is not None:
        return shardings
    raise StrategyError(
        f"source has the type {type(source).__name__}",
        path="source",
        fix="pass a PartitionManager or a tree of shardings",
    )


def plan_moves_of(
    tree: Any,
    targets: Any,
    *,
    sources: Any = None,
    piece: int | str = "64MiB",
    donate: bool = False,
    dtype: Any = None,
) -> ReshardPlan:
    """Plan a move to a tree of shardings. For the other arguments, see `plan_reshard`."""
    limit = parse_bytes(piece)
    if dtype is not None:
        dtype = read_value("dtype", dtype, checks.FLOATS, error=ShardingError)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_array_spec)
    after = _flattened(structure, targets, "specs")
    before = [None] * len(pairs) if sources is None else _flattened(structure, sources, "source")
    leaves: list[LeafMove] = []
    problems: list[Problem] = []
    # One array may move to two shardings, so the target is part of the key.
    first: dict[tuple[int, Sharding], str] = {}
    for (key_path, value), target, source in zip(pairs, after, before, strict=True):
        path = path_text(key_path)
        try:
            leaf = _plan_leaf(path, value, target, source, limit=limit, dtype=dtype)
        except ShardingError as error:
            problems += [
                dataclasses.replace(problem, path=problem.path or path)
                for problem in error.problems
            ]
            continue
        # Python shares small integers, so equal ids of two numbers do not make them one tied leaf.
        if isinstance(value, jax.Array | np.ndarray):
            tied = first.setdefault((id(value), target), path)
            leaf = leaf if tied == path else dataclasses.replace(leaf, tied_to=tied)
        leaves.append(leaf)
    raise_problems(problems)
    # With donation, first move the leaves that shrink: they make room for the leaves that grow.
    growth = [donate * (leaf.route.target_bytes - leaf.route.source_bytes) for leaf in leaves]
    order = sorted(range(len(leaves)), key=growth.__getitem__)
    return ReshardPlan(leaves=tuple(leaves), order=tuple(order), piece=limit, donate=donate)


def _plan_leaf(
    path: str, value: Any, target: Any, source: Any, *, limit: int, dtype: np.dtype | None
) -> LeafMove:
    if not isinstance(target, NamedSharding):
        raise ShardingError(
            f"the target has the type {type(target).__name__}",
            fix="move to a jax.sharding.NamedSharding",
        )
    raise_problems(checks.check_value(path, value))
    if source is None:
        raise_problems(checks.check_alive(path, value))
    where = source if source is not None else where_is(value, target)
    shape, own = plain_type(value)
    # Step counters, token ids and the like keep their dtype.
    is_cast = dtype is not None and jnp.issubdtype(own, jnp.floating)
    to_dtype = dtype if is_cast else own
    to_host = is_host(target.memory_kind)
    goal = on_device(target)
    if to_host and own == to_dtype and where == target:
        to_host, where = False, goal  # the array stays in host memory
    elif where is not None and is_host(where.memory_kind):
        where = None
    route = find_route(shape, own, to_dtype, where, goal, limit)
    if route.moves and not checks.is_wide_enough(own):
        raise ShardingError(
            f"the collectives of XLA do not take arrays of {own}",
            fix="move the array with jax.device_put(x, sharding), or move it as int8",
        )
    place = "one device" if isinstance(where, SingleDeviceSharding) else str(where)
    if isinstance(where, NamedSharding):
        place = spec_text(where.spec)
    return LeafMove(
        path=path,
        source="host" if where is None else place,
        target=spec_text(target.spec) + (" on host" if is_host(target.memory_kind) else ""),
        route=route,
        to_host=to_host,
    )


def on_device(target: NamedSharding) -> NamedSharding:
    """Return a sharding in device memory, in which the programs of a move write their results."""
    return target.with_memory_kind(DEVICE) if is_host(target.memory_kind) else target


def plain_type(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype of a leaf or, for PRNG keys, of their key data."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
        return tuple(data.shape), np.dtype(data.dtype)
    return tuple(value.shape), local_dtype(np.dtype(value.dtype))


def where_is(value: Any, target: NamedSharding) -> Sharding | None:
    """Return the sharding of a leaf. Return None if it must be copied from the host.

    A NumPy array and an array on another platform must be copied.

    Raises:
      ShardingError: The sharding of the leaf is unknown.
    """
    if isinstance(value, jax.core.Tracer):
        raise ShardingError(
            "the leaf is a traced value, and reshard moves arrays between compiled steps",
            fix="call reshard outside jit; inside jit, constrain the value with sw.shard",
        )
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        if isinstance(value, jax.ShapeDtypeStruct | ArraySpec):
            raise ShardingError(
                "the current sharding of the leaf is unknown",
                fix="pass source=, a manager or a tree of shardings",
            )
        return None
    if isinstance(value, jax.Array) and isinstance(target.mesh, Mesh):
        platforms = {device.platform for device in target.mesh.devices.flat}
        if not platforms & {device.platform for device in value.devices()}:
            return None
    own: Sharding = sharding
    return own


def _shardings_in(tree: Any) -> Any:
    """Return a tree of shardings, or None if a leaf neither is nor has a sharding."""
    leaves, structure = jax.tree.flatten(tree)
    found = [
        leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None) for leaf in leaves
    ]
    if not found or not all(isinstance(each, Sharding) for each in found):
        return None
    return jax.tree.unflatten(structure, found)


def _with_shapes(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf),
        tree,
        is_leaf=is_array_spec,
    )


def _flattened(structure: Any, tree: Any, name: str) -> list[Any]:
    try:
        leaves: list[Any] = structure.flatten_up_to(tree)
    except ValueError as error:
        raise StrategyError(
            "the tree of shardings and the tree of arrays have different structures",
            path=name,
            fix="pass one sharding for each array",
        ) from error
    return leaves
