"""Configurations of levanter: the mesh and the axis mappings of a trainer become a strategy.

levanter need not be installed. Files are read with PyYAML (the extra `maxtext`). Newer versions of
levanter have the mesh and both mappings in `trainer.mesh` (`MeshConfig`). Older versions have them
in keys of the trainer (`TrainerConfig`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardwright.errors import Problem, StrategyError, did_you_mean, raise_problems
from shardwright.interop.haliax.bridge import to_strategy as from_mappings
from shardwright.interop.logical_rules import Imported, read_yaml_tree, resized
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.integers import as_integer

# A type of values: its text in messages, and a function that tells whether a value has this type.
# The types of names and tables accept None, which means that the key is absent.
_Kind = tuple[str, Callable[[Any], bool]]


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


_NAME: Final[_Kind] = ("a name", lambda value: value is None or isinstance(value, str))
_NAMES: Final[_Kind] = ("a list of names", lambda value: value is None or _are_names(value))
_NAME_OR_NAMES: Final[_Kind] = (
    "a name, or a list of names",
    lambda value: _NAME[1](value) or _are_names(value),
)
_TABLE: Final[_Kind] = (
    "a mapping of names",
    lambda value: value is None or (isinstance(value, Mapping) and _are_names([*value])),
)
_COUNT: Final[_Kind] = ("a positive integer", lambda value: (as_integer(value) or 0) > 0)
_SIZE: Final[_Kind] = (
    "an integer: positive, or -1",
    lambda value: (as_integer(value) or 0) > 0 or as_integer(value) == -1,
)
_MESH_AXES: Final[_Kind] = (
    "a mesh axis, or a list of them",
    lambda value: bool(value) and _are_names([value] if isinstance(value, str) else value),
)
# The keys of `trainer` that concern sharding: their defaults, and their types.
_DEFAULTS: Final[Mapping[str, tuple[Any, _Kind]]] = {
    "batch_axis": ("batch", _NAME),
    "fsdp_axis": ("embed", _NAME_OR_NAMES),
    "tensor_parallel_axes": (None, _NAMES),
    "axis_resources": (None, _TABLE),
    "parameter_axis_resources": (None, _TABLE),
    "replica_ici_axis_size": (1, _COUNT),
    "model_axis_size": (1, _COUNT),
    "replica_dcn_axis_size": (1, _COUNT),
}
# The default sizes of levanter's mesh axes, inside a slice and across slices. `trainer.mesh` may
# add other mesh axes.
_AXES: Final = {"data": -1, "replica": 1, "model": 1}
_DCN_AXES: Final = {"replica_dcn": -1}
_SHARED: Final = {"mlp": "model", "heads": "model"}
_BATCH: Final = ("replica_dcn", "replica", "data")
_SIZES: Final = ("axes", "dcn_axes")
_MESH_KEYS: Final = (
    *(*_SIZES, "shared_mapping", "compute_mapping", "param_mapping"),
    "batch_axis_name",
)
_INHERITED: Final = (
    "the mapping of parameters includes trainer.mesh.shared_mapping; in the first versions of "
    "levanter with trainer.mesh, it had the names of param_mapping alone"
)
# Path of keys -> where the value is written.
_Places = Mapping[tuple[str, ...], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The mesh axes of a name, and where they are written."""

    mesh_axes: Any
    place: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The settings of a trainer that concern sharding.

    Attributes:
      compute: Name -> mesh axes, for activations.
      parameter: Name -> mesh axes, for parameters.
      mesh: Mesh axis -> size. One size may be -1.
      dcn: Mesh axis -> number of slices that it crosses.
      source: Name of the configuration.
      notes: Notes on values that the configuration lacks, one line each.
    """

    compute: Mapping[str, _Entry]
    parameter: Mapping[str, _Entry]
    mesh: Mapping[str, int]
    dcn: Mapping[str, int]
    source: str
    notes: tuple[str, ...] = ()


def to_strategy(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    replicated: Sequence[str] = (),
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn the trainer of a configuration of levanter into a strategy with the same specs.

    The mesh has the axes "replica", "data" and "model", as in levanter. In the files of newer
    versions, the mesh and the mappings are in `trainer.mesh`. Keys outside of `trainer` are
    ignored.

    Args:
      config: Path of a YAML file, or the content of the file.
      overrides: Key -> value, such as "trainer.model_axis_size": 2 or "trainer.mesh.axes.model": 2.
        An override replaces the value of the file.
      names: Axis name -> axis. A name that is not in `names` becomes a new axis: `embed` becomes
        `logical_embed`.
      replicated: Axis names that the configuration does not map.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Raises:
      StrategyError: The file cannot be read, or a key is unknown or has a wrong value; all such
        keys are reported at once.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      MissingMeshAxisError: A mapping names mesh axes that the mesh lacks; all are reported at once.

    >>> trainer = {"tensor_parallel_axes": ["mlp", "heads"], "model_axis_size": 4}
    >>> imported = to_strategy({"trainer": trainer})
    >>> dict(imported.strategy.mesh)
    {'replica': 1, 'data': -1, 'model': 4}
    """
    settings = _settings(config, overrides or {})

    def source(role: Role, name: str) -> str:
        table = settings.compute if role is Role.ACTIVATION else settings.parameter
        entry = table.get(name)
        return f"{settings.source} (not mapped)" if entry is None else entry.place

    imported = from_mappings(
        {name: entry.mesh_axes for name, entry in settings.compute.items()},
        {name: entry.mesh_axes for name, entry in settings.parameter.items()},
        # The rules do not depend on sizes, so every size is 1 here. `resized` sets the sizes.
        mesh=dict.fromkeys(settings.mesh, 1),
        names=names,
        replicated=replicated,
        source=source,
        own_axes=own_axes,
    )
    sized = resized(imported, mesh=settings.mesh, dcn=settings.dcn)
    notes = [*settings.notes]
    if not replicated:
        notes.append("haliax replicates a name that no mapping has; list such names in replicated=")
    return dataclasses.replace(sized, notes=(*sized.notes, *notes))


