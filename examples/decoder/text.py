"""Real text on every machine: the sources of the standard library of Python, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def stdlib_text(limit: int = 4_000_000) -> np.ndarray:
    """Return the modules of the standard library, in alphabetical order, as bytes `[size]`.

    Raises:
      FileNotFoundError: This Python has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise FileNotFoundError(f"no Python sources in {folder}")
    return np.frombuffer(b"\n".join(parts), dtype=np.uint8)[:limit]


def text_batches(
    text: np.ndarray, *, batch: int, length: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield random windows: `inputs`, and as `targets` the next bytes, `[batch, length]`."""
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(text) - length - 1, size=batch)
        windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        yield {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
