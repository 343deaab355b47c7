"""The arrays of an engine, and the compiled functions that change them.

If a call fails, the arrays are either unchanged, or deleted because they were donated. `is_deleted`
tells which of both, and `renew` replaces deleted arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwright import _jax
from shardwright.caches.change import readable
from shardwright.caches.paged.cache import PagedCache
from shardwright.errors import IndivisibleError, Problem, ServingError, ShardingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.processes.host_data import compare_data
from shardwright.serving import steps
from shardwright.serving.arguments import deleted_weights
from shardwright.serving.request import Sampling
from shardwright.serving.sampling import Drawn, rules_of
from shardwright.serving.steps import Caches, CacheShape, Model, Slots
from shardwright.serving.weights import (
    Moved,
    Update,
    Version,
    check_weights,
    move_weights,
    next_version,
    resumable,
)
from shardwright.vocabulary.modes import MODE_DECODE, MODE_INSERT, MODE_PREFILL

T = TypeVar("T")
# Engines with the same model and the same sizes share these compiled functions.
_prefill = jax.jit(steps.prefill, static_argnums=0, donate_argnums=1)
_decode = jax.jit(steps.decode, static_argnums=(0, 1), donate_argnums=(2, 3))
_insert = jax.jit(steps.insert, donate_argnums=0)
_park = jax.jit(steps.park, donate_argnums=0)
_resume = jax.jit(steps.resume, donate_argnums=0)
_clear = jax.jit(steps.clear, donate_argnums=0)
_clear_slots = jax.jit(steps.clear_slots, donate_argnums=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments of an engine, checked.

    Attributes:
      model: The model.
      params: Its weights.
      manager: Manager for insert and decode. None means that nothing is sharded.
      prefill_manager: Manager for prefill.
      prefill_params: The weights, sharded for prefill.
      shape: What the model stores in a cache.
      kind: Kind of the slots' caches.
      options: Options of that kind.
      slots: Sequences that are decoded together.
      capacity: Rows per slot.
      prefill_rows: Prompts that are read together.
      chunk: Tokens of a prompt that are read in one step.
      decode_steps: Largest number of tokens that a slot gets in one call.
      device: The device of the caches, if there is no manager. None leaves it to JAX.
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
    decode_steps: int
    device: jax.Device | None = None

    @property
    def reads_into_pages(self) -> bool:
        """Whether prompts are read directly into the pages of their slots."""
        return (
            self.kind == "paged"
            and self.prefill_manager is self.manager
            and self.prefill_params is self.params
        )

    @property
    def shares_mesh(self) -> bool:
        """Whether prefill is on the mesh of the slots."""
        if self.manager is None or self.prefill_manager is None:
            return True
        return bool(self.manager.mesh == self.prefill_manager.mesh)

    def under(self, mode: str) -> contextlib.AbstractContextManager[Any]:
        """Return the manager of a mode as a context manager.

        Raises:
          ServingError: The engine has no manager, but the caller is under one. That manager would
            move all arrays to its mesh.
        """
        manager = self.prefill_manager if mode == MODE_PREFILL else self.manager
        if manager is None and context.current() is not None:
            raise ServingError(
                "the engine was created without a manager, but is called under one",
                path="manager",
                fix="create the engine under the manager, or with manager=, or call it outside",
            )
        return contextlib.nullcontext() if manager is None else manager.for_mode(mode)

    def create_rows(self) -> Caches:
        """Create the caches of the prefill batch. They are dense if the slots are paged."""
        with self.under(MODE_PREFILL), _naming("prefill_rows", self.prefill_rows):
            return self._empty_rows()

    def create_transit(self) -> Caches:
        """Create a prefill batch on the mesh of the slots, to take prompts to another mesh."""
        assert self.manager is not None
        with self.manager.for_mode(MODE_PREFILL), _naming("prefill_rows", self.prefill_rows):
            return self._empty_rows()

    def _empty_rows(self) -> Caches:
        kind, options = ("dense", {}) if self.kind == "paged" else (self.kind, self.options)
        caches = steps.create_caches(
            kind, self.shape, batch=self.prefill_rows, capacity=self.capacity, options=options
        )
        return on_device(caches, self.device)

    def create_slots(self) -> Slots:
        """Create the slots."""
        with self.under(MODE_DECODE), _naming("slots", self.slots):
            caches = steps.create_caches(
                self.kind,
                self.shape,
                batch=self.slots,
                capacity=self.capacity,
                options=self.options,
            )
            return on_device(steps.create_slots(caches), self.device)


def placed(
    params: Any, prefill_params: Any, manager: PartitionManager | None
) -> tuple[Any, Any, jax.Device | None]:
    """Return both trees of weights, and the device of the caches if there is no manager.

    The device is that of all weights, which are then committed to it. It is None if there are
    several or none.

    Raises:
      ServingError: Weights are deleted.
    """
    if _jax.is_deleted((params, prefill_params)):
        raise deleted_weights()
    arrays = [leaf for leaf in jax.tree.leaves((params, prefill_params)) if _is_array(leaf)]
    devices = {device for array in arrays for device in array.sharding.device_set}
    device = devices.pop() if manager is None and len(devices) == 1 else None
    return on_device(params, device), on_device(prefill_params, device), device


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def on_device(tree: T, device: jax.Device | None) -> T:
    """Return a tree whose arrays are committed to a device. They share their memory.

    The functions of an engine return committed arrays if one argument is committed. Arrays that are
    not would then make JAX compile each function a second time.
    """
    if device is None:
        return tree
    placed: T = jax.tree.map(
        lambda leaf: jax.device_put(leaf, device) if _is_array(leaf) else leaf, tree
    )
    return placed


class Weights:
    """The weights of an engine.

    Attributes:
      version: Version of the weights.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.version: Version = 0

    @property
    def decode_steps(self) -> int:
        """Largest number of tokens that a slot gets in one call."""
        return self._setup.decode_steps

    def update_weights(
        self,
        params: Any,
        prefill_params: Any,
        version: Version | None,
        *,
        piece: int | str,
        donate: bool,
    ) -> Update:
        """Replace the weights, or leave them as they are if a move fails.

        Args:
          params: The new weights.
          prefill_params: The new weights of prefill. None means `params`.
          version: As in `next_version`.
          piece: As in `pm.reshard`.
          donate: As in `pm.reshard`.
        """
        setup, version = self._setup, next_version(self.version, version)
        for manager, tree in ((setup.manager, params), (setup.prefill_manager, prefill_params)):
            if manager is not None and (group := manager._group()) is not None:
                compare_data(group, tree, "update_params")
        move = functools.partial(move_weights, piece=piece)
        if setup.prefill_params is setup.params:
            if prefill_params is not None:
                raise ServingError(
                    "prefill has no weights of its own",
                    path="prefill_params",
                    fix="leave it out, or create the engine with prefill_params=",
                )
            moved = [move(params, setup.params, name="params", donate=donate)]
        else:
            moved = self._move_both(params, prefill_params, move, donate=donate)
        self._setup = dataclasses.replace(
            setup, params=moved[0].params, prefill_params=moved[-1].params
        )
        self.version = version
        return Update(
            version=version,
            plans=tuple(part.plan for part in moved if part.plan is not None),
            placed_bytes=sum(part.placed_bytes for part in moved),
        )

    def _move_both(
        self, params: Any, prefill_params: Any, move: Callable[..., Moved], *, donate: bool
    ) -> list[Moved]:
        """Move the weights of decode, and those of prefill first."""
        setup = self._setup
        if prefill_params is None:
            # `params` moves twice. Only the second move may donate it.
            prefill = move(params, setup.prefill_params, name="params", donate=False)
            return [move(params, setup.params, name="params", donate=donate), prefill]
        check_weights(params, setup.params, "params")
        # Only the second move may donate an array that is in both trees.
        both = set(map(id, jax.tree.leaves(params))) & set(map(id, jax.tree.leaves(prefill_params)))
        first = donate and not both
        with resumable(lambda tree: {"params": params, "prefill_params": tree}):
            prefill = move(
                prefill_params, setup.prefill_params, name="prefill_params", donate=first
            )
        kept = prefill.params if first else prefill_params
        with resumable(lambda tree: {"params": tree, "prefill_params": kept}):
            return [move(params, setup.params, name="params", donate=donate), prefill]

    def weights_are_deleted(self) -> bool:
        """Tell whether arrays of the weights were deleted, or donated to another function."""
        return _jax.is_deleted((self._setup.params, self._setup.prefill_params))

    def _vocabulary(self, caches: Caches) -> int:
        """Return the number of tokens for which the model has logits, without running it.

        Raises:
          ServingError: The model does not return what `Model` describes, or does not use `valid`.
        """
        setup = self._setup
        tokens, valid = np.zeros((setup.slots, 1), np.int32), np.zeros((setup.slots, 1), bool)
        with setup.under(MODE_DECODE):
            read = jax.make_jaxpr(functools.partial(steps.read, setup.model), return_shape=True)
            traced, (logits, _) = read(setup.params, tokens, caches, valid)
        # `valid` is the last input of the traced program. An equation must read it.
        used = (variable for equation in traced.jaxpr.eqns for variable in equation.invars)
        if not any(variable is traced.jaxpr.invars[-1] for variable in used):
            raise ServingError(
                "the model does not use valid, so padding would be written to its caches",
                path="model",
                fix="pass valid on: append_and_attend(..., valid=valid)",
            )
        return int(logits.shape[2])


