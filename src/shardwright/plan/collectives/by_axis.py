"""Map collectives from mesh axes back to semantic axes, by the rules of a manager."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.manager.core import Manager
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.collectives.collective import Collective
from shardwright.vocabulary.axes import SEMANTIC_AXES
from shardwright.vocabulary.modes import MODE_TRAIN, MODES, parse_mode


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
    """Group collectives by the semantic axes that may cause them. The key "" is for all others.

    A program does not say why it uses a mesh axis. A collective over `tp` is therefore listed under
    every axis that may be sharded over `tp`.

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
