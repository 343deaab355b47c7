"""Compile decode over caches for a TPU, without one: temporary memory, and what an append to the cache copies.

    python -m tests.attention.tpu_decode

prints one line of JSON per program. Needs libtpu, which `pip install "jax[tpu]"` brings.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from typing import Any

from tests.attention.tpu_memory import ROOT, SETTINGS, TOPOLOGY

BATCH, HEADS, RULES = 8, 8, '[rules]\nbatch = "dp"\n'
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"kind": "dense"},
    "int8": {"kind": "quantized"},
    "float8": {"kind": "quantized", "stored": "float8_e4m3fn"},
}
# kv heads and head_dim: TPUs hold each of these caches in another order.
SHAPES = ((8, 128), (2, 128), (8, 64))
CAPACITIES = (4096, 32768)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler says of an append and of attention to the cache; bytes per device."""

    kind: str
    kv_heads: int
    head_dim: int
    capacity: int
    held: int
    append: int
    attend: int


def measure() -> list[Compiled]:
    """Compile in a process of its own, whose settings libtpu reads when it is loaded."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.attention.tpu_decode"]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def compile_for_tpus(kind: str, kv_heads: int, head_dim: int, capacity: int) -> Compiled:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    import shardwright as sw
    from shardwright import caches
    from shardwright.attention import dot_product_attention

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = Mesh(np.array(devices), ("dp",), axis_types=(AxisType.Auto,))
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode")

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def attend(q: Any, cache: Any) -> Any:
        view = cache.view()
        scales = {"k_scale": view.k_scale, "v_scale": view.v_scale}
        return dot_product_attention(q, view.k, view.v, **scales, lengths=view.lengths, causal=True, implementation="blockwise")

    with pm:
        sizes = {"batch": BATCH, "capacity": capacity, "kv_heads": kv_heads, "head_dim": head_dim}
        cache = jax.eval_shape(lambda: caches.init(**KINDS[kind], **sizes))
        cache = jax.tree.map(abstract, cache, cache.axes())
        new, q = (
            abstract(jax.ShapeDtypeStruct((BATCH, 1, heads, head_dim), jnp.bfloat16), (sw.BATCH, sw.EMPTY, sw.EMPTY, sw.EMPTY))
            for heads in (kv_heads, HEADS)
        )
        append = jax.jit(lambda cache, k, v: cache.append(k, v), donate_argnums=0).trace(cache, new, new)
        programs = {"append": append, "attend": jax.jit(attend).trace(q, cache)}
        memory = {name: traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis() for name, traced in programs.items()}
    held = sum(x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves(cache))
    temporary = {name: one.temp_size_in_bytes for name, one in memory.items()}
    return Compiled(kind=kind, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity, held=held, **temporary)


if __name__ == "__main__":
    for kind, (kv_heads, head_dim), capacity in itertools.product(KINDS, SHAPES, CAPACITIES):
        print(json.dumps(dataclasses.asdict(compile_for_tpus(kind, kv_heads, head_dim, capacity))), flush=True)
