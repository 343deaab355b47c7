"""Compile what `serve_long_context` does with a long cache, for eight TPUs, without TPUs.

    python -m tests.caches.tpu_long_context

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests import tpu_compile

SLOTS, HEADS, KV_HEADS, DIM, CHUNK = 8, 8, 2, 128, 64
CAPACITIES = (16384, 65536)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports; bytes per device.

    Attributes:
      what: insert, chunk or decode.
      capacity: Rows of a slot.
      sent: Bytes that a device sends.
      temporary: Beside arguments and results.
      held: Of the cache.
    """

    what: str
    capacity: int
    sent: int
    temporary: int
    held: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.caches.tpu_long_context", Compiled)


def compiled(what: str, capacity: int) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright import caches
    from shardwright.attention import append_and_attend
    from shardwright.plan.collectives.read import read_collectives

    mesh = tpu_compile.tpu_mesh(sp=8)
    strategy = sw.Strategy.preset("serve_long_context")
    pm = sw.PartitionManager(strategy, mesh=mesh).for_mode(
        "prefill" if what == "chunk" else "decode"
    )

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def cache_of(batch: int) -> Any:
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": KV_HEADS, "head_dim": DIM}
        cache = jax.eval_shape(lambda: caches.init("dense", **sizes))
        return jax.tree.map(abstract, cache, cache.axes())

    def rows(batch: int, count: int, heads: int, axis: str) -> jax.ShapeDtypeStruct:
        x = jax.ShapeDtypeStruct((batch, count, heads, DIM), jnp.bfloat16)
        return abstract(x, (sw.BATCH, sw.QUERY_LENGTH, axis, sw.EMPTY))

    def attend(cache: Any, q: Any, k: Any, v: Any) -> Any:
        result = append_and_attend(q, k, v, cache)
        return result.o, result.cache

    with pm:
        batch, count = (1, CHUNK) if what == "chunk" else (SLOTS, 1)
        cache = cache_of(batch)
        if what == "insert":
            slots = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=pm.sharding())
            program = tpu_compile.compile_for_tpus(
                lambda cache, source, slots: cache.insert(source, slots),
                *(cache, cache_of(1), slots),
                donate_argnums=0,
            )
        else:
            new = rows(batch, count, KV_HEADS, sw.KV_HEAD)
            program = tpu_compile.compile_for_tpus(
                attend, cache, rows(batch, count, HEADS, sw.HEAD), new, new, donate_argnums=0
            )
    return Compiled(
        what=what,
        capacity=capacity,
        sent=int(sum(each.total_wire_bytes or 0 for each in read_collectives(program, mesh))),
        temporary=tpu_compile.temporary(program),
        held=tpu_compile.held(cache),
    )


if __name__ == "__main__":
    for what in ("insert", "chunk", "decode"):
        for capacity in CAPACITIES:
            tpu_compile.tell(compiled(what, capacity))
