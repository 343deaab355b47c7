"""Configurations of MaxText: `base.yml`, overrides and mesh become a strategy.

MaxText need not be installed. Files are read with PyYAML (the extra `maxtext`); a configuration
that is a mapping needs no package. Keys that do not concern sharding are ignored.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import Problem, StrategyError, did_you_mean, raise_problems
from shardwright.interop import logical_rules
from shardwright.interop.logical_rules import (
    REPLICATED_NAMES,
    Imported,
    Modes,
    Names,
    read_replicated,
    read_yaml,
    resized,
)
from shardwright.vocabulary.integers import as_integer

# MaxText's attention and decoder layers use these names in one mode only. A pair is (the name that
# other modes use instead, this mode). If the rules lack the name of a pair, the next pair is used.
MODES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "prefill_activation_length": (("activation_length", "prefill"),),
    "prefill_activation_norm_length": (("activation_norm_length", "prefill"),),
    "activation_prefill_kv_batch": (("activation_kv_batch", "prefill"),),
    "cache_batch_prefill": (("cache_batch", "prefill"),),
    "decode_batch": (("activation_batch_attn", "decode"), ("activation_batch", "decode")),
    "decode_length": (("activation_length_attn", "decode"), ("activation_length", "decode")),
}
# The axis and role of each name, for models that are annotated with axes of shardwright.
NAMES: Names = {
    "activation_batch": ("BATCH", "activation"),
    "activation_norm_length": ("LENGTH", "activation"),
    "activation_length": ("QUERY_LENGTH", "activation"),
    "activation_kv_length": ("KV_LENGTH", "activation"),
    "activation_embed": ("EMBED", "activation"),
    "activation_heads": ("HEAD", "activation"),
    "activation_kv": ("HEAD_DIM", "activation"),
    "activation_kv_heads": ("KV_HEAD", "activation"),
    "activation_kv_head_dim": ("KV_HEAD_DIM", "activation"),
    "activation_mlp": ("MLP_INTERMEDIATE", "activation"),
    "activation_vocab": ("VOCAB", "activation"),
    "activation_exp": ("EXPERT", "activation"),
    "embed": ("EMBED", "param"),
    "q_heads": ("HEAD", "param"),
    "kv": ("HEAD_DIM", "param"),
    "kv_heads": ("KV_HEAD", "param"),
    "kv_head_dim": ("KV_HEAD_DIM", "param"),
    "mlp": ("MLP_INTERMEDIATE", "param"),
    "vocab": ("VOCAB", "param"),
    "exp": ("EXPERT", "param"),
    "norm": ("NORM", "param"),
    "layers": ("LAYERS", "param"),
}
# The axis and role of each name of MaxDiffusion, whose configurations have the same form.
# `conv_batch` may have another rule than `activation_batch`, so it stays an axis of its own.
DIFFUSION_NAMES: Names = {
    "activation_batch": ("BATCH", "activation"),
    "activation_length": ("LENGTH", "activation"),
    "activation_kv_length": ("KV_LENGTH", "activation"),
    "activation_heads": ("HEAD", "activation"),
    "activation_kv": ("HEAD_DIM", "activation"),
    "height": ("HEIGHT", "activation"),
    "out_channels": ("CHANNEL", "activation"),
    "embed": ("EMBED", "param"),
    "heads": ("HEAD", "param"),
    "mlp": ("MLP_INTERMEDIATE", "param"),
    "norm": ("NORM", "param"),
    "keep_1": ("_", "param"),
    "keep_2": ("_", "param"),
    "conv_in": ("CHANNEL_IN", "param"),
    "conv_out": ("CHANNEL_OUT", "param"),
}

# The mesh axes of MaxText. If a rule names one of these and the mesh lacks it, it has size 1.
_MESH_AXES = (
    *("attn_dp", "attn_dp_expert", "autoregressive", "context", "context_autoregressive"),
    *("context_usp_ulysses", "data", "diloco", "expert", "fsdp", "fsdp_transpose", "model"),
    *("sequence", "stage", "tensor", "tensor_sequence", "tensor_transpose"),
)
_RULES = "logical_axis_rules"
_OVERRIDE = "override_logical_axis_rules"
_CUSTOM = "custom_mesh_and_rule"
# The keys that the file of `custom_mesh_and_rule` may replace.
_REPLACED = ("mesh_axes", _RULES, "data_sharding")
_INPUTS = "input_data_sharding_logical_axes"
# Mesh axis -> its name in the keys of its sizes, if this name differs.
_PARALLELISM = {"stage": "pipeline", "model": "tensor"}
_KEYS = {
    *(*_REPLACED, _OVERRIDE, _CUSTOM, _INPUTS, REPLICATED_NAMES),
    *("model_name", "num_slices", "shard_mode"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _MaxTextConfig:
    """Keys and values of one file or of several merged ones, and where each rule is written."""

    values: Mapping[str, Any]
    places: tuple[str, ...] = ()

    @property
    def rules(self) -> list[Any]:
        return list(self.values.get(_RULES) or [])


def to_strategy(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    names: Names | None = None,
    own_axes: Iterable[str] = (),
) -> Imported:
    """Turn a configuration of MaxText into a strategy with the same mesh and the same specs.

    As in MaxText, these are applied in this order: the `base_config`, the configuration, the file
    of the model (`model_name`), and `overrides`. Rules of the configuration replace all rules of
    the `base_config`. Rules of the model and of `overrides` replace earlier rules of the same name;
    with `override_logical_axis_rules`, they replace all earlier rules. Finally, the file of
    `custom_mesh_and_rule` replaces mesh and rules. Each file is searched for beside the
    configuration and in the folders above. If MaxText uses a name in one mode only, the rule of
    this name becomes a rule of that mode. If a rule names a mesh axis of MaxText that the mesh
    lacks, this axis gets size 1. The additional key `replicated` lists names that no rule mentions.

    Args:
      config: Path of a YAML file, or the content of the file.
      overrides: Keys and values that replace those of the file.
      names: MaxText's name -> (axis, role), such as `NAMES`. A name that is not listed becomes an
        axis of its own.
      own_axes: Axes of your own that `names` maps to. The strategy declares them.

    Returns:
      The strategy, the axis of each name, and notes. One mesh axis may have size -1.

    Raises:
      StrategyError: A file is missing or is not YAML, a key is unknown, or sizes are invalid.
      UnknownAxisError: `names` maps to axes that are neither in the vocabulary nor in `own_axes`;
        all are reported at once.
      MissingMeshAxisError: Rules name mesh axes that the mesh lacks and that are not MaxText's; all
        are reported at once.
    """
    notes: list[str] = []
    merged = _merged(config, {**(overrides or {})}, notes)
    mesh, dcn = _mesh(merged.values, notes)
    mesh |= _absent(merged, mesh, notes)
    known = {rule[0] for rule in merged.rules if _name(rule) is not None}
    modes: Modes = {
        name: next((pair for pair in pairs if pair[0] in known), pairs[0])
        for name, pairs in MODES.items()
    }
    replicated = read_replicated(merged.values, merged.rules, "configuration")
    imported = logical_rules.to_strategy(
        [*merged.rules, *replicated],
        # The rules do not depend on sizes, so every size is 1 here. `resized` sets the sizes.
        mesh=dict.fromkeys(mesh, 1),
        names=names,
        modes=modes,
        source=[*merged.places, *[f"configuration {REPLICATED_NAMES}"] * len(replicated)],
        own_axes=own_axes,
    )
    if inputs := merged.values.get(_INPUTS):
        notes.append(f"the names of the inputs' dims are {', '.join(map(str, inputs))}")
    if merged.values.get("shard_optimizer_over_data"):
        notes.append("shard_optimizer_over_data is not imported: see [policy] zero1")
    is_explicit = merged.values.get("shard_mode") == "explicit"
    imported = resized(imported, mesh=mesh, dcn=dcn, axis_types="explicit" if is_explicit else None)
    return dataclasses.replace(imported, notes=(*notes, *imported.notes))


def _merged(config: Any, overrides: dict[str, Any], notes: list[str]) -> _MaxTextConfig:
    """Merge the files in MaxText's order: bases, the model, the overrides, the custom file."""
    if isinstance(config, Mapping):
        _check_rules(config, "config")
        # A mapping has no folder, so files that it names are not found.
        folder, base = None, _MaxTextConfig(values=config, places=_numbered("config", config))
    else:
        folder, base = Path(config).parent, _read_with_bases(Path(config))
    axes = _axes(base.values, overrides)
    known = {*base.values, *_KEYS, *(key for axis in axes for key in _keys(axis))}
    raise_problems(
        [
            Problem(
                error=StrategyError,
                what=f"the configuration has no key {key!r}",
                fix=f"{did_you_mean(key, known)} correct the key or drop it".strip(),
            )
            for key in overrides
            if key not in known
        ]
    )
    _check_rules(overrides, "overrides")
    layers = [_MaxTextConfig(values=overrides, places=_numbered("overrides", overrides))]
    # MaxText has one file for a model and its instruct variant.
    name = {**base.values, **overrides}.get("model_name") or "default"
    name = str(name).replace("-Instruct", "")
    if name != "default":
        path = _find(f"models/{name}.yml", folder)
        if path is None:
            notes.append(f"models/{name}.yml is missing: its rules, if any, are not imported")
        else:
            layers.insert(0, _read(path))
    merged = base
    for layer in layers:
        merged = _over(merged, layer)
    custom = merged.values.get(_CUSTOM)
    if not custom:
        return merged
    custom_path = _find(f"{_CUSTOM}/{custom}.yml", folder)
    if custom_path is None:
        what = f"the file {_CUSTOM}/{custom}.yml is missing"
        raise StrategyError(what, fix="put the file beside the configuration, or in a folder above")
    replacement = _read(custom_path)
    values = {key: replacement.values[key] for key in _REPLACED if key in replacement.values}
    notes.append(f"{_CUSTOM}/{custom}.yml replaces {', '.join(values)}")
    places = replacement.places if _RULES in values else merged.places
    return _MaxTextConfig(values={**merged.values, **values}, places=places)


