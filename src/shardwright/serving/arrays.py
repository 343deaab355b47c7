"""An engine's arrays, and the compiled functions that change them. Whatever fails, the arrays are those before it or new ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.caches.paged.cache import PagedCache
from shardwright.errors import IndivisibleError, Problem, ServingError, ShardingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.serving import steps
from shardwright.serving.request import Sampling
from shardwright.serving.sampling import draws
from shardwright.serving.steps import Caches, CacheShape, Model, Slots
from shardwright.vocabulary.modes import MODE_DECODE, MODE_INSERT, MODE_PREFILL

# Compiled once for all engines of a model and its sizes.
_prefill = jax.jit(steps.prefill, static_argnums=0, donate_argnums=1)
_decode = jax.jit(steps.decode, static_argnums=0, donate_argnums=1)
_insert = jax.jit(steps.insert, donate_argnums=0)
_clear = jax.jit(steps.clear, donate_argnums=0)
_clear_slots = jax.jit(steps.clear_slots, donate_argnums=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is made, and where.

    Attributes:
      model: what is served.
      params: its weights.
      manager: for insert and decode; None: nothing is sharded.
      prefill_manager: for prefill.
      prefill_params: the weights where prefill has them.
      shape: what the model keeps of a token.
      kind: of the cache of the slots.
      options: of that kind.
      slots: sequences that are decoded together.
      capacity: rows per slot.
      prefill_rows: prompts that are read together.
      chunk: tokens that are read in one step.
    """

    model: Model
    params: Any
    manager: PartitionManager | None
    prefill_manager: PartitionManager | None
    prefill_params: Any
    shape: CacheShape
    kind: str
    options: Mapping[str, Any]
    slots: int
    capacity: int | None
    prefill_rows: int
    chunk: int

    def under(self, mode: str) -> contextlib.AbstractContextManager[Any]:
        """Return the manager of a mode, to be entered.

        Raises:
          ServingError: there is none, and the caller is under one, which would move everything onto its mesh.
        """
        manager = self.prefill_manager if mode == MODE_PREFILL else self.manager
        if manager is None and context.current() is not None:
            fix = "make the engine under the manager, or with manager=, or call it outside"
            raise ServingError(
                "the engine was made without a manager, and is called under one",
                path="manager",
                fix=fix,
            )
        return contextlib.nullcontext() if manager is None else manager.for_mode(mode)

    def make_rows(self) -> Caches:
        """Make the caches of the prefill batch. Pages are for slots: a prompt is read into rows."""
        kind, options = ("dense", {}) if self.kind == "paged" else (self.kind, self.options)
        with self.under(MODE_PREFILL), _named("prefill_rows", self.prefill_rows):
            return steps.make_caches(
                kind, self.shape, batch=self.prefill_rows, capacity=self.capacity, options=options
            )

    def make_slots(self) -> Slots:
        """Make the slots."""
        with self.under(MODE_DECODE), _named("slots", self.slots):
            return steps.make_slots(
                steps.make_caches(
                    self.kind,
                    self.shape,
                    batch=self.slots,
                    capacity=self.capacity,
                    options=self.options,
                )
            )


