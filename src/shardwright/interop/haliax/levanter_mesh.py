"""`trainer.mesh`, where newer versions of levanter have the mesh and both axis mappings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardwright.errors import Problem, StrategyError, did_you_mean, raise_problems
from shardwright.vocabulary.integers import as_integer

# The mesh axes of a slice and across slices, before those that the configuration adds.
_AXES: Final = {"data": -1, "replica": 1, "model": 1}
_DCN_AXES: Final = {"replica_dcn": -1}
_SHARED: Final = {"mlp": "model", "heads": "model"}
_BATCH: Final = ("replica_dcn", "replica", "data")
_MAPPINGS: Final = ("shared_mapping", "compute_mapping", "param_mapping")
_SIZES: Final = ("axes", "dcn_axes")
_KEYS: Final = (*_SIZES, *_MAPPINGS, "batch_axis_name")
_FIX: Final = "write it as levanter's MeshConfig has it"
_INHERITED: Final = (
    "parameters have the mappings of trainer.mesh.shared_mapping too; in the first versions with "
    "trainer.mesh, they had those of param_mapping alone"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevanterEntry:
    """The mesh axes of a name, and where they are written."""

    mesh_axes: Any
    place: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevanterSettings:
    """What a trainer says about sharding.

    Attributes:
      compute: Name -> mesh axes, for activations.
      parameter: The same for parameters.
      mesh: Mesh axis -> size. One of them may be -1.
      dcn: Mesh axis -> number of slices that it crosses.
      source: Name of the configuration.
      notes: What is not in the configuration, one line each.
    """

    compute: Mapping[str, LevanterEntry]
    parameter: Mapping[str, LevanterEntry]
    mesh: Mapping[str, int]
    dcn: Mapping[str, int]
    source: str
    notes: tuple[str, ...] = ()


def read_mesh(
    given: Any,
    overrides: Mapping[tuple[str, ...], Any],
    places: Mapping[tuple[str, ...], str],
    source: str,
) -> LevanterSettings:
    """Return what `trainer.mesh` says.

    Args:
      given: Its content.
      overrides: Path of keys below it -> value, which replaces that of `given`.
      places: Path of keys below it -> where it is written.
      source: Name of the configuration.

    Raises:
      StrategyError: A key is unknown or has a wrong value; all keys are reported at once.
    """
    table = dict(given) if isinstance(given, Mapping) else {}
    problems = [] if isinstance(given, Mapping) else [_problem("must be a mapping", given, source)]
    for (key, *names), value in overrides.items():
        if not names:
            table[key] = value
        elif isinstance(old := table.get(key, {}), Mapping):
            table[key] = {**old, names[0]: value}
    at = {**places, **dict.fromkeys(overrides, "overrides")}
    raise_problems(problems + _problems(table, at, source))

    def entries(key: str, default: Mapping[str, Any]) -> dict[str, LevanterEntry]:
        return {
            name: LevanterEntry(
                mesh_axes=axes if isinstance(axes, str) else tuple(axes),
                place=at.get((key, name)) or at.get((key,)) or f"{source} (default mesh.{key})",
            )
            for name, axes in (table.get(key, default) or {}).items()
        }

    defaults = {
        name: LevanterEntry(mesh_axes=axes, place=f"{source} (default of levanter)")
        for name, axes in _SHARED.items()
    }
    shared = {**defaults, **entries("shared_mapping", {})}
    compute, batch = dict(shared), table.get("batch_axis_name", "batch")
    own = entries("compute_mapping", {})
    if batch is not None and batch not in shared:
        place = at.get(("batch_axis_name",), f"{source} (default of levanter)")
        # levanter looks up the name "batch" here, whatever the batch is called.
        compute[batch] = own.get("batch") or LevanterEntry(mesh_axes=_BATCH, place=place)
    mesh, dcn, notes = _sizes(table)
    return LevanterSettings(
        compute={**compute, **own},
        parameter={**shared, **entries("param_mapping", {"embed": "data"})},
        mesh=mesh,
        dcn=dcn,
        source=source,
        notes=(_INHERITED, *notes),
    )


def _sizes(table: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return the sizes of all mesh axes, those across slices, and notes.

    Raises:
      StrategyError: More than one size is -1, or a mesh axis is in both tables.
    """
    given = [table.get(key) or {} for key in _SIZES]
    axes = _absorbed(_AXES, given[0], "data")
    dcn = _absorbed(_DCN_AXES, given[1], "replica_dcn")
    problems = []
    for key, sizes in zip(_SIZES, (axes, dcn), strict=True):
        absorbing = [name for name, size in sizes.items() if size == -1]
        if len(absorbing) > 1:
            what = f"trainer.mesh.{key}: the sizes of {', '.join(absorbing)} are all -1"
            problems.append(Problem(error=StrategyError, what=what, fix="write -1 for one of them"))
    if both := [name for name in axes if name in dcn]:
        what = f"trainer.mesh: {', '.join(both)} is in axes and in dcn_axes"
        problems.append(Problem(error=StrategyError, what=what, fix="remove it from one of them"))
    raise_problems(problems)
    notes = [
        f"{name} is 1, for one slice: for more, write trainer.mesh.dcn_axes: {{{name}: 2}}"
        for name, size in dcn.items()
        if size == -1
    ]
    known = {name: max(size, 1) for name, size in dcn.items()}
    across = {name: size for name, size in known.items() if size > 1}
    return {**axes, **known}, across, notes


def _absorbed(default: Mapping[str, int], given: Mapping[str, int], name: str) -> dict[str, int]:
    """Return sizes. A default of -1 becomes 1 if the configuration has another -1."""
    sizes = {**default, **given}
    if list(sizes.values()).count(-1) > 1 and name not in given:
        sizes[name] = 1
    return sizes


def _problems(
    table: Mapping[str, Any], places: Mapping[tuple[str, ...], str], source: str
) -> list[Problem]:
    problems = []
    for key, value in table.items():
        path = places.get((key,), source)
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS)
            fix = f"{hint} remove it".strip()
            if key == "tensor_parallel_axes":
                fix = "write shared_mapping: {mlp: model}; this key is of an older version"
            what = f"trainer.mesh.{key} is unknown"
            problems.append(Problem(error=StrategyError, what=what, path=path, fix=fix))
        elif key == "batch_axis_name":
            if value is not None and not isinstance(value, str):
                problems.append(_problem("must be a name", value, path, key))
        elif not isinstance(value or {}, Mapping):
            problems.append(_problem("must be a mapping of names", value, path, key))
        else:
            is_right, kind = (
                (_is_size, "an integer: positive, or -1")
                if key in _SIZES
                else (_is_axes, "a mesh axis, or a list of them")
            )
            problems += [
                _problem(f"must be {kind}", entry, places.get((key, name), path), f"{key}.{name}")
                for name, entry in (value or {}).items()
                if not (isinstance(name, str) and is_right(entry))
            ]
    return problems


def _problem(what: str, value: Any, path: str, key: str = "") -> Problem:
    name = f"trainer.mesh.{key}" if key else "trainer.mesh"
    return Problem(error=StrategyError, what=f"{name} {what}, got {value!r}", path=path, fix=_FIX)


def _is_size(value: Any) -> bool:
    size = as_integer(value)
    return size is not None and (size > 0 or size == -1)


def _is_axes(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, Sequence) and bool(value) and all(isinstance(x, str) for x in value)
