"""Compile appends in bfloat16 for eight TPUs, without one: what they send, hold and copy.

    python -m tests.caches.tpu_programs

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests import tpu_compile

BATCH, CAPACITY, HEADS, DIM = 8, 8192, 8, 128
COUNTS = (1, 4, 256)
MESHES = {
    "batch": {"dp": 8, "sp": 1, "tp": 1},
    "length": {"dp": 1, "sp": 8, "tp": 1},
    "batch, length and heads": {"dp": 2, "sp": 2, "tp": 2},
}
RULES = '[rules]\nbatch = "dp"\nkv_length = "sp"\nkv_head = "tp"\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports for an append; bytes per device."""

    mesh: str
    count: int
    collectives: int
    alias: int
    temporary: int
    held: int
    new: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.caches.tpu_programs", Compiled)


def compiled(name: str, count: int) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright import caches

    mesh = tpu_compile.tpu_mesh(**MESHES[name])
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode")

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    with pm:
        cache = jax.eval_shape(
            lambda: caches.init(
                "dense", batch=BATCH, capacity=CAPACITY, kv_heads=HEADS, head_dim=DIM
            )
        )
        cache = jax.tree.map(abstract, cache, cache.axes())
        new = jax.ShapeDtypeStruct((BATCH, count, HEADS, DIM), jnp.bfloat16)
        new = abstract(new, (sw.BATCH, sw.EMPTY, sw.KV_HEAD, sw.KV_HEAD_DIM))
        program = tpu_compile.compile_for_tpus(
            lambda cache, k, v: cache.append(k, v), cache, new, new, donate_argnums=0
        )
    counts, _ = tpu_compile.collectives(program, mesh)
    return Compiled(
        mesh=name,
        count=count,
        collectives=sum(counts.values()),
        alias=program.memory_analysis().alias_size_in_bytes,
        temporary=tpu_compile.temporary(program),
        held=tpu_compile.held(cache),
        new=tpu_compile.held((new, new)),
    )


if __name__ == "__main__":
    for name in MESHES:
        for count in COUNTS:
            tpu_compile.tell(compiled(name, count))
