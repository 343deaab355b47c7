"""A decoder with the weights of a checkpoint: its parameters, and the function that serves it.

A linear layer of a checkpoint is [out, in], and heads and head_dim are merged into one dim. The
axes of the tensor and of the parameter show how to split and order the dims, so no table of
transpositions is needed.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.errors import Problem, StrategyError, raise_problems
from shardwright.interop.hf.checkpoint import Checkpoint, read
from shardwright.interop.hf.config import OWN_CONFIG, fault
from shardwright.interop.hf.families import Tensors, sizes_of, tensors_of
from shardwright.interop.hf.model.decoder import Decoder, decoder_specs
from shardwright.interop.hf.model.latent import LatentConfig
from shardwright.interop.hf.model.sizes import Sizes
from shardwright.interop.hf.names import limited
from shardwright.interop.hf.source import Bounds, ChangedSource, Source, StackedSource, place
from shardwright.interop.logical_rules import check_manager
from shardwright.manager.manager import PartitionManager
from shardwright.trees.paths import is_array_spec, path_text
from shardwright.vocabulary.annotations import ArraySpec
from shardwright.vocabulary.axes import EMPTY
from shardwright.vocabulary.lowering import lower

if TYPE_CHECKING:
    from shardwright.serving import CacheShape


# JAX caches compiled steps by their function, here a decoder. So a decoder is hashed by identity,
# and weak references to it are possible.
@dataclasses.dataclass(
    frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True
)
class LoadedDecoder:
    """A decoder of the blocks of `shardwright.layers`, whose weights are not read yet.

    The decoder itself can be called as the model of a `serving.Engine`.

    Attributes:
      config: Its sizes, and the configs of its blocks.
      specs: Its parameters as `ArraySpec`s.
      sources: Path of each parameter in `specs` -> the `Source` that reads it from the files.
      notes: What differs from the files, one line each.
    """

    config: Sizes
    specs: dict[str, Any]
    sources: Mapping[str, Source]
    notes: tuple[str, ...]

    def load(self, pm: PartitionManager, *, mode: str | None = None) -> dict[str, Any]:
        """Read every parameter, shard by shard, into its sharding.

        Args:
          pm: The manager.
          mode: Runtime mode. Defaults to the manager's.

        Raises:
          ShardingError: A parameter does not fit the rules, or the mesh is abstract. Nothing is
            read.
          CheckpointError: A file has changed, or a value does not fit its dtype.
        """
        check_manager(pm)
        shardings = pm.shardings(self.specs, mode=mode)
        structure: Any
        pairs, structure = jax.tree_util.tree_flatten_with_path(self.specs, is_leaf=is_array_spec)
        placed = [
            place(path_text(path), self.sources[path_text(path)], spec.dtype, sharding)
            for (path, spec), sharding in zip(pairs, jax.tree.leaves(shardings), strict=True)
        ]
        params: dict[str, Any] = structure.unflatten(placed)
        return params

    @property
    def cache_shape(self) -> CacheShape:
        """The argument `shape` of a `serving.Engine`.

        Raises:
          StrategyError: See `__call__`.
        """
        from shardwright.serving import CacheShape

        self._check_served()
        stacks = self.config.stacks
        attention: Any = stacks[0].attention
        windows = {
            stack.attention_of(number).window  # type: ignore[union-attr]
            for stack in stacks
            for number in range(stack.period)
        }
        # The engine has one kind of cache. If layers have different windows, this cache keeps all
        # positions.
        window: Any = next(iter(windows)) if len(windows) == 1 else None
        return CacheShape(
            layers=sum(stack.layers for stack in stacks),
            kv_heads=attention.key_heads,
            head_dim=attention.size,
            dtype=attention.dtypes.cache,
            # The window of a cache includes the position of the query, but `window[0]` does not.
            window=None if window is None else window[0] + 1,
        )

    def __call__(
        self, params: Any, tokens: jax.Array, caches: Any, valid: jax.Array
    ) -> tuple[jax.Array, list[Any]]:
        """Return logits and caches. A `serving.Engine` calls this function as its model.

        Args:
          params: What `load` returns.
          tokens: `[batch, length]` int32.
          caches: One per layer. The tokens are appended to them.
          valid: `[batch, length]` bool, False for padding.

        Raises:
          StrategyError: The logits of the decoder would differ from those of the model, or no kind
            of cache stores what the attention of the decoder needs.
        """
        self._check_served()
        return Decoder(self.config, remat="none").logits(params, tokens, caches, valid)

    def _check_served(self) -> None:
        # A plan may differ from the model, with a note. Served tokens may not differ.
        reasons = list(self.config.differs)
        if any(isinstance(stack.attention, LatentConfig) for stack in self.config.stacks):
            reasons.append("attention needs a cache of latents, and no kind of cache stores them")
        if reasons:
            raise StrategyError(
                f"{self.config.family} cannot be served: {'; '.join(reasons)}",
                fix="write the forward pass yourself; planning and loading work without it",
            )


def decoder(
    folder: str | os.PathLike[str],
    *,
    param: str | None = None,
) -> LoadedDecoder:
    """Read the headers of a checkpoint, and make a decoder of the blocks of `shardwright.layers`.

    Args:
      folder: Folder with `config.json` and safetensors files.
      param: Dtype of the stored parameters. If it is given, matmuls are in bfloat16. By default,
        both have the dtype of the configuration.

    Raises:
      CheckpointError: See `read`. Or the parameters of the decoder are not those of the checkpoint,
        or differ in size. Or a weight is not stored as floats of 16 bits or more. All are reported
        at once.
      StrategyError: The configuration is not that of a decoder, or a value is not valid.
    """
    checkpoint: Checkpoint = read(folder)
    sizes = sizes_of(checkpoint.config, "config.json", param=param, capacity=None)
    # Build the decoder layer by layer: serving has a cache per layer, and does not scan.
    specs = decoder_specs(sizes, stacked=False)
    pairs, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_array_spec)
    sources = arrange(checkpoint, sizes, {path_text(path): spec for path, spec in pairs})
    notes = (*checkpoint.notes, *sizes.notes)
    return LoadedDecoder(config=sizes, specs=specs, sources=sources, notes=notes)


# Qwen 2 does not have this bias, although q, k and v have biases.
_NO_TENSOR: Final = "attention/out/bias"
_OWN_FORWARD: Final = "write the forward pass yourself, and read the tensors with hf.load"
# Number of values of the embedding that are compared at once with those of the head.
_CHUNK: Final = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arranged(ChangedSource):
    """A tensor whose dims are split, cut and reordered.

    Attributes:
      source: The tensor.
      split: For each dim of the source, the sizes of the dims that it is split into.
      starts: Where the result starts in each split dim.
      order: Dim of the result -> split dim.
      shape: Shape of the result.
    """

    split: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece. Whole rows are read, then cut if the piece has only a part of them."""
        # Turn the bounds in the dims of the result into bounds in the split dims.
        ranges = [(0, 0)] * len(self.order)
        for (start, stop), dim in zip(bounds, self.order, strict=True):
            ranges[dim] = (start + self.starts[dim], stop + self.starts[dim])
        rows: list[tuple[int, int]] = []
        shape: list[int] = []
        index: list[slice] = []
        inner = iter(ranges)
        for sizes in self.split:
            (start, stop), *rest = (next(inner) for _ in sizes)
            # A read returns whole inner dims, so cut them after the read.
            row = math.prod(sizes[1:])
            rows.append((start * row, stop * row))
            shape += [stop - start, *sizes[1:]]
            index += [slice(None), *(slice(*each) for each in rest)]
        piece = self.source.read(tuple(rows)).reshape(shape)[tuple(index)]
        return np.ascontiguousarray(piece.transpose(self.order))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """A bias of zeros, for a parameter of the decoder that the checkpoint does not have."""

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
    """Return the source that reads each parameter, by the path of the parameter.

    Args:
      checkpoint: A checkpoint with stacked experts and separate layers.
      sizes: The decoder.
      specs: Path of each parameter -> its spec.

    Raises:
      CheckpointError: A parameter has no tensor, or its tensor has another size or is not of a
        float dtype. Or a tensor belongs to no parameter. All problems are reported at once.
    """
    family = tensors_of(checkpoint.config)
    prefix = (
        family.prefix if any(name.startswith(family.prefix) for name in checkpoint.specs) else ""
    )
    # A dict and not a set, so that problems have the order of the checkpoint.
    unused = dict.fromkeys(checkpoint.specs)
    problems: list[Problem] = []
    found: dict[str, Source] = {}
    for path, spec in specs.items():
        names = []
        for each in _names_of(path, family, prefix):
            listed = each.split(" | ")
            names.append(next((name for name in listed if name in checkpoint.specs), listed[0]))
        absent = [name for name in names if name not in checkpoint.specs]
        if absent and path.endswith(_NO_TENSOR) and sizes.family.startswith("qwen2"):
            found[path] = Zeros(name=path, shape=tuple(spec.shape), dtype=np.dtype(spec.dtype))
            continue
        if absent or not names:
            what = f"the checkpoint lacks {', '.join(absent) or 'a tensor for this parameter'}"
            fix = OWN_CONFIG
            if path == "head":
                fix += '; or set "tie_word_embeddings": true, if the embedding is the head too'
            problems.append(fault(what, path, fix))
            continue
        for name in names:
            unused.pop(name, None)
        # A key and a value of latent attention are parts of one tensor.
        is_part = path.endswith(("attention/key", "attention/value"))
        latents = [each.attention for each in sizes.stacks if is_part]
        latent = next((each for each in latents if isinstance(each, LatentConfig)), None)
        # `kv_b_proj` of DeepSeek has, for each head, the part of the key that is not rotated, and
        # then the value.
        start = latent.plain_dim if latent is not None and path.endswith("value") else 0
        arranged = _arranged(checkpoint, names, path, spec, start)
        found[path] = arranged
        problems += _misfits(checkpoint, names, arranged, path, latent)
    count = sum(stack.layers for stack in sizes.stacks)
    for name in unused:
        what, fix = "the decoder has no parameter for this tensor", _OWN_FORWARD
        if name in family.parameters["head"] and sizes.tied:
            (embedding,) = _names_of("embedding", family, prefix)
            # Some checkpoints also store a tied head. This head must equal the embedding.
            if _are_equal(checkpoint.sources[name], checkpoint.sources[embedding]):
                continue
            what = "tie_word_embeddings is true, but this tensor differs from the embedding"
            fix = 'write "tie_word_embeddings": false in config.json'
        else:
            stem = (prefix + family.layers).removesuffix("#.")
            number = name.removeprefix(stem).partition(".")[0] if name.startswith(stem) else ""
            # Skip the layers after the decoder layers, because they predict further tokens. Skip
            # rotary frequencies, because they are computed.
            is_further = number.isdigit() and int(number) >= count
            if is_further or name.endswith("rotary_emb.inv_freq"):
                continue
        problems.append(fault(what, name, fix))
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


