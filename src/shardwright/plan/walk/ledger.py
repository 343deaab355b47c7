"""Move values between shardings, complete partial sums, and note the collectives of both."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from jax.sharding import PartitionSpec

from shardwright.plan.collectives.collective import Kind, ring_bytes
from shardwright.plan.walk.entries import Buffer, Peak
from shardwright.plan.walk.equations import for_gpus
from shardwright.plan.walk.events import CompilerChoice, Event, Idle, WalkLocation, Work
from shardwright.plan.walk.liveness import Timeline
from shardwright.plan.walk.moves import find_move
from shardwright.plan.walk.values import (
    Dims,
    Origin,
    ShardedValue,
    axes_of,
    dims_of_spec,
    explicit_axes,
    local_elements,
    on_host,
    shards,
)
from shardwright.resolution.partition_specs import entry_names
from shardwright.trees.tensors import whole_bytes

_LANES: Final = 128
_SUBLANES: Final = 8
_MATRIX: Final = ("rows", "columns")
_WHOLE_TILES: Final = "choose a size that gives each device whole tiles: other sizes are padded"
_KERNELS: Final = "compile the program: a convolution kernel's gradient may be all-reduced"
_TWICE: Final = (
    "look up all rows at once: XLA may add the gradients of several lookups before it sums them "
    "over devices"
)
SHARED: Final = (
    "gather it once: a compiler may share equal gathers, and the sums of their gradients"
)
_ADDED: Final = (
    "add the terms before shard(...), or gather the weight only once: a TPU may run one collective "
    "for both terms"
)
# Fixes of choices in which no stored weight competes with another value for a mesh axis.
LAYOUT_FIXES: Final = frozenset({_WHOLE_TILES, _KERNELS, _TWICE, _ADDED, SHARED})
_IN_STEPS: Final = "constrain the value in between with shard(...), one mesh axis at a time"


class Ledger:
    """The results of a walk so far: collectives, operations, memory and uncertain places.

    Attributes:
      sizes: Size of each mesh axis that has more than one device, in mesh order. In the body of a
        `shard_map`, the mesh axes that are Manual there are left out.
      mesh: Size of each mesh axis that has more than one device. It is the same in a `shard_map`.
      tiled: Whether the compiler keeps arrays in tiles, as compilers for TPUs do.
      in_stage: Whether the walk is in a `shard_map` over some mesh axes, such as the stages of a
        pipeline.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        renaming: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._renaming = renaming
        # `Dims` never has mesh axes of size 1, so they are left out of the sizes too.
        self.sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self.mesh = self.sizes
        self.tiled = not for_gpus()
        self.in_stage = False
        self.events: list[Event] = []
        # A dict keeps the order of the program. The order of a set of texts differs between
        # processes.
        self.choices: dict[CompilerChoice, None] = {}
        self.idle: list[Idle] = []
        self.unknown: Counter[str] = Counter()
        self.work = Work()
        # None in a walk that only computes shardings.
        self.timeline: Timeline | None = Timeline()
        self.copies: dict[Buffer, Buffer] = {}  # stacked weight -> its copy in another layout
        self.inner = Peak()  # peak of the jaxpr that the current equation runs
        self.moved = 0  # bytes, after the move, of the operands that the current equation moves

    def renamed(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the mesh axes of the plan that replace `names`, mesh axes of the trace."""
        return tuple(name for each in names for name in self._renaming.get(each, (each,)))

    def dims_of(self, spec: PartitionSpec, ndim: int) -> Dims:
        """Return the mesh axes of each dim in a spec of the trace."""
        entries = [
            entry if entry is PartitionSpec.UNCONSTRAINED else self.renamed(entry_names(entry))
            for entry in spec.partitions
        ]
        return dims_of_spec(entries, ndim, self.sizes)

    @contextlib.contextmanager
    def inside(self, manual: Iterable[str]) -> Iterator[None]:
        """Walk the body of a `shard_map` over `manual`. Its shapes are those of one shard."""
        sizes, manual, outer = self.sizes, frozenset(manual), self.in_stage
        self.sizes = {axis: size for axis, size in sizes.items() if axis not in manual}
        self.in_stage = True
        try:
            yield
        finally:
            self.sizes, self.in_stage = sizes, outer

    def blank(self) -> Ledger:
        """Return an empty ledger for the same mesh, for a walk that only computes shardings."""
        ledger = Ledger(self.sizes, self._renaming)
        ledger.timeline = None
        return ledger

    def begin_inner(self) -> tuple[Timeline | None, int]:
        """Start the timeline of a loop's body. Return the outer timeline, for `end_inner`."""
        outer = self.timeline, self.moved
        self.timeline = None if self.timeline is None else Timeline()
        return outer

    def end_inner(
        self,
        outer: tuple[Timeline | None, int],
        results: Iterable[ShardedValue],
        stacked: Iterable[ShardedValue] = (),
    ) -> Peak:
        """Continue the outer timeline, and return the peak of the body."""
        inner, (self.timeline, self.moved) = self.timeline, outer
        if inner is None:
            return Peak()
        held = [value.buffer for value in results if value.buffer is not None]
        written = [value.buffer for value in stacked if value.buffer is not None]
        return inner.peak(held, written=written, within=True)

    def local_shape(self, aval: Any, dims: Dims) -> tuple[int, ...]:
        """Return the shape of a value on one device. A dim that does not divide is padded."""
        pairs = zip(aval.shape, dims, strict=True)
        return tuple(-(-size // shards(axes, self.sizes)) for size, axes in pairs)

    def local_bytes(self, aval: Any, dims: Dims) -> int:
        """Return the bytes of a value on one device, 0 if the value is on the host."""
        return 0 if on_host(aval) else self._bytes(aval, dims)

    def host_bytes(self, aval: Any, dims: Dims) -> int:
        """Return the bytes of a value on the host, for each device; 0 if it is not on the host."""
        return self._bytes(aval, dims) if on_host(aval) else 0

    def _bytes(self, aval: Any, dims: Dims) -> int:
        return whole_bytes(local_elements(aval.shape, dims, self.sizes), aval.dtype)

    def cross_host_link(self, aval: Any, value: ShardedValue, runs: int) -> None:
        """Count the bytes of a move between the memories of host and device."""
        self.work += Work(host_bytes=runs * self._bytes(aval, value.dims))
        if value.buffer is not None and not on_host(aval):
            value.buffer.operands = None  # the copy reads the value from memory

    def move(
        self,
        value: ShardedValue,
        aval: Any,
        dims: Dims,
        location: WalkLocation,
        *,
        origins: Mapping[str, Origin],
    ) -> ShardedValue:
        """Move a value to another sharding, and note the collectives of the move.

        The order is that of XLA's partitioner: reduce-scatters, slices (which send nothing),
        all-reduces, all-to-alls, all-gathers and permutes.

        Args:
          value: The value before the move.
          aval: Its shape and dtype.
          dims: Mesh axes of each dim after the move.
          location: The equation that needs the move.
          origins: Why each mesh axis of `dims` shards its dim.
        """
        target = ShardedValue(
            dims=dims,
            runs=value.runs,
            origins={**value.origins, **origins},
            lookups=value.lookups,
        ).pruned()
        if value.free:
            return target
        sent = len(self.events)
        held, wanted = value.mesh_axes, target.mesh_axes
        current = [list(dim) for dim in value.dims]
        scattered = value.owed & wanted
        new = wanted - held - value.owed
        if any(_is_cut_again(goal, scattered, new) for goal in dims) or (
            scattered
            and (
                _is_cut_from_sum(value, aval, scattered)
                or self._is_summed_whole(value, aval, dims, scattered)
            )
        ):
            scattered = frozenset()
        if scattered:
            self._note(Kind.REDUCE_SCATTER, scattered, value, aval, _frozen(current), location)
            if self._is_padded(aval, dims, scattered):
                self.doubt(scattered, location, _WHOLE_TILES)
            current = [
                [axis for axis in goal if axis in dim or axis in scattered]
                # If a dim also gets a mesh axis of another dim, or a new one, its mesh axes are put
                # in order later.
                if {*dim, *scattered} >= set(goal)
                else list(dim)
                for dim, goal in zip(current, dims, strict=True)
            ]
        for dim, goal in zip(current, dims, strict=True):
            # The slices come before the all-reduce, which then adds up fewer bytes.
            owed = value.owed - scattered
            dim += [
                axis
                for at, axis in enumerate(goal)
                if axis in new and axis not in dim and owed.isdisjoint(goal[:at])
            ]
        for group in value.groups or (value.owed,):
            if group - scattered:
                rest = group - scattered
                self._note(Kind.ALL_REDUCE, rest, value, aval, _frozen(current), location)
        # `find_move` slices a complete value itself: it must see which mesh axes are new, to find
        # the permutes that replace one mesh axis by another.
        self._transfer(value, aval, _frozen(current) if value.owed else value.dims, dims, location)
        if target.dims != value.dims and len(self.events) > sent:
            # A move that sends nothing is a slice, which is fused into its use.
            self.moved += self.local_bytes(aval, target.dims)
        if value.owed:
            summed = tuple((event.kind, event.mesh_axes) for event in self.events[sent:])
        else:
            summed = value.summed if len(self.events) == sent else ()
        return dataclasses.replace(target, summed=summed)

    def _is_summed_whole(
        self, value: ShardedValue, aval: Any, dims: Dims, scattered: frozenset[str]
    ) -> bool:
        """Tell whether a TPU all-reduces an array, because its shards would not be whole tiles.

        A vector is always all-reduced, never reduce-scattered. In other arrays, the last two dims
        are cut into tiles. The sum of an elementwise result keeps the order of its dims in memory.
        The result of a matmul is transposed if the dim that is not scattered is not a multiple of
        128. The scattered dim is then along the lanes, and a shard needs a multiple of 128 numbers
        of 32 bits.
        """
        if not self.tiled:
            return False
        # Tiles ignore dims of size 1.
        pairs = [pair for pair in zip(aval.shape, dims, strict=True) if pair[0] > 1][-2:]
        if len(pairs) < len(_MATRIX):
            return True
        # A lane has 32 bits. So a row of a tile has 128 numbers of float32, or 256 of bfloat16.
        tile = _LANES * 4 // aval.dtype.itemsize
        for at, (size, axes) in enumerate(pairs):
            other = pairs[1 - at][0]
            turned = other % _LANES != 0 and (at == 1 or other > _LANES)
            along_lanes = turned or (at == 1 and not value.is_matmul)
            if scattered & {*axes} and along_lanes and not size % _LANES:
                return bool(size // shards(axes, self.sizes) % tile)
        return False

    def _is_padded(self, aval: Any, dims: Dims, scattered: frozenset[str]) -> bool:
        """Tell whether a TPU may sum a matrix in another way than by a reduce-scatter.

        A TPU pads parts that are not whole tiles, and then sends their edges by permutes. It may
        also lay out narrow rows along the sublanes.
        """
        if not self.tiled or aval.ndim != len(_MATRIX):
            return False
        parts = [
            (size // shards(axes, self.sizes), bool(scattered & {*axes}))
            for size, axes in zip(aval.shape, dims, strict=True)
        ]
        narrow = aval.shape[1] < _LANES and parts[0][1] and parts[0][0] % _LANES
        return bool(narrow) or any(part % _SUBLANES and cut for part, cut in parts)

    def _transfer(
        self, value: ShardedValue, aval: Any, current: Dims, dims: Dims, location: WalkLocation
    ) -> None:
        """Note the collectives of a move between two shardings of a complete value."""
        move = find_move(current, dims, self.sizes)
        for each in move.transfers:
            self._note(each.kind, each.axes, value, aval, each.dims, location, devices=each.devices)
        self.doubt(move.doubtful, location, _IN_STEPS)

    def doubt_kernel(self, mesh_axes: Iterable[str], location: WalkLocation) -> None:
        """Note that the gradient of a convolution kernel may be all-reduced, not reduce-scattered.

        The reason is that the gradient does not have the layout of a matrix on TPUs.
        """
        if self.tiled:
            self.doubt(mesh_axes, location, _KERNELS)

    def doubt_lookups(self, terms: Sequence[ShardedValue], location: WalkLocation) -> None:
        """Note a doubt if a sum adds the gradients of several lookups in one table."""
        lookups = frozenset().union(*(term.lookups for term in terms))
        if len(lookups) > max(len(term.lookups) for term in terms):
            self.doubt(frozenset().union(*(axes for _, axes in lookups)), location, _TWICE)

    def doubt_sums(self, terms: Sequence[ShardedValue], location: WalkLocation) -> None:
        """Note a doubt if an addition adds two sums that equal collectives have completed.

        TPUs may run only one collective for both sums.
        """
        first, *others = [term.summed for term in terms]
        if first in others:
            self.doubt({axis for _, axes in first for axis in axes}, location, _ADDED)

    def doubt(self, mesh_axes: Iterable[str], location: WalkLocation, fix: str) -> None:
        """Record that a compiler may handle mesh axes in another way, unless `fix` is applied."""
        for axis in self.mesh:
            if axis in mesh_axes:
                self.choices[CompilerChoice(mesh_axis=axis, source=location.source, fix=fix)] = None

    def settle(
        self, value: ShardedValue, aval: Any, location: WalkLocation, *, wanted: Dims | None = None
    ) -> ShardedValue:
        """Complete a partial sum, by a reduce-scatter if `wanted` shards it, else by an all-reduce.

        Args:
          value: The value, maybe a partial sum.
          aval: Its shape and dtype.
          location: The equation that needs the complete sum.
          wanted: Mesh axes of each dim that a later constraint gives the value.
        """
        if not value.owed:
            return value
        dims = value.dims
        if wanted is not None:
            axes = axes_of(wanted)
            # If `wanted` lacks a mesh axis of the value, a reduce-scatter would need a gather too.
            if value.owed & axes and value.mesh_axes <= axes:
                dims = wanted
        return self.move(value, aval, dims, location, origins=value.origins)

    def _note(
        self,
        kind: Kind,
        mesh_axes: Iterable[str],
        value: ShardedValue,
        aval: Any,
        dims: Dims,
        location: WalkLocation,
        *,
        devices: int | None = None,
    ) -> None:
        adds = kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        dtype = np.dtype(value.sum_dtype) if adds and value.sum_dtype else aval.dtype
        # Devices also send the padding of a dim that does not divide.
        parts = [shards(axes, self.sizes) for axes in value.dims]
        shape = [-(-size // part) * part for size, part in zip(aval.shape, parts, strict=True)]
        self.note(
            kind,
            mesh_axes,
            whole_bytes(local_elements(shape, dims, self.sizes), dtype),
            # XLA moves loop-invariant code out of loops, so a value from before the loop is sent
            # once.
            dataclasses.replace(location, runs=min(location.runs, value.runs)),
            dtype=str(dtype),
            origins=value.origins,
            devices=devices,
        )

    def note(
        self,
        kind: Kind,
        mesh_axes: Iterable[str],
        logical_bytes: int,
        location: WalkLocation,
        *,
        dtype: str,
        origins: Mapping[str, Origin],
        devices: int | None = None,
    ) -> None:
        """Note one collective, unless it has only one device, no bytes or no runs.

        Args:
          kind: Kind of collective.
          mesh_axes: Mesh axes that it runs over.
          logical_bytes: Bytes of the result of an all-gather, else of the operand.
          location: The equation that needs it.
          dtype: Element type.
          origins: Why each mesh axis shards its dim.
          devices: Number of devices in one group. Defaults to the number along the mesh axes.
        """
        chosen = set(mesh_axes)
        axes = tuple(axis for axis in self.mesh if axis in chosen)
        if devices is None:
            devices = shards(axes, self.mesh)
        if devices < 2 or not logical_bytes or not location.runs:
            return
        causes = [origins[axis] for axis in axes if axis in origins]
        paths = [cause.path for cause in causes if cause.path]
        self.events.append(
            Event(
                kind=kind,
                mesh_axes=axes,
                axes=_distinct(cause.axis for cause in causes),
                rules=_distinct(cause.rule for cause in causes),
                dtype=dtype,
                logical_bytes=logical_bytes,
                wire_bytes=ring_bytes(kind, logical_bytes, devices),
                runs=location.runs,
                maybe=location.maybe,
                source=location.source,
                path=paths[0] if paths else "",
            )
        )

    def count_matmul(
        self,
        elements: int,
        operands: Iterable[int],
        location: WalkLocation,
        *,
        dtypes: Sequence[Any] = (),
        copies: int = 1,
    ) -> int:
        """Count the bytes and operations of one matmul on one device. Return the operations.

        Args:
          elements: Multiplications of one run.
          operands: Bytes of each operand and of the result.
          location: The equation.
          dtypes: Element types of the operands. Defaults to bfloat16.
          copies: Number of devices that repeat the same computation.
        """
        flops = 2 * elements * location.runs
        names = {str(dtype) for dtype in dtypes}
        is_fp8 = bool(names) and all(name.startswith("float8") for name in names)
        self.work += Work(
            flops=flops,
            min_flops=flops,
            fp8_flops=flops if is_fp8 else 0,
            f32_flops=flops if "float32" in names else 0,
            matmul_bytes=sum(operands) * location.runs,
            # If several devices repeat the same computation, only one of them does useful work.
            repeated_flops=flops if location.recomputed else flops - flops // copies,
        )
        return flops


def _frozen(dims: Iterable[Iterable[str]]) -> Dims:
    return tuple(tuple(dim) for dim in dims)


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


def _is_cut_again(goal: tuple[str, ...], scattered: frozenset[str], new: frozenset[str]) -> bool:
    """Tell whether a new mesh axis comes after a reduce-scattered one in the mesh axes of a dim.

    XLA would have to slice the shards of the reduce-scatter again. It then all-reduces the whole
    array instead, and slices it once.
    """
    major = [at for at, axis in enumerate(goal) if axis in scattered]
    return bool(major) and not new.isdisjoint(goal[major[0] :])


def _is_cut_from_sum(value: ShardedValue, aval: Any, scattered: frozenset[str]) -> bool:
    """Tell whether a sum over Explicit mesh axes is scattered over only some of these mesh axes.

    XLA then all-reduces the whole array over all of these mesh axes, and slices it.
    """
    groups = value.groups or (value.owed,)
    return explicit_axes(aval) >= value.owed and any(
        group & scattered and not group <= scattered for group in groups
    )
