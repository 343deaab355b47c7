"""Call `shard_map` on arguments that may have another sharding than its `in_specs`.

Over Auto mesh axes `jax.shard_map` moves its arguments to their `in_specs`. Over Explicit mesh axes
it raises an error for an argument with another sharding. So the functions of this module reshard
the arguments first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from shardwright import _jax
from shardwright.manager import constraint


def place_for_shard_map(
    arguments: Sequence[Any],
    in_specs: Sequence[Any],
    *,
    mesh: Mesh | AbstractMesh,
    keep_reduced: bool = False,
) -> tuple[Any, ...]:
    """Reshard arguments to their `in_specs` if the mesh has an Explicit axis.

    Otherwise return them unchanged.

    Args:
      arguments: Trees of global arrays.
      in_specs: One tree of specs per argument, of the argument's structure.
      mesh: Mesh of the specs. If a mesh is ambient, its axis types apply.
      keep_reduced: Whether an argument that is reduced over mesh axes stays reduced, for
        `reduced_specs`. Otherwise the `shard_map` sums the gradient of the argument over these mesh
        axes.

    Raises:
      MeshMismatchError: A spec puts an Auto mesh axis before an Explicit one in one dimension.
    """
    ambient = _jax.ambient_mesh()
    if AxisType.Explicit not in (ambient or mesh).axis_types:
        return tuple(arguments)

    def place(x: Any, spec: PartitionSpec) -> Any:
        placed = constraint.place(x, constraint.make_placement(spec, mesh, ambient))
        # JAX refuses an argument that is reduced over a mesh axis, unless its `in_specs` entry is
        # reduced over this mesh axis too.
        kept = jax.typeof(placed).sharding.spec
        if keep_reduced or not kept.reduced:
            return placed
        return jax.reshard(placed, PartitionSpec(*kept.partitions))

    return tuple(
        jax.tree.map(place, argument, specs)
        for argument, specs in zip(arguments, in_specs, strict=True)
    )


def reduced_specs(arguments: Any, in_specs: Any) -> Any:
    """Return the specs of arguments, with the mesh axes that the arguments are reduced over.

    Inside the `shard_map`, cast such an argument by `_jax.vary_together`. Then its cotangent is
    unreduced: no gradient is summed over these mesh axes.
    """
    return jax.tree.map(
        lambda x, spec: PartitionSpec(
            *spec.partitions, reduced=jax.typeof(x).sharding.spec.reduced
        ),
        arguments,
        in_specs,
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
      mesh: Mesh of the specs. If a mesh is ambient, it is used instead, because a nested
        `shard_map` requires the ambient mesh.
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


def nested_shard_map(
    f: Callable[..., Any], *, in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Return `jax.shard_map` of `f` over the mesh axes that an outer `shard_map` leaves.

    The gradient of a plain `jax.shard_map` does not compile here: the residuals that its forward
    pass saves vary over the outer axes too, and get shardings that XLA refuses. So the backward
    pass is a `shard_map` of its own, which runs `f` again. Only reverse mode is supported, and only
    arguments can be differentiated, not values that `f` closes over.

    Args:
      f: Function of trees of local arrays.
      in_specs: One tree of specs per argument, of the argument's structure.
      out_specs: Tree of specs of the results, or a prefix of it.
    """

    def run(*arguments: Any) -> Any:
        ambient = _jax.ambient_mesh()
        if ambient is not None and set(ambient.axis_types) == {AxisType.Manual}:
            return f(*arguments)  # no mesh axis is left
        leaves, structure = jax.tree.flatten(arguments)
        specs = jax.tree.leaves(tuple(in_specs))
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
        float_specs, other_specs = _split(specs, is_float)

        def local(floats: list[Any], others: list[Any]) -> Any:
            given = iter(floats), iter(others)
            return f(*jax.tree.unflatten(structure, [next(given[not each]) for each in is_float]))

        def forward(floats: list[Any], others: list[Any]) -> Any:
            mapped = _over_rest(local, (float_specs, other_specs), out_specs)
            # `jax.checkpoint` makes the function one equation, which a scan over layers does not
            # split. Otherwise the scan would move the part that depends on no float out of the
            # loop, and would save residuals of this part with shardings that XLA refuses.
            return jax.checkpoint(mapped)(floats, others)

        def backward(saved: Any, cotangents: Any) -> Any:
            outputs = jax.tree.leaves(jax.tree.broadcast(out_specs, cotangents))
            kept = [leaf.dtype != jax.dtypes.float0 for leaf in jax.tree.leaves(cotangents)]

            def pull_back(floats: list[Any], others: list[Any], cotangents: list[Any]) -> Any:
                results, pull = jax.vjp(
                    lambda floats: _split(jax.tree.leaves(local(floats, others)), kept)[0], floats
                )
                return pull(list(map(_jax.vary_as, cotangents, results)))[0]

            given = (float_specs, other_specs, _split(outputs, kept)[0])
            mapped = _over_rest(pull_back, given, float_specs)
            return mapped(*saved, _split(jax.tree.leaves(cotangents), kept)[0]), None

        differentiable = jax.custom_vjp(forward)
        differentiable.defvjp(lambda *saved: (forward(*saved), saved), backward)
        return differentiable(*_split(leaves, is_float))

    return run


def _over_rest(f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return _jax.call_shard_map(f, mesh=None, in_specs=in_specs, out_specs=out_specs)


def _split(leaves: Sequence[Any], chosen: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the leaves that are chosen, and the other leaves."""
    pairs = list(zip(leaves, chosen, strict=True))
    return [leaf for leaf, yes in pairs if yes], [leaf for leaf, yes in pairs if not yes]
