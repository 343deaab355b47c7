"""Read the header of a GGUF file: its keys, and where its tensors are.

The reader of the package gguf creates objects for each word of the tokenizer. For 49,000 words this
takes 160 MB and several seconds. This reader skips arrays.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardwright.errors import CheckpointError
from shardwright.interop.hf.file_versions import FileVersion

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
# The formats of scalars by their number: of 8 to 64 bits, with and without sign, floats and bools.
_SCALARS: Final = {
    **dict(enumerate("BbHhIif?")),
    **dict(enumerate("Qqd", start=10)),
}
_DEEPEST: Final = 4
_MOST_DIMS: Final = 8
_FIX: Final = "pass a GGUF file, or download it again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor of a header.

    Attributes:
      name: Its name.
      shape: Its shape, the slowest dim first, as in PyTorch.
      kind: Number of its type.
      offset: Where its bytes start in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file.

    Attributes:
      content: The file, mapped into memory.
      version: The file as it was when the header was read.
      keys: Key -> scalar or text; for an array, how many values it has, as text.
      tensors: The tensors, in the order of the file.
    """

    content: Any
    version: FileVersion
    keys: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Return the header of a file.

    Raises:
      CheckpointError: The file is not GGUF, is truncated, or has another version.
    """
    version = FileVersion.of(path, fix=_FIX)
    if path.stat().st_size < len(_MAGIC):
        raise CheckpointError(f"{path} is not a GGUF file", fix=_FIX)
    cursor = _Cursor(np.memmap(path, np.uint8, mode="r"), path)
    if bytes(cursor.content[:4]) != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file", fix=_FIX)
    cursor.at = len(_MAGIC)
    form = cursor.scalar("I")
    if form not in _VERSIONS:
        what = f"{path}: version {form} of GGUF is not supported"
        raise CheckpointError(what, fix="convert the model again; versions 2 and 3 are supported")
    count, keys = cursor.scalar("Q"), cursor.scalar("Q")
    found: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.text()
        found[key] = cursor.value(cursor.scalar("I"))
    infos = [cursor.tensor() for _ in range(count)]
    alignment = found.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged()
    start = -(-cursor.at // alignment) * alignment
    tensors = tuple(dataclasses.replace(info, offset=start + info.offset) for info in infos)
    version.check()
    return Header(content=cursor.content, version=version, keys=found, tensors=tensors)


class _Cursor:
    """A place in a file that moves on with each value."""

    def __init__(self, content: Any, path: Path) -> None:
        self.content = content
        self.path = path
        self.at = 0

    def damaged(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is truncated or damaged", fix=_FIX)

    def skip(self, size: int) -> int:
        """Move on by some bytes, and return where they start."""
        start = self.at
        if start + size > len(self.content):
            raise self.damaged()
        self.at += size
        return start

    def scalar(self, form: str) -> Any:
        start = self.skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self.content, start)[0]

    def text(self) -> str:
        size = self.scalar("Q")
        start = self.skip(size)
        try:
            return bytes(self.content[start : start + size]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged() from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth >= _DEEPEST:
            raise self.damaged()
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            self.skip(struct.calcsize(f"<{_SCALARS[element]}") * count)
        elif element == _STRING:
            for _ in range(count):
                self.skip(self.scalar("Q"))
        else:
            for _ in range(count):
                self.value(element, depth + 1)
        return f"an array of {count}"

    def tensor(self) -> TensorInfo:
        name = self.text()
        rank = self.scalar("I")
        if rank > _MOST_DIMS:
            raise self.damaged()
        shape = tuple(reversed([self.scalar("Q") for _ in range(rank)]))
        if math.prod(shape) > 1 << 62:
            raise self.damaged()
        return TensorInfo(name=name, shape=shape, kind=self.scalar("I"), offset=self.scalar("Q"))
