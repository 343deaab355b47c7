"""Shard activations and gather weights under the ambient manager; without a manager, do nothing.

`sw.shard` and `sw.gather` raise an error without a manager. These functions do not, so that a layer
also runs without a manager, on one device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from shardwright import _jax
from shardwright.errors import LayerError, Problem, RankMismatchError, raise_problems
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.request import ShardingRequest
from shardwright.vocabulary.axes import BATCH, EMBED, LENGTH, QUERY_LENGTH, VOCAB, Role, axis_label

RESIDUAL = (BATCH, LENGTH, EMBED)
OPERAND = (BATCH, QUERY_LENGTH, EMBED)


def is_inside_shard_map() -> bool:
    """Tell whether a surrounding `shard_map` has made mesh axes Manual.

    A `shard_map` over some mesh axes, such as the pipeline's over pp, does not split arrays that
    only other mesh axes shard. `is_shard` and `split_over` tell which arrays it splits.
    """
    mesh = _jax.ambient_mesh()
    return mesh is not None and bool(mesh.manual_axes)


def is_shard(
    shape: Any,
    axes: Any,
    *,
    role: Role | None = None,
    path: str | None = None,
    manager: PartitionManager | None = None,
) -> bool:
    """Tell whether a surrounding `shard_map` has split an array.

    Without a manager this is unknown, so the answer is True for each array inside a `shard_map`.
    The arguments are those of `split_over`.
    """
    if manager is None and context.current() is None:
        return is_inside_shard_map()
    return any(split_over(shape, axes, role=role, path=path, manager=manager))


def split_over(
    shape: Any,
    axes: Any,
    *,
    role: Role | None = None,
    path: str | None = None,
    manager: PartitionManager | None = None,
) -> list[tuple[str, ...]]:
    """Return, for each dim of an array, the mesh axes over which a `shard_map` has split it.

    The split is known only from the rules of a manager, so without a manager no dim counts as
    split.

    Args:
      shape: Shape of the array, or of its shard.
      axes: Annotation.
      role: Role of the array. Defaults to activation.
      path: Path of a weight.
      manager: Manager whose rules are read. Defaults to the ambient one. A backward pass has no
        ambient manager, so pass it there.
    """
    manager = context.current() if manager is None else manager
    if manager is None or not is_inside_shard_map():
        return [()] * len(shape)
    manual = manager.manual_axes(_jax.ambient_mesh())
    policy = manager.rules.policy
    added = policy.largest_dim
    if role is Role.USE and added is not None and {*added.mesh_axes} <= {*policy.gather}:
        # Leave `largest_dim` out: it needs global sizes to choose a dim, and the dim that it shards
        # is gathered before use.
        rules = dataclasses.replace(
            manager.rules, policy=dataclasses.replace(policy, largest_dim=None)
        )
        manager = manager.having(rules=rules)
    resolution = manager.answer(ShardingRequest(axes, tuple(shape), None, role, path, manual))
    resolution.require()
    return [decision.manual for decision in resolution.decisions]


def split_problems(
    shape: Any,
    axes: Any,
    only: Any = None,
    *,
    name: str,
    path: str | None = None,
    role: Role = Role.USE,
) -> list[Problem]:
    """Return one problem for each dim of an array that a `shard_map` splits.

    Layers do not communicate inside a `shard_map`, so they would compute the result of one shard
    alone.

    Args:
      shape: Shape of the array.
      axes: Axes of the array.
      only: The axes that may not be split. Defaults to all.
      name: Name of the array.
      path: Path of a weight in the model, or None.
      role: Role of the array. Defaults to that of a gathered weight.
    """
    split = split_over(shape, axes, role=role, path=path)
    return [
        Problem(
            error=LayerError,
            what=f"a shard_map has split {axis_label(axis)} over {'+'.join(names)}, and this "
            f"function does not sum over {'+'.join(names)}",
            path=path or name,
            fix=f"call this outside of that shard_map, or leave {' and '.join(names)} out of its "
            "axis_names",
        )
        for axis, names in zip(axes, split, strict=True)
        if names and (only is None or axis in only)
    ]


def check_vocabulary(weight: Any, axes: Any, tokens: Any, *, name: str, path: str | None) -> None:
    """Check that no `shard_map` splits the vocabulary of a weight, as far as this can be known.

    Args:
      weight: The gathered weight.
      axes: Axes of the weight.
      tokens: Tokens or labels.
      name: Name of the weight.
      path: Path of the weight in the model, or None.

    Raises:
      LayerError: A `shard_map` splits the vocabulary. Or no manager is entered, and the weight
        varies over mesh axes that the tokens do not vary over.
    """
    if not is_inside_shard_map():
        return
    raise_problems(split_problems(weight.shape, axes, (VOCAB,), name=name, path=path))
    # Devices that divide a vocabulary among them have different parts of it, but the same tokens.
    # So the weight varies over a mesh axis that the tokens do not vary over.
    unknown = sorted(_jax.varying_axes(weight) - _jax.varying_axes(tokens))
    if context.current() is None and unknown:
        raise LayerError(
            f"it varies over {'+'.join(unknown)}, and the tokens do not: it may be a part of VOCAB",
            path=path or name,
            fix="call this outside of the shard_map, or enter a manager, whose rules say what "
            f"{' and '.join(unknown)} shards",
        )


def place(x: Any, axes: Any) -> Any:
    """Shard an activation as `sw.shard` does, if a manager is ambient."""
    manager = context.current()
    return x if manager is None else manager.shard(x, axes)


def use(params: Any, specs: Any, *, path: str | None = None) -> Any:
    """Gather stored weights as `sw.gather` does, if a manager is ambient.

    Args:
      params: A weight, or a tree of them.
      specs: The `ArraySpec`s of `params`.
      path: Path of the tree in the model, required if the strategy has `[[tensors]]` entries.
    """
    # Under FSDP, the spec of a stored weight differs from that of its use, so gather the weight
    # here.
    manager = context.current()
    return params if manager is None else manager.gather(params, specs, path=path)


def element(x: Any, at: tuple[int, ...]) -> Any:
    """Return `x[at]`, also if the indexed dims are sharded over Explicit mesh axes."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x[at]
    spec = (*sharding.spec.partitions, *[None] * x.ndim)[len(at) : x.ndim]
    return x.at[at].get(out_sharding=PartitionSpec(*spec))


