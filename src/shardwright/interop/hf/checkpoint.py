"""Checkpoints: read their headers, name the axes of each tensor, and load tensors as shards."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import (
    CheckpointError,
    Problem,
    ShardingError,
    StrategyError,
    raise_problems,
)
from shardwright.interop.hf.config import MOST_PROBLEMS, Config, fault
from shardwright.interop.hf.families import tensors_of
from shardwright.interop.hf.names import axes_of, check_mappings, missing
from shardwright.interop.hf.source import (
    PaddedSource,
    Source,
    StackedSource,
    place,
    safetensors_of,
)
from shardwright.interop.logical_rules import check_manager
from shardwright.manager.manager import PartitionManager
from shardwright.strategy.foreign_files import read_json
from shardwright.vocabulary.annotations import ArraySpec, PartOf, stacked
from shardwright.vocabulary.axes import VOCAB
from shardwright.vocabulary.integers import read_integer
from shardwright.vocabulary.lowering import describe
from shardwright.vocabulary.shown import text_of

_OTHERWISE: Final = (
    "to give a tensor other axes, pass axes= to hf.read or hf.load: "
    'axes={r"up_proj\\.weight$": (sw.EMPTY, sw.EMBED)}. The scales of a weight get its sharding.'
)
_EXPERT: Final = re.compile(r"(.*\bexperts\.)(\d+)\.(.*)", re.DOTALL)
_APART: Final = "download the checkpoint again, or do not stack experts: stack_experts=False"
# Stands for the number of an expert or a layer in a name that has no such number.
_NO_NUMBER: Final = -1
_SHORTER: Final = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers are read and checked, and whose tensors are not read yet.

    `str(checkpoint)` is a table of its tensors and their axes.

    Attributes:
      config: The content of `config.json`.
      specs: Name of each tensor -> its shape, dtype and axes.
      sources: Name of each tensor -> the `Source` that reads it from the files.
      notes: How the arrays differ from the files, one line each.
      unpadded: Name of each padded tensor -> its stored shape. Pass this mapping as `shapes` to
        `checkpoint.export_safetensors`.
    """

    config: Mapping[str, Any]
    specs: dict[str, ArraySpec]
    sources: dict[str, Source]
    notes: tuple[str, ...] = ()
    unpadded: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def load(self, pm: PartitionManager, *, mode: str | None = None) -> dict[str, jax.Array]:
        """Read every tensor, shard by shard, into the sharding of a parameter.

        Each process reads only the shards of its own devices. Host memory holds one shard at a
        time.

        Args:
          pm: The manager.
          mode: Runtime mode. Defaults to the manager's.

        Raises:
          ShardingError: A tensor does not fit the rules, or the mesh is abstract. Nothing is read.
          CheckpointError: A file has changed, or a value does not fit its dtype. No array is
            returned.
        """
        check_manager(pm)
        try:
            shardings = pm.shardings(self.specs, mode=mode)
        except ShardingError as error:
            # The errors tell the caller to annotate a dim, but these annotations come from a table.
            error.add_note(_OTHERWISE)
            raise
        return {
            name: place(name, source, self.specs[name].dtype, shardings[name])
            for name, source in self.sources.items()
        }

    def explain(self, pm: PartitionManager, *, mode: str | None = None) -> str:
        """Return a table of the tensors: their axes, their specs and their bytes per device.

        Args:
          pm: The manager.
          mode: Runtime mode. Defaults to the manager's.
        """
        check_manager(pm)
        return text_of(self, shardings=pm.shardings(self.specs, mode=mode))

    def __str__(self) -> str:
        return text_of(self)


def load(
    folder: str | os.PathLike[str],
    pm: PartitionManager,
    *,
    dtype: Any = None,
    axes: Mapping[str, Any] | None = None,
    stack_experts: bool = True,
    stack_layers: bool = False,
    pad_vocab: int | None = None,
    mode: str | None = None,
) -> tuple[dict[str, jax.Array], dict[str, ArraySpec]]:
    """Read a checkpoint into the sharding of a strategy.

    With `checkpoint = read(folder)`, the result is `(checkpoint.load(pm), checkpoint.specs)`. To
    see the axes of each tensor first, print what `read` returns.

    Args:
      folder: Folder with `config.json` and safetensors files.
      pm: The manager.
      dtype: Dtype of the weights that are stored as floats of 16 bits or more. Defaults to the
        stored dtype.
      axes: Pattern -> annotation, for tensors that the family does not have.
      stack_experts: See `read`.
      stack_layers: See `read`.
      pad_vocab: See `read`. For an export, call `read`: its result also has the shapes without
        padding.
      mode: Runtime mode. Defaults to the manager's.

    Returns:
      The parameters by name, and their `ArraySpec`s.

    Raises:
      CheckpointError: See `read`. Nothing is loaded.
      ShardingError: See `Checkpoint.load`. Nothing is loaded.
    """
    check_manager(pm)
    checkpoint = read(
        folder,
        dtype=dtype,
        axes=axes,
        stack_experts=stack_experts,
        stack_layers=stack_layers,
        pad_vocab=pad_vocab,
    )
    return checkpoint.load(pm, mode=mode), checkpoint.specs


