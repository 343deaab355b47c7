"""Export parameters as safetensors files, with one shard in host memory at a time."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import jax
import numpy as np

from shardwright.checkpoint import leaves
from shardwright.checkpoint.files import check_outside_of_trace, directory, fix_of_write, staged
from shardwright.errors import CheckpointError, Problem, ShardingError, raise_problems
from shardwright.reshard.pieces import parse_bytes

# The dtypes of the format, by their names in NumPy and `ml_dtypes`.
_DTYPES: Final = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "int16": "I16",
        "uint16": "U16",
        "int32": "I32",
        "uint32": "U32",
        "int64": "I64",
        "uint64": "U64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
    }
)

# The format keeps its metadata under this name.
_METADATA: Final = "__metadata__"


def export_safetensors(
    folder: str | os.PathLike[str],
    params: Any,
    *,
    most: int | str = "5GiB",
    metadata: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, str]:
    """Write parameters to a new folder as safetensors.

    The folder appears when it is complete, or not at all. If there is one file, its name is
    `model.safetensors`. If there are several, their names are `model-00001-of-00003.safetensors`
    and so on, and `model.safetensors.index.json` names the file of each tensor. The name of a
    tensor is its path, joined by ".", such as `layers.0.q`.

    Args:
      folder: A folder that does not exist.
      params: Tree of arrays of this process, sharded or not.
      most: Largest number of bytes of a file, as an integer or as text. A larger tensor gets its
        own file.
      metadata: Text for the header of each file, such as `{"format": "pt"}`.
      shapes: The shape of each padded tensor without its padding, by the name of the tensor. The
        padding is not written. For a padded vocabulary, `hf.read(folder, pad_vocab=128).unpadded`
        has these shapes.

    Returns:
      The file of each tensor, by name.

    Raises:
      CheckpointError: The folder exists, or cannot be written; arrays cannot be exported (all of
        them are named); the tree is empty; metadata or `shapes` is not valid; or the call is inside
        a trace.
    """
    check_outside_of_trace("parameters can be exported", CheckpointError)
    path = Path(directory(folder, CheckpointError, "folder"))
    text_by_name = _checked_metadata(metadata)
    if "://" in os.fspath(folder):
        fix = "export to a local folder, and copy it"
        raise CheckpointError("safetensors are written to local disks", path="folder", fix=fix)
    if path.exists():
        raise CheckpointError(f"{path} exists", path="folder", fix="export to a new folder")
    pairs, _ = leaves.flatten(params)
    if not pairs:
        raise CheckpointError("there are no parameters to export", fix="pass a tree of arrays")
    raise_problems([problem for name, value in pairs if (problem := _problem(name, value))])
    tensors = {".".join(name): value for name, value in pairs}
    if len(tensors) < len(pairs):
        raise CheckpointError(
            "two tensors have one name, because a key of the tree contains a dot",
            fix="rename the key",
        )
    if _METADATA in tensors:
        raise CheckpointError(
            "the safetensors format reserves this name for metadata",
            path=_METADATA,
            fix="rename the key",
        )
    tensors |= _cut(tensors, shapes or {})
    try:
        limit = parse_bytes(most)
    except ShardingError as error:
        raise CheckpointError(error.problems[0].what, path="most", fix=error.fix) from error
    files = _divided(tensors, limit)
    total = sum(value.nbytes for value in tensors.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    try:
        with staged(str(path)) as new:
            folder = Path(new)
            folder.mkdir()
            for file, names in files.items():
                _write(folder / file, {name: tensors[name] for name in names}, text_by_name)
            if len(files) > 1:
                # `transformers` finds the tensors of several files by this index.
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                text = json.dumps(index, indent=2) + "\n"
                (folder / "model.safetensors.index.json").write_text(text)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}",
            path="folder",
            fix=fix_of_write(error, f"the export takes {total} bytes"),
        ) from error
    return weight_map


def _checked_metadata(metadata: Any) -> dict[str, str]:
    """Return metadata as a dict. The format allows text only."""
    if metadata is None:
        return {}
    if isinstance(metadata, Mapping):
        wrong = [name for name, text in metadata.items() if not isinstance(text, str)]
        wrong += [name for name in metadata if not isinstance(name, str)]
        if not wrong:
            return dict(metadata)
        what = f"the entry {wrong[0]!r:.60} is not text"
    else:
        what = f"it is {type(metadata).__name__}"
    fix = 'pass a dict of text, such as {"format": "pt"}'
    raise CheckpointError(what, path="metadata", fix=fix)


def _problem(path: tuple[str, ...], value: Any) -> Problem | None:
    """Return why a leaf cannot be exported, or None."""
    refusal = leaves.refusal(value)
    if refusal is None and not isinstance(value, (jax.Array, np.ndarray)):
        refusal = f"{type(value).__name__} is not an array", "export a tree of arrays"
    elif refusal is None and str(value.dtype) not in _DTYPES:
        what = f"the safetensors format has no dtype {value.dtype}"
        refusal = what, f"dtypes are {', '.join(_DTYPES)}"
    elif refusal is None and isinstance(value, jax.Array) and not value.is_fully_addressable:
        refusal = (
            "the array has shards in other processes",
            "save a checkpoint, restore it in one process, and export there",
        )
    if refusal is None:
        return None
    what, fix = refusal
    return Problem(error=CheckpointError, what=what, path="/".join(path), fix=fix)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The first elements of an array, without its padding."""

    value: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def _cut(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Cut]:
    """Return the tensors that are written without their padding."""
    problems, cut = [], {}
    for name, shape in shapes.items():
        whole = tensors[name].shape if name in tensors else None
        if whole is None:
            what = "no tensor has this name, which is a key of the argument shapes"
        elif len(shape) != len(whole) or not all(
            0 < size <= most for size, most in zip(shape, whole, strict=True)
        ):
            what = f"the argument shapes has {tuple(shape)} for it, and the tensor has {whole}"
        else:
            cut[name] = _Cut(value=tensors[name], shape=tuple(shape))
            continue
        fix = "pass the `unpadded` of the hf.read(...) that loaded these parameters"
        problems.append(Problem(error=CheckpointError, what=what, path=name, fix=fix))
    raise_problems(problems)
    return cut


