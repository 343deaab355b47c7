"""Compare how a tree is sharded under two strategies, meshes or modes. No device is needed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from shardwright.errors import StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.decisions import Outcome, Resolution
from shardwright.trees.tensors import Tensor, as_tensors
from shardwright.vocabulary.axes import UNCONSTRAINED, Role
from shardwright.vocabulary.modes import MODES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """How one of the two managers shards a tensor in one mode.

    Attributes:
      found: Resolution, which may have problems.
      mesh_axes: Mesh axes of each dim, major first. `("?",)` means that the dim is left to the
        compiler. None if there is no spec.
      shards: Number of shards of each dim. None if there is no spec.
      bytes: Bytes per device; 0 if the tensor is in host memory. None if spec, shape or dtype is
        missing, or a dim is left to the compiler.
    """

    found: Resolution
    mesh_axes: tuple[tuple[str, ...], ...] | None
    shards: tuple[int, ...] | None
    bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tensor under both managers, the left one (`before`) and the right one (`after`).

    Attributes:
      tensor: The tensor.
      role: activation, param or state. Weights are compared as stored (param), not as used.
      mode: Mode on the left.
      mode_after: Mode on the right.
      before: Sharding on the left.
      after: Sharding on the right.
    """

    tensor: Tensor
    role: Role
    mode: str
    mode_after: str
    before: Placed
    after: Placed

    @property
    def moved(self) -> bool:
        """Whether mesh axes or memory (device, host) differ, or only one manager has a spec."""
        before, after = self.before, self.after
        return before.mesh_axes != after.mesh_axes or before.found.on_host != after.found.on_host

    @property
    def changed(self) -> bool:
        """Whether the tensor moved, or one of its dims has another number of shards."""
        # The mesh axes may be equal but have other sizes, such as tp=4 before and tp=8 after.
        return self.moved or self.before.shards != self.after.shards

    @property
    def grows(self) -> int | None:
        """Bytes per device on the right minus those on the left; None if either is unknown."""
        return (
            None
            if self.before.bytes is None or self.after.bytes is None
            else self.after.bytes - self.before.bytes
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Sum of the bytes per device, over the tensors of one role in one mode.

    A tensor whose bytes are unknown on either side is not in the sums. `uncounted` is the number of
    these tensors.
    """

    role: Role
    mode: str
    before: int
    after: int
    uncounted: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row per tensor and mode, in the order of the tree."""

    rows: tuple[Row, ...]

    @property
    def changed(self) -> tuple[Row, ...]:
        """The rows whose two sides differ."""
        return tuple(row for row in self.rows if row.changed)

    @property
    def ok(self) -> bool:
        """Whether every tensor has a spec on both sides."""
        return all(row.before.found.ok and row.after.found.ok for row in self.rows)

    def totals(self) -> tuple[Total, ...]:
        """Return the bytes per device of each role and mode."""
        totals = []
        for role, mode in dict.fromkeys((row.role, row.mode) for row in self.rows):
            rows = [row for row in self.rows if (row.role, row.mode) == (role, mode)]
            counted = [row for row in rows if row.grows is not None]
            before = sum(row.before.bytes or 0 for row in counted)
            after = sum(row.after.bytes or 0 for row in counted)
            uncounted = len(rows) - len(counted)
            totals.append(
                Total(role=role, mode=mode, before=before, after=after, uncounted=uncounted)
            )
        return tuple(totals)


def compare(before: PartitionManager, after: PartitionManager, *, tensors: Any) -> Comparison:
    """Compare how a tree is sharded under two managers. Weights are compared as they are stored.

    Managers with a mode (from `for_mode`) are compared in that mode. Managers without one are
    compared in all modes. To compare two modes, pass `pm.for_mode("train")` and
    `pm.for_mode("decode")`.

    Args:
      before: Manager of the left side.
      after: Manager of the right side. It has a mode if and only if the left one has.
      tensors: Tree of `ArraySpec`s or annotations, or a list of `Tensor`s.

    Raises:
      StrategyError: Only one manager has a mode, or the tree has leaves that are not annotations.

    >>> import shardwright as sw
    >>> fsdp, ddp = (
    ...     sw.PartitionManager(sw.Strategy.preset(name), mesh=sw.abstract_mesh("fsdp:8"))
    ...     for name in ("fsdp", "ddp")
    ... )
    >>> tree = {"up": sw.ArraySpec((64, 256), "float32", (sw.EMBED, sw.MLP_INTERMEDIATE))}
    >>> row = compare(fsdp, ddp, tensors=tree).changed[0]
    >>> row.before.bytes, row.after.bytes
    (8192, 65536)
    """
    if (before.mode is None) != (after.mode is None):
        raise StrategyError(
            "one manager has a mode and the other does not",
            fix='give both managers a mode, such as pm.for_mode("decode"), or neither',
        )
    pairs = (
        [(mode, mode) for mode in MODES]
        if before.mode is None or after.mode is None
        else [(before.mode, after.mode)]
    )
    rows = []
    for tensor in as_tensors(tensors):
        for mode, mode_after in pairs:
            left, right = _placed(tensor, before, mode), _placed(tensor, after, mode_after)
            role = next(
                (side.found.role for side in (left, right) if side.found.decisions),
                tensor.role or Role.ACTIVATION,
            )
            rows.append(
                Row(
                    tensor=tensor,
                    role=role,
                    mode=mode,
                    mode_after=mode_after,
                    before=left,
                    after=right,
                )
            )
    return Comparison(rows=tuple(rows))


def _placed(tensor: Tensor, manager: PartitionManager, mode: str) -> Placed:
    role = Role.PARAM if tensor.role is Role.USE else tensor.role
    resolution = manager.explain(
        tensor.axes, mode=mode, role=role, shape=tensor.shape, path=tensor.path or None
    )
    if not resolution.ok:
        return Placed(found=resolution, mesh_axes=None, shards=None, bytes=None)
    shards = tuple(
        math.prod(manager.mesh.shape[axis] for axis in decision.mesh_axes)
        for decision in resolution.decisions
    )
    mesh_axes = tuple(
        (UNCONSTRAINED,) if decision.outcome is Outcome.UNCONSTRAINED else decision.mesh_axes
        for decision in resolution.decisions
    )
    return Placed(
        found=resolution,
        mesh_axes=mesh_axes,
        shards=shards,
        bytes=bytes_on_device(tensor, resolution, manager),
    )


def bytes_on_device(
    tensor: Tensor, resolution: Resolution, manager: PartitionManager
) -> int | None:
    """Return the bytes of a tensor on each device: 0 if it lives on the host.

    Returns:
      None if spec, shape or dtype is unknown, or a dim is left to the compiler.
    """
    if not resolution.ok or any(
        decision.outcome is Outcome.UNCONSTRAINED for decision in resolution.decisions
    ):
        return None
    size = tensor.bytes_over(
        math.prod(
            manager.mesh.shape[axis]
            for decision in resolution.decisions
            for axis in decision.mesh_axes
        )
    )
    return 0 if resolution.on_host and size is not None else size
