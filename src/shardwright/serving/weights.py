"""Replace the weights of a running engine: move new weights to the shardings of the old weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardwright.errors import MoveError, Problem, ServingError, raise_problems
from shardwright.processes.host_data import compare_data
from shardwright.reshard import checks
from shardwright.reshard.move import move_tree
from shardwright.reshard.programs import flat_mesh
from shardwright.reshard.tree import ReshardPlan, plan_moves_of
from shardwright.serving.setup import Setup
from shardwright.trees.paths import path_text
from shardwright.vocabulary.shown import text_of

Version = int | str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of an update of the weights.

    Attributes:
      version: The version that the engine serves now.
      plans: How the weights moved: a plan for decode, and another plan if prefill has its own
        weights. The plans cover only weights on devices.
      placed_bytes: Bytes of the weights that are copied without a plan: those in host memory, and
        those that JAX may place anew in each step, such as `jnp.float32(1)`.
    """

    version: Version
    plans: tuple[ReshardPlan, ...]
    placed_bytes: int = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that devices sent to other devices or that the host sent, plus `placed_bytes`."""
        return sum(plan.bytes_sent for plan in self.plans) + self.placed_bytes

    def __str__(self) -> str:
        return text_of(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MovedWeights:
    """Weights that have moved.

    Attributes:
      params: The weights.
      plan: How the weights moved. None if no weight is on a device.
      placed_bytes: As in `Update`.
    """

    params: Any
    plan: ReshardPlan | None
    placed_bytes: int


def next_version(current: Version, given: Version | None) -> Version:
    """Return the version of an update. It defaults to the next integer.

    Raises:
      ServingError: The version is not an integer or a text; or it is the current version; or it is
        absent, and the current version is a text.
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


def update_weights(
    setup: Setup,
    params: Any,
    prefill_params: Any,
    version: Version,
    *,
    piece: int | str,
    donate: bool,
) -> tuple[Setup, Update]:
    """Return a setup with the new weights, and the `Update`. If a move fails, nothing changes.

    Args:
      setup: The setup with the old weights.
      params: The new weights.
      prefill_params: The new weights of prefill. None means `params`.
      version: Version of the new weights.
      piece: As in `pm.reshard`.
      donate: As in `pm.reshard`.
    """
    for manager, tree in ((setup.manager, params), (setup.prefill_manager, prefill_params)):
        if manager is not None and (group := manager.group()) is not None:
            compare_data(group, tree, "update_params")
    move = functools.partial(move_weights, piece=piece)
    if setup.prefill_params is setup.params:
        if prefill_params is not None:
            raise ServingError(
                "prefill has no weights of its own",
                path="prefill_params",
                fix="leave prefill_params out, or create the engine with prefill_params=",
            )
        moved = [move(params, setup.params, name="params", donate=donate)]
    else:
        moved = _move_both(setup, params, prefill_params, move, donate=donate)
    update = Update(
        version=version,
        plans=tuple(part.plan for part in moved if part.plan is not None),
        placed_bytes=sum(part.placed_bytes for part in moved),
    )
    setup = dataclasses.replace(setup, params=moved[0].params, prefill_params=moved[-1].params)
    return setup, update


def _move_both(
    setup: Setup,
    params: Any,
    prefill_params: Any,
    move: Callable[..., MovedWeights],
    *,
    donate: bool,
) -> list[MovedWeights]:
    """Move the weights of prefill, then those of decode."""
    if prefill_params is None:
        # `params` moves twice, to prefill and to decode, and only the second move may donate it.
        prefill = move(params, setup.prefill_params, name="params", donate=False)
        return [move(params, setup.params, name="params", donate=donate), prefill]
    check_weights(params, setup.params, "params")
    # Only the second move may donate an array that is in both trees.
    both = set(map(id, jax.tree.leaves(params))) & set(map(id, jax.tree.leaves(prefill_params)))
    first = donate and not both
    with resumable(lambda tree: {"params": params, "prefill_params": tree}):
        prefill = move(prefill_params, setup.prefill_params, name="prefill_params", donate=first)
    # If the first move donates, it deletes its source, so only its results can move again.
    kept = prefill.params if first else prefill_params
    with resumable(lambda tree: {"params": tree, "prefill_params": kept}):
        return [move(params, setup.params, name="params", donate=donate), prefill]


