"""Names of a list of rules, and the axis and role that each becomes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jax.sharding import PartitionSpec

from shardwright.errors import (
    AxisConflictError,
    Problem,
    StrategyError,
    UnknownAxisError,
    did_you_mean,
    raise_problems,
)
from shardwright.resolution.request import as_role
from shardwright.resolution.unknown_axes import check_axes
from shardwright.vocabulary.axes import (
    EMPTY,
    SEMANTIC_AXES,
    Role,
    axis_label,
    canonical_axis,
    file_name,
)

if TYPE_CHECKING:
    from shardwright.strategy.model import Strategy

Semantics = Literal["flax", "nnx", "strict"]
Names = Mapping[str, "tuple[str, Role | str] | str"]
Modes = Mapping[str, tuple[str, str]]
MeshAxes = str | tuple[str, ...] | None

# The key of the names in a variable's metadata, for three ranges of flax versions: since 0.12.4,
# from 0.11 to 0.12.3, before 0.11.
_KEYS = ("out_sharding", "sharding_names", "sharding")
_OWN = "pass an axis of your own in own_axes=, such as own_axes=strategy.axes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A strategy with the same meaning as a list of rules.

    Attributes:
      strategy: The strategy.
      names: Name in the list -> (axis, role), or one axis for both roles.
      notes: Notes on names that were declared, merged or dropped.
    """

    strategy: Strategy
    names: Mapping[str, tuple[str, Role] | str]
    notes: tuple[str, ...]

    def annotation(self, names: Sequence[str | None]) -> tuple[str, ...]:
        """Return the annotation of an array from the names of its dims; None becomes `EMPTY`.

        Raises:
          UnknownAxisError: A name has no rule and is not in `names`.
          AxisConflictError: A name occurs twice under the semantics of flax.
        """
        axes: list[str] = []
        for name in names:
            if name is not None and not isinstance(name, str):
                what = f"{name!r} is not the name of a dim"
                raise UnknownAxisError(what, fix='write one name per dim, such as ("embed", None)')
            if name is not None and name not in self.names:
                hint = did_you_mean(str(name), list(self.names))
                fix = f"{hint} add it to names=".strip()
                raise UnknownAxisError(f"the name {name!r} has no rule", fix=fix)
            # flax refuses a repeated name, even if the dims of this name are replicated.
            is_flax = self.strategy.policy.conflict == "next"
            if is_flax and name is not None and name in names[: len(axes)]:
                what, fix = f"the name {name!r} occurs twice", "give each dim its own name, or None"
                raise AxisConflictError(what, dim=len(axes), fix=fix)
            axes.append(EMPTY if name is None else axis_in(self.names[name]))
        return tuple(axes)

    def __str__(self) -> str:
        lines = [f"{len(self.names)} names imported"]
        return "\n".join([*lines, *(f"  note  {note}" for note in self.notes)])


def resized(
    imported: Imported,
    *,
    mesh: Mapping[str, int],
    dcn: Mapping[str, int] | None = None,
    axis_types: str | None = None,
) -> Imported:
    """Return an imported strategy with other mesh sizes, for bridges. One size may be -1."""
    from shardwright.strategy.model import Strategy

    data: dict[str, Any] = {"mesh": dict(mesh)}
    if dcn:
        data["dcn"] = dict(dcn)
    if axis_types is not None:
        data["axis_types"] = axis_types
    strategy = imported.strategy | Strategy.model_validate(data)
    return dataclasses.replace(imported, strategy=strategy)


def read_names(
    names: Any, own_axes: Iterable[str], *, declare: str = _OWN, are_imported: bool = False
) -> dict[str, Any]:
    """Return the canonical axis, or (axis, role), of each name that a caller maps.

    Args:
      names: Name -> (axis, role), or an axis for both roles. None maps nothing.
      own_axes: Axes besides those of the vocabulary.
      declare: The last words of a message, which say how to declare an axis of the user.
      are_imported: Whether a name may be mapped to the new axis that an import without `names`
        gives it, such as `embed` to `logical_embed`.

    Raises:
      StrategyError: A name is mapped to neither an axis nor a pair of an axis and a role.
      UnknownAxisError: Axes are neither in the vocabulary nor in `own_axes`; all are reported at
        once.
    """
    given = {} if names is None else names
    check_names(given)
    targets: dict[str, Any] = {}
    places = []
    for name, target in given.items():
        axis = canonical_axis(axis_in(target))
        targets[name] = axis
        if not isinstance(target, str):
            if (role := as_role(target[1])) not in (Role.ACTIVATION, Role.PARAM):
                what = f"the name {name!r} is mapped to the role {target[1]!r}"
                raise StrategyError(what, fix="map it to the role activation or param")
            targets[name] = (axis, role)
        # `names` may come from an import, which maps a name to a new axis. Accept such an axis.
        if not are_imported or axis != canonical_axis(f"logical_{plain_name(name)}"):
            places.append((f"names[{name!r}]", axis))
    check_axes(places, own_axes, declare=declare)
    return targets


