"""Count the bytes of each array of a tree: on each device, and those of its copies.

Counts are exact, and need only shapes, dtypes and shardings, so meshes and arrays may be abstract.
The tiling and alignment of a backend are left out: only the elements of the arrays count.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardwright.errors import Problem, ShardingError, StrategyError, raise_problems
from shardwright.manager.memory import is_host
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_names
from shardwright.resolution.patterns import compile_pattern
from shardwright.trees.paths import path_text, spread
from shardwright.trees.tensors import whole_bytes
from shardwright.vocabulary.shown import data_of, text_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafBytes:
    """Bytes of one array.

    Attributes:
      path: Path of the array.
      shape: Global shape.
      dtype: Element type as text, such as `bfloat16`.
      spec: `PartitionSpec`, or None if the sharding has none.
      devices: Number of devices that hold a part of the array.
      total: Bytes of one copy of the whole array.
      per_device: Bytes on each device, or on the host for each device.
      copies: Number of devices that hold each element.
      replicated_over: Mesh axes of size > 1 that the array is replicated over, in mesh order.
      memory_kind: Memory kind of the sharding, such as `pinned_host`, or empty.
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
    def on_host(self) -> bool:
        """Whether the array is in host memory."""
        return is_host(self.memory_kind)

    @property
    def held(self) -> int:
        """Bytes on all devices, copies included."""
        return self.per_device * self.devices

    @property
    def replicated(self) -> int:
        """Bytes on all devices beyond the first copy. Full sharding would save them."""
        # `devices // copies` devices together hold one copy.
        return self.per_device * (self.devices - self.devices // self.copies)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeBytes:
    """Bytes of a tree: one entry per array, in flattening order, and sums. `print` shows a table.

    Arrays in host memory count in `total` and in `host_per_device` only.
    """

    leaves: tuple[LeafBytes, ...]

    @property
    def total(self) -> int:
        """Bytes of one copy of every array."""
        return sum(leaf.total for leaf in self.leaves)

    @property
    def per_device(self) -> int:
        """Bytes on each device."""
        return sum(leaf.per_device for leaf in self.leaves if not leaf.on_host)

    @property
    def host_per_device(self) -> int:
        """Bytes on the host for each device."""
        return sum(leaf.per_device for leaf in self.leaves if leaf.on_host)

    @property
    def held(self) -> int:
        """Bytes on all devices, copies included."""
        return sum(leaf.held for leaf in self.leaves if not leaf.on_host)

    @property
    def replicated(self) -> int:
        """Bytes on all devices beyond the first copy of each array."""
        return sum(leaf.replicated for leaf in self.leaves if not leaf.on_host)

    @property
    def replicated_share(self) -> float:
        """Replicated bytes / held bytes: 0 if fully sharded, 7/8 if 8 devices each hold a copy."""
        return self.replicated / self.held if self.held else 0.0

    def select(self, pattern: str) -> TreeBytes:
        """Return the arrays whose path matches a pattern (`re.search`).

        Raises:
          StrategyError: The pattern is not a regular expression.
        """
        compiled = compile_pattern(pattern)
        return TreeBytes(leaves=tuple(leaf for leaf in self.leaves if compiled.search(leaf.path)))

    def most_replicated(self) -> TreeBytes:
        """Return the arrays that have replicated bytes. Those with the most come first."""
        leaves = sorted(
            (leaf for leaf in self.leaves if leaf.replicated), key=lambda leaf: -leaf.replicated
        )
        return TreeBytes(leaves=tuple(leaves))

    def to_json(self) -> dict[str, Any]:
        """Return sums and arrays as plain data."""
        return data_of(self)

    def __str__(self) -> str:
        return text_of(self)


def bytes_by_path(tree: Any, shardings: Any = None) -> TreeBytes:
    """Count the bytes of every array of a tree. Nothing is computed or moved.

    Args:
      tree: Tree of arrays, or of `ShapeDtypeStruct`s with shardings. If `shardings` is given, the
        leaves only need a shape and a dtype.
      shardings: Tree of shardings, or a prefix of one. Defaults to the arrays' own.

    Raises:
      StrategyError: A leaf has no sharding, its sharding does not fit its shape, or its sharding
        leaves a dim to the compiler. The error lists all such leaves.

    >>> from shardwright import abstract_mesh
    >>> everywhere = NamedSharding(abstract_mesh("dp:8"), PartitionSpec())
    >>> found = bytes_by_path({"w": jax.ShapeDtypeStruct((4, 4), "float32", sharding=everywhere)})
    >>> found.total, found.per_device, found.replicated, found.leaves[0].replicated_over
    (64, 64, 448, ('dp',))
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaf_shardings = (
        [getattr(leaf, "sharding", None) for _, leaf in pairs]
        if shardings is None
        else _spread(tree, shardings)
    )
    leaves: list[LeafBytes] = []
    problems: list[Problem] = []
    for (path, leaf), sharding in zip(pairs, leaf_shardings, strict=True):
        try:
            leaves.append(leaf_bytes(leaf, sharding, path=path_text(path)))
        except ShardingError as error:
            problems += error.problems
    raise_problems(problems)
    return TreeBytes(leaves=tuple(leaves))


def leaf_bytes(value: Any, sharding: Any, *, path: str = "") -> LeafBytes:
    """Count the bytes of one array under a sharding.

    Raises:
      StrategyError: As for `bytes_by_path`.
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
            fix="give every dim mesh axes, or replicate it",
        )
    try:
        shard = sharding.shard_shape(shape)
    except ValueError as error:
        raise StrategyError(
            f"the sharding does not fit shape {shape}: {str(error).splitlines()[0]}",
            path=path,
            fix="pass the sharding of this array",
        ) from error
    over: tuple[str, ...] = ()
    if isinstance(sharding, NamedSharding):
        # Along an unreduced axis, each device holds its own summand, which is not a copy.
        named = {axis for entry in sharding.spec.partitions for axis in entry_names(entry)} | set(
            sharding.spec.unreduced
        )
        sizes = sharding.mesh.shape
        over = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in named)
        copies = math.prod(sizes[axis] for axis in over)
    else:
        # The key is text, because slices have no hash before Python 3.12.
        places = {str(index) for index in sharding.devices_indices_map(shape).values()}
        copies = sharding.num_devices // len(places)
    # Typed random keys have a dtype that NumPy does not know, so take it as it is.
    extended = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
    return LeafBytes(
        path=path,
        shape=shape,
        dtype=str(value.dtype if extended else jax.numpy.dtype(value.dtype)),
        spec=spec,
        devices=sharding.num_devices,
        total=whole_bytes(math.prod(shape), value.dtype),
        per_device=whole_bytes(math.prod(shard), value.dtype),
        copies=copies,
        replicated_over=over,
        memory_kind="" if sharding.memory_kind in (None, "device") else sharding.memory_kind,
    )


def _spread(tree: Any, shardings: Any) -> list[Any]:
    """Return the sharding of each array. A sharding may cover a whole subtree."""
    try:
        return spread(shardings, tree, lambda leaf: isinstance(leaf, Sharding))
    except ValueError as error:
        what = f"the tree of shardings does not fit the tree: {str(error).splitlines()[0]}"
        raise StrategyError(what, fix="pass pm.shardings(...) of the same tree") from error
