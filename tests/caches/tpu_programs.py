"""Compile appends in bfloat16 for eight TPUs, without one: what they send, hold and copy.

    python -m tests.caches.tpu_programs

prints one line of JSON per program. Needs libtpu, which `pip install "jax[tpu]"` brings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from tests.attention.tpu_memory import ROOT, SETTINGS, TOPOLOGY

BATCH, CAPACITY, HEADS, DIM = 8, 8192, 8, 128
COUNTS = (1, 4, 256)
MESHES = {"batch": (8, 1, 1), "length": (1, 8, 1), "batch, length and heads": (2, 2, 2)}
RULES = '[rules]\nbatch = "dp"\nkv_length = "sp"\nkv_head = "tp"\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler says of an append; bytes per device."""

    mesh: str
    count: int
    collectives: int
    alias: int
    temporary: int
    held: int
    new: int


def measure() -> list[Compiled]:
    """Compile in a process of its own, whose settings libtpu reads when it is loaded."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.caches.tpu_programs"]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def compile_for_tpus(name: str, count: int) -> Compiled:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    import shardwright as sw
    from shardwright import caches
    from shardwright.plan.collectives import read_collectives

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = Mesh(np.array(devices).reshape(MESHES[name]), ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode")

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def local(tree: Any) -> int:
        return sum(x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(tree))

    with pm:
        cache = jax.eval_shape(lambda: caches.init("dense", batch=BATCH, capacity=CAPACITY, kv_heads=HEADS, head_dim=DIM))
        cache = jax.tree.map(abstract, cache, cache.axes())
        new = jax.ShapeDtypeStruct((BATCH, count, HEADS, DIM), jnp.bfloat16)
        new = abstract(new, (sw.BATCH, sw.EMPTY, sw.KV_HEAD, sw.KV_HEAD_DIM))
        step = jax.jit(lambda cache, k, v: cache.append(k, v), donate_argnums=0)
        compiled = step.trace(cache, new, new).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    return Compiled(
        mesh=name,
        count=count,
        collectives=len(read_collectives(compiled, mesh)),
        alias=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        held=local(cache),
        new=local((new, new)),
    )


if __name__ == "__main__":
    for name in MESHES:
        for count in COUNTS:
            print(json.dumps(dataclasses.asdict(compile_for_tpus(name, count))), flush=True)
