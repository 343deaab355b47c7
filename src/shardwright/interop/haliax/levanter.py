"""Configurations of levanter: the mesh and the axis mappings of a trainer become a strategy.

levanter need not be installed. Files are read with PyYAML (the extra `maxtext`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardwright.errors import Problem, StrategyError, did_you_mean, raise_problems
from shardwright.interop.haliax.bridge import to_strategy as from_mappings
from shardwright.interop.haliax.levanter_mesh import LevanterEntry, LevanterSettings, read_mesh
from shardwright.interop.logical_rules import Imported, read_yaml_tree, resized
from shardwright.vocabulary.axes import Role
from shardwright.vocabulary.integers import as_integer

# The keys of `trainer` that concern sharding, and the values that they have by default.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "batch_axis": "batch",
    "fsdp_axis": "embed",
    "tensor_parallel_axes": None,
    "axis_resources": None,
    "parameter_axis_resources": None,
    "replica_ici_axis_size": 1,
    "model_axis_size": 1,
    "replica_dcn_axis_size": 1,
}
_SIZES: Final = ("replica_ici_axis_size", "model_axis_size", "replica_dcn_axis_size")


def to_strategy(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    replicated: Sequence[str] = (),
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn the trainer of a configuration of levanter into a strategy with the same specs.

    The mesh has the axes "replica", "data" and "model", as in levanter. Newer versions have the
    mesh and the mappings in `trainer.mesh`. What is not under `trainer` is ignored.

    Args:
      config: A YAML file, or its content.
      overrides: Key -> value, such as "trainer.model_axis_size": 2 or "trainer.mesh.axes.model": 2.
        It replaces the file's.
      names: Axis name -> axis. A name that is not in `names` becomes a new axis: `embed` becomes
        `logical_embed`.
      replicated: Axis names that the configuration does not map.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Raises:
      StrategyError: The file cannot be read, or a key is unknown or has a wrong value; all keys are
        reported at once.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      MissingMeshAxisError: A mapping names other mesh axes; all are reported at once.

    >>> trainer = {"tensor_parallel_axes": ["mlp", "heads"], "model_axis_size": 4}
    >>> imported = to_strategy({"trainer": trainer})
    >>> dict(imported.strategy.mesh)
    {'replica': 1, 'data': -1, 'model': 4}
    """
    settings = _settings(config, overrides or {})
    imported = from_mappings(
        {name: entry.mesh_axes for name, entry in settings.compute.items()},
        {name: entry.mesh_axes for name, entry in settings.parameter.items()},
        mesh=dict.fromkeys(settings.mesh, 1),
        names=names,
        replicated=replicated,
        source=lambda role, name: _source(settings, role, name),
        own_axes=own_axes,
    )
    sized = resized(imported, mesh=settings.mesh, dcn=settings.dcn)
    notes = [*settings.notes]
    if not replicated:
        notes.append("haliax replicates a name that no mapping has; list such names in replicated=")
    return dataclasses.replace(sized, notes=(*sized.notes, *notes))


