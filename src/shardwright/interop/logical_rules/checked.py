"""Check the arrays that flax, nnx and haliax shard by the rules of a manager.

Each of these libraries maps names to mesh axes by a table without fallbacks. All silently replicate
an array whose size does not divide. Some also replicate a dim whose name is not in the table.
The libraries offer no hook, so `checked` wraps the one function of a library that reads the table.
The wrapper checks an array only while a bridge has entered a `CheckedTable`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardwright.errors import (
    IndivisibleError,
    Problem,
    RankMismatchError,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.interop.logical_rules.names import MeshAxes, Names, axis_of, read_names
from shardwright.interop.logical_rules.to_rules import candidate_shards
from shardwright.manager import context
from shardwright.resolution.partition_specs import entry_names
from shardwright.vocabulary.axes import EMPTY, Role

if TYPE_CHECKING:
    from shardwright.manager.manager import PartitionManager

Library = Literal["flax", "nnx", "haliax"]

_ARRAYS = (
    "call interop.flax.arrays instead of nn.unbox: in the state of an optimizer, moments may have "
    "the box of a parameter that has other dims"
)
_PLACE = (
    "give the variable one name per dim\n"
    "or, if it is a factored moment, create model and optimizer in nnx.use_eager_sharding(False), "
    "and call place(model, pm, names) and place(optimizer, pm, names, params=model)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTable:
    """A table that a bridge gives to another library.

    The table is a part of JAX's cache keys. It does not hold the manager, because JAX's caches
    would keep the manager alive.

    Attributes:
      library: The library.
      table: Name -> mesh axes, in the form that the library takes.
      names: Name -> (axis, role), or an axis, for all names of the model.
      mesh: Mesh axis -> size.
      sizes: One entry per name in `sizes=`: the name, its size, and the numbers of shards into
        which its rule may split a dim.
    """

    library: Library
    table: tuple[tuple[str, MeshAxes], ...]
    names: tuple[tuple[str, Any], ...]
    mesh: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[str, int, tuple[int, ...]], ...]

    def check(
        self,
        names: Sequence[Any],
        shape: Sequence[int | None],
        entries: Sequence[Any],
        *,
        place: str,
        known: Iterable[str] = (),
        advice: Sequence[str] = (),
    ) -> None:
        """Check the names of an array, and that its sizes divide.

        Args:
          names: Names of the dims of the array. Only strings are checked.
          shape: Sizes of the dims; None for a size that is not known.
          entries: The mesh axes that the library will use for each dim.
          place: The array, for messages.
          known: Names besides those of the model that the library knows, such as mesh axes.
          advice: The first lines of the fix.

        Raises:
          UnknownAxisError: The array has names that the model lacks; all are reported at once.
          IndivisibleError: A size is not a multiple of the number of shards.
          StrategyError: A dim has another size than `sizes=` says, and the strategy shards the two
            sizes in different ways.
        """
        known, model = {*known}, dict(self.names)
        problems: list[Problem] = []
        for name in names:
            if isinstance(name, str) and name not in known:
                axis_of(name, model, place, problems)
        raise_problems(problems)
        # flax allows fewer names than dims; the last dims are then replicated.
        for dim, (name, size, entry) in enumerate(zip(names, shape, entries, strict=False)):
            where = {"path": place, "dim": dim, "size": size}
            error = None if size is None else self._misfit(name, size, entry, advice, where)
            if error is not None:
                if self.library == "nnx":
                    self._resolve(shape, dim, name)
                raise error

    def _misfit(
        self, name: str, size: int, entry: Any, advice: Sequence[str], where: Mapping[str, Any]
    ) -> ShardingError | None:
        """Return an error if a size does not fit the mesh axes of its name; else None.

        A table of another library has no fallbacks, so a size that does not divide is an error. An
        error is also returned if the table was made for another size, and the strategy shards the
        two sizes in different ways.
        """
        mesh, axes = dict(self.mesh), entry_names(entry)
        shards = math.prod(mesh[axis] for axis in axes)
        if size % shards:
            call = "bound" if self.library == "nnx" else "rules"
            fix = f"pass sizes={{{name!r}: {size}}} to {call}, so that a fallback applies"
            return IndivisibleError(
                f"size {size} of {name!r} does not divide over {'+'.join(axes)}={shards}",
                mesh_axes=axes,
                shards=shards,
                fix="\n".join([*advice, fix, "or choose a size and a mesh that divide"]),
                **where,
            )
        own = [(given, counts) for other, given, counts in self.sizes if other == name]
        for given, counts in own:
            # Two sizes get the same mesh axes if the same numbers of shards divide both.
            if any((size % count == 0) != (given % count == 0) for count in counts):
                what = f"size {size} of {name!r}: the rules were made for size {given}"
                what += ", which the strategy shards in another way"
                fix = f"give dims of size {given} another name than {name!r}"
                return StrategyError(what, fix="\n".join([*advice, fix]), **where)
        return None

    def _resolve(self, shape: Sequence[Any], dim: int, name: str) -> None:
        """Raise the error of the resolver, if the resolver raises one.

        It raises no error if the rule has a fallback. nnx cannot use the fallback, so the
        caller then raises its own error.
        """
        target, manager = dict(self.names).get(name), context.current()
        if target is not None and manager is not None:
            axis, role = (target, Role.PARAM) if isinstance(target, str) else target
            annotation = [EMPTY] * len(shape)
            annotation[dim] = axis
            # Let `resolve` raise the error: its message names the rule and the file, which are not
            # in the table.
            manager.resolve(*annotation, role=role, shape=shape)


@contextlib.contextmanager
def checked(
    library: Library,
    table: Iterable[tuple[str, MeshAxes]],
    pm: PartitionManager,
    names: Names,
    sizes: Mapping[str, int] | None,
) -> Iterator[None]:
    """Enter a manager, and check the arrays that a library shards by the manager's table.

    Raises:
      StrategyError: The mesh has Explicit axes, and constraints of flax and haliax need Auto ones.
    """
    targets = read_names(names, pm.rules.user_axes, declare="")
    entered = CheckedTable(
        library=library,
        table=tuple(table),
        names=tuple(
            (name, target if isinstance(target, str) else tuple(target))
            for name, target in names.items()
        ),
        mesh=tuple(dict(pm.mesh.shape).items()),
        sizes=tuple(
            (name, size, candidate_shards(pm, name, targets[name]))
            for name, size in (sizes or {}).items()
            if name in targets
        ),
    )
    if library != "nnx" and AxisType.Explicit in pm.mesh.axis_types:
        what = f"{library}'s constraints need Auto mesh axes, and the mesh has Explicit ones"
        raise StrategyError(what, fix='use axis_types = "auto"')
    # Wrap at the first use, because importing a bridge must not change flax.
    _INSTALL[library]()
    # Both contexts are parts of jit's cache key, unlike the table that the library keeps.
    with pm, context.RULES(entered):
        yield


def _wrap(module: Any, function: str, library: Library, check: Callable[..., None]) -> None:
    """Wrap a function of a library, once. `check` gets the table and the function's arguments."""
    original: Any = getattr(module, function)
    # An earlier call has wrapped this function, perhaps before this module was reloaded.
    if getattr(original, "checks_shardwright_table", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        table = context.RULES.value
        if isinstance(table, CheckedTable) and table.library == library:
            check(table, *args, **options)
        return original(*args, **options)

    wrapped.checks_shardwright_table = True  # type: ignore[attr-defined]
    setattr(module, function, wrapped)


def _install_flax() -> None:
    import flax.linen.spmd as spmd

    def check(table: CheckedTable, names: Any, x: Any, **options: Any) -> None:
        # A model may enter a table of its own, which is not checked.
        if names is None or options.get("rules") != table.table:
            return
        # flax passes the names of a box as a `PartitionSpec`, and those of a constraint as a tuple.
        advice = [_ARRAYS] if isinstance(names, PartitionSpec) else []
        names = tuple(names)
        for shape in map(np.shape, jax.tree.leaves(x)):
            place = f"array of shape {shape}"
            if len(names) > len(shape):
                what = f"{len(names)} names {names} for {len(shape)} dims"
                raise RankMismatchError(
                    what, path=place, fix="\n".join(advice) or "write one name per dim"
                )
            entries: Any = spmd.logical_to_mesh_axes(names, table.table) or ()
            table.check(names, shape, entries, place=place, advice=advice)

    _wrap(spmd, "_with_sharding_constraint_one_fallback", "flax", check)


def _install_nnx() -> None:
    from flax.core import spmd

    def check(table: CheckedTable, value: Any, names: Any, own_rules: Any, mesh: Any) -> None:
        # A model may enter a table of its own, which is not checked.
        if spmd.get_logical_axis_rules() != table.table or not isinstance(names, tuple):
            return
        shape = tuple(getattr(value, "shape", ()))
        if len(names) > len(shape):
            what = f"the variable has the names {names} for {len(shape)} dims"
            raise RankMismatchError(what, path=f"variable {shape}", fix=_PLACE)
        # A variable may have rules of its own, `own_rules`. Its names may also be mesh axes.
        rules = {name: name for name, _ in table.mesh} | dict(table.table) | dict(own_rules or ())
        entries = [rules.get(name) if isinstance(name, str) else None for name in names]
        table.check(names, shape, entries, place=f"variable {shape}", known=rules)

    _wrap(spmd, "shard_value", "nnx", check)


def _install_haliax() -> None:
    from haliax import partitioning

    def check(table: CheckedTable, axes: Any, mapping: Any = None) -> None:
        rules = dict(table.table)
        if mapping is not None and mapping != rules:
            return  # The model itself has entered this mapping, so it is not checked.
        sizes = partitioning.axis_spec_to_shape_dict(axes)
        place = f"array with the axes {', '.join(sizes)}"
        table.check([*sizes], [*sizes.values()], [*map(rules.get, sizes)], place=place)

    _wrap(partitioning, "pspec_for_axis", "haliax", check)


_INSTALL = {"flax": _install_flax, "nnx": _install_nnx, "haliax": _install_haliax}
