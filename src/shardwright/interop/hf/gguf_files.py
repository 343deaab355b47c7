"""Read GGUF, the format of llama.cpp, and dequantize one piece at a time.

The tensors get the names of Hugging Face, so that the same model runs on both formats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.config import required_size, size_of
from shardwright.interop.hf.file_versions import FileVersion
from shardwright.interop.hf.gguf_header import Header, TensorInfo
from shardwright.interop.hf.gguf_latent import join_latents
from shardwright.interop.hf.gguf_models import (
    PAIRED,
    ROWS,
    SHIFTED,
    config_of,
    gguf_library,
    names_of,
)
from shardwright.interop.hf.gguf_parts import read_parts
from shardwright.interop.hf.source import Bounds, Source
from shardwright.vocabulary.axes import EMPTY

# Tensors that only GGUF has: factors of the rotary embedding.
GGUF_AXES: Final[Mapping[str, Any]] = {r"^rope_freqs\.weight$": (EMPTY,)}
# Number of values to dequantize at once. Meanwhile the package gguf holds several copies of them.
_CHUNK: Final = 1 << 16
# Types that are not quantized.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Where the number of tokens is, if no key has it.
_EMBEDDINGS: Final = ("model.embed_tokens.weight", "embeddings.word_embeddings.weight")
_OTHER: Final = "use another quantization of the model, such as Q8_0"
_AGAIN: Final = "download the file again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
      name: Its name in the file.
      file: Name of the file.
      data: Mapped into memory: its bytes, [..., rows, bytes of a row], or its values.
      kind: Its type, of the package gguf.
      shape: Its shape, as in PyTorch.
      dtype: Dtype of what `read` returns.
      block: Number of values of a row that are quantized together.
      version: The file as it was when its header was read.
      pairs: Size of a head whose rows GGUF stores as pairs for its rotary embedding; 0 for none.
      shift: What GGUF has added to the values.
    """

    name: str
    file: str
    data: Any
    kind: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int
    version: FileVersion
    pairs: int = 0
    shift: float = 0.0

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece and dequantize it, some rows at a time.

        Raises:
          CheckpointError: The file has changed since its header was read.
        """
        self.version.check()
        if not self.pairs:
            return self._rows(bounds)
        # GGUF stores the two elements of each rotated pair in adjacent rows. Hugging Face stores
        # the first elements of all pairs of a head, then the second ones.
        (start, stop), *rest = bounds
        first = start // self.pairs * self.pairs
        last = -(-stop // self.pairs) * self.pairs
        rows = self._rows(((first, last), *rest))
        heads = rows.reshape(-1, self.pairs // 2, 2, *rows.shape[1:])
        return heads.swapaxes(1, 2).reshape(rows.shape)[start - first : stop - first]

    def _rows(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        piece = np.empty([stop - start for start, stop in bounds], self.dtype)
        if len(bounds) == 3:
            for at, number in enumerate(range(*bounds[0])):
                self._fill(piece[at], self.data[number], bounds[1:])
        elif len(bounds) == 1:
            self._fill(piece[None], self.data[None], ((0, 1), *bounds))
        else:
            self._fill(piece, self.data, bounds)
        return piece - self.dtype.type(self.shift) if self.shift else piece

    def _fill(self, piece: np.ndarray[Any, Any], data: Any, bounds: Bounds) -> None:
        """Write a matrix into `piece`.

        Args:
          piece: Where to write it.
          data: The bytes or values of the whole matrix.
          bounds: The part of the matrix.
        """
        (top, bottom), (left, right) = bounds
        if data.dtype == self.dtype:
            piece[...] = data[top:bottom, left:right]
            return
        first, last = left // self.block, -(-right // self.block)
        size = data.shape[1] // (self.shape[-1] // self.block)
        height = max(1, _CHUNK // max(1, (last - first) * self.block))
        for row in range(top, bottom, height):
            end = min(row + height, bottom)
            packed = np.ascontiguousarray(data[row:end, first * size : last * size])
            values = gguf_library().quants.dequantize(packed, self.kind)
            skip = left - first * self.block
            piece[row - top : end - top] = values[:, skip : skip + right - left]


def gguf_of(path: Path) -> tuple[dict[str, Any], dict[str, Source]]:
    """Return a configuration in the words of `config.json`, and the tensors by their names.

    Args:
      path: The file, or one of the files of a checkpoint that is split.

    Raises:
      CheckpointError: A file is absent or truncated, has a tensor twice, or has a model or a
        quantization that is not supported.
    """
    parts = read_parts(path)
    first, header = next(iter(parts.items()))
    config = config_of(header, first)
    listed = [(file, info) for file, each in parts.items() for info in each.tensors]
    if config["num_hidden_layers"] > len(listed):
        what = f"{first.name} has {config['num_hidden_layers']} layers and {len(listed)} tensors"
        raise CheckpointError(what, fix=_AGAIN)
    head_dim = size_of(config, "head_dim") or (
        required_size(config, "hidden_size") // required_size(config, "num_attention_heads")
    )
    kind = header.keys["general.architecture"]
    names = names_of(header, config)
    problems: list[Problem] = []
    tensors: dict[str, Source] = {}
    for file, info in listed:
        name = names.get(info.name, info.name)
        pairs = head_dim if kind in PAIRED and _is_rotated(name) else 0
        is_row = name.endswith(ROWS) and len(info.shape) == 1
        shaped = dataclasses.replace(info, shape=(1, *info.shape)) if is_row else info
        tensor = _tensor(parts[file], shaped, file, pairs=pairs)
        if kind in SHIFTED and name.endswith("norm.weight") and isinstance(tensor, GgufTensor):
            tensor = dataclasses.replace(tensor, shift=1.0)
        if name in tensors:
            what = f"{file.name} has this tensor, and so has {tensors[name].file}"
            tensor = Problem(error=CheckpointError, what=what, path=info.name, fix=_AGAIN)
        if isinstance(tensor, Problem):
            problems.append(tensor)
        else:
            tensors[name] = tensor
    raise_problems(problems[:20])
    if config.get("kv_lora_rank"):
        join_latents(tensors, config)
    embedding = next((tensors[name] for name in _EMBEDDINGS if name in tensors), None)
    if embedding is not None and embedding.shape:
        config.setdefault("vocab_size", embedding.shape[0])
    return config, tensors


def _is_rotated(name: str) -> bool:
    return ".self_attn.q_proj." in name or ".self_attn.k_proj." in name


def _tensor(header: Header, info: TensorInfo, path: Path, *, pairs: int) -> GgufTensor | Problem:
    """Return a tensor, or why it cannot be read."""
    library = gguf_library()
    try:
        kind = library.GGMLQuantizationType(info.kind)
    except ValueError:
        what = f"the package gguf does not know the type {info.kind}"
        return Problem(error=CheckpointError, what=what, path=info.name, fix=_OTHER)
    block, size = library.GGML_QUANT_SIZES[kind]
    dtype = _DTYPES.get(kind.name)
    if dtype is None and not _is_dequantized(kind, size):
        what = f"the package gguf cannot dequantize {kind.name}"
        return Problem(error=CheckpointError, what=what, path=info.name, fix=_OTHER)
    row = info.shape[-1] if info.shape else 1
    length = math.prod(info.shape) // block * size
    end = info.offset + length
    if row % block or end > len(header.content):
        what = f"{path.name} is truncated or damaged: its bytes end at {end}"
        return Problem(error=CheckpointError, what=what, path=info.name, fix=_AGAIN)
    data = header.content[info.offset : end]
    if dtype is None:
        data = data.reshape(*info.shape[:-1], row // block * size)
    else:
        data = data.view(dtype).reshape(info.shape)
    return GgufTensor(
        name=info.name,
        file=path.name,
        data=data,
        kind=kind,
        shape=info.shape,
        dtype=np.dtype(np.float32) if dtype is None else dtype,
        block=block,
        version=header.version,
        pairs=pairs,
    )


def _is_dequantized(kind: Any, size: int) -> bool:
    """Tell whether the package gguf dequantizes a type."""
    library = gguf_library()
    try:
        library.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
