"""Cut a batch into the microbatches of a pipeline, so that each stage has whole microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardwright import _jax
from shardwright.errors import IndivisibleError, raise_problems
from shardwright.manager import constraint
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_of
from shardwright.resolution.pipeline import STAGES, microbatch_problem
from shardwright.vocabulary.axes import BATCH


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """How the rows of a batch are divided into microbatches.

    The mesh axes of BATCH are some axes before pp, then pp, then some axes after pp. Let `a` be the
    number of shards over the axes before pp, `c` the number over the axes after pp, S the number of
    stages, and m = S q the number of microbatches. Each shard has k rows of each of its
    microbatches. To see which rows a microbatch has, reshape the indices of the B rows:

        [B] = [a, S, c, q, k],  and microbatch s q + j has the rows [:, s, :, j, :]

    So the rows of a microbatch are on one stage, spread over all shards of this stage, and no row
    is sent. If pp is the last mesh axis of BATCH, c is 1, and the rows of a microbatch do not
    depend on S: each of the `a` shards is cut into m parts, and microbatch i has the i-th part of
    each shard.

    Attributes:
      manager: The manager.
      batch: B in the text above: the number of rows of the batch.
      count: m, the number of microbatches.
      stages: S, the size of pp.
      before: Mesh axes of BATCH before pp; all of them if BATCH is not sharded over pp.
      after: Mesh axes of BATCH after pp.
      in_rows: pp if BATCH is sharded over pp, else empty.
    """

    manager: PartitionManager
    batch: int
    count: int
    stages: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    in_rows: tuple[str, ...]

    def split(self, x: Any) -> Any:
        """Reshape an array [B, ...] to [S, q, rows of a microbatch, ...].

        An array that has one value for all rows, `[1, ...]` or a scalar, is repeated for each
        microbatch.
        """
        if x.shape[:1] != (self.batch,):
            return jnp.broadcast_to(x, (self.stages, self.count // self.stages, *x.shape))
        shards = self._sizes()
        x = self._reshape(x, shards, [self.before, self.in_rows, self.after, (), ()], 1)
        x = x.transpose(1, 3, 0, 2, 4, *range(5, x.ndim))
        sizes = (self.stages, shards[3], -1)
        return self._reshape(x, sizes, [self.in_rows, (), self.before + self.after], 5)

    def join(self, x: Any) -> Any:
        """Undo `split`."""
        # Each result is on the stage that its microbatch came from. If BATCH is not sharded over
        # pp, this placement gathers the results over pp.
        x = self._place(x, [self.in_rows, (), self.before + self.after])
        a, stages, c, q, k = self._sizes()
        entries = [self.in_rows, (), self.before, self.after, ()]
        x = self._reshape(x, (stages, q, a, c, k), entries, 3)
        x = x.transpose(2, 0, 3, 1, 4, *range(5, x.ndim))
        return self._reshape(x, (self.batch,), [self.before + self.in_rows + self.after], 5)

    def _sizes(self) -> tuple[int, ...]:
        a, c = (
            math.prod(self.manager.sizes[axis] for axis in axes)
            for axes in (self.before, self.after)
        )
        return a, self.stages, c, self.count // self.stages, self.batch // (a * c * self.count)

    def _reshape(
        self, x: Any, sizes: Sequence[int], entries: Sequence[tuple[str, ...]], replaced: int
    ) -> Any:
        """Reshape the first dims. The sharding of the other dims does not change."""
        shape = (*sizes, *x.shape[replaced:])
        if shape[len(sizes) - 1] == -1:
            last = math.prod(x.shape[:replaced]) // math.prod(sizes[:-1])
            shape = (*sizes[:-1], last, *x.shape[replaced:])
        given = self._placement(entries, len(shape))
        if given.explicit is None:
            return constraint.place(jnp.reshape(x, shape), given)
        # Over Explicit mesh axes, JAX does not choose the sharding of a dim that a reshape splits.
        kept = (*jax.typeof(x).sharding.spec.partitions, *[None] * x.ndim)[replaced : x.ndim]
        first = (*given.explicit.partitions, *[None] * len(shape))[: len(sizes)]
        x = jax.lax.reshape(x, shape, out_sharding=PartitionSpec(*first, *kept))
        return constraint.place(x, given)

    def _place(self, x: Any, entries: Sequence[tuple[str, ...]]) -> Any:
        return constraint.place(x, self._placement(entries, x.ndim))

    def _placement(self, entries: Sequence[tuple[str, ...]], rank: int) -> constraint.Placement:
        rest = [UNCONSTRAINED] * (rank - len(entries))
        spec = PartitionSpec(*map(entry_of, entries), *rest)
        return constraint.make_placement(spec, self.manager.mesh, _jax.ambient_mesh())


def microbatches_of(manager: PartitionManager, batch: int) -> Microbatches:
    """Return how `[pipeline]` cuts a batch into microbatches.

    Args:
      manager: A manager whose rules have a pipeline that runs.
      batch: Number of rows.

    Raises:
      IndivisibleError: The rows do not divide over the mesh axes of BATCH or into the microbatches.
        Or the microbatches do not divide over the stages.
    """
    assert manager.rules.pipeline is not None
    count, stages = manager.rules.pipeline.microbatches, manager.sizes.get(STAGES, 1)
    if problem := microbatch_problem(manager.rules.pipeline, stages):
        raise_problems([problem])
    axes = tuple(axis for axis in manager.mesh_axes(BATCH, batch) if manager.sizes[axis] > 1)
    at = axes.index(STAGES) if STAGES in axes else len(axes)
    before, after = axes[:at], axes[at + 1 :]
    shards = math.prod(manager.sizes[axis] for axis in (*before, *after))
    if batch % (shards * count):
        over = "+".join((*before, *after))
        rows = batch // shards
        each = f", {rows} on each of {shards} shards over {over}" if shards > 1 else ""
        raise IndivisibleError(
            f"the batch has {batch} rows{each}, and {rows} rows do not divide into {count} "
            "microbatches",
            path="x",
            fix=f"pass a multiple of {shards * count} rows, or write fewer microbatches under "
            "[pipeline]",
        )
    return Microbatches(
        manager=manager,
        batch=batch,
        count=count,
        stages=stages,
        before=before,
        after=after,
        in_rows=axes[at : at + 1],
    )
