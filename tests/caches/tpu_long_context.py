"""Compile what `serve_long_context` does with a long cache, for eight TPUs, without TPUs.

    python -m tests.caches.tpu_long_context

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tests import tpu_compile

SLOTS, HEADS, CHUNK = 8, 8, 64
# Dims of a head and kv heads. With heads of 32, a decode step is combined by one all-gather.
SIZES = {32: 4, 128: 2}
CAPACITIES = (16384, 65536)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports; bytes per device.

    Attributes:
      what: insert, chunk or decode.
      dim: Of a head.
      capacity: Rows of a slot.
      sent: Bytes that a device sends.
      temporary: Beside arguments and results.
      held: Of the cache.
    """

    what: str
    dim: int
    capacity: int
    sent: int
    temporary: int
    held: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.caches.tpu_long_context", Compiled)


def compiled(what: str, dim: int, capacity: int) -> Compiled:
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
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": SIZES[dim], "head_dim": dim}
        cache = jax.eval_shape(lambda: caches.init("dense", **sizes))
        return jax.tree.map(abstract, cache, cache.axes())

    def rows(batch: int, count: int, heads: int, axis: str) -> jax.ShapeDtypeStruct:
        x = jax.ShapeDtypeStruct((batch, count, heads, dim), jnp.bfloat16)
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
            new = rows(batch, count, SIZES[dim], sw.KV_HEAD)
            program = tpu_compile.compile_for_tpus(
                attend, cache, rows(batch, count, HEADS, sw.HEAD), new, new, donate_argnums=0
            )
    return Compiled(
        what=what,
        dim=dim,
        capacity=capacity,
        sent=int(sum(each.total_wire_bytes or 0 for each in read_collectives(program, mesh))),
        temporary=tpu_compile.temporary(program),
        held=tpu_compile.held(cache),
    )


if __name__ == "__main__":
    for what, dim, capacity in itertools.product(("insert", "chunk", "decode"), SIZES, CAPACITIES):
        tpu_compile.tell(compiled(what, dim, capacity))
