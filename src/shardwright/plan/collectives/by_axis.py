"""From mesh axes back to semantic axes: what a collective over `tp` may be moving, under a manager's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.manager.manager import PartitionManager
from shardwright.mesh.build import mesh_sizes
from shardwright.plan.collectives.read import Collective
from shardwright.resolution.rules import AxisRules
from shardwright.vocabulary.axes import SEMANTIC_AXES
from shardwright.vocabulary.modes import MODE_TRAIN, MODES, parse_mode


def carried_axes(
    manager: PartitionManager, *, mode: str | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the semantic axes that may lie over each mesh axis of more than one device, in any role.

    That is read from the rules: an axis counts where one of its candidates names the mesh axis, chosen or not.

    Args:
      manager: whose rules and mesh.
      mode: runtime mode; absent: the manager's, else train.

    >>> from shardwright import Strategy, abstract_mesh
    >>> carried_axes(PartitionManager(Strategy.preset("ddp"), mesh=abstract_mesh("dp:8")))
    {'dp': ('__BATCH__', '__CAPACITY__')}
    """
    asked = parse_mode(mode) if mode is not None else manager.mode or MODE_TRAIN
    rules = manager.rules
    over = {axis: set(_named(rules, axis, asked)) for axis in (*SEMANTIC_AXES, *rules.user_axes)}
    mesh_axes = [name for name, size in mesh_sizes(manager.mesh).items() if size > 1]
    return {
        name: tuple(axis for axis, names in over.items() if name in names) for name in mesh_axes
    }


def _named(rules: AxisRules, axis: str, mode: str) -> Iterator[str]:
    """Yield every mesh axis that a rule of an axis names."""
    at = MODES.index(mode)
    tables = [rules.activations[at], rules.params[at], *(entry.rules for entry in rules.tensors)]
    yield from (
        name for table in tables for key, rule in table if key == axis for name in rule.mesh_axes
    )


def by_axis(
    collectives: Iterable[Collective], manager: PartitionManager, *, mode: str | None = None
) -> dict[str, tuple[Collective, ...]]:
    """Return the collectives that each semantic axis may cause; those of no axis under `""`.

    One over `tp` stands under every axis that may lie over tp: a program says which mesh axes it uses, not why.

    Args:
      collectives: what `read_collectives` returned.
      manager: whose rules and mesh.
      mode: runtime mode; absent: the manager's, else train.
    """
    carried = carried_axes(manager, mode=mode)
    found: dict[str, list[Collective]] = {}
    for one in collectives:
        axes = dict.fromkeys(axis for name in one.mesh_axes for axis in carried.get(name, ()))
        for axis in axes or ("",):
            found.setdefault(axis, []).append(one)
    return {axis: tuple(ones) for axis, ones in found.items()}
