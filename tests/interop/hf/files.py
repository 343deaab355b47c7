"""Small checkpoints, written for the tests."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[3]
TREES: dict[str, Any] = json.loads(
    (ROOT / "tests" / "interop" / "golden" / "hf_trees.json").read_text(encoding="utf-8")
)["trees"]


def values_of(case: str, dtype: Any = np.float32) -> dict[str, np.ndarray[Any, Any]]:
    """Return different values for each tensor of a family."""
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape).astype(dtype) for name, shape in TREES[case]["tensors"].items()
    }


def write_config(folder: Path, case: str, **changes: Any) -> None:
    config = {**TREES[case]["config"], **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write(folder: Path, case: str, **changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Write a checkpoint of one file."""
    values = values_of(case)
    write_config(folder, case, **changes)
    save_file(values, folder / "model.safetensors")
    return values


def write_shards(
    folder: Path, case: str, values: Mapping[str, np.ndarray[Any, Any]], count: int = 3
) -> dict[str, str]:
    """Write a checkpoint of several files with an index."""
    write_config(folder, case)
    names = list(values)
    weights = {}
    for at in range(count):
        file = f"model-{at + 1:05}-of-{count:05}.safetensors"
        part = {name: values[name] for name in names[at::count]}
        save_file(part, folder / file)
        weights |= dict.fromkeys(part, file)
    write_index(folder, weights)
    return weights


def write_index(folder: Path, weights: Mapping[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weights})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def put_uncounted(piece: np.ndarray[Any, Any], target: Any) -> jax.Array:
    """Copy a piece to a device, in memory that tracemalloc does not count.

    A CPU device keeps a piece that is aligned, so that the piece itself is the device's buffer.
    """
    buffer = mmap.mmap(-1, piece.nbytes + 4)
    copy = np.frombuffer(buffer, piece.dtype, offset=4, count=piece.size).reshape(piece.shape)
    copy[...] = piece
    return jax.device_put(copy, target)
