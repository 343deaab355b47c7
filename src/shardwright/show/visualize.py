"""Draw which device holds which block of an array: as text in terminals, as SVG in notebooks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardwright.errors import StrategyError
from shardwright.mesh.build import abstract_mesh, mesh_sizes
from shardwright.resolution.decisions import Resolution
from shardwright.resolution.partition_specs import UNCONSTRAINED, entry_names, spec_text
from shardwright.show.html import LONGEST_CELL, grid, html_text
from shardwright.show.tables import table

# Largest numbers of panels, rows and columns that are drawn. If there are more, the middle ones are
# left out.
_MOST_PANELS: Final = 16
_MOST_ROWS: Final = 16
_MOST_COLUMNS: Final = 8
_Position = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitDim:
    """A dim that is cut into blocks.

    Attributes:
      dim: Position.
      label: Its axis, or "".
      size: Number of elements, or None if unknown.
      blocks: Number of blocks.
      over: The mesh axes, as in `fsdp+tp`, or "" if they are unknown.
    """

    dim: int
    label: str
    size: int | None
    blocks: int
    over: str

    @property
    def name(self) -> str:
        """The dim as messages name it."""
        return f"dim {self.dim}{f' {self.label}' if self.label else ''}"

    def block(self, at: int) -> str:
        """Return the elements of a block, such as `0:32`, or its number if the size is unknown."""
        if self.size is None:
            return f"block {at}"
        width = self.size // self.blocks
        return f"{at * width}:{(at + 1) * width}"

    def __str__(self) -> str:
        size = "" if self.size is None else f" {self.size}"
        over = f" over {self.over}" if self.over else f" into {self.blocks}"
        return f"{self.label or f'dim {self.dim}'}{size}{over}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardPicture:
    """The devices that hold each block of an array. `print` shows text; a notebook shows an SVG.

    Attributes:
      title: Title of the picture.
      dims: The dims that are cut, in order.
      holders: The devices of each block, by the block's index along each of `dims`.
    """

    title: str
    dims: tuple[SplitDim, ...]
    holders: Mapping[_Position, tuple[int, ...]]

    def __str__(self) -> str:
        lines = [self.title]
        for heading, rows, columns, cells in self._panels():
            corner = " / ".join(dim.name for dim in self.dims[-2:]) or "all of it"
            body = [
                [corner, *columns],
                *([row, *each] for row, each in zip(rows, cells, strict=True)),
            ]
            lines += ["", *([heading] if heading else []), *table(body, indent="  ")]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        panels = list(self._panels())
        drawn = "".join(
            grid(
                cells, heading or self._caption(), rows=rows, columns=columns, at=(at, len(panels))
            )
            for at, (heading, rows, columns, cells) in enumerate(panels)
        )
        caption = f"<div>{html_text(self._caption())}</div>" if len(panels) > 1 else ""
        flow = f'<div style="display: flex; flex-wrap: wrap; gap: 4px 16px">{drawn}</div>'
        return f"<div><div><b>{html_text(self.title)}</b></div>{flow}{caption}</div>"

    def plain_html(self) -> str:
        """Return the SVG of at most two cut dims, without labels of the elements in each block."""
        ((_, _, _, cells),) = self._panels()
        return grid(cells, f"Devices by the part that they hold. {self._caption()}")

    def _caption(self) -> str:
        names = ["Columns", "Rows"]
        captions = [f"{names.pop(0) if names else 'Panels'}: {dim}" for dim in reversed(self.dims)]
        return ". ".join(reversed(captions)) or "Every device holds all of it"

    def _panels(self) -> Iterator[tuple[str, list[str], list[str], list[list[str]]]]:
        """Yield the heading, the names of rows and columns, and the cells of each panel.

        The last two cut dims are rows and columns. Each block of the other cut dims is a panel.
        """
        every: list[SplitDim | None] = [None] * (2 - len(self.dims))
        every.extend(self.dims)
        *outer, rows, columns = every
        down = _shown(1 if rows is None else rows.blocks, _MOST_ROWS)
        across = _shown(1 if columns is None else columns.blocks, _MOST_COLUMNS)
        places = list(itertools.product(*(range(dim.blocks) for dim in outer if dim is not None)))
        for number in _shown(len(places), _MOST_PANELS):
            if number is None:
                yield "...", [""], [""], [["..."]]
                continue
            place = places[number]
            heading = ", ".join(
                f"{dim.name} {_name(dim, at)}"
                for dim, at in zip(outer, place, strict=True)
                if dim is not None
            )
            inner = [
                [
                    self._cell((*place, *([row] if rows else []), *([column] if columns else [])))
                    for column in across
                ]
                for row in down
            ]
            names = [
                [_name(dim, at) for at in shown] for dim, shown in ((rows, down), (columns, across))
            ]
            yield heading, names[0], names[1], inner

    def _cell(self, place: Sequence[int | None]) -> str:
        """Return the devices of a block in one short line."""
        if None in place:
            return "..."
        devices = self.holders[tuple(at for at in place if at is not None)]
        text = ", ".join(map(str, devices))
        if len(devices) <= 2 or len(text) <= LONGEST_CELL:
            return text
        first, last = devices[0], devices[-1]
        if devices == tuple(range(first, last + 1)):
            return f"{first} to {last}"
        return f"{first}, {devices[1]}, … {last}"


def visualize(
    x: Any,
    *,
    shape: Sequence[int] | None = None,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | str | None = None,
) -> ShardPicture:
    """Return a picture of which device holds which block. It is text in a terminal, SVG in Jupyter.

    The last two dims that are cut are rows and columns. If more dims are cut, there is a panel for
    each block of the other cut dims. Devices of an array are shown by their ids. Other devices are
    numbered in the order of the mesh, the last mesh axis fastest.

    Args:
      x: An array, a `jax.ShapeDtypeStruct` with a sharding, a sharding, a `PartitionSpec`, or a
        `Resolution`.
      shape: Shape, for a sharding or a spec. Without one, blocks are numbered.
      mesh: Mesh of a spec: a mesh, sizes by name, or text such as `fsdp:2,tp:4`.

    Raises:
      ShardingError: The resolution failed.
      StrategyError: `x` has no sharding, or the mesh of a spec is not given.
      ValueError: JAX refuses the spec for this shape.

    >>> print(visualize(jax.P("fsdp", "tp"), shape=(8, 8), mesh="fsdp:2,tp:2"))
    P('fsdp', 'tp') of [8,8] on fsdp:2,tp:2, a block has [4,4]
    <BLANKLINE>
      dim 0 / dim 1  0:4  4:8
      0:4            0    1
      4:8            2    3
    """
    if isinstance(x, Resolution):
        labels = [decision.label for decision in x.decisions]
        sizes: list[Any] = [decision.size for decision in x.decisions]
        name = f"{x.path} {x.annotation}".strip()
        # A size may be unknown, or a symbol of `jax.export`.
        known = sizes if all(type(size) is int for size in sizes) else None
        return _of_spec(x.require(), dict(x.mesh), known, name=name, labels=labels)
    if isinstance(x, PartitionSpec):
        if mesh is None:
            fix = 'pass mesh="fsdp:2,tp:4" and shape=, or a NamedSharding'
            raise StrategyError("a spec is drawn on a mesh, and none is given", fix=fix)
        return _of_spec(x, abstract_mesh(mesh) if isinstance(mesh, str) else mesh, shape)
    is_sharding = isinstance(x, jax.sharding.Sharding)
    # Inside `jit`, an array has a sharding only in its type, and only on Explicit mesh axes.
    is_traced = isinstance(x, jax.core.Tracer)
    sharding = x if is_sharding else getattr(jax.typeof(x) if is_traced else x, "sharding", None)
    if sharding is None or (is_traced and AxisType.Explicit not in sharding.mesh.axis_types):
        fix = "pass a jax.Array, a sharding, or a Resolution, such as pm.explain(axes, shape=...)"
        if is_traced:
            fix = "visualize it outside of jit, or use jax.debug.visualize_array_sharding"
        raise StrategyError(f"{type(x).__name__} has no sharding to draw", fix=fix)
    if not is_sharding:
        shape = x.shape
    if isinstance(sharding, NamedSharding):
        name = "" if is_sharding else f"{x.dtype}{list(x.shape)}".replace(" ", "")
        return _of_spec(sharding.spec, sharding.mesh, shape, name=name)
    if shape is None:
        fix = "pass shape="
        raise StrategyError(
            f"the blocks of a {type(sharding).__name__} depend on the shape", fix=fix
        )
    return _of_indices(sharding, tuple(shape))


def _of_spec(
    spec: PartitionSpec,
    mesh: Any,
    shape: Sequence[int] | None,
    *,
    name: str = "",
    labels: Sequence[str] = (),
) -> ShardPicture:
    sizes = dict(mesh_sizes(mesh))
    over = [entry_names(entry) for entry in spec.partitions]
    text = ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    title = f"{name}{'  ->  ' if name else ''}{spec_text(spec)}"
    if shape is not None:
        shape = tuple(shape)
        if len(over) > len(shape):
            fix = f"pass shape= with {len(over)} sizes"
            raise StrategyError(f"{spec_text(spec)} has more dims than {list(shape)}", fix=fix)
        on = NamedSharding(abstract_mesh(sizes), PartitionSpec(*(names or None for names in over)))
        whole = "" if name else f" of {list(shape)}".replace(", ", ",")
        block = str(list(on.shard_shape(shape))).replace(" ", "")
        title = f"{title}{whole} on {text}, a block has {block}"
    else:
        title = f"{title} on {text}"
    if UNCONSTRAINED in spec.partitions:
        title = f"{title}; the compiler decides dims that are {UNCONSTRAINED}"
    dims = tuple(
        SplitDim(
            dim=at,
            label=labels[at] if labels else "",
            size=None if shape is None else shape[at],
            blocks=math.prod(sizes[axis] for axis in names),
            over="+".join(names),
        )
        for at, names in enumerate(over)
        # Mesh axes of size 1 cut nothing, so a dim that is sharded only over them is drawn whole.
        if math.prod(sizes[axis] for axis in names) > 1
    )
    numbers = (
        [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else itertools.count()
    )
    holders: dict[_Position, list[int]] = {}
    # The last mesh axis varies fastest, as in `Mesh.devices.flat`.
    for number, position in zip(
        numbers, itertools.product(*map(range, sizes.values())), strict=False
    ):
        at = dict(zip(sizes, position, strict=True))
        place = tuple(_block(at, sizes, over[dim.dim]) for dim in dims)
        holders.setdefault(place, []).append(number)
    held = {place: tuple(sorted(devices)) for place, devices in holders.items()}
    return ShardPicture(title=title, dims=dims, holders=held)


def _of_indices(sharding: Any, shape: tuple[int, ...]) -> ShardPicture:
    """Return the picture of a sharding that names no mesh axes, such as that of one device."""
    starts = {
        device.id: tuple(index.start or 0 for index in indices)
        for device, indices in sharding.devices_indices_map(shape).items()
    }
    cuts = [sorted({each[at] for each in starts.values()}) for at in range(len(shape))]
    dims = tuple(
        SplitDim(dim=at, label="", size=shape[at], blocks=len(cut), over="")
        for at, cut in enumerate(cuts)
        if len(cut) > 1
    )
    holders: dict[_Position, list[int]] = {}
    for number, start in starts.items():
        place = tuple(cuts[dim.dim].index(start[dim.dim]) for dim in dims)
        holders.setdefault(place, []).append(number)
    title = f"{type(sharding).__name__} of {list(shape)}".replace(", ", ",")
    held = {place: tuple(sorted(devices)) for place, devices in holders.items()}
    return ShardPicture(title=title, dims=dims, holders=held)


def _block(at: Mapping[str, int], sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    """Return the index of the block that a device holds. The first mesh axis is major."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def _name(dim: SplitDim | None, at: int | None) -> str:
    if dim is None:
        return ""
    return "..." if at is None else dim.block(at)


def _shown(count: int, most: int) -> list[int | None]:
    """Return the numbers of the blocks to draw, with one None in place of the other blocks."""
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]
