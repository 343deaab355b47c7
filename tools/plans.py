"""Write the pages of `shardwright open` for well-known models: python -m tools.plans site/plans

`make docs` writes them beside the built site. docs/open.md links to them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwright.cli.main import main

CONFIGS = Path(__file__).resolve().parents[1] / "tests/interop/hf/configs"
# Configuration -> a slice on which it can be trained.
MODELS = {
    "llama-3-8b": "v5p:4x4x4",
    "gemma-3-1b": "v5e:4x4",
    "mixtral-8x7b": "v5p:4x4x8",
    "gpt-oss-20b": "v5p:4x4x4",
    "deepseek-v3": "v5p:8x8x16",
}
CANDIDATES = 20  # a minute for each model, or two for the largest


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, topology in MODELS.items():
        out = str(folder / f"{name}.html")
        words = ["--topology", topology, "--mode", "train", "--axes", "fsdp,ep,tp"]
        words += ["--candidates", str(CANDIDATES), "--out", out]
        code = main(["open", str(CONFIGS / f"{name}.json"), *words])
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
