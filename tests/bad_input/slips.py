"""Mistakes that are easy to make, and for which a message suggests what was meant."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

import shardwright as sw
from tests.bad_input.scene import Call

P = jax.P
MESH = {"dp": 4, "tp": 2}


def manager(preset: str = "fsdp_tp", mesh: str = "fsdp:4,tp:2") -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset(preset), mesh=sw.abstract_mesh(mesh))


def strategy(**tables: object) -> sw.AxisRules:
    return sw.Strategy(version=1, mesh=MESH, **tables).compile()


def router(*axes: str, preset: str = "moe_ep", **options: object) -> object:
    return manager(preset, "fsdp:2,ep:4").resolve(axes, shape=(8,) * len(axes), **options)


SLIPS: dict[str, Call] = {
    "preset of None": lambda scene: sw.Strategy.preset(None),
    "preset of a path": lambda scene: sw.Strategy.preset(Path("fsdp")),
    "preset with an ending": lambda scene: sw.Strategy.preset("fsdp.toml"),
    "dpp in a rule": lambda scene: strategy(rules={"batch": "dpp"}),
    "dpp for an axis": lambda scene: manager().resolve(("dpp",)),
    "dpp as a key": lambda scene: strategy(rules={"dpp": "dp"}),
    "the name of another library": lambda scene: manager().resolve(("mlp",)),
    "the name of another library as a key": lambda scene: strategy(rules={"mlp": "tp"}),
    "a name with two meanings": lambda scene: manager().resolve(("seq",)),
    "a parallelism axis for an axis": lambda scene: manager().resolve(("model",)),
    "dpp in a spec": lambda scene: manager(mesh="dp:8").resolve(P("dpp"), shape=(8,)),
    "dp 2": lambda scene: sw.abstract_mesh("dp 2"),
    "dp 2,tp 4": lambda scene: sw.abstract_mesh("dp 2,tp 4"),
    "dp 2 tp 4": lambda scene: sw.abstract_mesh("dp 2 tp 4"),
    "dp:2 tp:4": lambda scene: sw.abstract_mesh("dp:2 tp:4"),
    "dp2": lambda scene: sw.abstract_mesh("dp2"),
    "dp = 2": lambda scene: sw.abstract_mesh("dp = 2"),
    "dp": lambda scene: sw.abstract_mesh("dp"),
    "__DP__": lambda scene: manager().resolve(("__DP__",)),
    "__batch__": lambda scene: manager().resolve(("__batch__",)),
    "__DP__ as a key": lambda scene: strategy(rules={"__DP__": "dp"}),
    "__batch__ as a key": lambda scene: strategy(rules={"__batch__": "dp"}),
    "__DP__ in a rule": lambda scene: strategy(rules={"batch": "__DP__"}),
    "__DATA_PARALLEL__ in a rule": lambda scene: strategy(rules={"batch": "__DATA_PARALLEL__"}),
    "JSON for TOML": lambda scene: sw.Strategy.loads('{"version": 1}'),
    "JSON in lines": lambda scene: sw.Strategy.loads('\n{\n "version": 1\n}\n'),
    "TOML for JSON": lambda scene: sw.Strategy.loads("version = 1", format="json"),
    "YAML": lambda scene: sw.Strategy.loads("version: 1", format="yaml"),
    "a path for a text": lambda scene: sw.Strategy.loads("fsdp.toml"),
    "flax in a spec": lambda scene: manager().resolve(P("embed", "mlp"), shape=(8, 8)),
    "flax in shard": lambda scene: manager().shard(np.ones((8, 8), np.float32), P("embed", "mlp")),
    "flax in a tree": lambda scene: manager().shardings(
        {"w": np.ones((8, 8))}, {"w": P("embed", "mlp")}
    ),
    "router logits": lambda scene: router(sw.BATCH, sw.QUERY_LENGTH, sw.EXPERT),
    "router weights": lambda scene: router(sw.EMBED, sw.EXPERT, role="param"),
    "router logits, served": lambda scene: router(
        sw.BATCH, sw.QUERY_LENGTH, sw.EXPERT, preset="serve_tp", mode="decode"
    ),
}