def _settings(config: Any, overrides: Mapping[str, Any]) -> _Settings:
    """Return the settings of a configuration that concern sharding.

    Raises:
      StrategyError: The configuration has no mapping under `trainer`, or keys are unknown or have
        wrong values.
    """
    lines: dict[tuple[str, ...], int] = {}
    content, source = config, "configuration"
    if not isinstance(config, Mapping):
        source = Path(config).name
        content, lines = read_yaml_tree(Path(config))
    trainer = content.get("trainer", {}) if isinstance(content, Mapping) else None
    if not isinstance(trainer, Mapping):
        what = "the configuration has no mapping under trainer"
        raise StrategyError(what, path=source, fix="write trainer: {model_axis_size: 1}")
    places = {
        keys[1:]: f"{source}:{line}" for keys, line in lines.items() if keys[:1] == ("trainer",)
    }
    given = _given(overrides)
    of_mesh = {key[1:]: value for key, value in given.items() if key[0] == "mesh"}
    if "mesh" not in trainer and not of_mesh:
        own = {key: value for (key,), value in given.items()}
        return _read_trainer(trainer, own, places, source)
    older = [key for key in (*trainer, *(key[0] for key in given)) if key in _DEFAULTS]
    if older:
        what = f"older keys have no effect in a trainer that has mesh: {', '.join(older)}"
        raise StrategyError(
            what, path=source, fix="move these keys to trainer.mesh, or remove them"
        )
    below = {keys[1:]: place for keys, place in places.items() if keys[:1] == ("mesh",)}
    return _read_mesh(trainer.get("mesh", {}), of_mesh, below, source)


