"""The rules that `bound` gives to nnx, and a check of each variable that nnx shards by them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.errors import Problem, RankMismatchError, raise_problems
from shardwright.interop.logical_rules import MeshAxes, Names, Sizes, axis_of, misfit, shard_counts
from shardwright.vocabulary.axes import EMPTY, Role

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager


class Table(tuple[tuple[str, MeshAxes], ...]):  # noqa: SLOT001
    """Rules for nnx, and the manager and the names that they come from.

    nnx reads a tuple. flax keeps it for each thread, so the check needs no state of its own.
    """

    pm: PartitionManager
    names: Names
    sizes: Sizes

    @classmethod
    def of(
        cls,
        pm: PartitionManager,
        names: Names,
        table: Mapping[str, MeshAxes],
        sizes: Mapping[str, int] | None,
    ) -> Table:
        """Return the rules of a manager."""
        rules = cls(table.items())
        rules.pm, rules.names, rules.sizes = pm, names, shard_counts(pm, names, sizes)
        return rules

    def check(self, shape: tuple[int, ...], sharding: Any, own: Any = ()) -> None:
        """Check that nnx can shard an array of a shape as its names say.

        Args:
          shape: The shape.
          sharding: The names of its dims.
          own: Rules of the variable itself, which nnx applies besides those of the table.

        Raises:
          RankMismatchError: There are more names than dims.
          IndivisibleError: A size is not a multiple of the number of shards.
          StrategyError: The rules were made for another size of a name.
          UnknownAxisError: A name is neither in the table nor a mesh axis.
        """
        table, sizes = {**dict(self), **dict(own or ())}, self.pm.mesh.shape
        if len(sharding) > len(shape):
            what = f"the variable has the names {tuple(sharding)} for {len(shape)} dims"
            fix = (
                "give the variable one name per dim\n"
                "or, if it is a factored moment, create model and optimizer in "
                "nnx.use_eager_sharding(False), and call place(model, pm, names) and "
                "place(optimizer, pm, names, params=model)"
            )
            raise RankMismatchError(what, path=f"variable {shape}", fix=fix)
        problems: list[Problem] = []
        for dim, (size, name) in enumerate(zip(shape, sharding, strict=False)):
            if not isinstance(name, str):
                continue
            if name not in table and name not in sizes:
                axis_of(name, self.names, f"variable {shape} dim {dim}", problems)
                continue
            entry, place = table.get(name, name), f"variable {shape}"
            error = misfit(
                name, size, entry, sizes, sizes=self.sizes, path=place, dim=dim, call="bound"
            )
            if error is not None:
                self._resolve(shape, dim, name)
                raise error
        raise_problems(problems)

    def _resolve(self, shape: tuple[int, ...], dim: int, name: str) -> None:
        """Raise the error of the resolver, unless its rule has a fallback that nnx cannot use."""
        if name in self.names:
            target = self.names[name]
            axis, role = (target, Role.PARAM) if isinstance(target, str) else target
            annotation = [EMPTY] * len(shape)
            annotation[dim] = axis
            self.pm.resolve(*annotation, role=role, shape=shape)


def install(spmd: Any) -> None:
    """Wrap flax's function that shards a variable, once, so that it checks under a `Table`."""
    original = spmd.shard_value
    if getattr(original, "checks_shardwright_tables", False):
        return

    @functools.wraps(original)
    def shard_value(value: Any, out_sharding: Any, sharding_rules: Any, mesh: Any) -> Any:
        rules = spmd.get_logical_axis_rules()
        if isinstance(rules, Table) and isinstance(out_sharding, tuple):
            rules.check(tuple(getattr(value, "shape", ())), out_sharding, sharding_rules)
        return original(value, out_sharding, sharding_rules, mesh)

    shard_value.checks_shardwright_tables = True  # type: ignore[attr-defined]
    spmd.shard_value = shard_value
