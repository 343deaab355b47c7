"""Run the plan of a move: leaf by leaf, and each leaf piece by piece."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from shardwright.errors import MoveError, raise_problems
from shardwright.manager import constraint
from shardwright.manager.core import Manager
from shardwright.processes.host_data import compare_data
from shardwright.reshard.leaf import check_processes, move_leaf
from shardwright.reshard.tree import (
    LeafMove,
    ReshardPlan,
    on_device,
    plan_moves_of,
    target_shardings,
)
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
    manager: Manager,
    tree: Any,
    specs: Any,
    *,
    piece: int | str = "64MiB",
    donate: bool = False,
    dtype: Any = None,
    progress: Callable[[Progress], object] | None = None,
) -> Any:
    """Move a tree of arrays; see `PartitionManager.reshard`."""
    if isinstance(manager.mesh, AbstractMesh):
        raise constraint.no_devices()
    targets = target_shardings(manager, tree, specs)
    # Processes that move different trees would wait in different collectives forever.
    if (group := manager.group()) is not None:
        compare_data(group, tree, "pm.reshard")
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
    # Plan before the first leaf moves. Planning finds all problems, so none of them can stop the
    # move halfway.
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
    moving = _Moving(plan, values, shardings, _Reporter(plan, progress))
    try:
        moving.run()
    except Exception as error:
        raise moving.failure(structure, error) from error
    except BaseException as error:
        # Ctrl-C and exits keep their type, so that they end the program. Their cause is the
        # MoveError, which has the tree.
        raise error from moving.failure(structure, error)
    return jax.tree.unflatten(structure, moving.results)


class _Moving:
    """A move that runs.

    Attributes:
      results: For each leaf, its result, or its source if the leaf has not moved yet.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        values: Sequence[Any],
        targets: Sequence[NamedSharding],
        reporter: _Reporter,
    ) -> None:
        self.results = list(values)
        self._plan, self._values, self._targets = plan, values, targets
        self._reporter = reporter
        self._done: list[str] = []
        self._places = {leaf.path: index for index, leaf in enumerate(plan.leaves)}

    def run(self) -> None:
        """Move the leaves in the order of the plan."""
        values, donate = self._values, self._plan.donate
        # Count sources by identity, because equal arrays have separate memory.
        uses = Counter(map(id, values))
        # Ids of the sources that are not copied: the result is the source, or shares its memory.
        kept = {
            id(value)
            for value, leaf in zip(values, self._plan.leaves, strict=True)
            if not leaf.copies
        }
        for index in self._plan.order:
            leaf, source = self._plan.leaves[index], values[index]
            self._reporter.begin(leaf)
            if leaf.tied_to:
                self.results[index] = self.results[self._places[leaf.tied_to]]
            else:
                tick, target = self._reporter.tick, self._targets[index]
                moved = move_leaf(source, on_device(target), leaf.route, donate=donate, tick=tick)
                if leaf.to_host:
                    # Copy before the source is deleted: a relabeled leaf shares the memory of the
                    # source.
                    moved = jax.block_until_ready(jax.device_put(moved, target))
                self.results[index] = moved
            uses[id(source)] -= 1
            if leaf.moves:
                self._done.append(leaf.path)
            # An array that is in the tree several times is deleted after its last use.
            is_spent = leaf.copies and not uses[id(source)] and id(source) not in kept
            if donate and is_spent and isinstance(source, jax.Array) and not source.is_deleted():
                source.delete()

    def failure(self, structure: Any, error: BaseException) -> MoveError:
        """Return the error with the tree, from which the move can be resumed."""
        # The source of a tied leaf may be deleted already, so take the result of the leaf to which
        # it is tied.
        for index, leaf in enumerate(self._plan.leaves):
            if leaf.tied_to:
                self.results[index] = self.results[self._places[leaf.tied_to]]
        text = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        return MoveError(
            f"the move failed after {len(self._done)} of {self._reporter.leaves} arrays: {text}",
            path=self._reporter.path,
            fix=_resume(self._done, donate=self._plan.donate),
            tree=jax.tree.unflatten(structure, self.results),
            moved=tuple(self._done),
        )


def _resume(done: list[str], *, donate: bool) -> str:
    resume = "reshard(error.tree, ...) resumes: error.tree has all arrays, moved or not"
    if not donate:
        return f"the source is unchanged, so call reshard again; or {resume}"
    if not done:
        return f"nothing has moved; {resume}"
    return f"{resume}\nmoved, with their sources deleted: {', '.join(done)}"


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