class Arrays(Weights):
    """The arrays of an engine. Every call replaces those that it changes.

    A call returns before the devices have computed its results. `fetch` of a result waits for it.

    Attributes:
      rows: Caches of the prefill batch, one per layer.
      slots: The state of decoding, which every step takes and returns.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._following: Drawn | None = None
        self.rows = setup.create_rows()
        self.slots = setup.create_slots()

    def prefill(
        self, chunks: Mapping[int, Sequence[int]], sampling: Mapping[int, Sampling]
    ) -> Drawn:
        """Read chunks of prompts.

        Args:
          chunks: Tokens by row of the prefill batch.
          sampling: Sampling by row.

        Returns:
          `[rows]`, the token that would follow each chunk, or a code such as `steps.NO_NUMBER`.
        """
        setup = self._setup
        tokens = np.zeros((setup.prefill_rows, setup.chunk), np.int32)
        counts = np.zeros(setup.prefill_rows, np.int32)
        for row, chunk in chunks.items():
            tokens[row, : len(chunk)] = chunk
            counts[row] = len(chunk)
        with setup.under(MODE_PREFILL):
            self.rows, self._following = _prefill(
                setup.model,
                self.rows,
                setup.prefill_params,
                tokens,
                counts,
                rules_of(setup.prefill_rows, sampling),
            )
        return self._following.readable()

    def insert(
        self,
        into: Mapping[int, int],
        first: Mapping[int, int],
        sampling: Mapping[int, Sampling],
        limits: Mapping[int, int],
    ) -> Codes:
        """Copy rows of the prefill batch into slots. Return `[rows]` codes.

        Args:
          into: Slot by row.
          first: First generated token by row. Without it, a row has the token that the latest
            `prefill` has drawn, which the host need not know.
          sampling: Sampling by row.
          limits: Largest number of tokens by row, including the first one.
        """
        setup, rows = self._setup, self._setup.prefill_rows
        entries = np.stack([_targets(into, rows, none=setup.slots), _targets(first, rows, none=-1)])
        source, following = self._rows_for_insert(), self._following_for_insert()
        with setup.under(MODE_INSERT):
            rules = rules_of(rows, sampling, limits)
            self.slots, refused = _insert(self.slots, source, entries, following, rules)
        return Codes.of(refused)

    def park(self, into: Mapping[int, int]) -> Codes:
        """Copy partly read prompts into their slots. Return `[rows]` codes.

        Args:
          into: Slot by row.
        """
        setup = self._setup
        slots = _targets(into, setup.prefill_rows, none=setup.slots)
        source = self._rows_for_insert()
        with setup.under(MODE_INSERT):
            self.slots, refused = _park(self.slots, source, slots)
        return Codes.of(refused)

    def resume(self, taken: Mapping[int, int]) -> Codes:
        """Copy prompts from their slots into the prefill batch. Return `[rows]` codes.

        Args:
          taken: Slot by row.
        """
        setup = self._setup
        slots = _targets(taken, setup.prefill_rows, none=setup.slots)
        source, lost = self.slots.caches, list[jax.Array]()
        if not setup.shares_mesh:
            source, *lost = self._in_transit(slots)
            rows = setup.prefill_rows
            slots = _targets({row: row for row in taken}, rows, none=rows)
        with setup.under(MODE_PREFILL):
            self.rows, refused = _resume(self.rows, source, slots)
        return Codes.of(refused, *lost)

    def decode(self) -> Drawn:
        """Give active slots their next tokens. Return `[decode_steps, slots]` tokens or codes."""
        setup, slots = self._setup, self.slots
        with setup.under(MODE_DECODE):
            caches, ends, drawn = _decode(
                setup.model, setup.decode_steps, slots.caches, slots.ends, slots.rules, setup.params
            )
        self.slots = dataclasses.replace(slots, caches=caches, ends=ends)
        readable_drawn: Drawn = drawn.readable()
        return readable_drawn

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Empty rows of the prefill batch."""
        with self._setup.under(MODE_PREFILL):
            self.rows = _clear(self.rows, _padded(rows, self._setup.prefill_rows))

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Empty slots."""
        with self._setup.under(MODE_DECODE):
            self.slots = _clear_slots(self.slots, _padded(slots, self._setup.slots))

    def compile(self) -> None:
        """Run every compiled function once, on no rows and no slots, so that nothing changes."""
        self.prefill({}, {})
        self.insert({}, {}, {}, {})
        self.park({})
        self.resume({})
        self.decode()
        self.clear_rows(())
        self.clear_slots(())

    def renew(self, part: str) -> None:
        """Replace "rows" or "slots" by empty ones."""
        if part == "rows":
            self.rows = self._setup.create_rows()
        else:
            self.slots = self._setup.create_slots()

    def size(self, part: str) -> int:
        """Return the number of "rows" or "slots"."""
        return self._setup.prefill_rows if part == "rows" else self._setup.slots

    def vocabulary(self) -> int:
        """Return the number of tokens that the model has logits for, without running it."""
        return self._vocabulary(self.slots.caches)

    def _rows_for_insert(self) -> Caches:
        """Return the caches of the prefill batch on the mesh of the slots."""
        setup = self._setup
        if setup.shares_mesh:
            return self.rows
        assert setup.manager is not None
        return _moved(self.rows, setup.manager.for_mode(MODE_PREFILL))

    def _following_for_insert(self) -> Drawn:
        """Return what the latest `prefill` has drawn on the mesh of the slots."""
        setup, following = self._setup, self._following
        assert following is not None
        if setup.shares_mesh:
            return following
        assert setup.manager is not None
        replicated = NamedSharding(setup.manager.mesh, PartitionSpec())
        return Drawn(packed=jax.device_put(following.packed, replicated))

    def _in_transit(self, slots: np.ndarray) -> tuple[Caches, jax.Array]:
        """Return a prefill batch on the mesh of prefill, and `[rows]` codes.

        Args:
          slots: `[rows]` int32, the slot that each row gets, as in `steps.resume`.
        """
        setup = self._setup
        assert setup.manager is not None
        assert setup.prefill_manager is not None
        transit = setup.create_transit()
        with setup.manager.for_mode(MODE_PREFILL):
            rows, refused = _resume(transit, self.slots.caches, slots)
        return _moved(rows, setup.prefill_manager.for_mode(MODE_PREFILL)), refused


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Codes of `Refusal` that devices may still compute.

    Attributes:
      parts: Arrays `[rows]`, one per copy of a cache.
    """

    parts: tuple[jax.Array, ...]

    @classmethod
    def of(cls, *parts: jax.Array) -> Codes:
        """Return codes that this process can read; see `Drawn.readable`."""
        return cls(parts=tuple(map(readable, parts)))

    def fetch(self) -> Any:
        """Return `[rows]` codes; 0 if no copy was refused. Wait for them."""
        return functools.reduce(np.maximum, map(np.asarray, self.parts))


