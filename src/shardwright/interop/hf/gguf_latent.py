"""Latent attention (MLA) in GGUF: its sizes, and the projection that llama.cpp splits in two."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardwright.errors import CheckpointError, Problem, raise_problems
from shardwright.interop.hf.gguf_header import Header
from shardwright.interop.hf.source import Bounds, Source
from shardwright.vocabulary.integers import as_integer

_KEYS: Final = re.compile(r"blk\.(\d+)\.attn_k_b\.weight")
_AGAIN: Final = "download the file again"


def latent_sizes(header: Header, path: Path) -> dict[str, int]:
    """Return the sizes of latent attention in the words of `config.json`.

    Raises:
      CheckpointError: A key is absent or is not a size; all such keys are reported at once.
    """
    start = f"{header.keys['general.architecture']}."
    problems: list[Problem] = []

    def size(*names: str) -> int:
        keys = [start + name for name in names]
        written = next((key for key in keys if key in header.keys), keys[-1])
        value = as_integer(header.keys.get(written))
        if value is None or value < 1:
            got = f"must be a positive integer, got {header.keys.get(written)!r}"
            what = f"{path.name}: {written} {got}"
            problems.append(Problem(error=CheckpointError, what=what, fix=_AGAIN))
            return 1
        return value

    # In files without the keys of MLA, the others have these sizes.
    whole = size("attention.key_length_mla", "attention.key_length")
    value = size("attention.value_length_mla", "attention.value_length")
    latent, rope = size("attention.kv_lora_rank"), size("rope.dimension_count")
    sizes = {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "v_head_dim": value}
    sizes["qk_nope_head_dim"] = whole - rope
    if f"{start}attention.q_lora_rank" in header.keys:
        sizes["q_lora_rank"] = size("attention.q_lora_rank")
    if not problems and whole <= rope:
        what = f"{path.name}: a key has {whole} dims, of which {rope} are rotated"
        problems.append(Problem(error=CheckpointError, what=what, fix=_AGAIN))
    raise_problems(problems)
    return sizes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeysAndValues:
    """The projection from latents to keys and values: [heads * (key + value), latent].

    Attributes:
      name: Its name.
      keys: The part of keys in the file: [heads, latent, key].
      values: The part of values: [heads, value, latent].
    """

    name: str
    keys: Source
    values: Source

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        heads, latent, key = self.keys.shape
        return (heads * (key + self.values.shape[1]), latent)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of what `read` returns."""
        both = self.keys.dtype, self.values.dtype
        return both[0] if both[0] == both[1] else np.dtype(np.float32)

    @property
    def file(self) -> str:
        """Name of the file of the keys."""
        return self.keys.file

    def read(self, bounds: Bounds) -> np.ndarray[Any, Any]:
        """Read the rows of keys and of values of one head after the other."""
        (top, bottom), columns = bounds
        key, value = self.keys.shape[2], self.values.shape[1]
        piece = np.empty((bottom - top, columns[1] - columns[0]), self.dtype)
        row = top
        while row < bottom:
            head, first = divmod(row, key + value)
            end = min(bottom - row + first, key if first < key else key + value)
            own = (head, head + 1)
            if first < key:
                part = self.keys.read((own, columns, (first, end)))[0].T
            else:
                part = self.values.read((own, (first - key, end - key), columns))[0]
            piece[row - top : row - top + end - first] = part
            row += end - first
        return piece


def join_latents(tensors: dict[str, Source], config: Mapping[str, Any]) -> None:
    """Replace the two parts of each projection to keys and values by the whole projection.

    Args:
      tensors: The tensors by their names.
      config: The sizes of the model.

    Raises:
      CheckpointError: The shape of a part differs from the sizes; all are reported at once.
    """
    heads, latent, key, value = (
        config[name]
        for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    )
    problems: list[Problem] = []
    for match in [match for name in tensors if (match := _KEYS.fullmatch(name))]:
        names = (match[0], match[0].replace("_k_b", "_v_b"))
        if names[1] not in tensors:
            continue  # it is reported as a tensor without a place
        parts = [tensors.pop(name) for name in names]
        for part, shape in zip(parts, ((heads, latent, key), (heads, value, latent)), strict=True):
            if part.shape != shape:
                what = f"the shape is {part.shape}, and the header says {shape}"
                problem = Problem(error=CheckpointError, what=what, path=part.name, fix=_AGAIN)
                problems.append(problem)
        name = f"model.layers.{match[1]}.self_attn.kv_b_proj.weight"
        tensors[name] = KeysAndValues(name=name, keys=parts[0], values=parts[1])
    raise_problems(problems[:20])
