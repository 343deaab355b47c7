"""The results of a walk: collectives, choices between dims, idle mesh axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.plan.collectives.collective import Kind
from shardwright.plan.walk.entries import Peak


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WalkLocation:
    """The place in a program where the walk is.

    Attributes:
      runs: How often the equation runs, loops included.
      maybe: Whether it is in a branch of `cond`, which may not be taken.
      source: Line of the model, `model.py:12`.
      calls: The ids of the equations that contain the jaxpr, the outermost first.
      recomputed: Whether rematerialization repeats an earlier equation here.
    """

    runs: int = 1
    maybe: bool = False
    source: str = ""
    calls: tuple[int, ...] = ()
    recomputed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One collective that a program needs. Bytes are of one run, on one device.

    Attributes:
      kind: Kind of collective.
      mesh_axes: Mesh axes that it runs over, in mesh order.
      axes: Semantic axes that cause it: they are sharded over these mesh axes. Empty if the specs
        were written by hand.
      rules: The rules that shard these axes.
      dtype: Element type, as NumPy names it.
      logical_bytes: Bytes on one device of the result of an all-gather, or of the operand of any
        other collective.
      wire_bytes: Bytes that a device sends on a ring.
      runs: How often it runs.
      maybe: Whether it is in a branch that may not be taken.
      source: Line of the model that causes it, `model.py:12`.
      path: Path of the tensor, or "".
    """

    kind: Kind
    mesh_axes: tuple[str, ...]
    axes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    dtype: str
    logical_bytes: int
    wire_bytes: int
    runs: int
    maybe: bool = False
    source: str = ""
    path: str = ""

    @property
    def total_wire_bytes(self) -> int:
        """Bytes that a device sends in all runs."""
        return self.runs * self.wire_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {name: list(fields[name]) for name in ("mesh_axes", "axes", "rules")}
        return {**fields, **lists, "kind": str(self.kind)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Event:
        """Return the event from which `to_json` made the data.

        Raises:
          ValueError: The kind is unknown.
          TypeError: A field is missing or unknown.
        """
        lists = {name: tuple(data[name]) for name in ("mesh_axes", "axes", "rules")}
        return cls(**{**data, **lists, "kind": Kind(data["kind"])})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompilerChoice:
    """A mesh axis for which a compiler may choose differently than the walk.

    Either several dims compete for the mesh axis and no annotation decides, or XLA may handle the
    mesh axis in another way.

    Attributes:
      mesh_axis: The mesh axis.
      source: Line of the model.
      fix: What to change so that the compiler has no choice, such as an annotation.
    """

    mesh_axis: str
    source: str
    fix: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A matmul that all devices along some mesh axes repeat.

    Attributes:
      mesh_axes: Mesh axes that no dim of the matmul is sharded over.
      source: Line of the model.
      flops: Floating-point operations of one device, in all runs.
    """

    mesh_axes: tuple[str, ...]
    source: str
    flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The matmuls of a program, on one device.

    Attributes:
      flops: Floating-point operations. Of a `cond`, the largest branch counts.
      min_flops: Floating-point operations if the smallest branch of each `cond` counts.
      fp8_flops: The part of `flops` that is in matmuls whose two operands are float8.
      f32_flops: The part of `flops` that is in matmuls with a float32 operand.
      matmul_bytes: Bytes that the matmuls read and write. Of a `cond`, the largest branch counts.
      repeated_flops: The part of `flops` that repeats other operations. Rematerialization repeats
        the forward pass. Devices along an idle mesh axis repeat each other's operations.
      host_bytes: Bytes that move between the memories of the device and its host, both ways.
    """

    flops: int = 0
    min_flops: int = 0
    fp8_flops: int = 0
    f32_flops: int = 0
    matmul_bytes: int = 0
    repeated_flops: int = 0
    host_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        """Return the sum of both amounts of work."""
        return Work(
            flops=self.flops + other.flops,
            min_flops=self.min_flops + other.min_flops,
            fp8_flops=self.fp8_flops + other.fp8_flops,
            f32_flops=self.f32_flops + other.f32_flops,
            matmul_bytes=self.matmul_bytes + other.matmul_bytes,
            repeated_flops=self.repeated_flops + other.repeated_flops,
            host_bytes=self.host_bytes + other.host_bytes,
        )

    @staticmethod
    def either(branches: Sequence[Work]) -> Work:
        """Return the work of several branches, of which only one runs."""
        largest = max(branches, key=lambda branch: branch.flops)
        return Work(
            flops=largest.flops,
            fp8_flops=largest.fp8_flops,
            f32_flops=largest.f32_flops,
            min_flops=min(branch.min_flops for branch in branches),
            matmul_bytes=max(branch.matmul_bytes for branch in branches),
            repeated_flops=max(branch.repeated_flops for branch in branches),
            host_bytes=max(branch.host_bytes for branch in branches),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """The result of one walk over a program.

    Attributes:
      events: Collectives, in program order.
      choices: Places where a compiler may choose differently than the walk.
      idle: Matmuls that leave mesh axes idle.
      unknown: Primitive without a rule -> number of its equations. If there are any, the other
        numbers are too low.
      work: Matmuls, per device.
      memory: Range of the peak memory, per device.
    """

    events: tuple[Event, ...]
    choices: tuple[CompilerChoice, ...]
    idle: tuple[Idle, ...]
    unknown: Mapping[str, int]
    work: Work
    memory: Peak

    @property
    def flops(self) -> int:
        """Floating-point operations of matmuls, per device."""
        return self.work.flops

    @property
    def useful_flops(self) -> int:
        """Floating-point operations of matmuls, per device, without repeated operations."""
        return self.work.flops - self.work.repeated_flops

    @property
    def matmul_bytes(self) -> int:
        """Bytes that matmuls read and write, per device."""
        return self.work.matmul_bytes

    @property
    def complete(self) -> bool:
        """Whether every primitive of the program has a rule."""
        return not self.unknown
