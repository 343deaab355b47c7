"""What a model needs to be trained here, and the lines that its user writes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import numpy as np

import shardwright as sw

LENGTH: Final = 16
VOCAB: Final = 64
TOKENS: Final = np.random.default_rng(0).integers(1, VOCAB, (8, LENGTH)).astype(np.int32)
SEEDS: Final = [(sw.BATCH, sw.LENGTH)]
# Our mesh -> the sizes of (batch, weights over the batch, tensor) for the model's own rules.
MESHES: Final[Mapping[str, tuple[int, int, int]]] = {
    "fsdp:8": (1, 8, 1),
    "fsdp:4,tp:2": (1, 4, 2),
    "dp:2,tp:4": (2, 1, 4),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """A model after the lines of its user have run.

    Attributes:
      params: Its arrays, sharded.
      forward: Function of the arrays and the tokens; returns logits.
      context: The context manager in which the program runs.
    """

    params: Any
    forward: Callable[[Any, Any], Any]
    context: AbstractContextManager[Any] = dataclasses.field(default_factory=contextlib.nullcontext)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model.

    Attributes:
      name: Its name.
      source: Its repository, and the part of it that is imported.
      params: Its arrays on one device.
      forward: Function of the arrays and the tokens; returns logits.
      manager: Function of a mesh; returns the manager.
      user: The function with the lines that a user writes.
      shard: Function of a manager, which calls `user`; returns the sharded model.
      own: Function of the mesh sizes in `MESHES`; returns the shardings by the model's own rules,
        one for each array, or None if it has no rules.
      epsilon: Epsilon of AdamW.
    """

    name: str
    source: str
    params: Any
    forward: Callable[[Any, Any], Any]
    user: Callable[..., Any]
    shard: Callable[[sw.PartitionManager], Sharded]
    own: Callable[[tuple[int, int, int]], Any]
    epsilon: float = 1e-8
    manager: Callable[[str], sw.PartitionManager] = lambda mesh: sw.PartitionManager(
        sw.Strategy.preset("fsdp_tp"), mesh=sw.create_mesh(mesh)
    )

    @property
    def lines(self) -> int:
        """Number of lines in the body of `user`."""
        return len(inspect.getsource(self.user).rstrip().partition(":\n")[2].splitlines())


def bytes_by(params: Any, shardings: Any) -> int:
    """Return the bytes of parameters that one device holds."""
    total = 0
    leaves = jax.tree.leaves(params)
    for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        total += int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
    return total


def held(params: Any) -> int:
    """Return the bytes of parameters that the first device holds."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


def mesh_of(names: tuple[str, ...], sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    """Return a mesh for a model's own rules."""
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=auto)
