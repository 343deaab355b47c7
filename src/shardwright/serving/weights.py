"""Replace the weights of a running engine: move new ones to the shardings of the old ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardwright.errors import Problem, ServingError, raise_problems
from shardwright.reshard.move import move_tree
from shardwright.reshard.tree import ReshardPlan, plan_moves_of
from shardwright.trees.paths import path_text

Version = int | str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of an update of the weights.

    Attributes:
      version: The version that the engine serves now.
      plans: How the weights moved: a plan for decode, and another one if prefill has its own
        weights. Weights that are not sharded have no plan.
    """

    version: Version
    plans: tuple[ReshardPlan, ...]

    @property
    def bytes_sent(self) -> int:
        """Bytes that devices sent to other devices, or that the host sent."""
        return sum(plan.bytes_sent for plan in self.plans)

    def __str__(self) -> str:
        heads = [str(plan).splitlines()[0] for plan in self.plans]
        return "\n".join([f"version {self.version}", *(f"  {head}" for head in heads)])


def next_version(current: Version, given: Version | None) -> Version:
    """Return the version of an update. It defaults to the next integer.

    Raises:
      ServingError: The version is not an integer or a text, it is the current one, or it is absent
        and the current one is a text.
    """
    fix = f"pass an integer or a text other than {current!r}"
    if given is None:
        if isinstance(current, str):
            what = f"no version is given, and the current one is the text {current!r}"
            raise ServingError(what, path="version", fix=fix)
        return current + 1
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise ServingError(f"version={given!r}", path="version", fix=fix)
    if given == current:
        raise ServingError(f"version={given!r} is already served", path="version", fix=fix)
    return given


def move_weights(
    new: Any, old: Any, *, name: str, piece: int | str, donate: bool
) -> tuple[Any, ReshardPlan | None]:
    """Return new weights with the shardings and dtypes of the old ones, and how they moved.

    Without `donate`, the result shares no array with `new`, so a training step may donate `new`
    afterwards. With `donate`, the result contains the arrays of `new` that are already in place.

    Args:
      new: Tree of JAX or NumPy arrays, on any mesh or none.
      old: The weights that are served now.
      name: The argument that `new` was passed as.
      piece: As in `pm.reshard`.
      donate: As in `pm.reshard`.

    Raises:
      ServingError: The trees have different structures, shapes or dtypes.
      MoveError: A piece failed. `old` is unchanged.
    """
    dtype = _common_dtype(new, old, name)
    leaves, structure = jax.tree.flatten(old)
    targets = [leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves]
    if not all(isinstance(target, NamedSharding) for target in targets):
        put = [
            _put(leaf, jnp.result_type(kept), target)
            for leaf, kept, target in zip(jax.tree.leaves(new), leaves, targets, strict=True)
        ]
        return jax.tree.unflatten(structure, put), None
    shardings = jax.tree.unflatten(structure, targets)
    plan = plan_moves_of(new, shardings, piece=piece, donate=donate, dtype=dtype)
    moved = move_tree(new, shardings, piece=piece, donate=donate, dtype=dtype)
    return moved if donate else _without_shared(moved, plan), plan


def _put(leaf: Any, dtype: Any, target: Any) -> Any:
    """Return a copy with an unsharded weight's sharding, or in host memory if `target` is None."""
    if target is None:
        return np.array(leaf, dtype)
    return jax.device_put(leaf, target, may_alias=False).astype(dtype)


def _without_shared(moved: Any, plan: ReshardPlan) -> Any:
    """Copy the leaves that were in place, because they share their memory with the source."""
    leaves, structure = jax.tree.flatten(moved)
    copies: dict[int, Any] = {}
    for at, (leaf, leaf_plan) in enumerate(zip(leaves, plan.leaves, strict=True)):
        if not leaf_plan.route.moves:
            # Tied leaves, which are the same array, share one copy.
            leaves[at] = copies.setdefault(id(leaf), jnp.copy(leaf))
    return jax.tree.unflatten(structure, leaves)


def _common_dtype(new: Any, old: Any, name: str) -> Any:
    """Return the dtype to which new floating-point weights are cast. None if there are several.

    Raises:
      ServingError: The trees have different structures, shapes or dtypes. It names all differences.
    """
    given = jax.tree_util.tree_flatten_with_path(new)[0]
    served = jax.tree_util.tree_flatten_with_path(old)[0]
    structure: Any = jax.tree.structure(new)
    if structure != jax.tree.structure(old):
        raise _different_trees([path for path, _ in given], [path for path, _ in served], name)
    dtypes = {jnp.result_type(leaf) for _, leaf in served}
    floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    common = next(iter(floats)) if len(floats) == 1 else None
    problems = []
    for (path, leaf), (_, kept) in zip(given, served, strict=True):
        own, required = jnp.result_type(leaf), jnp.result_type(kept)
        is_cast = common is not None and jnp.issubdtype(own, jnp.floating)
        if np.shape(leaf) != np.shape(kept):
            what = f"it has shape {np.shape(leaf)}, but the served weight has {np.shape(kept)}"
            fix = "pass weights of the same model"
        elif own != required and not (is_cast and required == common):
            what = f"it is {own}, but the served weight is {required}"
            fix = f"cast it to {required}"
        else:
            continue
        where = f"{name}/{path_text(path)}" if path else name
        problems.append(Problem(error=ServingError, what=what, path=where, fix=fix))
    raise_problems(problems)
    return common


def _different_trees(given: list[Any], served: list[Any], name: str) -> ServingError:
    paths = {path_text(path) for path in given}
    served_paths = {path_text(path) for path in served}
    missing, unknown = sorted(served_paths - paths), sorted(paths - served_paths)
    parts = [f"{', '.join(missing[:3])} is missing"] if missing else []
    parts += [f"{', '.join(unknown[:3])} is unknown"] if unknown else []
    return ServingError(
        "the tree differs from that of the served weights: "
        + ("; ".join(parts) or "it has other containers"),
        path=name,
        fix="pass a tree like the params of the engine",
    )