def _divided(tensors: Mapping[str, Any], most: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, value in tensors.items():
        if parts[-1] and size + value.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += value.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": names
        for number, names in enumerate(parts, 1)
    }


def _write(file: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write one file: 8 bytes with the length of the header, the header as JSON, the tensors."""
    # `safetensors.serialize_file` needs every tensor of a file whole in host memory at once. For a
    # file of 256 MiB whose tensors have eight shards each, that is 256 MiB; this code takes 6 MiB.
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        dtype = _DTYPES[str(value.dtype)]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces after the JSON. Like the safetensors library, use them to align the
    # tensors to 8 bytes.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        _reserve(stream, end)
    if not end:
        return
    content = np.memmap(file, np.uint8, mode="r+", offset=8 + len(text), shape=(end,))
    for name, value in tensors.items():
        start, stop = header[name]["data_offsets"]
        part = content[start:stop].view(value.dtype).reshape(value.shape)
        for index, shard in _shards(value):
            part[index] = shard
    content.flush()


def _reserve(stream: BinaryIO, size: int) -> None:
    """Reserve disk space for the tensors of a file.

    The file is memory-mapped. Without reserved space, a write to a full disk would end the process
    by SIGBUS.
    """
    # macOS has no posix_fallocate. There, and on ZFS, zeros are written.
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if allocate is not None and size:
        try:
            allocate(stream.fileno(), stream.tell(), size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # ZFS cannot allocate
                raise
        else:
            return
    block = bytes(2**20)
    stream.writelines(block[: size - start] for start in range(0, size, len(block)))


def _shards(value: Any) -> Iterator[tuple[Any, np.ndarray[Any, Any]]]:
    """Yield (slices, values) for each part of an array. A replicated part comes only once."""
    if isinstance(value, _Cut):
        for index, shard in _shards(value.value):
            starts = [part.start or 0 for part in index] or [0] * shard.ndim
            sizes = [
                max(0, min(size, most - start))
                for start, size, most in zip(starts, shard.shape, value.shape, strict=True)
            ]
            place = tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))
            yield place, shard[tuple(map(slice, sizes))]
        return
    if isinstance(value, np.ndarray):
        yield (), value
        return
    for shard in value.addressable_shards:
        # Replicated shards are equal, so only one of them is copied to the host.
        if shard.replica_id == 0 and math.prod(shard.data.shape):
            yield shard.index, np.asarray(shard.data)