def _read_trainer(
    given: Mapping[str, Any], overrides: Mapping[str, Any], places: _Places, source: str
) -> _Settings:
    """Return the settings of a trainer that has the keys of older versions."""
    values = {key: default for key, (default, _) in _DEFAULTS.items()}
    values |= {**{key: given[key] for key in given if key in _DEFAULTS}, **overrides}
    at: _Places = {**places, **{(key,): "overrides" for key in overrides}}
    rows = [((key,), value, _DEFAULTS[key][1]) for key, value in values.items()]
    raise_problems(_wrong("trainer", rows, at, source, "TrainerConfig"))

    def listed(key: str, mesh_axes: Any = None) -> dict[str, _Entry]:
        """Return the entries of a key. Its value is names, or a table of names and mesh axes."""
        value = values[key] or ()
        default = at.get((key,), f"{source} (default {key})")
        entries = {}
        for name in (value,) if isinstance(value, str) else value:
            axes = value[name] if isinstance(value, Mapping) else mesh_axes
            axes = tuple(axes) if isinstance(axes, list) else axes
            entries[name] = _Entry(mesh_axes=axes, place=at.get((key, name), default))
        return entries

    # Later entries win, as in `TrainerConfig.compute_axis_mapping` and `parameter_axis_mapping`.
    compute = {
        **listed("axis_resources"),
        **listed("tensor_parallel_axes", "model"),
        **listed("batch_axis", ("replica", "data")),
    }
    across = values["replica_dcn_axis_size"]
    note = "the configuration has no trainer: levanter's defaults are used"
    return _Settings(
        compute=compute,
        parameter={**compute, **listed("parameter_axis_resources"), **listed("fsdp_axis", "data")},
        mesh={
            # The mesh axis `replica` has the replicas inside a slice and those across slices.
            "replica": values["replica_ici_axis_size"] * across,
            "data": -1,
            "model": values["model_axis_size"],
        },
        dcn={"replica": across} if across > 1 else {},
        source=source,
        notes=() if given or overrides else (note,),
    )


