"""Compute which devices hold which part of an array, and draw the parts."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tools.pictures.svg import Box, Picture

Block = tuple[tuple[int, int], ...]  # for each dim: first index, and the one after the last


def holders(sharding: NamedSharding, shape: Sequence[int]) -> dict[Block, list[int]]:
    """Return the devices that hold each part of an array, numbered by position in the mesh."""
    assert isinstance(sharding.mesh, Mesh)
    place = {device: number for number, device in enumerate(sharding.mesh.devices.flat)}
    parts: dict[Block, list[int]] = {}
    for device, slices in sharding.devices_indices_map(tuple(shape)).items():
        bounds = (part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))
        parts.setdefault(tuple(bounds), []).append(place[device])
    return {block: sorted(devices) for block, devices in sorted(parts.items())}


def spec_text(spec: PartitionSpec) -> str:
    """Return a spec as code."""
    return f"P({', '.join(map(repr, spec))})"


def draw_matrix(picture: Picture, box: Box, sharding: NamedSharding, shape: Sequence[int]) -> None:
    """Draw the parts of an array of two dims with their devices; color the part of device 0."""
    rows, columns = shape
    for ((top, bottom), (left, right)), devices in holders(sharding, shape).items():
        part = Box(
            x=box.x + left * box.width / columns,
            y=box.y + top * box.height / rows,
            width=(right - left) * box.width / columns,
            height=(bottom - top) * box.height / rows,
        )
        picture.box(part, kind="mine" if 0 in devices else "part")
        picture.label(part, " ".join(map(str, devices)))


def draw_mesh(picture: Picture, box: Box, mesh: Mesh) -> None:
    """Draw a mesh of two axes: one cell per device, with its number."""
    rows, columns = mesh.devices.shape
    for number in range(mesh.devices.size):
        row, column = divmod(number, columns)
        cell = Box(
            x=box.x + column * box.width / columns,
            y=box.y + row * box.height / rows,
            width=box.width / columns,
            height=box.height / rows,
        )
        picture.box(cell, kind="mine" if number == 0 else "part")
        picture.label(cell, str(number))