def path_of(parent: str | None, name: object) -> str | None:
    """Return the path of a part, given the path of its parent; None if that path is None."""
    return None if parent is None else f"{parent}/{name}"


def check_rows(name: str, x: Any, embed: int) -> None:
    """Raise RankMismatchError unless an argument is `[batch, length, embed]`."""
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != 3 or shape[-1] != embed:
        fix = f"pass [batch, length, {embed}]: the residual, or the output of an encoder"
        raise RankMismatchError(f"{name} has shape {shape}", path=name, fix=fix)


def check_residual(x: Any, embed: int) -> None:
    """Check the shape and the dtype of a residual.

    Raises:
      RankMismatchError: The residual is not `[batch, length, embed]`.
      LayerError: Its dtype is not a float dtype, so what a block adds would be cut to integers. Or
        a `shard_map` has split LENGTH and QUERY_LENGTH over different mesh axes, and a block cannot
        gather the residual inside of that `shard_map`.
    """
    check_rows("x", x, embed)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise LayerError(
            f"x is {x.dtype}", path="x", fix="pass floats: tokens go through layers.embedding first"
        )
    before, after = (split_over(x.shape, axes)[1] for axes in (RESIDUAL, OPERAND))
    if before != after:
        raise LayerError(
            f"a shard_map has split LENGTH over {'+'.join(before) or '-'}, and QUERY_LENGTH over "
            f"{'+'.join(after) or '-'}: a block gathers the residual only outside of a shard_map",
            path="x",
            fix=f"call the block outside of that shard_map, or leave {'+'.join(before or after)} "
            "out of its axis_names",
        )