class Board:
    """The arrays.

    Attributes:
      rows: caches of the prefill batch, one per layer.
      slots: what decoding carries.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.rows = plan.make_rows()
        self.slots = plan.make_slots()

    def prefill(self, chunks: Mapping[int, Sequence[int]], sampling: Mapping[int, Sampling]) -> Any:
        """Read chunks of prompts by row; return `[rows]` tokens that would follow."""
        plan = self._plan
        tokens, counts = (
            np.zeros((plan.prefill_rows, plan.chunk), np.int32),
            np.zeros(plan.prefill_rows, np.int32),
        )
        for row, chunk in chunks.items():
            tokens[row, : len(chunk)] = chunk
            counts[row] = len(chunk)
        with plan.under(MODE_PREFILL):
            self.rows, found = _prefill(
                plan.model,
                self.rows,
                plan.prefill_params,
                tokens,
                counts,
                draws(plan.prefill_rows, sampling),
            )
        return found

    def insert(
        self, into: Mapping[int, int], first: Mapping[int, int], sampling: Mapping[int, Sampling]
    ) -> Any:
        """Move rows into slots; return `[rows]` codes of `Refusal`.

        Args:
          into: slot by row.
          first: first token by row.
          sampling: by row.
        """
        plan = self._plan
        slots, tokens = (
            np.full(plan.prefill_rows, plan.slots, np.int32),
            np.zeros(plan.prefill_rows, np.int32),
        )
        for row, slot in into.items():
            slots[row], tokens[row] = slot, first[row]
        source = self._moved()
        with plan.under(MODE_INSERT):
            self.slots, refused = _insert(
                self.slots, source, slots, tokens, draws(plan.prefill_rows, sampling)
            )
        return refused

    def decode(self) -> Any:
        """Give every active slot its next token; return `[slots]` of them."""
        with self._plan.under(MODE_DECODE):
            self.slots, tokens = _decode(self._plan.model, self.slots, self._plan.params)
        return tokens

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Empty rows of the prefill batch."""
        with self._plan.under(MODE_PREFILL):
            self.rows = _clear(self.rows, _padded(rows, self._plan.prefill_rows))

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Empty slots."""
        with self._plan.under(MODE_DECODE):
            self.slots = _clear_slots(self.slots, _padded(slots, self._plan.slots))

    def compile(self) -> None:
        """Run everything once, on nothing: no row and no slot changes."""
        self.prefill({}, {})
        self.insert({}, {}, {})
        self.decode()
        self.clear_rows(())
        self.clear_slots(())

    def renew(self, part: str) -> None:
        """Make empty "rows" or "slots" in the place of what is there."""
        if part == "rows":
            self.rows = self._plan.make_rows()
        else:
            self.slots = self._plan.make_slots()

    def size(self, part: str) -> int:
        """Return how many "rows" or "slots" there are."""
        return self._plan.prefill_rows if part == "rows" else self._plan.slots

    def weights_are_gone(self) -> bool:
        """Tell whether somebody has deleted arrays of the weights, or donated them to another function."""
        return is_gone((self._plan.params, self._plan.prefill_params))

    def vocabulary(self) -> int:
        """Return the number of tokens that the model tells apart, without running it.

        Raises:
          ServingError: the model does not return what `Model` says, or does not look at `valid`.
        """
        plan = self._plan
        tokens, valid = np.zeros((plan.slots, 1), np.int32), np.zeros((plan.slots, 1), bool)
        with plan.under(MODE_DECODE):
            read = jax.make_jaxpr(functools.partial(steps.read, plan.model), return_shape=True)
            traced, (logits, _) = read(plan.params, tokens, self.slots.caches, valid)
        if not any(
            one is traced.jaxpr.invars[-1]
            for equation in traced.jaxpr.eqns
            for one in equation.invars
        ):
            what = "the model does not look at valid, so what is no token would fill its caches"
            raise ServingError(
                what, path="model", fix="pass it on: append_and_attend(..., valid=valid)"
            )
        return int(logits.shape[2])

    def _moved(self) -> Caches:
        """Return the prefill batch where insert wants it."""
        plan = self._plan
        if (
            plan.manager is None
            or plan.prefill_manager is None
            or plan.manager.mesh == plan.prefill_manager.mesh
        ):
            return self.rows
        there = plan.manager.for_mode(MODE_PREFILL)
        return tuple(
            jax.device_put(cache, there.shardings(cache, cache.axes(), role="activation"))
            for cache in self.rows
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the arrays say is held, read from the devices: for tests and for people who look for leaks.

    Attributes:
      row_lengths: tokens of each row of the prefill batch, the most of any layer.
      slot_lengths: likewise of each slot.
      pages: pages that are referred to, the most of any layer; 0 for a cache without pages.
    """

    row_lengths: tuple[int, ...]
    slot_lengths: tuple[int, ...]
    pages: int


def read_held(board: Board) -> Held:
    """Return what is held."""
    paged = [cache for cache in board.slots.caches if isinstance(cache, PagedCache)]
    return Held(
        row_lengths=_lengths(board.rows),
        slot_lengths=_lengths(board.slots.caches),
        pages=max(
            (int(np.count_nonzero(np.asarray(cache.references))) for cache in paged), default=0
        ),
    )


def _lengths(held: Caches) -> tuple[int, ...]:
    return tuple(
        int(length) for length in np.max([np.asarray(cache.length) for cache in held], axis=0)
    )


def _padded(numbers: Sequence[int], size: int) -> np.ndarray:
    return np.asarray([*numbers, *[size] * (size - len(numbers))], np.int32)


def is_gone(tree: Any) -> bool:
    """Tell whether arrays of a tree were deleted, as a compiled function does with arrays that are donated to it."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


@contextlib.contextmanager
def _named(argument: str, size: int) -> Iterator[None]:
    """Say of a batch that does not divide which argument of the engine it is, and what would divide."""
    try:
        yield
    except ShardingError as error:
        problems = [_reworded(problem, argument, size) for problem in error.problems]
        if tuple(problems) == error.problems:
            raise
        raise type(error)(problems=problems, resolution=error.resolution) from error


def _reworded(problem: Problem, argument: str, size: int) -> Problem:
    if problem.error is not IndivisibleError or problem.axis != "BATCH" or not problem.shards:
        return problem
    what = problem.what.replace(f"size {size}", f"{argument}={size}", 1)
    return dataclasses.replace(
        problem,
        what=what,
        fix=f"pass {argument}={-(-size // problem.shards) * problem.shards}, or {problem.fix}",
    )
