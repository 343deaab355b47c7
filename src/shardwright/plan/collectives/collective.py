"""A collective of a compiled program, as data, and the semantic axes that it runs over."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.manager.core import Manager
from shardwright.mesh.build import mesh_sizes
from shardwright.vocabulary.axes import SEMANTIC_AXES
from shardwright.vocabulary.modes import MODE_TRAIN, MODES, parse_mode


class Kind(enum.StrEnum):
    """Kind of a collective."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "permute"
    BROADCAST = "broadcast"
    RAGGED_ALL_TO_ALL = "ragged_all_to_all"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a compiled program. Bytes are per run and per device.

    Attributes:
      kind: Kind of collective.
      mesh_axes: Mesh axes along which the devices of a group differ, in mesh order.
      devices: Number of devices in a group; for a permute, in the longest chain or ring.
      partial: Whether a group has only a part of the devices along its mesh axes.
      count: Number of runs, loops included. None if a loop's trip count depends on data.
      maybe: Whether it is in a branch that may not be taken. `count` is then an upper bound.
      gathers: Whether it is an all-reduce of arrays that are zero except for the slice of their
        device. Such an all-reduce does the work of an all-gather, and sends twice the bytes.
      between_slices: Whether it crosses the network between slices.
      dtype: Element type in the program, as HLO writes it (`bf16`). Several are joined by `+`.
      wire_dtype: Element type that is sent.
      logical_bytes: Bytes in `dtype` of the whole array: the result of an all-gather, else the
        operand.
      wire_bytes: Bytes in `wire_dtype` that a device sends on a ring. An all-reduce sends twice as
        much as a reduce-scatter.
      name: Name of the instruction.
      op_name: JAX operation with its scopes, or empty if the compiler does not say.
      source: Source line (`file.py:12`), or empty if the compiler does not say.
    """

    kind: Kind
    mesh_axes: tuple[str, ...]
    devices: int
    partial: bool
    count: int | None
    maybe: bool
    gathers: bool
    between_slices: bool
    dtype: str
    wire_dtype: str
    logical_bytes: int
    wire_bytes: int
    name: str
    op_name: str
    source: str

    @property
    def total_bytes(self) -> int | None:
        """Logical bytes of all runs; None if their number is unknown."""
        return None if self.count is None else self.count * self.logical_bytes

    @property
    def total_wire_bytes(self) -> int | None:
        """Wire bytes of all runs; None if their number is unknown."""
        return None if self.count is None else self.count * self.wire_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the collective as plain data."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**data, "kind": str(self.kind), "mesh_axes": list(self.mesh_axes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Collective:
        """Return the collective from which `to_json` made the data.

        Raises:
          ValueError: The kind is unknown.
          TypeError: A field is missing or unknown.
        """
        axes = tuple(data["mesh_axes"])
        return cls(**{**data, "kind": Kind(data["kind"]), "mesh_axes": axes})


def total(collectives: Iterable[Collective]) -> int | None:
    """Return the logical bytes of all runs of all collectives.

    Returns:
      None if the number of runs of a collective is unknown.
    """
    totals = [count.total_bytes for count in collectives]
    return None if None in totals else sum(count for count in totals if count is not None)


def ring_bytes(kind: Kind, whole: int, devices: int) -> int:
    """Return the bytes that each device sends on a ring, for an array of `whole` bytes."""
    if kind in (Kind.PERMUTE, Kind.BROADCAST):
        return whole
    # A device keeps its own part and sends the other `devices - 1` parts. A ring runs an all-reduce
    # as a reduce-scatter and then an all-gather.
    one_pass = -(-whole * (devices - 1) // devices)
    return 2 * one_pass if kind is Kind.ALL_REDUCE else one_pass


def carried_axes(manager: Manager, *, mode: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the semantic axes that may be sharded over each mesh axis, in any role.

    An axis counts if any candidate of its rules names the mesh axis. Mesh axes of size 1 are left
    out.

    Args:
      manager: Manager with the rules and the mesh.
      mode: Runtime mode. Defaults to the manager's, else train.

    >>> from shardwright import Strategy, abstract_mesh
    >>> carried_axes(PartitionManager(Strategy.preset("ddp"), mesh=abstract_mesh("dp:8")))
    {'dp': ('__BATCH__', '__CAPACITY__')}
    """
    resolved_mode = parse_mode(mode) if mode is not None else manager.mode or MODE_TRAIN
    rules = manager.rules
    index = MODES.index(resolved_mode)
    tables = [
        rules.activations[index],
        rules.params[index],
        *(entry.rules for entry in rules.tensors),
    ]
    over = {
        axis: {
            name
            for table in tables
            for key, rule in table
            if key == axis
            for name in rule.mesh_axes
        }
        for axis in (*SEMANTIC_AXES, *rules.user_axes)
    }
    mesh_axes = [name for name, size in mesh_sizes(manager.mesh).items() if size > 1]
    return {
        name: tuple(axis for axis, names in over.items() if name in names) for name in mesh_axes
    }


def by_axis(
    collectives: Iterable[Collective], manager: Manager, *, mode: str | None = None
) -> dict[str, tuple[Collective, ...]]:
    """Group collectives by the semantic axes that may cause them.

    A program does not say why it uses a mesh axis. A collective over `tp` is therefore listed under
    every axis that may be sharded over `tp`, or under the key "" if there is no such axis.

    Args:
      collectives: Result of `read_collectives`.
      manager: Manager with the rules and the mesh.
      mode: Runtime mode. Defaults to the manager's, else train.
    """
    carried = carried_axes(manager, mode=mode)
    groups: dict[str, list[Collective]] = {}
    for collective in collectives:
        axes = dict.fromkeys(
            axis for name in collective.mesh_axes for axis in carried.get(name, ())
        )
        for axis in axes or ("",):
            groups.setdefault(axis, []).append(collective)
    return {axis: tuple(members) for axis, members in groups.items()}