def _misfits(
    checkpoint: Checkpoint,
    names: Sequence[str],
    found: Arranged,
    path: str,
    latent: LatentConfig | None,
) -> Iterator[Problem]:
    """Yield a problem if tensors cannot become a parameter: they are not floats, or do not fit."""
    for name in names:
        dtype = checkpoint.sources[name].dtype
        if dtype.itemsize < 2 or not jnp.issubdtype(dtype, jnp.floating):
            what = f"the weights are {dtype.name}, and the decoder computes with floats"
            yield fault(what, name, _OWN_FORWARD)
    flat = [size for part in found.split for size in part]
    stored = tuple(flat[dim] for dim in found.order)
    expected = found.shape
    if latent is not None:
        expected = (*expected[:-1], latent.plain_dim + latent.value_dim)
    if stored != expected:
        what = f"the tensor has the sizes {stored}, and the decoder needs {expected}"
        yield fault(what, path)


def _arranged(
    checkpoint: Checkpoint, names: Sequence[str], path: str, spec: ArraySpec, start: int
) -> Arranged:
    """Return the source of a parameter, whose axes are those of its tensors in another order."""
    source: Source = checkpoint.sources[names[0]]
    split = [*_members(checkpoint.specs[names[0]])]
    if len(names) > 1:
        parts = tuple(checkpoint.sources[name] for name in names)
        source = StackedSource(name=path, parts=parts, dtype=source.dtype)
        # Several tensors of one parameter, such as gate and up, are stacked along a new first dim.
        split.insert(0, [(EMPTY, len(names))])
    flat = [each for members in split for each in members]
    wanted = [axis for members in _members(spec) for axis, _ in members]
    # A tensor with one dim has only one order, so do not compare its axis. For example, the scale
    # of `q_norm` has the axis NORM in the decoder, and HEAD_DIM in the checkpoint.
    axes = wanted if len(flat) == 1 else [axis for axis, _ in flat]
    if sorted(axes) != sorted(wanted):
        raise AssertionError(f"{path} has the axes {wanted}, and {names} have {axes}")
    # An axis occurs once in a tensor, so the axes determine the transposition.
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
    """Yield the axes of each dim with their sizes; a merged dim has several axes."""
    for dim, size in zip(lower(spec.axes, spec.shape).dims, spec.shape, strict=True):
        yield list(dim.merged) or [(dim.semantic_axis or next(iter(dim.axes), EMPTY), size)]


def _are_equal(first: Source, second: Source) -> bool:
    """Tell whether two tensors have equal values. The tensors are compared part by part."""
    if first.shape != second.shape:
        return False
    count, width = first.shape
    rows = max(1, _CHUNK // width)
    return all(
        np.array_equal(first.read(bounds), second.read(bounds))
        for start in range(0, count, rows)
        for bounds in [((start, min(start + rows, count)), (0, width))]
    )