def read(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    axes: Mapping[str, Any] | None = None,
    stack_experts: bool = True,
    stack_layers: bool = False,
    pad_vocab: int | None = None,
) -> Checkpoint:
    """Read the headers of a checkpoint, and decide the axes of each tensor. No tensor is read.

    Args:
      folder: Folder with `config.json` and safetensors files.
      dtype: Dtype of the weights that are stored as floats of 16 bits or more. Defaults to the
        stored dtype.
      axes: Pattern -> annotation, for tensors that the family does not have. The first pattern that
        is found in a name applies, even if the family has the tensor.
      stack_experts: Whether to stack the experts of a layer into one array with the axis EXPERT. In
        the files, each expert has its own tensors. The name of the stack has no expert number.
      stack_layers: Whether to stack each tensor of a layer over all layers. The stack has the axis
        LAYERS first, for `jax.lax.scan`. The name of the stack has no layer number. The patterns
        and annotations of `axes` still describe the tensors of one layer.
      pad_vocab: Append rows of zeros to each VOCAB dim, so that its size is a multiple of this
        number, such as 128. The logits of these rows are 0. To hide them, pass `vocab=` to
        `loss.logits` and `loss.cross_entropy`.

    Raises:
      CheckpointError: Files are missing or truncated, tensors are missing or unknown, or their
        shapes differ from the configuration. All problems of a kind are reported at once.
      StrategyError: The dtype is not a float dtype, or an annotation is invalid.
    """
    check_mappings(axes=axes or {})
    path = Path(folder)
    if not path.exists():
        fix = "pass a folder that has config.json and safetensors files"
        raise CheckpointError(f"{path} does not exist", fix=fix)
    fix = "pass the folder that has config.json beside the weights"
    file = (path if path.is_dir() else path.parent) / "config.json"
    config = read_json(file, error=CheckpointError, fix=fix)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object", fix=fix)
    sources: dict[str, Source] = dict(safetensors_of(path))
    # `others` are files that the index does not list, such as other variants of the weights.
    read = {source.file for source in sources.values()}
    others = [file.name for file in sorted(path.glob("*.safetensors")) if file.name not in read]
    notes = [f"not read: {', '.join(others[:10])}"] if others else []
    floats = _float_dtype(dtype)
    tensors = _stack_experts(sources) if stack_experts else sources
    # `_stack_experts` checks the experts itself.
    if not stack_experts:
        _check_experts(sources, config)
    shapes = {name: source.shape for name, source in tensors.items()}
    annotations = axes_of(shapes, config, axes=axes)
    # Check missing tensors after unknown ones: with a wrong `model_type`, nearly all names are
    # unknown, and nearly all expected names are missing.
    raise_problems(missing(tensors, config))
    if len(tensors) < len(sources):
        # `tensors` has one entry for each stack, so `len(sources) - len(tensors)` is too small by
        # the number of stacks.
        count = sum(isinstance(source, StackedSource) for source in tensors.values())
        notes.append(
            f"{len(sources) - len(tensors) + count} tensors of experts became {count} stacks"
        )
    problems: list[Problem] = []
    specs: dict[str, ArraySpec] = {}
    for name, source in tensors.items():
        own = _dtype_of(name, source.dtype, floats, notes, problems)
        specs[name] = ArraySpec(source.shape, own, annotations[name])
    raise_problems(problems)
    if stack_layers:
        stacks, tensors = _stack_layers(specs, tensors, config)
        count = sum(name not in specs for name in stacks)
        notes.append(f"{len(specs) - len(stacks) + count} tensors of layers became {count} stacks")
        specs = stacks
    checkpoint = Checkpoint(config=config, specs=specs, sources=tensors, notes=tuple(notes))
    return _pad_vocabulary(checkpoint, pad_vocab)