def _given(overrides: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the value of each override by its path of keys below `trainer`.

    Raises:
      StrategyError: Keys do not concern sharding; all such keys are reported at once.
    """
    # A key has at most three parts: `mesh`, a key of `mesh`, and a name in the table of that key.
    given = {tuple(key.removeprefix("trainer.").split(".", 2)): key for key in overrides}
    problems = []
    for keys, key in given.items():
        if not (keys[0] in _DEFAULTS and len(keys) == 1) and not (keys[0] == "mesh" and keys[1:]):
            hint = did_you_mean(key, [f"trainer.{known}" for known in _DEFAULTS])
            fix = f"{hint} leave it out: other keys do not concern sharding".strip()
            what = f"the override {key!r} is unknown"
            problems.append(Problem(error=StrategyError, what=what, fix=fix))
    raise_problems(problems)
    return {keys: overrides[key] for keys, key in given.items()}


def _wrong(
    prefix: str,
    rows: Iterable[tuple[tuple[str, ...], Any, _Kind]],
    places: _Places,
    source: str,
    config: str,
) -> list[Problem]:
    """Return a problem for each value of a wrong type. A row is (path of keys, value, type)."""
    return [
        Problem(
            error=StrategyError,
            what=f"{'.'.join(map(str, (prefix, *keys)))} must be {text}, got {value!r}",
            path=places.get(keys) or places.get(keys[:1], source),
            fix=f"write the value as in levanter's {config}",
        )
        for keys, value, (text, is_right) in rows
        if not is_right(value)
    ]


def _read_mesh(
    given: Any,
    overrides: Mapping[tuple[str, ...], Any],
    places: _Places,
    source: str,
) -> _Settings:
    """Return the settings of `trainer.mesh`.

    Args:
      given: Content of `trainer.mesh`.
      overrides: Path of keys below `trainer.mesh` -> value, which replaces the value of `given`.
      places: Path of keys below `trainer.mesh` -> where the value is written.
      source: Name of the configuration.

    Raises:
      StrategyError: A key is unknown or has a wrong value; all such keys are reported at once.
    """
    is_mapping: _Kind = ("a mapping", lambda value: isinstance(value, Mapping))
    raise_problems(_wrong("trainer.mesh", [((), given, is_mapping)], places, source, "MeshConfig"))
    table = dict(given)
    for (key, *names), value in overrides.items():
        if not names:
            table[key] = value
        # An override of one name keeps the other names of its table.
        elif isinstance(old := table.get(key, {}), Mapping):
            table[key] = {**old, names[0]: value}
    at = {**places, **dict.fromkeys(overrides, "overrides")}
    raise_problems(_mesh_problems(table, at, source))

    def entries(key: str, default: Mapping[str, Any]) -> dict[str, _Entry]:
        return {
            name: _Entry(
                mesh_axes=axes if isinstance(axes, str) else tuple(axes),
                place=at.get((key, name)) or at.get((key,)) or f"{source} (default mesh.{key})",
            )
            for name, axes in (table.get(key, default) or {}).items()
        }

    defaults = {
        name: _Entry(mesh_axes=axes, place=f"{source} (default of levanter)")
        for name, axes in _SHARED.items()
    }
    shared = {**defaults, **entries("shared_mapping", {})}
    # `shared_mapping` applies to activations and to parameters. `compute_mapping` overrides it for
    # activations, and `param_mapping` for parameters.
    compute, batch = dict(shared), table.get("batch_axis_name", "batch")
    own = entries("compute_mapping", {})
    if batch is not None and batch not in shared:
        place = at.get(("batch_axis_name",), f"{source} (default of levanter)")
        # levanter looks up the name "batch" here, even if `batch_axis_name` is another name.
        compute[batch] = own.get("batch") or _Entry(mesh_axes=_BATCH, place=place)
    mesh, dcn, notes = _sizes(table)
    return _Settings(
        compute={**compute, **own},
        parameter={**shared, **entries("param_mapping", {"embed": "data"})},
        mesh=mesh,
        dcn=dcn,
        source=source,
        notes=(_INHERITED, *notes),
    )


def _sizes(table: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return the sizes of all mesh axes, the sizes across slices, and notes.

    Raises:
      StrategyError: More than one size of a table is -1, or a mesh axis is in both tables.
    """
    given = [table.get(key) or {} for key in _SIZES]
    axes = _absorbed(_AXES, given[0], "data")
    dcn = _absorbed(_DCN_AXES, given[1], "replica_dcn")
    problems = []
    for key, sizes in zip(_SIZES, (axes, dcn), strict=True):
        absorbing = [name for name, size in sizes.items() if size == -1]
        if len(absorbing) > 1:
            what = f"trainer.mesh.{key}: the sizes of {', '.join(absorbing)} are all -1"
            problems.append(
                Problem(error=StrategyError, what=what, fix="write -1 for only one of them")
            )
    if both := [name for name in axes if name in dcn]:
        what = f"trainer.mesh: {', '.join(both)} is in axes and in dcn_axes"
        problems.append(
            Problem(error=StrategyError, what=what, fix="write each mesh axis in only one of them")
        )
    raise_problems(problems)
    notes = [
        f"{name} is 1, for one slice: for two slices, write trainer.mesh.dcn_axes: {{{name}: 2}}"
        for name, size in dcn.items()
        if size == -1
    ]
    # Here, -1 means one slice; a note says how to write more slices.
    known = {name: max(size, 1) for name, size in dcn.items()}
    across = {name: size for name, size in known.items() if size > 1}
    return {**axes, **known}, across, notes


def _absorbed(default: Mapping[str, int], given: Mapping[str, int], name: str) -> dict[str, int]:
    """Return sizes. A default of -1 becomes 1 if the configuration has another -1."""
    sizes = {**default, **given}
    if list(sizes.values()).count(-1) > 1 and name not in given:
        sizes[name] = 1
    return sizes


def _mesh_problems(table: Mapping[str, Any], places: _Places, source: str) -> list[Problem]:
    problems = []
    rows: list[tuple[tuple[str, ...], Any, _Kind]] = []
    for key, value in table.items():
        if key not in _MESH_KEYS:
            fix = f"{did_you_mean(str(key), _MESH_KEYS)} remove it".strip()
            if key == "tensor_parallel_axes":
                fix = "write shared_mapping: {mlp: model}; older versions have tensor_parallel_axes"
            what, path = f"trainer.mesh.{key} is unknown", places.get((key,), source)
            problems.append(Problem(error=StrategyError, what=what, path=path, fix=fix))
            continue
        rows.append(((key,), value, _NAME if key == "batch_axis_name" else _TABLE))
        if isinstance(value, Mapping):
            kind = _SIZE if key in _SIZES else _MESH_AXES
            rows += [((key, name), entry, kind) for name, entry in value.items()]
    return problems + _wrong("trainer.mesh", rows, places, source, "MeshConfig")