def _moved(caches: Caches, target: PartitionManager) -> Caches:
    """Return the caches of a prefill batch on the mesh of a manager."""
    return tuple(
        jax.device_put(cache, target.shardings(cache, cache.axes(), role="activation"))
        for cache in caches
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The number of tokens and pages that the caches hold. It shows slots and pages that leak.

    Attributes:
      row_lengths: Tokens of each row of the prefill batch, the maximum over layers.
      slot_lengths: Tokens of each slot, the maximum over layers.
      pages: Pages in use, the maximum over layers. 0 unless the cache is paged.
    """

    row_lengths: tuple[int, ...]
    slot_lengths: tuple[int, ...]
    pages: int


def read_held(arrays: Arrays) -> Held:
    """Read the content of the caches from the devices."""
    paged = [cache for cache in arrays.slots.caches if isinstance(cache, PagedCache)]
    return Held(
        row_lengths=_lengths(arrays.rows),
        slot_lengths=_lengths(arrays.slots.caches),
        pages=max(
            (int(np.count_nonzero(np.asarray(readable(cache.references)))) for cache in paged),
            default=0,
        ),
    )


def _lengths(caches: Caches) -> tuple[int, ...]:
    return tuple(
        int(length)
        for length in np.max([np.asarray(readable(cache.length)) for cache in caches], axis=0)
    )


def _targets(into: Mapping[int, int], size: int, *, none: int) -> np.ndarray:
    """Return the target of each of `size` sequences; `none` is out of range."""
    return np.asarray([into.get(at, none) for at in range(size)], np.int32)


def _padded(numbers: Sequence[int], size: int) -> np.ndarray:
    """Return numbers of rows or slots, padded with `size`, which is out of range."""
    return np.asarray([*numbers, *[size] * (size - len(numbers))], np.int32)


@contextlib.contextmanager
def _naming(argument: str, size: int) -> Iterator[None]:
    """If the batch of a cache does not divide, name the argument of the engine in the error."""
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
