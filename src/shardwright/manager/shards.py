"""Run a function on shards: place its arguments as `shard_map` needs them, then map it.

Over Auto mesh axes `jax.shard_map` moves its arguments to their `in_specs`. Over Explicit mesh axes
it moves nothing: an argument with another sharding is an error. So the arguments are resharded
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardwright import _jax
from shardwright.manager import constraint


def place_for_shard_map(
    arguments: Sequence[Any], in_specs: Sequence[Any], *, mesh: Mesh | AbstractMesh
) -> tuple[Any, ...]:
    """Reshard arguments to their `in_specs` if the mesh has an Explicit axis.

    Otherwise return them unchanged.

    Args:
      arguments: Trees of global arrays.
      in_specs: One tree of specs per argument, of the argument's structure.
      mesh: Mesh of the specs. An ambient mesh has the same axes, and its axis types count.

    Raises:
      MeshMismatchError: A spec puts an Auto mesh axis before an Explicit one in one dimension.
    """
    ambient = _jax.ambient_mesh()
    if AxisType.Explicit not in (ambient or mesh).axis_types:
        return tuple(arguments)

    def place(x: Any, spec: PartitionSpec) -> Any:
        return constraint.place(x, constraint.make_placement(spec, mesh, ambient))

    return tuple(
        jax.tree.map(place, argument, specs)
        for argument, specs in zip(arguments, in_specs, strict=True)
    )


def call_on_shards(
    f: Callable[..., Any],
    arguments: Sequence[Any],
    in_specs: Sequence[Any],
    *,
    out_specs: Any,
    mesh: Mesh | AbstractMesh,
    check_vma: bool = True,
) -> Any:
    """Return `f(*shards)` as global arrays: call `place_for_shard_map`, then `jax.shard_map`.

    Args:
      f: Function of trees of local arrays.
      arguments: Trees of global arrays.
      in_specs: One tree of specs per argument, of the argument's structure.
      out_specs: Tree of specs of the results.
      mesh: Mesh of the specs. An ambient mesh takes its place, as nested `shard_map`s need.
      check_vma: Whether JAX tracks which mesh axes values vary over. Defaults to True.

    Raises:
      MeshMismatchError: A spec puts an Auto mesh axis before an Explicit one in one dimension.
    """
    own = mesh if _jax.ambient_mesh() is None else None
    mapped = _jax.call_shard_map(
        f, mesh=own, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=check_vma
    )
    return mapped(*place_for_shard_map(arguments, in_specs, mesh=mesh))
