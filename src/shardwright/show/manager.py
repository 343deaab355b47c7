"""Show managers in notebooks: the mesh, and the mesh axes that the rules give each axis."""

from __future__ import annotations

import itertools
import math
from typing import Final

from jax.sharding import Mesh

from shardwright.manager.manager import PartitionManager
from shardwright.show.html import MOST_CELLS, MOST_DEVICES, grid, html_table, html_text
from shardwright.show.resolution import mesh_axes_text
from shardwright.vocabulary.axes import SEMANTIC_AXES, Role, axis_label
from shardwright.vocabulary.shown import html_of

# Largest number of rows of the table. Further axes are left out.
_MOST_ROWS: Final = 100


@html_of.register(PartitionManager)
def manager_html(manager: PartitionManager) -> str:
    """Return a manager as HTML: a picture of its mesh, if it is small, and a table of its axes."""
    axes = [*SEMANTIC_AXES, *manager.rules.user_axes][:_MOST_ROWS]
    roles = (Role.ACTIVATION, Role.PARAM)
    rows = [(axis_label(axis), *(_cell(manager, axis, role) for role in roles)) for axis in axes]
    return (
        f"<div><div><b>{html_text(repr(manager))}</b></div>{_mesh_picture(manager)}"
        f"{html_table(('axis', *map(str, roles)), rows, inline=True)}</div>"
    )


def _cell(manager: PartitionManager, axis: str, role: Role) -> str:
    """Return the mesh axes of an axis, or its rule if the size of the dim decides them."""
    resolution = manager.explain((axis,), role=role)
    if not resolution.decisions:
        return "!"
    decision = resolution.decisions[0]
    if resolution.ok:
        return mesh_axes_text(decision)
    # No size is given here, so a rule with several candidates is not decided. Show its text.
    return decision.rule.text if decision.rule is not None else "!"


def _mesh_picture(manager: PartitionManager) -> str:
    """Return a picture of the devices by mesh axis, or an empty string for a large mesh."""
    # Leave out axes of size 1: they change no number and no place in the picture.
    sizes = {axis: size for axis, size in manager.mesh.shape.items() if size > 1}
    count = math.prod(sizes.values())
    # The last mesh axis varies fastest, so its devices form a row.
    columns = list(sizes.values())[-1] if sizes else 1
    if count > MOST_DEVICES or max(columns, count // columns) > MOST_CELLS:
        return ""
    # The devices of an abstract mesh have no ids: they are numbered in mesh order.
    mesh = manager.mesh
    ids = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else range(count)
    names = map(str, ids)
    cells = [list(itertools.islice(names, columns)) for _ in range(count // columns)]
    *major, last = [f"{axis}={size}" for axis, size in sizes.items()] or ["one device"]
    caption = f"Rows: {', '.join(major)}. Columns: {last}" if major else f"Columns: {last}"
    return grid(cells, f"Devices by mesh axis. {caption}")
