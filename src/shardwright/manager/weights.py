"""`gather`: constrain a stored weight to its `use` sharding, and its gradient to the stored one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardwright import _jax
from shardwright.errors import RankMismatchError, raise_problems
from shardwright.manager import context, manual_gather
from shardwright.manager.core import Manager
from shardwright.manager.memory import in_host_memory
from shardwright.manager.place import decide_array, path_required
from shardwright.manager.trees import map_leaves
from shardwright.manager.which_shard import Weight
from shardwright.resolution.request import ShardingRequest, lower_local
from shardwright.trees import annotated
from shardwright.vocabulary.annotations import (
    ArraySpec,
    read_annotation,
    tree_of_annotations,
)
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.lowering import as_shape, lower


def gather(
    manager: Manager,
    w: Any,
    axes: tuple[Any, ...],
    *,
    path: str | None = None,
    mode: str | None = None,
    shape: Any = None,
) -> Any:
    """Gather a stored weight, or a tree of them, into the sharding that computation uses."""
    if _jax.is_array(w):
        return _gather(manager, w, ShardingRequest(read_annotation(axes), shape, mode, None, path))
    prefix, shapes = f"{path}/" if path else "", iter(annotated.shapes_like(w, shape))

    def gather_leaf(leaf: annotated.Leaf) -> Any:
        leaf_path = None if path is None else prefix + leaf.path
        return _gather(
            manager,
            leaf.value,
            ShardingRequest(leaf.annotation, next(shapes), mode, None, leaf_path),
        )

    return map_leaves(w, tree_of_annotations(axes), gather_leaf)


def _gather(manager: Manager, w: Any, request: ShardingRequest) -> Any:
    """Gather one weight. The shape of the request is the caller's `shape`, or None."""
    local, ambient = np.shape(w), jax.sharding.get_abstract_mesh()
    annotation, shape = request.annotation, request.shape
    if isinstance(annotation, ArraySpec):
        shape = annotation.shape if shape is None else shape
        # `lower` raises an error if the shape is not that of the spec. Inside `shard_map` the value
        # is a shard, so compare only a shape that the caller passes.
        lower(annotation, as_shape(shape) if ambient.manual_axes else local)
        annotation = annotation.axes
    shape = None if shape is None else as_shape(shape)
    # Without rules by path, all layers of a model share one entry of the cache.
    path = request.path if request.path is not None and manager.reads_paths else None
    key: Any = ("gather", annotation, local, shape, request.mode, path, ambient)
    if ambient.manual_axes:
        if in_host_memory(w):
            w = jax.device_put(w, jax.memory.Space.Device)
        request = request._replace(annotation=annotation, shape=shape)
        varying = _jax.varying_axes(w) if _jax.tracks_varying() else None
        # `find_split` also reads `varying` and INPUTS, so they are a part of the key.
        key = (*key, varying, context.INPUTS.value)
        plan = manager.cache[key]
        if plan is None:
            plan = manager.cache.keep(key, _plan_gather(manager, request, local, varying))
        return plan(w)
    if shape not in (None, local):
        what = f"the weight has shape {local}, but shape= is {shape}"
        fix = "omit shape=: outside shard_map every shape is global"
        raise RankMismatchError(what, path=request.path or "", fix=fix)
    both = manager.cache[key]
    if both is None:
        request = request._replace(annotation=annotation)
        both = [decide_array(manager, request.of(role, local)) for role in (Role.USE, Role.PARAM)]
        manager.cache.keep(key, both)
    return manager.effect.gather(w, *both)


def _plan_gather(
    manager: Manager,
    request: ShardingRequest,
    local: tuple[int, ...],
    varying: frozenset[str] | None,
) -> manual_gather.ManualGather:
    manual = manager.manual_axes(_jax.ambient_mesh())
    dims = lower_local(request.annotation, local, manager.rules)
    if request.path is None:
        raise_problems(path_required(request, manager.rules, local=local))
    weight = Weight(
        resolve=lambda role, shape: manager.answer(request.of(role, shape)),
        dims=dims,
        local=local,
        shape=None if request.shape is None else tuple(request.shape),
        varying=varying,
        # A mesh axis of size 1 splits nothing, and would multiply the trials of `find_split`.
        manual={axis: size for axis, size in manager.sizes.items() if axis in manual and size > 1},
        path=request.path or "",
    )
    return manual_gather.plan_gather(weight, context.INPUTS.value, mesh=manager.mesh)