def _float_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype that the caller wants for weights, or None."""
    if dtype is None:
        return None
    fix = "pass a dtype such as jnp.bfloat16, or leave dtype out to keep the stored dtype"
    try:
        wanted: np.dtype[Any] = jnp.dtype(dtype)
    except TypeError as error:
        raise StrategyError(f"{dtype!r} is not a dtype", fix=fix) from error
    if not jnp.issubdtype(wanted, jnp.floating) or wanted.itemsize < 2:
        raise StrategyError(f"{wanted.name} is not a float dtype of 16 bits or more", fix=fix)
    return wanted


def _dtype_of(
    name: str,
    stored: np.dtype[Any],
    floats: np.dtype[Any] | None,
    notes: list[str],
    problems: list[Problem],
) -> np.dtype[Any]:
    """Return the dtype of a loaded tensor. JAX has dtypes of 64 bits only in 64-bit mode."""
    # Scales stay as stored: a coarser scale would change every weight of its block.
    is_scale = "_scale" in name
    if floats is not None and stored.itemsize > 1 and jnp.issubdtype(stored, jnp.floating):
        stored = stored if is_scale else floats
    if stored.itemsize < 8 or jax.config.read("jax_enable_x64"):
        return stored
    if stored in _SHORTER:
        notes.append(f"{name} is {_SHORTER[stored].name}, because JAX is not in 64-bit mode")
        return _SHORTER[stored]
    fix = 'pass dtype=jnp.float32, or jax.config.update("jax_enable_x64", True)'
    what = f"{stored.name} needs JAX in 64-bit mode"
    problems.append(fault(what, name, fix))
    return stored


def _pad_vocabulary(checkpoint: Checkpoint, multiple: int | None) -> Checkpoint:
    """Pad the VOCAB dims of a checkpoint to the next multiple of a number.

    Raises:
      CheckpointError: The number is not a positive integer, or the VOCAB dims have several sizes.
    """
    if multiple is None:
        return checkpoint
    fix = "pass a multiple of the number of shards of VOCAB, such as pad_vocab=128"
    read_integer("pad_vocab", multiple, error=CheckpointError, fix=fix)
    dims = {
        name: [dim for dim, entry in enumerate(spec.axes) if entry == VOCAB]
        for name, spec in checkpoint.specs.items()
    }
    # Embedding and head must keep one size, so that logits and tokens agree.
    sizes = {checkpoint.specs[name].shape[dim]: name for name, own in dims.items() for dim in own}
    if len(sizes) > 1:
        what = " and ".join(f"{size} in {name}" for size, name in sizes.items())
        raise CheckpointError(
            f"VOCAB has several sizes: {what}", fix="load the checkpoint without pad_vocab"
        )
    vocab = next(iter(sizes), 0)
    # The smallest number of rows that makes the size a multiple.
    more = -vocab % multiple
    if not more:
        return checkpoint
    specs, sources, unpadded = dict(checkpoint.specs), dict(checkpoint.sources), {}
    for name, own in dims.items():
        if own:
            unpadded[name] = specs[name].shape
            shape = tuple(size + more * (dim in own) for dim, size in enumerate(unpadded[name]))
            specs[name] = dataclasses.replace(specs[name], shape=shape)
            sources[name] = PaddedSource(source=sources[name], shape=shape)
    note = f"the vocabulary of {vocab} is padded by {more} rows of zeros to {vocab + more}"
    notes = (*checkpoint.notes, note)
    return dataclasses.replace(
        checkpoint, specs=specs, sources=sources, notes=notes, unpadded=unpadded
    )


def _stack_experts(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the tensors. The experts of each layer are stacked into one tensor.

    The name of a stack has no expert number.

    Raises:
      CheckpointError: Experts are absent, or differ in shape or dtype.
    """
    problems: list[Problem] = []
    result: dict[str, Source] = {}
    for whole, names in _groups(sources, _EXPERT, problems).items():
        if _NO_NUMBER in names:
            result[whole] = sources[whole]
            continue
        # Name at most ten absent experts, because a damaged name may have a huge number.
        numbers = (number for number in range(max(names) + 1) if number not in names)
        if absent := ", ".join(map(str, itertools.islice(numbers, 10))):
            problems.append(fault(f"the experts {absent} are absent", whole, _APART))
        # Sort by number: as text, expert 10 would come before expert 2.
        parts = [sources[names[number]] for number in sorted(names)]
        kinds = sorted({(part.dtype.name, part.shape) for part in parts})
        if len(kinds) > 1:
            texts = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
            problems.append(fault(f"the experts differ: {texts}", whole, _APART))
        result[whole] = StackedSource(name=whole, parts=tuple(parts), dtype=parts[0].dtype)
    raise_problems(problems[:MOST_PROBLEMS])
    return result


