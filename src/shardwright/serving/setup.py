"""The checked arguments of an engine, and the empty caches that these arguments describe."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax

from shardwright import _jax
from shardwright.errors import IndivisibleError, Problem, ServingError, ShardingError
from shardwright.manager import context
from shardwright.manager.manager import PartitionManager
from shardwright.serving import steps
from shardwright.serving.arguments import deleted_weights
from shardwright.serving.steps import Caches, CacheShape, Model, SlotState
from shardwright.vocabulary.modes import MODE_DECODE, MODE_PREFILL

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The checked arguments of an engine.

    Attributes:
      model: The model.
      params: The weights of the model.
      manager: Manager for insert and decode. None means that nothing is sharded.
      prefill_manager: Manager for prefill.
      prefill_params: The weights, sharded for prefill.
      shape: Sizes of the keys and values that the model stores in a cache.
      kind: Kind of the caches of the slots.
      options: Options of that kind of cache.
      slots: Number of sequences that are decoded together.
      capacity: Rows per slot.
      prefill_rows: Number of prompts that are read together.
      chunk: Number of tokens of a prompt that are read in one step.
      decode_steps: Largest number of tokens that a slot gets in one call.
      device: The device of the caches, if there is no manager. None leaves the choice to JAX.
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
        """Whether prefill runs on the mesh of the slots."""
        if self.manager is None or self.prefill_manager is None:
            return True
        return bool(self.manager.mesh == self.prefill_manager.mesh)

    def under(self, mode: str) -> contextlib.AbstractContextManager[Any]:
        """Return the manager of a mode as a context manager.

        Raises:
          ServingError: The engine has no manager, but a manager is ambient. The ambient manager
            would move all arrays to its mesh.
        """
        manager = self.prefill_manager if mode == MODE_PREFILL else self.manager
        if manager is None and context.current() is not None:
            raise ServingError(
                "the engine was created without a manager, but is called under one",
                path="manager",
                fix="create the engine under the manager, or with manager=, or call the engine "
                "outside of the manager",
            )
        return contextlib.nullcontext() if manager is None else manager.for_mode(mode)

    def create_rows(self, manager: PartitionManager | None = None) -> Caches:
        """Create the caches of the prefill batch. They are dense if the slots are paged.

        Args:
          manager: The manager of the mesh that the caches are on. Defaults to the manager of
            prefill.
        """
        under = self.under(MODE_PREFILL) if manager is None else manager.for_mode(MODE_PREFILL)
        kind, options = ("dense", {}) if self.kind == "paged" else (self.kind, self.options)
        with under, _naming("prefill_rows", self.prefill_rows):
            caches = steps.create_caches(
                kind, self.shape, batch=self.prefill_rows, capacity=self.capacity, options=options
            )
            return on_device(caches, self.device)

    def create_slots(self) -> SlotState:
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

    If all weights are on one device, return that device, and commit the weights to it. Otherwise
    the device is None.

    Raises:
      ServingError: Weights are deleted.
    """
    if _jax.is_deleted((params, prefill_params)):
        raise deleted_weights()
    leaves = jax.tree.leaves((params, prefill_params))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    devices = {device for array in arrays for device in array.sharding.device_set}
    device = devices.pop() if manager is None and len(devices) == 1 else None
    return on_device(params, device), on_device(prefill_params, device), device


def on_device(tree: T, device: jax.Device | None) -> T:
    """Return a tree whose arrays are committed to a device.

    The arrays of the result share memory with those of `tree`.

    A function of an engine returns committed caches if one of its arguments is committed. If the
    caches of the first call were not committed, those of the next call would be, and JAX would
    compile the function a second time.
    """
    if device is None:
        return tree
    placed: T = jax.tree.map(
        lambda leaf: jax.device_put(leaf, device) if isinstance(leaf, jax.Array) else leaf, tree
    )
    return placed


@contextlib.contextmanager
def _naming(argument: str, size: int) -> Iterator[None]:
    """Name the argument of the engine in an error about a batch size that shards do not divide."""
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
