"""Write the golden files anew: `python -m tests.golden.update`. Then read the diff: every changed line is a changed sharding."""

from __future__ import annotations

import shardwright as sw
from tests.golden.specs import path_of, render


def main() -> None:
    """Write one file per preset, and say which changed."""
    for preset in sw.Strategy.presets():
        path, text = path_of(preset), render(preset)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {'unchanged' if text == old else 'written'}")


if __name__ == "__main__":
    main()