def _check_experts(names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Check that each layer with experts has all experts.

    Raises:
      CheckpointError: Experts are absent.
    """
    problems: list[Problem] = []
    groups = _groups(names, _EXPERT, problems)
    count = Config(values=config).size("num_local_experts", "num_experts", "n_routed_experts") or 0
    for whole, group in groups.items():
        numbers = (number for number in range(count) if number not in group)
        absent = ", ".join(map(str, itertools.islice(numbers, 10)))
        if absent and _NO_NUMBER not in group:
            again = "download the checkpoint again"
            problems.append(fault(f"the experts {absent} are absent", whole, again))
    raise_problems(problems[:MOST_PROBLEMS])


def _stack_layers(
    specs: Mapping[str, ArraySpec],
    sources: Mapping[str, Source],
    config: Mapping[str, Any],
) -> tuple[dict[str, ArraySpec], dict[str, Source]]:
    """Stack each tensor of a layer over all layers, and return the specs and tensors.

    The name of a stack has no layer number.

    Raises:
      CheckpointError: A tensor is not in every layer, or layers differ.
    """
    family = tensors_of(config)
    # A model without a head has the same names without the prefix, so the prefix is optional here.
    start, prefix = re.escape(family.layers.removesuffix("#.")), re.escape(family.prefix)
    pattern = re.compile(rf"((?:{prefix})?{start})(\d+)\.(.*)", re.DOTALL)
    count = Config(values=config).number("num_hidden_layers")
    fix = "leave out stack_layers=True: this model has no single stack of equal layers"
    problems: list[Problem] = []
    stacks: dict[str, ArraySpec] = {}
    tensors: dict[str, Source] = {}
    for whole, names in _groups(specs, pattern, problems).items():
        if _NO_NUMBER in names:
            stacks[whole], tensors[whole] = specs[whole], sources[whole]
            continue
        if len(names) != count:
            what = f"{len(names)} of the {count} layers have this tensor"
            problems.append(fault(what, whole, fix))
        # Sort by number, like the experts above.
        parts = [specs[names[number]] for number in sorted(names)]
        kinds = {f"{part.dtype}{list(part.shape)} {describe(part.axes)}" for part in parts}
        if len(kinds) > 1:
            what = f"the layers differ: {', '.join(sorted(kinds)[:4])}"
            problems.append(fault(what, whole, fix))
        stack = stacked(parts[0], len(parts))
        if isinstance(stack.axes, PartOf):
            # A scale points to its weight. So the stack of scales points to the stack of weights.
            path = _without_number(stack.axes.path, pattern)
            stack = dataclasses.replace(stack, axes=dataclasses.replace(stack.axes, path=path))
        stacks[whole] = stack
        tensors[whole] = StackedSource(
            name=whole,
            parts=tuple(sources[names[number]] for number in sorted(names)),
            dtype=np.dtype(parts[0].dtype),
        )
    raise_problems(problems[:MOST_PROBLEMS])
    return stacks, tensors


def _groups(
    names: Iterable[str], pattern: re.Pattern[str], problems: list[Problem]
) -> dict[str, dict[int, str]]:
    """Return the tensors of each stack: name of the stack -> number -> name of the tensor.

    A name without a number forms a group of its own.
    """
    groups: dict[str, dict[int, str]] = {}
    for name in names:
        match = pattern.fullmatch(name)
        # The first name gives the stack its place in the order.
        group = groups.setdefault(_without_number(name, pattern), {})
        number = int(match[2]) if match else _NO_NUMBER
        is_whole = number == _NO_NUMBER
        if number in group or (group and is_whole != (_NO_NUMBER in group)):
            what = f"this tensor and {next(iter(group.values()))} have the same place in a stack"
            problems.append(fault(what, name, "download the checkpoint again"))
        group[number] = name
    return groups


def _without_number(name: str, pattern: re.Pattern[str]) -> str:
    match = pattern.fullmatch(name)
    return match[1] + match[3] if match else name
