"""Where a bad request is made, and everything that it might have changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import shardwright as sw
from shardwright.manager import context
from shardwright.testing import cpu_mesh

RULES = """version = 1
name = "scene"

[axes]
open = "left to the compiler"

[rules]
batch = "dp"
length = "-"
embed = "tp"
head = "tp"
kv_head = "tp | -"
mlp_intermediate = "tp"
vocab = "dp+tp"
open = "?"

[params]
embed = "dp"
open = "-"

[policy]
gather = "dp"
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A folder with one good file, a manager on dp=2, tp=4, and arrays: `host` is NumPy, `placed`
    is sharded over the mesh.
    """

    folder: Path
    strategy: sw.Strategy
    pm: sw.PartitionManager
    host: np.ndarray
    placed: jax.Array
    tree: dict[str, Any]

    def write(self, text: str, name: str = "bad.toml") -> Path:
        """Write a file to be read; it is part of the scene from then on."""
        path = self.folder / name
        path.write_text(text)
        return path

    def array(self, *shape: int) -> np.ndarray:
        """Return an array of a shape."""
        return np.zeros(shape, np.float32)


def make_scene(folder: Path) -> Scene:
    (folder / "scene.toml").write_text(RULES)
    strategy = sw.Strategy.load(folder / "scene.toml")
    pm = sw.PartitionManager(strategy, mesh=cpu_mesh("dp:2,tp:4"))
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {"up": host.copy(), "down": host.T.copy()}
    return Scene(
        folder=folder,
        strategy=strategy,
        pm=pm,
        host=host,
        placed=pm.shard(host, sw.BATCH, sw.EMBED),
        tree=tree,
    )


def state(scene: Scene) -> dict[str, Any]:
    """Return all that a refused request must leave as it was; files that the request itself was
    given are the caller's to add.
    """
    mesh = jax.sharding.get_mesh()
    return {
        "files": {
            path.name: path.read_bytes()
            for path in sorted(scene.folder.iterdir())
            if path.name != "bad.toml" and path.name != "bad.json"
        },
        "host": scene.host.tobytes(),
        "placed": (
            np.asarray(scene.placed).tobytes(),
            scene.placed.sharding,
            scene.placed.is_deleted(),
        ),
        "tree": {name: leaf.tobytes() for name, leaf in scene.tree.items()},
        "strategy": scene.strategy.to_data(),
        "manager": (scene.pm, hash(scene.pm), scene.pm.resolve(sw.BATCH, sw.EMBED)),
        "ambient": (
            context.current(),
            jax.sharding.get_abstract_mesh(),
            None if mesh.empty else mesh,
            len(context._ENTERED.stack),
        ),
    }


Call = Callable[[Scene], Any]


def message(scene: Scene, error: Exception) -> str:
    """Return an error as the golden file shows it: its class, then what it says, without the
    folder's name.
    """
    return f"{type(error).__name__}\n{error}".replace(str(scene.folder), "<folder>")
