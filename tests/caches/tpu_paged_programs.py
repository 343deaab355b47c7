"""Compile a decode step over bfloat16 pages for eight TPUs, without one: what of the pool it copies.

    python -m tests.caches.tpu_paged_programs

prints one line of JSON per program. Needs libtpu, which `pip install "jax[tpu]"` brings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from typing import Any

from tests.attention.tpu_memory import ROOT, SETTINGS, TOPOLOGY

BATCH, CAPACITY, KV_HEADS, HEADS, DIM, PAGES, PAGE_SIZE = 8, 8192, 8, 16, 128, 8192, 16
COUNTS = (1, 256)
MESHES = {"kv heads": (1, 1, 8), "pages": (1, 8, 1), "batch, pages and kv heads": (2, 2, 2)}
RULES = '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp"\npage = "sp"\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler says of an append and attention to it; bytes per device.

    Attributes:
      mesh: where pages lie.
      count: tokens per slot.
      copies: instructions that copy a whole pool of keys or values. They may need no temporary memory that is told of.
      alias: of the arguments that are written in place.
      temporary: beside arguments and results.
      held: of the cache.
    """

    mesh: str
    count: int
    copies: int
    alias: int
    temporary: int
    held: int


def measure() -> list[Compiled]:
    """Compile in a process of its own, whose settings libtpu reads when it is loaded."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.caches.tpu_paged_programs"]
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
    from shardwright.attention import paged_attention

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = Mesh(np.array(devices).reshape(MESHES[name]), ("dp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode")

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        cache = cache.append(k, v).cache
        view = cache.view()
        return cache, paged_attention(q, view.k, view.v, block_tables=view.tables, lengths=view.lengths)

    options = {"batch": BATCH, "capacity": CAPACITY, "kv_heads": KV_HEADS, "head_dim": DIM, "pages": PAGES, "page_size": PAGE_SIZE}
    with pm:
        cache = jax.eval_shape(lambda: caches.init("paged", **options))
        cache = jax.tree.map(abstract, cache, cache.axes())
        new = abstract(jax.ShapeDtypeStruct((BATCH, count, KV_HEADS, DIM), jnp.bfloat16), (sw.BATCH, sw.EMPTY, sw.KV_HEAD, sw.EMPTY))
        q = abstract(jax.ShapeDtypeStruct((BATCH, count, HEADS, DIM), jnp.bfloat16), (sw.BATCH, sw.EMPTY, sw.HEAD, sw.EMPTY))
        traced = jax.jit(step, donate_argnums=0).trace(cache, q, new, new)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    shape = ",".join(str(size) for size in cache.k_pages.sharding.shard_shape(cache.k_pages.shape))
    copy = re.compile(rf"= \(?bf16\[{shape}\].* (copy|copy-start|transpose)\(")
    memory = compiled.memory_analysis()
    return Compiled(
        mesh=name,
        count=count,
        copies=sum(1 for line in compiled.as_text().splitlines() if copy.search(line)),
        alias=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        held=sum(x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(cache)),
    )


if __name__ == "__main__":
    for name in MESHES:
        for count in COUNTS:
            print(json.dumps(dataclasses.asdict(compile_for_tpus(name, count))), flush=True)
