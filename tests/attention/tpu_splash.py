"""Compile the splash kernel for eight TPUs, without one, forward and backward: that it does, its memory, what is sent.

    python -m tests.attention.tpu_splash [program ...]

prints a table, or with --json one line per program. Needs libtpu, which `pip install "jax[tpu]"` brings.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.attention.tpu_memory import ROOT, SETTINGS, TOPOLOGY

RULES = '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp | -"\n'
UNSHARDED = '[rules]\nbatch = "-"\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One call: sizes, options, and which arrays it has."""

    batch: int = 2
    q_length: int = 1024
    kv_length: int = 1024
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 128
    v_dim: int = 128
    dtype: str = "bfloat16"
    rules: str = RULES
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"causal": True})
    arrays: tuple[str, ...] = ()
    implementation: str = "splash"


PLAIN = Program(batch=8, q_length=4096, kv_length=4096, heads=32, kv_heads=8)
PROGRAMS = {
    "plain": PLAIN,
    "plain by sdpa": dataclasses.replace(PLAIN, implementation="sdpa"),
    "plain by blockwise": dataclasses.replace(PLAIN, implementation="blockwise"),
    "full": Program(options={}),
    "window, capped, sinks": Program(options={"window": (300, 0), "softcap": 30.0}, arrays=("sinks",)),
    "chunks": Program(options={"causal": True, "chunk": 300}),
    "packed": Program(arrays=("segment_ids", "lengths")),
    "ragged": Program(q_length=200, kv_length=1000),
    "float32": Program(dtype="float32"),
    "one kv head": Program(kv_heads=1),
    "no mesh axis": Program(rules=UNSHARDED),
    "wider values": Program(head_dim=192, v_dim=128),
    **{f"head_dim {dim}": Program(head_dim=dim, v_dim=dim) for dim in (8, 64, 80, 96, 256)},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiler says of one forward and backward pass.

    Attributes:
      name: the program.
      temporary: bytes per device beside arguments and results.
      kernels: calls of Mosaic kernels.
      counts: how often each kind of collective runs.
      seconds: to trace and compile.
    """

    name: str
    temporary: int
    kernels: int
    counts: dict[str, int]
    seconds: float


def measure(*names: str) -> dict[str, Compiled]:
    """Compile in a process of its own, whose settings libtpu reads when it is loaded."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.attention.tpu_splash", "--json", *names]
    done = subprocess.run(
        command, env={**os.environ, **SETTINGS, "PYTHONPATH": paths}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one.name: one for one in found}


def compile_for_tpus(name: str) -> Compiled:
    """Compile a forward and a backward pass."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    import shardwright as sw
    from shardwright.attention.api import dot_product_attention
    from shardwright.plan.collectives import read_collectives

    program = PROGRAMS[name]
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices).reshape(2, 4)
    pm = sw.PartitionManager(sw.Strategy.loads(program.rules), mesh=Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2))

    def array(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=pm.sharding(axes, shape=shape))

    def by_head(length_axis: str, head_axis: str, *sizes: int) -> jax.ShapeDtypeStruct:
        return array((sw.BATCH, length_axis, head_axis, sw.HEAD_DIM), (program.batch, *sizes), program.dtype)

    q = by_head(sw.QUERY_LENGTH, sw.HEAD, program.q_length, program.heads, program.head_dim)
    k, v = (by_head(sw.KV_LENGTH, sw.KV_HEAD, program.kv_length, program.kv_heads, dim) for dim in (program.head_dim, program.v_dim))
    do = by_head(sw.QUERY_LENGTH, sw.HEAD, program.q_length, program.heads, program.v_dim)
    known = {
        "segment_ids": lambda: array((sw.BATCH, sw.QUERY_LENGTH), (program.batch, program.q_length), jnp.int32),
        "lengths": lambda: array((sw.BATCH,), (program.batch,), jnp.int32),
        "sinks": lambda: array((sw.HEAD,), (program.heads,), jnp.float32),
    }
    floats = {"q": q, "k": k, "v": v} | {name: known[name]() for name in program.arrays if name == "sinks"}
    rest = {name: known[name]() for name in program.arrays if name != "sinks"}

    def both(floats: dict[str, Any], rest: dict[str, Any], do: Any) -> Any:
        def attend(floats: dict[str, Any]) -> Any:
            return dot_product_attention(**floats, **rest, **program.options, mode="train", implementation=program.implementation)

        o, pull_back = jax.vjp(attend, floats)
        return o, pull_back(do)

    start = time.perf_counter()
    with pm:
        compiled = jax.jit(both).trace(floats, rest, do).lower(lowering_platforms=("tpu",)).compile()
    seconds = time.perf_counter() - start
    counts: dict[str, int] = {}
    for one in read_collectives(compiled, pm.mesh):
        counts[str(one.kind)] = counts.get(str(one.kind), 0) + (one.count or 0)
    kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Compiled(name=name, temporary=temporary, kernels=kernels, counts=counts, seconds=seconds)


def main(arguments: Sequence[str]) -> None:
    names = [name for name in arguments if name != "--json"] or list(PROGRAMS)
    if "--json" in arguments:
        for name in names:
            print(json.dumps(dataclasses.asdict(compile_for_tpus(name))), flush=True)
        return
    for one in measure(*names).values():
        print(f"{one.name:24} {one.temporary / 1e6:8.1f} MB   {one.kernels} kernels   {one.counts}   {one.seconds:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
