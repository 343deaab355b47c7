"""A check of the arrays that haliax shards by the mapping of `rules`.

This file imports haliax, so `bridge` imports it where it is used.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import haliax.partitioning as partitioning

from shardwright.errors import Problem, raise_problems
from shardwright.interop.logical_rules import Names, Sizes, axis_of, misfit, shard_counts
from shardwright.manager import context

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwright.manager.manager import PartitionManager


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The mapping that `rules` enters, as a part of JAX's cache key.

    Attributes:
      mapping: Name -> mesh axes; names that are replicated are left out.
      names: All names of the model.
      mesh: Mesh axis -> size.
      sizes: The sizes that the mapping was made for.
    """

    mapping: tuple[tuple[str, str | tuple[str, ...]], ...]
    names: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    sizes: Sizes

    @classmethod
    def of(
        cls,
        pm: PartitionManager,
        names: Names,
        mapping: Mapping[str, Any],
        sizes: Mapping[str, int] | None,
    ) -> Rules:
        """Return the rules of a manager."""
        return cls(
            mapping=(*mapping.items(),),
            names=(*names,),
            mesh=(*dict(pm.mesh.shape).items(),),
            sizes=shard_counts(pm, names, sizes),
        )

    def check(self, axes: Any, mapping: Any) -> None:
        """Check the names of an array, and that its sizes divide. haliax itself would not.

        Args:
          axes: The axes of the array.
          mapping: The mapping that haliax uses; None for the one that is entered.

        Raises:
          UnknownAxisError: Names are not in the names of the model; all are reported at once.
          IndivisibleError: A size is not a multiple of the number of shards.
          StrategyError: The mapping was made for another size of a name.
        """
        table = dict(self.mapping)
        if mapping is not None and mapping != table:
            return  # a mapping of the model itself
        sizes = partitioning.axis_spec_to_shape_dict(axes)
        place = f"array with the axes {', '.join(sizes)}"
        problems: list[Problem] = []
        for name in sizes:
            axis_of(name, dict.fromkeys(self.names, ""), place, problems)
        raise_problems(problems)
        for dim, (name, size) in enumerate(sizes.items()):
            if size is None:
                continue
            error = misfit(
                name,
                size,
                table.get(name),
                dict(self.mesh),
                sizes=self.sizes,
                path=place,
                dim=dim,
                call="rules",
            )
            if error is not None:
                raise error


def install() -> None:
    """Wrap the function of haliax that returns the spec of an array, once, so that it checks."""
    original: Any = partitioning.pspec_for_axis
    if getattr(original, "checks_shardwright_rules", False):
        return

    @functools.wraps(original)
    def pspec_for_axis(axis: Any, mapping: Any = None) -> Any:
        rules = context.RULES.value
        if isinstance(rules, Rules):
            rules.check(axis, mapping)
        return original(axis, mapping)

    wrapped: Any = pspec_for_axis
    wrapped.checks_shardwright_rules = True
    partitioning.pspec_for_axis = wrapped