def check_names(names: Any) -> None:
    """Check that each name is mapped to an axis, or to an axis and a role.

    Raises:
      StrategyError: A value is neither of these, or `names` is not a mapping.
    """
    if not isinstance(names, Mapping):
        what = f"names is {type(names).__name__}, not a mapping"
        raise StrategyError(what, fix='write names={"embed": (sw.EMBED, "param")}')
    problems = []
    for name, target in names.items():
        is_pair = isinstance(target, (tuple, list)) and len(target) == 2
        if not isinstance(name, str) or not isinstance(target[0] if is_pair else target, str):
            what = f"{name!r}: {target!r} does not map a name to an axis and a role"
            fix = 'write "embed": (sw.EMBED, "param"), or "embed": sw.EMBED for both roles'
            problems.append(Problem(error=StrategyError, what=what, path="names", fix=fix))
    raise_problems(problems)


def axis_in(target: Any) -> str:
    """Return the axis in a value of `Names`. The value is an axis, or an axis and a role."""
    axis: str = target if isinstance(target, str) else target[0]
    return axis


def plain_name(name: str) -> str:
    """Return a name with only letters, digits and underscores."""
    return re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "axis"


def axis_of(name: Any, names: Names, place: str, problems: list[Problem]) -> str:
    """Return the axis of a name of another library; `EMPTY` for None. Bridges use this function.

    UNCONSTRAINED becomes `EMPTY` too: a stored array has a fixed sharding, so no dim can be left to
    the compiler. A name that is not in `names`, or is not text, becomes a problem at `place`.
    """
    if name is None or name is PartitionSpec.UNCONSTRAINED:
        return EMPTY
    if not isinstance(name, str):
        what, fix = f"{name!r} is not the name of a dim", "write one name per dim"
        problems.append(Problem(error=UnknownAxisError, what=what, path=place, fix=fix))
        return EMPTY
    if name not in names:
        hint = did_you_mean(str(name), list(names))
        what = f"the name {name!r} is not in names"
        fix = f"{hint} add it to names{_choice(str(name))}\n".lstrip()
        fix += f"or {name!r}: sw.EMPTY, if this dim is never sharded"
        problems.append(Problem(error=UnknownAxisError, what=what, path=place, fix=fix))
        return EMPTY
    return canonical_axis(axis_in(names[name]))


def entry_of(entry: Any, names: Names, place: str, problems: list[Problem]) -> Any:
    """Return the axis of a name, or a composite of the axes of several names."""
    if isinstance(entry, (tuple, list)):
        return tuple(axis_of(name, names, place, problems) for name in entry)
    return axis_of(entry, names, place, problems)


def names_of_metadata(metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the names in the metadata of an nnx variable.

    The key of the names depends on the version of flax.
    """
    sharding = next((metadata[key] for key in _KEYS if metadata.get(key)), ())
    if not isinstance(sharding, (tuple, list, PartitionSpec)):
        # The value is a NamedSharding of names, or a Format that contains such a sharding.
        sharding = getattr(sharding, "sharding", sharding)
        sharding = sharding.spec
    return tuple(sharding)


def _choice(name: str) -> str:
    """Return the end of a fix: an example with the axis that the name resembles, or all axes."""
    axes = {file_name(axis): axis_label(axis) for axis in SEMANTIC_AXES}
    # A name may be the start of an axis, as `mlp` is of `mlp_intermediate`. `did_you_mean` does not
    # suggest this axis, because the two spellings differ too much.
    begin = [other for other in axes if other.startswith(f"{name.lower()}_")]
    nearest = begin[0] if len(begin) == 1 else ""
    if similar := re.search("'(.+)'", did_you_mean(name, axes)):
        nearest = similar[1]
    if nearest in axes:
        return f", such as {name!r}: (sw.{axes[nearest]}, 'param')"
    return (
        f" as {name!r}: (axis, role); axes are {', '.join(f'sw.{axis}' for axis in axes.values())}"
    )
