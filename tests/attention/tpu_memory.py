"""Compile attention over a sharded sequence for eight TPUs, without one: memory, and what is sent.

    python -m tests.attention.tpu_memory [implementation ...]

prints a table, or with --json one line per program. Needs libtpu, which `pip install "jax[tpu]"` brings.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WHY_NOT = 'libtpu is not installed: pip install "jax[tpu]"'
# Quiet where there is no TPU, and harmless next to another process that compiles.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TOPOLOGY = "v5e:2x4"
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM, SHARDS = 1, 16384, 16, 8, 128, 8
PLAIN = "jax.nn.dot_product_attention"
IMPLEMENTATIONS = ("ring", "ulysses", "allgather_kv", PLAIN)
RULES = '[rules]\nquery_length = "sp"\nkv_length = "sp"\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiler says of one forward and backward pass.

    Attributes:
      name: the implementation.
      temporary: bytes per device beside arguments and results.
      counts: how often each kind of collective runs.
      sent: logical bytes of each kind, all runs together.
    """

    name: str
    temporary: int
    counts: dict[str, int]
    sent: dict[str, int]


def available() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def measure(*names: str) -> dict[str, Compiled]:
    """Compile in a process of its own, whose settings libtpu reads when it is loaded."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.attention.tpu_memory", "--json", *names]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one.name: one for one in found}


def compile_for_tpus(name: str) -> Compiled:
    """Compile a forward and backward pass, causal and in zigzag order (but for plain JAX, which cannot)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    import shardwright as sw
    from shardwright.attention.api import dot_product_attention
    from shardwright.plan.collectives import read_collectives

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=Mesh(np.array(devices), ("sp",), axis_types=(AxisType.Auto,)))

    def array(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=pm.sharding(axes, shape=shape))

    q = array((sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM), (BATCH, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
    k = array((sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM), (BATCH, LENGTH, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    positions = array((sw.BATCH, sw.QUERY_LENGTH), (BATCH, LENGTH), jnp.int32)

    def attend(q: Any, k: Any, v: Any, positions: Any) -> Any:
        if name == PLAIN:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dot_product_attention(q, k, v, causal=True, positions=positions, mode="train", implementation=name)

    def both(q: Any, k: Any, v: Any, positions: Any, do: Any) -> Any:
        o, pull_back = jax.vjp(lambda *arrays: attend(*arrays, positions), q, k, v)
        return o, pull_back(do)

    with pm:
        compiled = jax.jit(both).trace(q, k, k, positions, q).lower(lowering_platforms=("tpu",)).compile()
    found = read_collectives(compiled, pm.mesh)
    counts, sent = {}, {}
    for one in found:
        counts[str(one.kind)] = counts.get(str(one.kind), 0) + (one.count or 0)
        sent[str(one.kind)] = sent.get(str(one.kind), 0) + (one.total_bytes or 0)
    return Compiled(name=name, temporary=compiled.memory_analysis().temp_size_in_bytes, counts=counts, sent=sent)


def main(arguments: Sequence[str]) -> None:
    names = [name for name in arguments if name != "--json"] or list(IMPLEMENTATIONS)
    if "--json" not in arguments:
        for one in measure(*names).values():
            print(f"{one.name:30} {one.temporary / 1e6:8.1f} MB   {one.counts}")
        return
    for name in names:
        print(json.dumps(dataclasses.asdict(compile_for_tpus(name))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