def move_weights(new: Any, old: Any, *, name: str, piece: int | str, donate: bool) -> MovedWeights:
    """Move new weights to the shardings and dtypes of the old ones. Return the moved weights.

    Without `donate`, the result shares no array with `new`, so a training step may donate `new`
    afterwards. With `donate`, the result contains the arrays of `new` that are already in place.

    Args:
      new: Tree of JAX or NumPy arrays, on any mesh or none.
      old: The weights that are served now.
      name: Name of the argument that `new` was passed as, for messages.
      piece: As in `pm.reshard`.
      donate: As in `pm.reshard`.

    Raises:
      ServingError: The trees have different structures, shapes or dtypes.
      MoveError: A piece failed. `old` is unchanged.
    """
    dtype = check_weights(new, old, name)
    given, structure = jax.tree.flatten(new)
    kept = jax.tree.leaves(old)
    targets = [_target(leaf) for leaf in kept]
    placed = {
        at: _place(leaf, old_leaf)
        for at, (leaf, old_leaf, target) in enumerate(zip(given, kept, targets, strict=True))
        if target is None
    }

    def merged(moved: Any, others: Mapping[int, Any]) -> Any:
        rest = iter(jax.tree.leaves(moved))
        leaves = [others[at] if at in placed else next(rest) for at in range(len(given))]
        return jax.tree.unflatten(structure, leaves)

    # JAX takes None as an empty tree, so the plan has only the leaves that are not in `placed`,
    # with their own paths.
    planned = [None if at in placed else leaf for at, leaf in enumerate(given)]
    tree, shardings = (jax.tree.unflatten(structure, part) for part in (planned, targets))
    plan = plan_moves_of(tree, shardings, piece=piece, donate=donate, dtype=dtype)
    with resumable(lambda part: merged(part, dict(enumerate(given)))):
        moved = move_tree(tree, shardings, piece=piece, donate=donate, dtype=dtype)
    moved = jax.tree.leaves(moved if donate else _without_shared(moved, plan))
    served = [old_leaf for at, old_leaf in enumerate(kept) if at not in placed]
    params = merged(list(map(_as_served, moved, served)), placed)
    size = sum(leaf.nbytes for leaf in placed.values())
    return MovedWeights(params=params, plan=plan if moved else None, placed_bytes=size)


@contextlib.contextmanager
def resumable(complete: Callable[[Any], Any]) -> Iterator[None]:
    """In a `MoveError`, replace the tree of one move by the whole tree, to be passed again."""
    try:
        yield
    except BaseException as error:
        failure = error if isinstance(error, MoveError) else error.__cause__
        if isinstance(failure, MoveError):
            failure.tree = complete(failure.tree)
        raise


def _target(old: Any) -> NamedSharding | None:
    """Return the sharding to which a plan moves a weight.

    Return None if the weight is placed without a plan.
    """
    sharding = old.sharding if isinstance(old, jax.Array) else None
    if isinstance(sharding, SingleDeviceSharding) and old.committed:
        (device,) = sharding.device_set
        # A plan needs a mesh. A single device becomes a mesh of one; `_as_served` removes this mesh
        # again.
        mesh = flat_mesh([device])
        return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return sharding if isinstance(sharding, NamedSharding) else None


def _place(leaf: Any, old: Any) -> Any:
    """Return a copy of a weight, on the device or the host that the served weight `old` is on.

    `old` is not on a mesh.
    """
    dtype = jnp.result_type(old)
    if not isinstance(old, jax.Array):
        return np.array(leaf, dtype)
    if not old.committed:
        return jnp.array(np.asarray(leaf), dtype)
    return jax.device_put(leaf, old.sharding, may_alias=False).astype(dtype)


def _as_served(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return a moved weight. If the old weight is on a single device, remove the mesh."""
    if isinstance(old.sharding, SingleDeviceSharding):
        # Remove the mesh from the array's type, without a copy. With another type, jit would
        # compile its functions again.
        single: jax.Array = jax.device_put(new.addressable_shards[0].data, old.sharding)
        return single
    return new


def _without_shared(moved: Any, plan: ReshardPlan) -> Any:
    """Copy the leaves that did not move, because they share their memory with the source."""
    leaves, structure = jax.tree.flatten(moved)
    copies: dict[int, Any] = {}
    for at, (leaf, leaf_plan) in enumerate(zip(leaves, plan.leaves, strict=True)):
        # A leaf that has moved is a new array already.
        if not leaf_plan.route.moves:
            # Tied leaves, which are the same array, share one copy.
            leaves[at] = copies.setdefault(id(leaf), jnp.copy(leaf))
    return jax.tree.unflatten(structure, leaves)


def check_weights(new: Any, old: Any, name: str) -> Any:
    """Check that new weights fit the old ones, and return the dtype to which floats are cast.

    The dtype is None if the old weights have several floating-point dtypes.

    Raises:
      ServingError: The trees have different structures, shapes or dtypes. The error names all
        differences.
    """
    given = jax.tree_util.tree_flatten_with_path(new)[0]
    served = jax.tree_util.tree_flatten_with_path(old)[0]
    structure: Any = jax.tree.structure(new)
    if structure != jax.tree.structure(old):
        raise _different_trees([path for path, _ in given], [path for path, _ in served], name)
    paths = [f"{name}/{path_text(path)}" if path else name for path, _ in given]
    problems: list[Problem] = []
    for path, (_, leaf) in zip(paths, given, strict=True):
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or not hasattr(leaf, "shape"):
            problems += [*checks.check_alive(path, leaf), *checks.check_value(path, leaf)]
            continue
        what = f"{type(leaf).__name__} has no values"
        problems.append(Problem(error=ServingError, what=what, path=path, fix="pass arrays"))
    raise_problems(problems)
    dtypes = {jnp.result_type(leaf) for _, leaf in served}
    floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    common = next(iter(floats)) if len(floats) == 1 else None
    for path, (_, leaf), (_, kept) in zip(paths, given, served, strict=True):
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
        problems.append(Problem(error=ServingError, what=what, path=path, fix=fix))
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
