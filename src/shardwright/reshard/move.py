"""Run the plan of a move: leaf by leaf, and each leaf piece by piece."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from shardwright.errors import MoveError, raise_problems
from shardwright.manager import constraint
from shardwright.manager.manager import PartitionManager
from shardwright.reshard.leaf import check_processes, move_leaf
from shardwright.reshard.tree import LeafMove, ReshardPlan, plan_moves_of, target_shardings
from shardwright.trees.paths import is_array_spec

_LOG = logging.getLogger("shardwright.reshard")
# Seconds between two lines that a long move writes to the log.
_SECONDS_BETWEEN_REPORTS = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a move.

    Attributes:
      path: Path of the leaf that moves.
      leaf: Number of this leaf among the leaves that move. The first one is 1.
      leaves: Number of leaves that move.
      bytes_done: Bytes of the target that have arrived, over all devices.
      bytes_all: Bytes of the target that move, over all devices.
    """

    path: str
    leaf: int
    leaves: int
    bytes_done: int
    bytes_all: int

    def __str__(self) -> str:
        share = self.bytes_done / self.bytes_all if self.bytes_all else 1.0
        return f"leaf {self.leaf} of {self.leaves}, {self.path}: {share:.0%} of all bytes"


def reshard(
    manager: PartitionManager,
    tree: Any,
    specs: Any,
    *,
    piece: int | str = "64MiB",
    donate: bool = False,
    dtype: Any = None,
    progress: Callable[[Progress], object] | None = None,
) -> Any:
    """Move a tree of arrays to this manager's shardings, exactly as `plan_reshard` says.

    A leaf that already has its target sharding is returned as the same object. If all shards of a
    leaf are already on their devices and only the mesh differs, the result shares these shards. An
    array that is in the tree twice moves once. A second move with the same shapes and shardings
    compiles nothing.

    Args:
      manager: The manager with the target shardings. Its mesh has devices.
      tree: Tree of arrays or NumPy arrays, on any mesh or none.
      specs: As for `plan_reshard`.
      piece: As for `plan_reshard`.
      donate: Delete each source array after its leaf has moved, so that the peak is lower. Defaults
        to False.
      dtype: As for `plan_reshard`.
      progress: Called after each piece. Defaults to a line in the log `shardwright.reshard` every
        five seconds.

    Raises:
      MeshSpecError: The manager's mesh is abstract.
      ShardingError: As for `plan_reshard`; or blocks would go directly between the devices of
        different processes.
      MoveError: A piece failed. `error.tree` has the moved leaves, and the other leaves as before.
        `pm.reshard(error.tree, specs, ...)` resumes the move.
    """
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    targets = target_shardings(manager, tree, specs)
    return move_tree(tree, targets, piece=piece, donate=donate, dtype=dtype, progress=progress)


def move_tree(
    tree: Any,
    targets: Any,
    *,
    piece: int | str = "64MiB",
    donate: bool = False,
    dtype: Any = None,
    progress: Callable[[Progress], object] | None = None,
) -> Any:
    """Move a tree to a tree of shardings. For the other arguments, see `reshard`."""
    plan = plan_moves_of(tree, targets, piece=piece, donate=donate, dtype=dtype)
    values, structure = jax.tree.flatten(tree, is_leaf=is_array_spec)
    shardings: list[NamedSharding] = structure.flatten_up_to(targets)  # type: ignore[attr-defined]
    raise_problems(
        [
            problem
            for leaf, value, target in zip(plan.leaves, values, shardings, strict=True)
            for problem in check_processes(leaf.path, value, target, leaf.route)
        ]
    )
    results = list(values)
    reporter = _Reporter(plan, progress)
    uses = Counter(map(id, values))
    # Results that are, or share the memory of, their sources.
    kept = {
        id(value) for value, leaf in zip(values, plan.leaves, strict=True) if not leaf.route.moves
    }
    places = {leaf.path: index for index, leaf in enumerate(plan.leaves)}
    done: list[str] = []
    try:
        for index in plan.order:
            leaf = plan.leaves[index]
            reporter.begin(leaf)
            if leaf.tied_to:
                results[index] = results[places[leaf.tied_to]]
            else:
                results[index] = move_leaf(
                    values[index], shardings[index], leaf.route, donate=donate, tick=reporter.tick
                )
            uses[id(values[index])] -= 1
            if leaf.moves:
                done.append(leaf.path)
            # An array that is in the tree several times is deleted after its last use.
            source = values[index]
            if donate and leaf.route.moves and not uses[id(source)] and id(source) not in kept:
                _delete(source)
    except Exception as error:
        for index, leaf in enumerate(plan.leaves):
            if leaf.tied_to:
                results[index] = results[places[leaf.tied_to]]
        first_line = next(iter(str(error).splitlines()), "")
        raise MoveError(
            f"the move failed after {len(done)} of {reporter.leaves} arrays: "
            f"{type(error).__name__}: {first_line}",
            path=reporter.path,
            fix=_resume(done, donate=donate),
            tree=jax.tree.unflatten(structure, results),
            moved=tuple(done),
        ) from error
    return jax.tree.unflatten(structure, results)


def _resume(done: list[str], *, donate: bool) -> str:
    resume = "reshard(error.tree, ...) resumes: error.tree has all arrays, moved or not"
    if not donate:
        return f"the source is unchanged, so call reshard again; or {resume}"
    if not done:
        return f"nothing has moved; {resume}"
    return f"{resume}\nmoved, with their sources deleted: {', '.join(done)}"


def _delete(value: Any) -> None:
    if isinstance(value, jax.Array) and not value.is_deleted():
        value.delete()


class _Reporter:
    """Report the progress of a move to the caller, or every few seconds to the log."""

    def __init__(self, plan: ReshardPlan, progress: Callable[[Progress], object] | None) -> None:
        moving = [leaf for leaf in plan.leaves if leaf.moves]
        self.leaves = len(moving)
        self.path = ""
        self._all = sum(leaf.route.target_bytes for leaf in moving)
        self._leaf = self._before = 0
        self._leaf_bytes = 0
        self._progress = progress
        self._due = time.monotonic() + _SECONDS_BETWEEN_REPORTS

    def begin(self, leaf: LeafMove) -> None:
        """Begin to count the bytes of a leaf."""
        self.path = leaf.path
        if leaf.moves:
            self._leaf += 1
            self._before += self._leaf_bytes
            self._leaf_bytes = leaf.route.target_bytes

    def tick(self, pieces: int, of: int) -> None:
        """Report that some pieces of the leaf have arrived."""
        state = Progress(
            path=self.path,
            leaf=self._leaf,
            leaves=self.leaves,
            bytes_done=self._before + self._leaf_bytes * pieces // of,
            bytes_all=self._all,
        )
        if self._progress is not None:
            self._progress(state)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + _SECONDS_BETWEEN_REPORTS
            _LOG.info("reshard: %s", state)
