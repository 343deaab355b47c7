"""The rules that `rules` gives to flax, and a check of each constraint that flax places by them.

This file imports flax, so `bridge` imports it where it is used.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import flax.linen.spmd as spmd
import numpy as np

from shardwright.errors import Problem, raise_problems
from shardwright.interop.logical_rules import MeshAxes, Names, axis_of, indivisible

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager


class Rules(tuple[tuple[str, MeshAxes], ...]):  # noqa: SLOT001
    """Rules for flax, and the manager and the names that they come from.

    flax reads a tuple. It keeps it for each thread, so the check needs no state of its own.
    """

    pm: PartitionManager
    names: Names

    @classmethod
    def of(
        cls, pm: PartitionManager, names: Names, exported: tuple[tuple[str, MeshAxes], ...]
    ) -> Rules:
        """Return the rules of a manager."""
        rules = cls(exported)
        rules.pm, rules.names = pm, names
        return rules

    def check(self, shape: tuple[int, ...], names: Any) -> None:
        """Check the names of an array, and that its sizes divide. flax itself would replicate it.

        Raises:
          UnknownAxisError: A name is not in `names`; all are reported at once.
          IndivisibleError: A size is not a multiple of the number of shards.
        """
        place = f"array of shape {shape}"
        problems: list[Problem] = []
        for name in names:
            if isinstance(name, str):
                axis_of(name, self.names, place, problems)
        raise_problems(problems)
        spec = spmd.logical_to_mesh_axes(names, tuple(self)) or ()
        for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
            mesh = self.pm.mesh.shape
            error = indivisible(names[dim], size, entry, mesh, path=place, dim=dim, call="rules")
            if error is not None:
                raise error


def install() -> None:
    """Wrap flax's function that places a constraint, once, so that it checks under `Rules`."""
    original: Any = spmd._with_sharding_constraint_one_fallback
    if getattr(original, "checks_shardwright_rules", False):
        return

    @functools.wraps(original)
    def constrain(names: Any, x: Any, **options: Any) -> Any:
        rules = options.get("rules")
        if isinstance(rules, Rules) and names is not None:
            rules.check(np.shape(x), tuple(names))
        return original(names, x, **options)

    wrapped: Any = constrain
    wrapped.checks_shardwright_rules = True
    spmd._with_sharding_constraint_one_fallback = wrapped
