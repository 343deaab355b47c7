"""Read safetensors: headers first, then slices of tensors. A file that changes is noticed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.config import MOST_PROBLEMS, fault
from shardwright.interop.hf.source import Bounds
from shardwright.interop.logical_rules import library
from shardwright.strategy.foreign_files import read_json

_PLAIN: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_AGAIN: Final = "download the checkpoint again"
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BOOL": np.dtype(np.bool_),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# safetensors 0.8 cannot make NumPy arrays of these.
_BY_OFFSET: Final = ("F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsTensor:
    """A tensor of a safetensors file.

    Attributes:
      name: Its name in the file.
      path: The file.
      handle: The opened file, of the package safetensors.
      kind: Its dtype, as the file spells it.
      shape: Its shape.
      offset: Where its bytes start in the file.
      content: The bytes of the file, mapped into memory.
      version: The file as it was when its header was read.
    """

    name: str
    path: Path
    handle: Any
    kind: str
    shape: tuple[int, ...]
    offset: int
    content: Any
    version: FileVersion

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        return _DTYPES[self.kind]

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.path.name

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece.

        Raises:
          CheckpointError: The file has changed since its header was read.
        """
        self.version.check()
        index = tuple(slice(*bound) for bound in bounds)
        try:
            if self.kind in _BY_OFFSET:
                # These dtypes have one byte.
                end = self.offset + math.prod(self.shape)
                whole = self.content[self.offset : end].view(self.dtype).reshape(self.shape)
                # A copy, because a view would read the file when it is used, perhaps changed.
                return np.array(whole[index])
            return np.asarray(self.handle.get_slice(self.name)[index])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {error}", path=self.name, fix=_AGAIN) from error


def safetensors_of(folder: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of a folder, or of one file, in the order of their names.

    Raises:
      CheckpointError: There are no such files, one is truncated, or the index does not fit them;
        all problems of a folder are reported at once.
    """
    index = folder / _INDEX
    if folder.is_file():
        return _tensors_of(folder)
    if index.is_file():
        return _indexed(folder, _weight_map(index))
    files = sorted(folder.glob("*.safetensors"))
    # Other files beside this one are variants, such as model.fp16.safetensors, or adapters.
    if (plain := folder / _PLAIN) in files:
        return _tensors_of(plain)
    if len(files) == 1:
        return _tensors_of(files[0])
    if files:
        what = f"{folder} has {len(files)} safetensors files and no {_INDEX}"
        raise CheckpointError(what, fix=f"add {_INDEX}, or pass the path of one file")
    fix = "pass a folder that has config.json and safetensors files"
    if list(folder.glob("*.bin")):
        fix = "write it again with save_pretrained(..., safe_serialization=True)"
    raise CheckpointError(f"{folder} has no safetensors file", fix=fix)


def _weight_map(index: Path) -> dict[str, str]:
    fix = f'{_INDEX} has {{"weight_map": {{"tensor": "file", ...}}}}'
    try:
        weights = read_json(index, error=CheckpointError, fix=fix)["weight_map"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of tensors", fix=fix) from error
    is_map = isinstance(weights, dict) and all(isinstance(file, str) for file in weights.values())
    if not is_map:
        raise CheckpointError(f"{index} is not an index of tensors", fix=fix)
    return dict(weights)


def _indexed(folder: Path, weights: Mapping[str, str]) -> dict[str, SafetensorsTensor]:
    """Return the tensors of several files, after comparing them with the index."""
    problems: list[Problem] = []
    found: dict[str, SafetensorsTensor] = {}
    for file in sorted(set(weights.values())):
        # The index may name only files of this folder.
        if file in ("", "..") or Path(file).name != file:
            what = f"{_INDEX} names {file!r}, which is not a name of a file"
            problems.append(fault(what, "", _AGAIN))
            continue
        try:
            tensors = _tensors_of(folder / file)
        except CheckpointError as error:
            # The problems of the other files are reported in the same error.
            problems += error.problems
            continue
        listed = [name for name, of in weights.items() if of == file]
        problems += [
            fault(f"{file} lacks it, but {_INDEX} lists it", name, _AGAIN)
            for name in listed
            if name not in tensors
        ]
        problems += [
            fault(f"{file} has it, but {_INDEX} does not list it", name, _AGAIN)
            for name in tensors
            if weights.get(name) != file
        ]
        found |= tensors
    raise_problems(problems)
    return dict(sorted(found.items()))


def _tensors_of(path: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of one file.

    Raises:
      CheckpointError: The file is absent, truncated or not safetensors, or has an unknown dtype.
    """
    safetensors = library("safetensors")
    version = FileVersion.of(path, fix=_AGAIN)
    try:
        # Opening checks that the header is valid, and that the file has all the bytes that it
        # names.
        handle = safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        what = f"{path} is truncated or is not a safetensors file: {error}"
        raise CheckpointError(what, fix=_AGAIN) from error
    with path.open("rb") as file:
        # The format: 8 bytes with the length of the header, the header as JSON, then all tensors.
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    # Mapped, not read: pages are loaded where a piece is read.
    content = np.memmap(path, np.uint8, mode="r")
    version.check()
    header.pop("__metadata__", None)
    unknown = [name for name, entry in header.items() if entry["dtype"] not in _DTYPES]
    fix = f"convert the checkpoint to one of {', '.join(_DTYPES)}"
    raise_problems(
        [
            fault(f"{path.name}: the dtype {header[name]['dtype']} cannot be read", name, fix)
            for name in unknown[:MOST_PROBLEMS]
        ]
    )
    return {
        name: SafetensorsTensor(
            name=name,
            path=path,
            handle=handle,
            kind=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + size + entry["data_offsets"][0],
            content=content,
            version=version,
        )
        for name, entry in sorted(header.items())
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileVersion:
    """A file as it was at one time.

    Attributes:
      path: The file.
      state: Its device, inode, size and time of the last change.
    """

    path: Path
    state: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, *, fix: str) -> FileVersion:
        """Return the present version of a file.

        Raises:
          CheckpointError: It does not exist, or cannot be read.
        """
        try:
            return cls(path=path, state=_state(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist", fix=fix) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", fix=fix) from error

    def check(self) -> None:
        """Check that the file is still this version. A process that reads past its end is killed.

        Raises:
          CheckpointError: The file was replaced, changed or removed.
        """
        try:
            is_same = _state(self.path) == self.state
        except OSError:
            is_same = False
        if not is_same:
            what = f"{self.path} has changed since its header was read"
            raise CheckpointError(what, fix="wait until no one writes it, and call hf.read again")


def _state(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
