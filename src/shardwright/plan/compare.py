"""Compare two placings of one tree: two strategies, two meshes or two modes. Pure; needs no devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from shardwright.errors import StrategyError
from shardwright.manager.manager import PartitionManager
from shardwright.resolution.decisions import Outcome, Resolution
from shardwright.trees.tensors import Tensor, as_tensors
from shardwright.vocabulary.axes import UNCONSTRAINED, Role
from shardwright.vocabulary.modes import MODES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor in one mode on one side.

    Attributes:
      found: its resolution; a problem is part of the answer.
      mesh_axes: mesh axes of each dim, major first, `("?",)` where it is left to the compiler; None where there is no spec.
      shards: number of shards of each dim, or None where it has no spec.
      bytes: bytes per device, or None where spec, shape or dtype is missing, or the compiler decides.
    """

    found: Resolution
    mesh_axes: tuple[tuple[str, ...], ...] | None
    shards: tuple[int, ...] | None
    bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tensor in one mode, on both sides.

    Attributes:
      tensor: the tensor.
      role: activation, param or state; a weight counts as it is stored.
      mode: mode on the left, and in `mode_after` on the right.
      before: how it lies on the left.
      after: how it lies on the right.
    """

    tensor: Tensor
    role: Role
    mode: str
    mode_after: str
    before: Placed
    after: Placed

    @property
    def moved(self) -> bool:
        """Whether its dims lie over other mesh axes, or only one side has a spec."""
        return self.before.mesh_axes != self.after.mesh_axes

    @property
    def changed(self) -> bool:
        """Whether it moved, or its dims are cut into other numbers of shards: the same spec on another mesh."""
        return self.moved or self.before.shards != self.after.shards

    @property
    def grows(self) -> int | None:
        """Bytes per device that it gains, or None where one side's are unknown."""
        return (
            None
            if self.before.bytes is None or self.after.bytes is None
            else self.after.bytes - self.before.bytes
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Bytes per device of all tensors of a role in one mode, of those whose bytes both sides know."""

    role: Role
    mode: str
    before: int
    after: int
    uncounted: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every tensor in every mode compared, in the tree's order."""

    rows: tuple[Row, ...]

    @property
    def changed(self) -> tuple[Row, ...]:
        """The rows that differ."""
        return tuple(row for row in self.rows if row.changed)

    @property
    def ok(self) -> bool:
        """Whether every tensor has a spec on both sides."""
        return all(row.before.found.ok and row.after.found.ok for row in self.rows)

    def totals(self) -> tuple[Total, ...]:
        """Return the bytes per device of each role and mode."""
        keys = dict.fromkeys((row.role, row.mode) for row in self.rows)
        return tuple(
            _total(role, mode, [row for row in self.rows if (row.role, row.mode) == (role, mode)])
            for role, mode in keys
        )


def _total(role: Role, mode: str, rows: Sequence[Row]) -> Total:
    counted = [row for row in rows if row.grows is not None]
    return Total(
        role=role,
        mode=mode,
        before=sum(row.before.bytes or 0 for row in counted),
        after=sum(row.after.bytes or 0 for row in counted),
        uncounted=len(rows) - len(counted),
    )


def compare(before: PartitionManager, after: PartitionManager, *, tensors: Any) -> Comparison:
    """Compare how a tree lies under two managers, weights as they are stored.

    Args:
      before: the left side; of `for_mode(mode)`, that mode alone.
      after: the right side; it has a mode where the left one has. Two modes of one manager compare `pm.for_mode("train")` with
        `pm.for_mode("decode")`.
      tensors: a tree of `ArraySpec`s or annotations, or a list of `Tensor`s.

    Raises:
      StrategyError: one side has a mode and the other none, or the tree has leaves that are no annotations.

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
            "one side has a mode and the other has none",
            fix='give both one, pm.for_mode("decode"), or neither',
        )
    pairs = (
        [(mode, mode) for mode in MODES]
        if before.mode is None or after.mode is None
        else [(before.mode, after.mode)]
    )
    rows = [_row(tensor, before, after, *pair) for tensor in as_tensors(tensors) for pair in pairs]
    return Comparison(rows=tuple(rows))


def _row(
    tensor: Tensor, before: PartitionManager, after: PartitionManager, mode: str, mode_after: str
) -> Row:
    left, right = _placed(tensor, before, mode), _placed(tensor, after, mode_after)
    role = next(
        (one.found.role for one in (left, right) if one.found.decisions),
        tensor.role or Role.ACTIVATION,
    )
    return Row(tensor=tensor, role=role, mode=mode, mode_after=mode_after, before=left, after=right)


def _placed(tensor: Tensor, manager: PartitionManager, mode: str) -> Placed:
    role = Role.PARAM if tensor.role is Role.USE else tensor.role
    found = manager.explain(
        tensor.axes, mode=mode, role=role, shape=tensor.shape, path=tensor.path or None
    )
    if not found.ok:
        return Placed(found=found, mesh_axes=None, shards=None, bytes=None)
    shards = tuple(
        math.prod(manager.mesh.shape[axis] for axis in decision.mesh_axes)
        for decision in found.decisions
    )
    lies = tuple(
        (UNCONSTRAINED,) if one.outcome is Outcome.UNCONSTRAINED else one.mesh_axes
        for one in found.decisions
    )
    return Placed(
        found=found, mesh_axes=lies, shards=shards, bytes=bytes_on_device(tensor, found, manager)
    )


def bytes_on_device(tensor: Tensor, found: Resolution, manager: PartitionManager) -> int | None:
    """Return the bytes that each device holds; None where the spec, a size or the dtype is not known, or a dim is the compiler's."""
    if not found.ok or any(
        decision.outcome is Outcome.UNCONSTRAINED for decision in found.decisions
    ):
        return None
    return tensor.bytes_over(
        math.prod(
            manager.mesh.shape[axis] for decision in found.decisions for axis in decision.mesh_axes
        )
    )
