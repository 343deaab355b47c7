"""Compile a decode step over bfloat16 pages for eight TPUs, without TPUs: what does it copy?

    python -m tests.caches.tpu_paged_programs

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tests import tpu_compile

BATCH, CAPACITY, KV_HEADS, HEADS, DIM, PAGES, PAGE_SIZE = 8, 8192, 8, 16, 128, 8192, 16
COUNTS = (1, 256)
MESHES = {
    "kv heads": {"dp": 1, "sp": 1, "tp": 8},
    "pages": {"dp": 1, "sp": 8, "tp": 1},
    "batch, pages and kv heads": {"dp": 2, "sp": 2, "tp": 2},
}
RULES = '[rules]\nbatch = "dp"\nhead = "tp"\nkv_head = "tp"\npage = "sp"\n'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports for an append and attention; bytes per device.

    Attributes:
      mesh: how pages are sharded.
      count: tokens per slot.
      copies: Instructions that copy a whole pool. Temporary memory may not show them.
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
    return tpu_compile.measure("tests.caches.tpu_paged_programs", Compiled)


def compiled(name: str, count: int) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright import caches
    from shardwright.attention import paged_attention

    mesh = tpu_compile.tpu_mesh(**MESHES[name])
    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=mesh).for_mode("decode")

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        cache = cache.append(k, v).cache
        view = cache.view()
        return cache, paged_attention(
            q, view.k, view.v, block_tables=view.tables, lengths=view.lengths
        )

    options = {
        "batch": BATCH,
        "capacity": CAPACITY,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "pages": PAGES,
        "page_size": PAGE_SIZE,
    }
    with pm:
        cache = jax.eval_shape(lambda: caches.init("paged", **options))
        cache = jax.tree.map(abstract, cache, cache.axes())
        new = abstract(
            jax.ShapeDtypeStruct((BATCH, count, KV_HEADS, DIM), jnp.bfloat16),
            (sw.BATCH, sw.EMPTY, sw.KV_HEAD, sw.EMPTY),
        )
        q = abstract(
            jax.ShapeDtypeStruct((BATCH, count, HEADS, DIM), jnp.bfloat16),
            (sw.BATCH, sw.EMPTY, sw.HEAD, sw.EMPTY),
        )
        program = tpu_compile.compile_for_tpus(step, cache, q, new, new, donate_argnums=0)
    shape = ",".join(str(size) for size in cache.k_pages.sharding.shard_shape(cache.k_pages.shape))
    copy = re.compile(rf"= \(?bf16\[{shape}\].* (copy|copy-start|transpose)\(")
    return Compiled(
        mesh=name,
        count=count,
        copies=sum(1 for line in program.as_text().splitlines() if copy.search(line)),
        alias=program.memory_analysis().alias_size_in_bytes,
        temporary=tpu_compile.temporary(program),
        held=tpu_compile.held(cache),
    )


if __name__ == "__main__":
    for name in MESHES:
        for count in COUNTS:
            tpu_compile.tell(compiled(name, count))