def _read(path: Path) -> _MaxTextConfig:
    values, lines = read_yaml(path, _RULES)
    if not isinstance(values, dict):
        what = f"a configuration is a mapping, got {type(values).__name__}"
        raise StrategyError(what, path=path.name, fix="write one key: value on each line")
    _check_rules(values, path.name)
    return _MaxTextConfig(values=values, places=tuple(f"{path.name}:{line}" for line in lines))


def _check_rules(values: Mapping[str, Any], source: str) -> None:
    """Check that the rules of a configuration are a list.

    Raises:
      StrategyError: The rules are not a list.
    """
    rules = values.get(_RULES)
    if rules is not None and not isinstance(rules, (list, tuple)):
        what = f"{_RULES} is {type(rules).__name__}, not a list of pairs"
        raise StrategyError(what, path=source, fix=f"write {_RULES}: [['embed', ['fsdp']]]")


def _numbered(source: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{source}[{at}]" for at in range(len(values.get(_RULES) or ())))


def _read_with_bases(path: Path) -> _MaxTextConfig:
    """Read a file and its `base_config`, and merge them.

    If the file has rules, they replace all rules of the base.
    """
    layers = [_read(path)]
    chain = [path.resolve()]
    while (name := layers[0].values.get("base_config")) is not None:
        base = _find(str(name), chain[-1].parent)
        if base is None:
            what = f"the base_config {str(name)!r} is missing"
            fix = "put the file beside the configuration, or in a folder above"
            raise StrategyError(what, path=chain[-1].name, fix=fix)
        if base.resolve() in chain:
            names = " -> ".join(each.name for each in [*chain, base])
            raise StrategyError(f"base_config forms a cycle: {names}", fix="remove one base_config")
        chain.append(base.resolve())
        # The base of all bases is read last, and applied first.
        layers.insert(0, _read(base))
    values: dict[str, Any] = {}
    places: tuple[str, ...] = ()
    for layer in layers:
        values.update(layer.values)
        places = layer.places if _RULES in layer.values else places
    return _MaxTextConfig(values=values, places=places)


def _over(base: _MaxTextConfig, layer: _MaxTextConfig) -> _MaxTextConfig:
    """Merge a layer over a base.

    The rules of the layer come last, and replace rules of the same name.
    """
    rules = list(zip(base.rules, base.places, strict=True))
    own = list(zip(layer.rules, layer.places, strict=True))
    if layer.values.get(_OVERRIDE):
        rules = []
    # As in MaxText, a new rule of a name replaces all rules of this name in the base.
    replaced = {_name(rule) for rule, _ in own}
    merged = [pair for pair in rules if _name(pair[0]) not in replaced] + own
    values = {**base.values, **layer.values, _RULES: [rule for rule, _ in merged]}
    return _MaxTextConfig(values=values, places=tuple(place for _, place in merged))


def _name(rule: Any) -> str | None:
    """Return the name of a rule; None if the rule is malformed."""
    is_pair = isinstance(rule, Sequence) and not isinstance(rule, str) and len(rule) == 2
    return rule[0] if is_pair and isinstance(rule[0], str) else None


def _find(name: str, folder: Path | None) -> Path | None:
    """Return the path of a file in a folder, or in the nearest folder above that has it."""
    folders = [] if folder is None else [folder, *folder.resolve().parents]
    return next((each / name for each in folders if (each / name).is_file()), None)


def _axes(*layers: Mapping[str, Any]) -> list[str]:
    """Return the `mesh_axes` of the last layer that has this key."""
    written = [layer["mesh_axes"] for layer in layers if "mesh_axes" in layer]
    is_list = bool(written) and isinstance(written[-1], (list, tuple))
    return [str(axis) for axis in written[-1]] if is_list else []


def _keys(axis: str) -> Iterator[str]:
    """Yield the two keys that set the size of a mesh axis: inside a slice, then across slices."""
    for network in ("ici", "dcn"):
        yield f"{network}_{_PARALLELISM.get(axis, axis)}_parallelism"


def _mesh(values: Mapping[str, Any], notes: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the total size of each mesh axis, and its size across slices if that is above 1.

    Raises:
      StrategyError: There are no mesh axes, or sizes are invalid.
    """
    axes = _axes(values)
    if not axes:
        raise StrategyError("the configuration has no mesh_axes", fix="add mesh_axes: ['fsdp']")
    if twice := sorted({axis for axis in axes if axes.count(axis) > 1}):
        what = f"mesh_axes has {', '.join(twice)} twice"
        raise StrategyError(what, fix="name each mesh axis once")
    inside: dict[str, int] = {}
    across: dict[str, int] = {}
    problems: list[Problem] = []
    for axis in axes:
        for key, sizes in zip(_keys(axis), (inside, across), strict=True):
            size = as_integer(values.get(key, 1))
            if size is None or (size < 1 and size != -1):
                what = f"{key} must be a positive integer or -1, got {values[key]!r}"
                problems.append(Problem(error=StrategyError, what=what, fix=f"write {key}: 1"))
            sizes[axis] = size or 1
    raise_problems(problems)
    if unsized := [axis for axis in axes if not any(key in values for key in _keys(axis))]:
        missing = [f"{axis} (no {next(_keys(axis))})" for axis in unsized]
        notes.append(f"mesh axes without a size have size 1: {', '.join(missing)}")
    given = values.get("num_slices")
    count = 1 if given is None else as_integer(given)
    if count is None:
        raise StrategyError(
            f"num_slices must be an integer, got {given!r}", fix="write the number of slices, or -1"
        )
    # -1 lets MaxText count the slices of its devices. Their number is not known here, so assume one
    # slice.
    slices = max(count, 1)
    if slices == 1 and (ignored := {axis: size for axis, size in across.items() if size > 1}):
        texts = [f"{[*_keys(axis)][1]}={size}" for axis, size in ignored.items()]
        notes.append(f"not imported, because num_slices is not more than 1: {', '.join(texts)}")
    across = _filled(across, slices)
    # ICI and DCN sizes multiply, as in `create_hybrid_device_mesh`.
    mesh = {axis: -1 if size == -1 else size * across[axis] for axis, size in inside.items()}
    if len(free := [axis for axis, size in mesh.items() if size == -1]) > 1:
        what = f"the sizes of {', '.join(free)} are -1"
        raise StrategyError(what, fix="give only one of these axes the size -1")
    return mesh, {axis: size for axis, size in across.items() if size > 1}


def _absent(merged: _MaxTextConfig, mesh: Mapping[str, int], notes: list[str]) -> dict[str, int]:
    """Return the mesh axes of MaxText that rules name and the mesh lacks, with size 1.

    In MaxText, a dim can be sharded over an absent mesh axis, and a later dim then cannot use this
    axis. Only after that does MaxText leave the axis out of the spec.
    """
    written = [rule[1] for rule in merged.rules if _name(rule)]
    # A value that is not the name of a mesh axis is reported later.
    listed = [axes if isinstance(axes, (list, tuple)) else [axes] for axes in written]
    named = [axis for axes in listed for axis in axes if isinstance(axis, str)]
    absent = [axis for axis in dict.fromkeys(named) if axis in _MESH_AXES and axis not in mesh]
    if absent:
        notes.append(f"mesh axes that only the rules name have size 1: {', '.join(absent)}")
    for axis in (axis for axis in _MESH_AXES if axis not in mesh):
        key = next(_keys(axis))
        size = as_integer(merged.values.get(key, 1))
        if size is not None and size > 1 and key not in {k for own in mesh for k in _keys(own)}:
            notes.append(f"not imported, because the mesh has no such axis: {key}={size}")
    return dict.fromkeys(absent, 1)


def _filled(across: Mapping[str, int], slices: int) -> dict[str, int]:
    """Return the sizes across slices, with a number in place of -1.

    On one slice, all these sizes are 1, as in MaxText.
    """
    # MaxText builds no hybrid mesh for one slice, and ignores the dcn sizes.
    if slices == 1:
        return dict.fromkeys(across, 1)
    free = [axis for axis, size in across.items() if size == -1]
    known = math.prod(size for size in across.values() if size != -1)
    if len(free) > 1 or slices % known or (not free and known != slices):
        sizes = ", ".join(f"{axis}={size}" for axis, size in across.items() if size != 1)
        what = f"the dcn sizes {sizes or 'are all 1, which'} do not fit {slices} slices"
        raise StrategyError(
            what, fix=f"choose dcn sizes whose product is {slices}; one size may be -1"
        )
    return {axis: slices // known if size == -1 else size for axis, size in across.items()}
