"""Call `shard_map` on arguments that may have another sharding than its `in_specs`.

Over Auto mesh axes `jax.shard_map` moves its arguments to their `in_specs`. Over Explicit mesh axes
it raises an error for an argument with another sharding. So the functions of this module reshard
the arguments first.
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
      mesh: Mesh of the specs. If a mesh is ambient, its axis types apply.

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
    """Call `place_for_shard_map`, then `jax.shard_map` of `f`, and return the global results.

    Args:
      f: Function of trees of local arrays.
      arguments: Trees of global arrays.
      in_specs: One tree of specs per argument, of the argument's structure.
      out_specs: Tree of specs of the results.
      mesh: Mesh of the specs. An ambient mesh replaces it, because a nested `shard_map` requires
        that.
      check_vma: Whether JAX tracks which mesh axes values vary over. Defaults to True.

    Raises:
      MeshMismatchError: A spec puts an Auto mesh axis before an Explicit one in one dimension.
    """
    mapped = _jax.call_shard_map(
        f,
        mesh=mesh if _jax.ambient_mesh() is None else None,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        check_vma=check_vma,
    )
    return mapped(*place_for_shard_map(arguments, in_specs, mesh=mesh))
