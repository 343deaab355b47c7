"""Bytes that a program keeps between steps: parameters, gradients, optimizer state, caches.

Counts are exact and need neither a function nor a device. If an array is replicated over a mesh
axis, the count names the cause: the rule that shards no dim of the array over this axis.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.errors import Problem, ShardingError, StrategyError, did_you_mean, raise_problems
from shardwright.manager.core import Manager
from shardwright.manager.memory import host_kind
from shardwright.plan.memory import LeafBytes, TreeBytes, leaf_bytes
from shardwright.resolution.decisions import DimDecision, Reason, Resolution
from shardwright.resolution.free_axes import policy_notes
from shardwright.resolution.request import ShardingRequest
from shardwright.trees.paths import spread
from shardwright.trees.tensors import Tensor, is_dtype
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.shown import data_of


class Category(enum.StrEnum):
    """What an array is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    CACHE = "cache"
    INPUTS = "inputs"

    __hash__ = str.__hash__


# The role under which the arrays of a category are resolved. With None, the annotation decides the
# role.
ROLES: Final = {
    Category.PARAMETERS: Role.PARAM,
    Category.GRADIENTS: Role.PARAM,
    Category.OPTIMIZER: Role.STATE,
    Category.CACHE: Role.ACTIVATION,
    Category.INPUTS: None,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why an array is replicated over a mesh axis.

    Attributes:
      mesh_axis: The mesh axis.
      rule: The rule as written, `embed = "-"`, or "" if no rule decides.
      place: File, line and table of the rule.
      why: Why the array is not sharded over the mesh axis.
      saves: Bytes on each device that sharding the array over the mesh axis would save.
    """

    mesh_axis: str
    rule: str
    place: str
    why: str
    saves: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateLeaf:
    """One array: its category, its bytes, and why it is replicated.

    Attributes:
      category: Category of the array.
      bytes: Its bytes.
      causes: One cause per mesh axis over which the array is replicated.
    """

    category: Category
    bytes: LeafBytes
    causes: tuple[Cause, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """The arrays that a program keeps between steps.

    Attributes:
      leaves: One entry per array, in flattening order.
      missing: Arrays that are not counted, each with the reason.
    """

    leaves: tuple[StateLeaf, ...]
    missing: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[Category, ...]:
        """The categories that occur."""
        held = {leaf.category for leaf in self.leaves}
        return tuple(category for category in Category if category in held)

    def of(self, *categories: str) -> TreeBytes:
        """Return the bytes of some categories. Defaults to all categories except gradients.

        Gradients exist only during a step, so they are not among a program's arguments.
        """
        wanted = categories or [each for each in Category if each is not Category.GRADIENTS]
        return TreeBytes(
            leaves=tuple(leaf.bytes for leaf in self.leaves if leaf.category in wanted)
        )

    @property
    def stored(self) -> TreeBytes:
        """Bytes of all categories except inputs."""
        return self.of(*(each for each in Category if each is not Category.INPUTS))

    def to_json(self) -> dict[str, Any]:
        """Return sums by category and all arrays as plain data."""
        return data_of(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountedArray:
    """One array to count.

    Attributes:
      path: Its path.
      value: A value with a shape and a dtype.
      source: Its annotation as a request, or its sharding, or None if it is replicated.
      category: Category of the array. None means parameters if the array has the role param, else
        inputs.
    """

    path: str
    value: Any
    source: ShardingRequest | NamedSharding | None
    category: Category | None = None


def count_state(manager: Manager, arrays: Iterable[CountedArray]) -> StateBytes:
    """Count arrays under a manager. If there is optimizer state, add the gradients.

    A gradient has the sharding and the dtype of its parameter.

    Raises:
      ShardingError: Annotations do not resolve. The error lists all of them.
    """
    leaves: list[StateLeaf] = []
    problems: list[Problem] = []
    for array in arrays:
        try:
            leaves.append(_leaf(manager, array))
        except ShardingError as error:
            problems += error.problems
    raise_problems(problems)
    if any(leaf.category is Category.OPTIMIZER for leaf in leaves):
        leaves += gradients(leaves)
    return StateBytes(leaves=tuple(leaves))


def gradients(leaves: Iterable[StateLeaf]) -> list[StateLeaf]:
    """Return the gradients of those arrays that are parameters."""
    return [
        dataclasses.replace(leaf, category=Category.GRADIENTS)
        for leaf in leaves
        if leaf.category is Category.PARAMETERS
    ]


def count_tensors(
    manager: Manager,
    tensors: Iterable[Tensor],
    *,
    caches: Iterable[str] = (),
    copies: int = 0,
    train: bool = True,
) -> StateBytes:
    """Count named tensors under a manager, without a function.

    Args:
      manager: Strategy, mesh and mode.
      tensors: The tensors. Parameters and optimizer state are told apart by their roles.
      caches: Paths of the tensors that are caches. Other activations are not counted:
        `StateBytes.missing` lists them.
      copies: Number of arrays that an optimizer keeps for each parameter, two for Adam.
      train: Whether to add the gradients.

    Raises:
      ShardingError: Annotations do not resolve. The error lists all of them.
    """
    cached = set(caches)
    arrays: list[CountedArray] = []
    missing: list[str] = []
    for tensor in tensors:
        request = ShardingRequest(tensor.axes, tensor.shape, manager.mode, tensor.role, tensor.path)
        role = manager.answer(request).role
        reason = ""
        if role is Role.ACTIVATION and tensor.path not in cached:
            reason = "is an activation; --cache PATTERN counts it as a cache"
        elif tensor.shape is None:
            reason = "has no shape"
        elif not is_dtype(tensor.dtype):
            reason = "has no dtype"
        if reason:
            missing.append(f"{tensor.path or 'a tensor'} {reason}")
            continue
        value = jax.ShapeDtypeStruct(tensor.shape or (), tensor.dtype)
        category = Category.OPTIMIZER if role is Role.STATE else Category.PARAMETERS
        category = Category.CACHE if tensor.path in cached else category
        arrays.append(
            CountedArray(path=tensor.path, value=value, source=request, category=category)
        )
        if category is Category.PARAMETERS:
            arrays += [
                CountedArray(
                    path=f"optimizer/{number}/{tensor.path}",
                    value=value,
                    # A [[tensors]] entry that matches the parameter matches its state too.
                    source=request._replace(role=Role.STATE),
                    category=Category.OPTIMIZER,
                )
                for number in range(copies)
            ]
    counted = count_state(manager, arrays)
    # `count_state` adds gradients in every mode, but only if there is optimizer state. Here,
    # gradients are counted if `train` is set, with or without optimizer state.
    leaves = counted.leaves
    if train and Category.GRADIENTS not in counted.categories:
        leaves += tuple(gradients(leaves))
    elif not train:
        leaves = tuple(leaf for leaf in leaves if leaf.category is not Category.GRADIENTS)
    return StateBytes(leaves=leaves, missing=tuple(missing))


def read_holds(shapes: Sequence[Any], holds: Any) -> list[Category | None]:
    """Return the category of each array of the arguments, or None where `holds` names none.

    Args:
      shapes: Per argument, a tree of arrays.
      holds: Per argument, a category, None, or a tree of them. A category covers a subtree.

    Raises:
      StrategyError: `holds` does not fit the arguments, or names an unknown category.
    """
    if holds is None:
        return [None] * len(jax.tree.leaves(tuple(shapes)))
    fix = 'write one name per argument, such as holds=("parameters", "optimizer", "inputs")'
    if not isinstance(holds, (tuple, list)) or len(holds) != len(shapes):
        what = f"holds is not a tuple with one entry for each of the {len(shapes)} arguments"
        raise StrategyError(what, fix=fix)
    known = {str(category) for category in Category if category is not Category.GRADIENTS}
    categories: list[Category | None] = []
    for tree, names in zip(shapes, holds, strict=True):
        # For JAX, None is a tree without leaves. Here, None leaves the category of a subtree open.
        for name in jax.tree.leaves(names):
            if name not in known:
                hint = did_you_mean(str(name), known)
                what = f"holds names the unknown category {name!r}"
                raise StrategyError(what, fix=hint or f"categories are {', '.join(sorted(known))}")
        try:
            covers = spread(names, tree, lambda name: name is None)
        except ValueError as error:
            what = f"holds does not fit the argument: {str(error).splitlines()[0]}"
            raise StrategyError(what, fix=fix) from error
        categories += [None if name is None else Category(name) for name in covers]
    return categories


def _leaf(manager: Manager, array: CountedArray) -> StateLeaf:
    source, resolution = array.source, None
    if isinstance(source, ShardingRequest):
        resolution = manager.answer(source)
        kind = host_kind(manager.mesh, resolution.memory) if resolution.on_host else None
        sharding = NamedSharding(manager.mesh, resolution.require(), memory_kind=kind)
    else:
        sharding = source or NamedSharding(manager.mesh, PartitionSpec())
    counted = leaf_bytes(array.value, sharding, path=array.path)
    causes = tuple(_cause(resolution, counted, axis, manager) for axis in counted.replicated_over)
    # If no category is given, arrays with the role param are parameters, and all others are inputs.
    category = array.category
    if category is None:
        stored = resolution is not None and resolution.role is Role.PARAM
        category = Category.PARAMETERS if stored else Category.INPUTS
    return StateLeaf(category=category, bytes=counted, causes=causes)


def _cause(resolution: Resolution | None, counted: LeafBytes, axis: str, manager: Manager) -> Cause:
    """Return why an array is replicated over a mesh axis.

    If `policy.largest_dim` names the mesh axis, the cause is this policy, with the reason why it
    does not shard the array. Otherwise, the cause is the rule that skipped the mesh axis because a
    size does not divide. If there is no such rule, the cause is the rule of one dim: of the dims
    that the mesh axis divides, the dim with the most elements per device.
    """
    sizes, policy = manager.mesh.shape, manager.rules.policy.largest_dim
    devices = sizes[axis]
    saves = counted.per_device - -(-counted.per_device // devices)
    decisions = () if resolution is None else resolution.decisions
    if not decisions:
        why = "not annotated" if counted.shape else "a scalar"
        return Cause(mesh_axis=axis, rule="", place="", why=why, saves=saves)
    if policy is not None and axis in policy.mesh_axes:
        assert resolution is not None
        if notes := policy_notes(resolution, policy):
            ref, why = policy.ref, "; ".join(notes)
            return Cause(mesh_axis=axis, rule=ref.written, place=ref.place, why=why, saves=saves)
    for decision in decisions:
        for skip in decision.skipped:
            if skip.reason is Reason.INDIVISIBLE and axis in skip.candidate:
                return _caused(decision, axis, str(skip), saves)

    def room(decision: DimDecision) -> int:
        """Return the size of a dim on one device if the mesh axis divides it, else 0."""
        ways = math.prod(sizes[name] for name in decision.mesh_axes)
        local = counted.shape[decision.dim] // ways
        return local if local % devices == 0 else 0

    widest = max(decisions, key=room)
    why = (
        f"no candidate has {axis}" if room(widest) else f"{axis}: no dim is divisible by {devices}"
    )
    return _caused(widest, axis, why, saves)


def _caused(decision: DimDecision, axis: str, why: str, saves: int) -> Cause:
    rule = "" if decision.rule is None else decision.rule.written
    place = "" if decision.rule is None else decision.rule.place
    return Cause(mesh_axis=axis, rule=rule, place=place, why=why, saves=saves)
