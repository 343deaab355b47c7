"""The rules that `rules` gives to flax, and a check of each constraint that flax places by them.

This file imports flax, so `bridge` imports it where it is used.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import flax.linen.spmd as spmd
import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardwright.errors import Problem, RankMismatchError, raise_problems
from shardwright.interop.logical_rules import MeshAxes, Names, Sizes, axis_of, misfit, shard_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwright.manager.manager import PartitionManager

_UNBOX = (
    "in the state of an optimizer, moments may have the box of a parameter with other dims: "
    "call unbox of interop.flax instead of nn.unbox"
)


class Rules(tuple[tuple[str, MeshAxes], ...]):  # noqa: SLOT001
    """Rules for flax, and the manager and the names that they come from.

    flax reads a tuple. It keeps it for each thread, so the check needs no state of its own.
    """

    pm: PartitionManager
    names: Names

    sizes: Sizes

    @classmethod
    def of(
        cls,
        pm: PartitionManager,
        names: Names,
        exported: tuple[tuple[str, MeshAxes], ...],
        sizes: Mapping[str, int] | None,
    ) -> Rules:
        """Return the rules of a manager."""
        rules = cls(exported)
        rules.pm, rules.names, rules.sizes = pm, names, shard_counts(pm, names, sizes)
        return rules

    def check(self, shape: tuple[int, ...], names: Any) -> None:
        """Check the names of an array, and that its sizes divide. flax itself would replicate it.

        Raises:
          UnknownAxisError: A name is not in `names`; all are reported at once.
          RankMismatchError: There are more names than dims.
          IndivisibleError: A size is not a multiple of the number of shards.
          StrategyError: The rules were made for another size of a name.
        """
        place = f"array of shape {shape}"
        # flax passes the names of a box as a `PartitionSpec`, and those of a constraint as a tuple.
        advice = _UNBOX if isinstance(names, PartitionSpec) else ""
        names = tuple(names)
        if len(names) > len(shape):
            what = f"{len(names)} names {names} for {len(shape)} dims"
            raise RankMismatchError(what, path=place, fix=advice or "write one name per dim")
        problems: list[Problem] = []
        for name in names:
            if isinstance(name, str):
                axis_of(name, self.names, place, problems)
        raise_problems(problems)
        spec = spmd.logical_to_mesh_axes(names, tuple(self)) or ()
        for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
            error = misfit(
                names[dim],
                size,
                entry,
                self.pm.mesh.shape,
                sizes=self.sizes,
                path=place,
                dim=dim,
                call="rules",
                advice=advice,
            )
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
            for leaf in jax.tree.leaves(x):
                rules.check(np.shape(leaf), names)
        return original(names, x, **options)

    wrapped: Any = constrain
    wrapped.checks_shardwright_rules = True
    spmd._with_sharding_constraint_one_fallback = wrapped
