"""The tensors of a checkpoint as the parameters of the decoder, still unread.

A linear layer of a checkpoint is [out, in], and its heads are one dim. The axes of both say how its
dims are split and ordered, so no table of transpositions is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.checkpoint import Checkpoint
from shardwright.interop.hf.families import tensors_of
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.interop.hf.model.sizes import Sizes
from shardwright.interop.hf.names import limited
from shardwright.interop.hf.source import Bounds, Source, StackedSource
from shardwright.interop.hf.tensors import Tensors
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.lowering import lower

# Qwen 2 does not have it, although q, k and v have biases.
_NO_TENSOR: Final = "attention/out/bias"
_OWN_FORWARD: Final = "write the forward pass yourself, and read the tensors with hf.load"
# Number of values of the embedding that are compared with those of the head at once.
_CHUNK: Final = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A tensor with its dims split, cut and in another order.

    Attributes:
      source: The tensor.
      split: Sizes of the dims that each of its dims becomes.
      starts: Where the result starts in each of these dims.
      order: Dim of the result -> one of these dims.
      shape: Shape of the result.
    """

    source: Source
    split: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name in the file."""
        return self.source.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of what `read` returns."""
        return self.source.dtype

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.source.file

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece. If inner dims are cut, whole rows of them are read first."""
        ranges = [(0, 0)] * len(self.order)
        for (start, stop), dim in zip(bounds, self.order, strict=True):
            ranges[dim] = (start + self.starts[dim], stop + self.starts[dim])
        rows: list[tuple[int, int]] = []
        shape: list[int] = []
        index: list[slice] = []
        inner = iter(ranges)
        for sizes in self.split:
            (start, stop), *rest = (next(inner) for _ in sizes)
            row = math.prod(sizes[1:])
            rows.append((start * row, stop * row))
            shape += [stop - start, *sizes[1:]]
            index += [slice(None), *(slice(*each) for each in rest)]
        piece = self.source.read(tuple(rows)).reshape(shape)[tuple(index)]
        return np.ascontiguousarray(piece.transpose(self.order))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """A parameter that the model does not have: a bias that adds nothing."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: str = ""

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Return zeros."""
        return np.zeros([stop - start for start, stop in bounds], self.dtype)


def arrange(
    checkpoint: Checkpoint, sizes: Sizes, specs: Mapping[str, ArraySpec]
) -> dict[str, Source]:
    """Return where each parameter is, by its path.

    Args:
      checkpoint: Its experts are stacked, and its layers are not.
      sizes: The decoder.
      specs: Path of each parameter -> its spec.

    Raises:
      CheckpointError: A parameter has no tensor, or one of another size or without floats, or a
        tensor belongs to no parameter. All are reported at once.
    """
    family = tensors_of(checkpoint.config)
    prefix = (
        family.prefix if any(name.startswith(family.prefix) for name in checkpoint.specs) else ""
    )
    unused = dict.fromkeys(checkpoint.specs)
    problems: list[Problem] = []
    found: dict[str, Source] = {}
    for path, spec in specs.items():
        names = [_first_of(each, checkpoint.specs) for each in _names_of(path, family, prefix)]
        absent = [name for name in names if name not in checkpoint.specs]
        if absent and path.endswith(_NO_TENSOR) and sizes.family.startswith("qwen2"):
            found[path] = Zeros(name=path, shape=tuple(spec.shape), dtype=np.dtype(spec.dtype))
            continue
        if absent or not names:
            what = f"the checkpoint lacks {', '.join(absent) or 'it'}"
            fix = "use the config.json of this checkpoint"
            if path == "head":
                fix += '; "tie_word_embeddings": true if the embedding takes its place'
            problems.append(Problem(error=CheckpointError, what=what, path=path, fix=fix))
            continue
        for name in names:
            unused.pop(name, None)
        arranged = _arranged(checkpoint, names, path, spec, _starts(path, sizes))
        found[path] = arranged
        problems += _misfits(checkpoint, names, arranged, path, sizes)
    for name in unused:
        what, fix = "the decoder has no parameter for this tensor", _OWN_FORWARD
        if name in family.parameters["head"] and sizes.tied:
            (embedding,) = _names_of("embedding", family, prefix)
            if _are_equal(checkpoint.sources[name], checkpoint.sources[embedding]):
                continue
            what = "tie_word_embeddings is true, and this differs from the embedding"
            fix = 'write "tie_word_embeddings": false in config.json'
        elif _is_left_out(name, sizes, prefix + family.layers):
            continue
        problems.append(Problem(error=CheckpointError, what=what, path=name, fix=fix))
    raise_problems(limited(problems))
    return found


def _names_of(path: str, family: Tensors, prefix: str) -> list[str]:
    """Return the names of the tensors of a parameter."""
    if path == "head":
        return list(family.parameters[path])
    start, own = prefix, path
    if path.startswith("layers/"):
        _, number, own = path.split("/", 2)
        start += family.layers.replace("#", number)
    listed = (name.split(" | ") for name in family.parameters.get(own, ()))
    return [" | ".join(start + name for name in names) for names in listed]


def _first_of(names: str, known: Mapping[str, Any]) -> str:
    """Return the first name that a checkpoint has, or else the first one."""
    listed = names.split(" | ")
    return next((name for name in listed if name in known), listed[0])


def _latent(path: str, sizes: Sizes) -> LatentConfig | None:
    """Return the latent attention of a key or value: both are parts of one tensor."""
    latents = (each.attention for each in sizes.stacks)
    is_part = path.endswith(("attention/key", "attention/value"))
    return next((each for each in latents if is_part and isinstance(each, LatentConfig)), None)


def _starts(path: str, sizes: Sizes) -> int:
    """Return where a parameter starts in HEAD_DIM."""
    latent = _latent(path, sizes)
    return latent.plain_dim if latent is not None and path.endswith("attention/value") else 0


def _misfits(
    checkpoint: Checkpoint, names: Sequence[str], found: Arranged, path: str, sizes: Sizes
) -> Iterator[Problem]:
    """Yield what keeps tensors from being a parameter: no floats, or other sizes."""
    for name in names:
        dtype = checkpoint.sources[name].dtype
        if dtype.itemsize < 2 or not jnp.issubdtype(dtype, jnp.floating):
            what = f"the weights are {dtype.name}, and the decoder computes with floats"
            yield Problem(error=CheckpointError, what=what, path=name, fix=_OWN_FORWARD)
    flat = [size for part in found.split for size in part]
    stored = tuple(flat[dim] for dim in found.order)
    expected = found.shape
    if (latent := _latent(path, sizes)) is not None:
        expected = (*expected[:-1], latent.plain_dim + latent.value_dim)
    if stored != expected:
        what = f"the tensor has the sizes {stored}, and the decoder {expected}"
        fix = "use the config.json of this checkpoint"
        yield Problem(error=CheckpointError, what=what, path=path, fix=fix)


def _arranged(
    checkpoint: Checkpoint, names: Sequence[str], path: str, spec: ArraySpec, start: int
) -> Arranged:
    """Return the tensors as the parameter, whose axes are theirs in another order."""
    source: Source = checkpoint.sources[names[0]]
    split = [*_members(checkpoint.specs[names[0]])]
    if len(names) > 1:
        parts = tuple(checkpoint.sources[name] for name in names)
        source = StackedSource(name=path, parts=parts, dtype=source.dtype)
        split.insert(0, [(EMPTY, len(names))])
    flat = [each for members in split for each in members]
    wanted = [axis for members in _members(spec) for axis, _ in members]
    # A norm of heads has the axis NORM here, and that of the heads in a checkpoint.
    axes = wanted if len(flat) == 1 else [axis for axis, _ in flat]
    if sorted(axes) != sorted(wanted):
        raise AssertionError(f"{path} has the axes {wanted}, and {names} have {axes}")
    order = tuple(axes.index(axis) for axis in wanted)
    starts = [0] * len(flat)
    starts[order[-1]] = start
    return Arranged(
        source=source,
        split=tuple(tuple(size for _, size in members) for members in split),
        starts=tuple(starts),
        order=order,
        shape=tuple(spec.shape),
    )


def _members(spec: ArraySpec) -> Iterator[list[tuple[str, int]]]:
    """Yield the axes of each dim with their sizes: several of a merged dim."""
    for dim, size in zip(lower(spec.axes, spec.shape).dims, spec.shape, strict=True):
        yield list(dim.merged) or [(dim.means or next(iter(dim.axes), EMPTY), size)]


def _is_left_out(name: str, sizes: Sizes, layers: str) -> bool:
    """Tell whether the logits do not depend on a tensor."""
    start = layers.removesuffix("#.")
    number = name.removeprefix(start).partition(".")[0] if name.startswith(start) else ""
    count = sum(stack.layers for stack in sizes.stacks)
    # Layers after the last one predict further tokens. Frequencies are computed.
    is_further = number.isdigit() and int(number) >= count
    return is_further or name.endswith("rotary_emb.inv_freq")


def _are_equal(first: Source, second: Source) -> bool:
    """Tell whether two tensors have the same values, which are read in parts."""
    if first.shape != second.shape:
        return False
    count, width = first.shape
    rows = max(1, _CHUNK // width)
    return all(
        np.array_equal(first.read(bounds), second.read(bounds))
        for start in range(0, count, rows)
        for bounds in [((start, min(start + rows, count)), (0, width))]
    )