def _settings(config: Any, overrides: Mapping[str, Any]) -> LevanterSettings:
    """Return what a configuration says about sharding.

    Raises:
      StrategyError: It has no mapping under `trainer`, or keys are unknown or have wrong values.
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
        return _Trainer.read(trainer, own, places, source).settings()
    older = [key for key in (*trainer, *(key[0] for key in given)) if key in _DEFAULTS]
    if older:
        what = f"the trainer has mesh, and so {', '.join(older)} of older versions has no effect"
        raise StrategyError(what, path=source, fix="write it in trainer.mesh, or remove it")
    below = {keys[1:]: place for keys, place in places.items() if keys[:1] == ("mesh",)}
    return read_mesh(trainer.get("mesh", {}), of_mesh, below, source)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Trainer:
    """The keys of a trainer.

    Attributes:
      values: Key -> value.
      places: Path of keys below the trainer -> where it is written.
      source: Name of the configuration, for a key that has no line of its own.
      is_given: Whether the configuration has a trainer.
    """

    values: Mapping[str, Any]
    places: Mapping[tuple[str, ...], str]
    source: str
    is_given: bool

    @classmethod
    def read(
        cls,
        trainer: Mapping[str, Any],
        overrides: Mapping[str, Any],
        places: Mapping[tuple[str, ...], str],
        source: str,
    ) -> _Trainer:
        values = {
            **_DEFAULTS,
            **{key: trainer[key] for key in trainer if key in _DEFAULTS},
            **overrides,
        }
        at = dict(places)
        at.update({(key,): "overrides" for key in overrides})
        raise_problems(_problems(values, at, source))
        is_given = bool(trainer) or bool(overrides)
        return cls(values=values, places=at, source=source, is_given=is_given)

    def settings(self) -> LevanterSettings:
        """Return what the keys say about sharding."""
        compute, parameter = self.mappings()
        across = self.values["replica_dcn_axis_size"]
        note = "the configuration has no trainer: levanter's defaults are used"
        return LevanterSettings(
            compute=compute,
            parameter=parameter,
            mesh={
                "replica": self.values["replica_ici_axis_size"] * across,
                "data": -1,
                "model": self.values["model_axis_size"],
            },
            dcn={"replica": across} if across > 1 else {},
            source=self.source,
            notes=() if self.is_given else (note,),
        )

    def place(self, *keys: str) -> str:
        """Return where a key is written. A key that is not written has its default."""
        for end in range(len(keys), 0, -1):
            if keys[:end] in self.places:
                return self.places[keys[:end]]
        return f"{self.source} (default {keys[0]})"

    def mappings(self) -> tuple[dict[str, LevanterEntry], dict[str, LevanterEntry]]:
        """Return the mappings of activations and parameters. Later entries win, as in levanter."""
        compute = self._listed("axis_resources")
        for name in self.values["tensor_parallel_axes"] or ():
            compute[name] = LevanterEntry(
                mesh_axes="model", place=self.place("tensor_parallel_axes")
            )
        if (batch := self.values["batch_axis"]) is not None:
            both = ("replica", "data")
            compute[batch] = LevanterEntry(mesh_axes=both, place=self.place("batch_axis"))
        parameter = {**compute, **self._listed("parameter_axis_resources")}
        fsdp = self.values["fsdp_axis"]
        for name in [fsdp] if isinstance(fsdp, str) else fsdp or ():
            parameter[name] = LevanterEntry(mesh_axes="data", place=self.place("fsdp_axis"))
        return compute, parameter

    def _listed(self, key: str) -> dict[str, LevanterEntry]:
        entries = self.values[key] or {}
        return {
            name: LevanterEntry(
                mesh_axes=tuple(axes) if isinstance(axes, list) else axes,
                place=self.place(key, name),
            )
            for name, axes in entries.items()
        }


def _source(settings: LevanterSettings, role: Role, name: str) -> str:
    table = settings.compute if role is Role.ACTIVATION else settings.parameter
    entry = table.get(name)
    return f"{settings.source} (not mapped)" if entry is None else entry.place


def _given(overrides: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the overrides by their paths of keys below `trainer`.

    Raises:
      StrategyError: A key does not concern sharding; all are reported at once.
    """
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


def _problems(
    values: Mapping[str, Any], places: Mapping[tuple[str, ...], str], source: str
) -> list[Problem]:
    """Return a problem for each key with a value of a wrong kind."""

    def is_names(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)

    def is_table(value: Any) -> bool:
        return isinstance(value, Mapping) and is_names([*value])

    checks: dict[str, tuple[bool, str]] = {}
    for key in _SIZES:
        size = as_integer(values[key])
        checks[key] = (size is not None and size > 0, "a positive integer")
    for key in ("axis_resources", "parameter_axis_resources"):
        checks[key] = (values[key] is None or is_table(values[key]), "a mapping of names")
    tensor, fsdp = values["tensor_parallel_axes"], values["fsdp_axis"]
    checks["tensor_parallel_axes"] = (tensor is None or is_names(tensor), "a list of names")
    is_fsdp = fsdp is None or isinstance(fsdp, str) or is_names(fsdp)
    checks["fsdp_axis"] = (is_fsdp, "a name, or a list of names")
    batch = values["batch_axis"]
    checks["batch_axis"] = (batch is None or isinstance(batch, str), "a name")
    return [
        Problem(
            error=StrategyError,
            what=f"trainer.{key} must be {kind}, got {values[key]!r}",
            path=places.get((key,), source),
            fix="write it as levanter's TrainerConfig has it",
        )
        for key, (is_right, kind) in checks.items()
        if not is_right
    ]
