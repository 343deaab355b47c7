"""Read GGUF, the format of llama.cpp: each piece is dequantized alone.

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
from shardwright.interop.hf.families import FAMILIES
from shardwright.interop.hf.gguf_header import Header, TensorInfo, read_header
from shardwright.interop.hf.source import Bounds
from shardwright.vocabulary.axes import EMPTY

# Their `general.architecture` -> `model_type`.
_ARCHITECTURES: Final[Mapping[str, str]] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Key of config.json -> key of GGUF, below the name of the architecture.
_KEYS: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}
_REQUIRED: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# Tensors that only GGUF has: factors of the rotary embedding.
GGUF_AXES: Final[Mapping[str, Any]] = {r"^rope_freqs\.weight$": (EMPTY,)}
# Values that are dequantized at once: the library needs several copies of them in between.
_CHUNK: Final = 1 << 16
# Types that are not quantized.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (64, 32, 16, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
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
      pairs: Size of a head whose rows GGUF stores as pairs for its rotary embedding; 0 for none.
    """

    name: str
    file: str
    data: Any
    kind: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int
    pairs: int = 0

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read one piece and dequantize it, some rows at a time."""
        if not self.pairs:
            return self._rows(bounds)
        # The rows of whole heads, back in the order of Hugging Face: first halves, second halves.
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
        return piece

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
            values = _library().quants.dequantize(packed, self.kind)
            skip = left - first * self.block
            piece[row - top : end - top] = values[:, skip : skip + right - left]


def gguf_of(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return a configuration in the words of `config.json`, and the tensors by their names.

    Raises:
      CheckpointError: The file is truncated, is one of several, or has a model or a quantization
        that is not supported.
    """
    header = read_header(path)
    kind = _architecture(header, path)
    config = _config(header, kind, path)
    layers = required_size(config, "num_hidden_layers")
    head_dim = size_of(config, "head_dim") or (
        required_size(config, "hidden_size") // required_size(config, "num_attention_heads")
    )
    names = _names(kind, layers)
    problems: list[Problem] = []
    tensors: dict[str, GgufTensor] = {}
    for info in header.tensors:
        name = names.get(info.name, info.name)
        # llama.cpp has its own order of the rows of a rotated head, in this architecture alone.
        pairs = head_dim if kind == "llama" and _is_rotated(name) else 0
        tensor = _tensor(header, info, path, pairs=pairs)
        if isinstance(tensor, Problem):
            problems.append(tensor)
        else:
            tensors[name] = tensor
    raise_problems(problems[:20])
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is not None:
        config.setdefault("vocab_size", embedding.shape[0])
    return config, tensors


def _architecture(header: Header, path: Path) -> str:
    kind = str(header.keys.get("general.architecture"))
    if kind not in _ARCHITECTURES or header.keys.get(f"{kind}.expert_count"):
        name = f"{kind} with experts" if kind in _ARCHITECTURES else kind
        what = f"{path.name}: the architecture {name!r} is not supported in GGUF"
        fix = f"use the safetensors of the model; GGUF is read for {', '.join(_ARCHITECTURES)}"
        raise CheckpointError(what, fix=fix)
    count = header.keys.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        what = f"{path.name} is one of {count} files of a checkpoint"
        fix = "merge the files: llama-gguf-split --merge first.gguf whole.gguf"
        raise CheckpointError(what, fix=fix)
    return kind


def _config(header: Header, kind: str, path: Path) -> dict[str, Any]:
    """Return the keys of a file in the words of `config.json`."""
    sizes = {key: header.keys.get(f"{kind}.{of}") for key, of in _KEYS.items()}
    absent = [f"{kind}.{_KEYS[key]}" for key in _REQUIRED if sizes[key] is None]
    if absent:
        raise CheckpointError(f"{path.name} lacks {', '.join(absent)}", fix=_AGAIN)
    present = {key: value for key, value in sizes.items() if value is not None}
    return {"model_type": _ARCHITECTURES[kind], **present}


def _is_rotated(name: str) -> bool:
    return ".self_attn.q_proj." in name or ".self_attn.k_proj." in name


def _tensor(header: Header, info: TensorInfo, path: Path, *, pairs: int) -> GgufTensor | Problem:
    """Return a tensor, or why it cannot be read."""
    library = _library()
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
        pairs=pairs,
    )


def _is_dequantized(kind: Any, size: int) -> bool:
    """Tell whether the package gguf dequantizes a type."""
    library = _library()
    try:
        library.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _names(kind: str, layers: int) -> dict[str, str]:
    """Return the name of Hugging Face for each name of GGUF, by the table of the package gguf."""
    library = _library()
    architectures = {name: key for key, name in library.MODEL_ARCH_NAMES.items()}
    table = library.get_tensor_name_map(architectures[kind], layers)
    family = FAMILIES[_ARCHITECTURES[kind]]
    names: dict[str, str] = {}
    for row in family.rows():
        prefix = "" if row.startswith("lm_head") else family.prefix
        for layer in range(layers) if "#" in row else (0,):
            name = prefix + row.replace("#", str(layer))
            other = table.get_name(name, try_suffixes=(".weight", ".bias"))
            if other is not None:
                names.setdefault(other, name)
    return names


def _library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need gguf: python -m pip install gguf") from error
    return gguf
