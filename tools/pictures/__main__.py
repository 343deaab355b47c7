"""Write every picture: `python -m tools.pictures`, in the root of a clone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tools.pictures import caches, pipelines, rooms, strategies, weights

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: Mapping[str, Callable[[], str]] = {
    "caches": caches.draw,
    "pipelines": pipelines.draw,
    "rooms": rooms.draw,
    "strategies": strategies.draw,
    "weights": weights.draw,
}


def main() -> None:
    """Draw each picture into docs/pictures."""
    from shardwright.testing import virtual_devices

    virtual_devices(8)
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
