"""Bytes of a tree of arrays by path: what a device holds, how much of it other devices hold too, and over which mesh axes.

Exact, from shapes, dtypes and shardings alone: abstract meshes and arrays that do not exist yet will do. All counts are bytes
of the arrays' elements; what a backend adds around them (tiling, alignment) is not in it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardwright.errors import Problem, ShardingError, StrategyError, raise_problems
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_names
from shardwright.trees.paths import compile_pattern, path_text
from shardwright.trees.tensors import whole_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafBytes:
    """What one array takes.

    Attributes:
      path: the array's path.
      shape: global shape.
      dtype: element type as text, for instance `bfloat16`.
      spec: where it lies; None under a sharding that has no spec.
      devices: number of devices that hold a part of it.
      total: bytes of one copy of the whole array.
      per_device: bytes that each device holds.
      copies: how many devices hold the same element.
      replicated_over: mesh axes of more than one device along which copies lie, in mesh order.
      memory_kind: `pinned_host` and the like where the sharding names one, else empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None
    devices: int
    total: int
    per_device: int
    copies: int
    replicated_over: tuple[str, ...] = ()
    memory_kind: str = ""

    @property
    def held(self) -> int:
        """Bytes on all devices together, copies included."""
        return self.per_device * self.devices

    @property
    def replicated(self) -> int:
        """Bytes on all devices together beyond the first copy: what full sharding would save."""
        return self.per_device * (self.devices - self.devices // self.copies)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain data; the spec has one list of mesh axes per entry."""
        spec = (
            None
            if self.spec is None
            else [list(entry_names(entry)) for entry in self.spec.partitions]
        )
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {"shape": list(self.shape), "replicated_over": list(self.replicated_over)}
        return {**data, **lists, "spec": spec, "held": self.held, "replicated": self.replicated}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeBytes:
    """What a tree takes: one entry per array, in flattening order, and their sums."""

    leaves: tuple[LeafBytes, ...]

    @property
    def total(self) -> int:
        """Bytes of one copy of every array."""
        return sum(leaf.total for leaf in self.leaves)

    @property
    def per_device(self) -> int:
        """Bytes that each device holds."""
        return sum(leaf.per_device for leaf in self.leaves)

    @property
    def held(self) -> int:
        """Bytes on all devices together, copies included."""
        return sum(leaf.held for leaf in self.leaves)

    @property
    def replicated(self) -> int:
        """Bytes on all devices together beyond the first copy of each array."""
        return sum(leaf.replicated for leaf in self.leaves)

    @property
    def replicated_share(self) -> float:
        """Replicated bytes by all bytes held: 0 where every array is sharded over all devices, 7/8 where eight hold the same."""
        return self.replicated / self.held if self.held else 0.0

    def select(self, pattern: str) -> TreeBytes:
        """Return the arrays whose path a pattern is found in (`re.search`).

        Raises:
          StrategyError: it is no regular expression.
        """
        compiled = compile_pattern(pattern)
        return TreeBytes(leaves=tuple(leaf for leaf in self.leaves if compiled.search(leaf.path)))

    def most_replicated(self) -> TreeBytes:
        """Return the arrays that have copies, those with most replicated bytes first."""
        found = sorted(
            (leaf for leaf in self.leaves if leaf.replicated), key=lambda leaf: -leaf.replicated
        )
        return TreeBytes(leaves=tuple(found))

    def to_json(self) -> dict[str, Any]:
        """Return sums and arrays as plain data."""
        names = ("total", "per_device", "held", "replicated", "replicated_share")
        return {
            **{name: getattr(self, name) for name in names},
            "leaves": [leaf.to_json() for leaf in self.leaves],
        }


def bytes_by_path(tree: Any, shardings: Any = None) -> TreeBytes:
    """Count the bytes of every array of a tree, on paper: nothing is computed or moved.

    Args:
      tree: arrays, `ShapeDtypeStruct`s with shardings, or with `shardings` anything that has a shape and a dtype.
      shardings: a tree of shardings, or of prefixes; absent: the arrays' own.

    Raises:
      StrategyError: leaves without a sharding, or with one that does not fit or leaves a dim to the compiler; all at once.

    >>> from shardwright import abstract_mesh
    >>> everywhere = NamedSharding(abstract_mesh("dp:8"), PartitionSpec())
    >>> found = bytes_by_path({"w": jax.ShapeDtypeStruct((4, 4), "float32", sharding=everywhere)})
    >>> found.total, found.per_device, found.replicated, found.leaves[0].replicated_over
    (64, 64, 448, ('dp',))
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    lies = (
        [getattr(leaf, "sharding", None) for _, leaf in pairs]
        if shardings is None
        else _each(structure, tree, shardings)
    )
    found: list[LeafBytes] = []
    problems: list[Problem] = []
    for (path, leaf), sharding in zip(pairs, lies, strict=True):
        try:
            found.append(leaf_bytes(leaf, sharding, path=path_text(path)))
        except ShardingError as error:
            problems += error.problems
    raise_problems(problems)
    return TreeBytes(leaves=tuple(found))


def leaf_bytes(value: Any, sharding: Any, *, path: str = "") -> LeafBytes:
    """Count the bytes of one array under a sharding.

    Raises:
      StrategyError: as `bytes_by_path` does.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise StrategyError(
            f"{type(value).__name__} has no shape and dtype",
            path=path,
            fix="pass arrays or ShapeDtypeStructs",
        )
    if not isinstance(sharding, Sharding):
        fix = "pass shardings=pm.shardings(...), or arrays from pm.shard or pm.abstract"
        raise StrategyError(
            f"{type(value).__name__} of shape {tuple(value.shape)} has no sharding",
            path=path,
            fix=fix,
        )
    shape = tuple(value.shape)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    if spec is not None and UNCONSTRAINED in spec.partitions:
        raise StrategyError(
            f"{spec} leaves a dim to the compiler, so its bytes are not known",
            path=path,
            fix="say where every dim lies",
        )
    over = _replicated_over(sharding)
    return LeafBytes(
        path=path,
        shape=shape,
        dtype=_dtype_text(value.dtype),
        spec=spec,
        devices=sharding.num_devices,
        total=whole_bytes(math.prod(shape), value.dtype),
        per_device=whole_bytes(math.prod(_shard_shape(sharding, shape, path)), value.dtype),
        copies=_copies(sharding, shape)
        if over is None
        else math.prod(sharding.mesh.shape[axis] for axis in over),  # type: ignore[attr-defined]
        replicated_over=over or (),
        memory_kind="" if sharding.memory_kind in (None, "device") else sharding.memory_kind,
    )


def _each(structure: Any, tree: Any, shardings: Any) -> list[Any]:
    """Return the sharding of each array, where one may cover a whole subtree."""
    ones, outer = jax.tree.flatten(shardings, is_leaf=_is_sharding)
    try:
        parts = outer.flatten_up_to(tree)  # type: ignore[attr-defined]
    except ValueError as error:
        what = f"the tree of shardings does not fit the tree: {str(error).splitlines()[0]}"
        raise StrategyError(what, fix="pass pm.shardings(...) of the same tree") from error
    found = [
        one
        for one, part in zip(ones, parts, strict=True)
        for _ in range(len(jax.tree.leaves(part)))
    ]
    assert len(found) == structure.num_leaves
    return found


def _is_sharding(value: object) -> bool:
    return isinstance(value, Sharding)


def _replicated_over(sharding: Sharding) -> tuple[str, ...] | None:
    """Return the mesh axes that hold copies; None where the sharding names no mesh axes."""
    if not isinstance(sharding, NamedSharding):
        return None
    # Along an unreduced axis every device holds a summand of its own: no copy.
    named = {axis for entry in sharding.spec.partitions for axis in entry_names(entry)} | set(
        sharding.spec.unreduced
    )
    return tuple(
        axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in named
    )


def _copies(sharding: Sharding, shape: tuple[int, ...]) -> int:
    places = {str(index) for index in sharding.devices_indices_map(shape).values()}
    return sharding.num_devices // len(places)


def _shard_shape(sharding: Sharding, shape: tuple[int, ...], path: str) -> tuple[int, ...]:
    try:
        return sharding.shard_shape(shape)
    except ValueError as error:
        raise StrategyError(
            f"the sharding does not fit shape {shape}: {str(error).splitlines()[0]}",
            path=path,
            fix="pass the sharding of this very array",
        ) from error


def _dtype_text(dtype: Any) -> str:
    return str(
        dtype if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.numpy.dtype(dtype)
    )
