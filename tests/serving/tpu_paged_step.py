"""Compile the decode step of a paged engine for eight TPUs, without TPUs: what do its tables send?

    python -m tests.serving.tpu_paged_step

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tests import tpu_compile

SLOTS, CAPACITY, HEADS, KV_HEADS, DIM, PAGE_SIZE, TOKENS = 8, 8192, 8, 2, 128, 16, 512
MESHES = {"sp:8": {"sp": 8}, "dp:2,sp:4": {"dp": 2, "sp": 4}}
LAYERS = (1, 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports for a step; bytes per device.

    Attributes:
      mesh: The mesh.
      layers: Layers of the model.
      integers: Number of collectives of integers, such as tables, lengths and tokens.
      collectives: Number of all collectives.
      pool: Of the pages of a layer, which suffice for all slots.
      dense: Of a dense cache of a layer.
    """

    mesh: str
    layers: int
    integers: int
    collectives: int
    pool: int
    dense: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.serving.tpu_paged_step", Compiled)


def compiled(name: str, layers: int) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright import attention, caches
    from shardwright.plan.collectives.read import read_collectives
    from shardwright.serving import steps

    mesh = tpu_compile.tpu_mesh(**MESHES[name])
    pm = sw.PartitionManager(sw.Strategy.preset("serve_long_context"), mesh=mesh, mode="decode")

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def cache_of(kind: str, **options: Any) -> Any:
        sizes = {"batch": SLOTS, "capacity": CAPACITY, "kv_heads": KV_HEADS, "head_dim": DIM}
        cache = jax.eval_shape(lambda: caches.init(kind, **sizes, **options))
        return jax.tree.map(abstract, cache, cache.axes())

    def model(params: Any, tokens: Any, layers: Any, valid: Any) -> Any:
        x = params[tokens].reshape(*tokens.shape, HEADS, DIM)
        x = sw.shard(x, sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
        after = []
        for cache in layers:
            keys = x[:, :, :KV_HEADS]
            done = attention.append_and_attend(x, keys, keys, cache, valid=valid)
            x = x + done.o
            after.append(done.cache)
        return jnp.einsum("bthd,vhd->btv", x, params.reshape(-1, HEADS, DIM)), after

    def step(pools: Any, last: Any, params: Any, batch: Any) -> Any:
        return steps.decode_pages(model, spec, 1, pools, last, params, batch)

    with pm:
        paged, dense = cache_of("paged", page_size=PAGE_SIZE), cache_of("dense")
        spec, pool = paged.spec, (paged.k_pages, paged.v_pages)
        replicated = pm.sharding()
        shape = jax.ShapeDtypeStruct
        tables = shape(paged.tables.shape, jnp.int32, sharding=replicated)
        last = shape((SLOTS,), jnp.int32, sharding=pm.sharding((sw.BATCH,), shape=(SLOTS,)))
        state = shape((3, SLOTS), jnp.int32, sharding=replicated)
        rules = shape((5, SLOTS), jnp.uint32, sharding=replicated)
        params = shape((TOKENS, HEADS * DIM), jnp.bfloat16, sharding=replicated)
        batch = steps.PagedBatch(tables=tables, state=state, rules=rules)
        program = tpu_compile.compile_for_tpus(
            step, (pool,) * layers, last, params, batch, donate_argnums=(0, 1)
        )
    found = read_collectives(program, mesh)
    return Compiled(
        mesh=name,
        layers=layers,
        integers=sum(each.count or 0 for each in found if str(each.dtype)[0] in "supi"),
        collectives=sum(each.count or 0 for each in found),
        pool=tpu_compile.held(pool),
        dense=tpu_compile.held({name: dense.buffers[name] for name in ("k", "v")}),
    )


if __name__ == "__main__":
    for name, layers in itertools.product(MESHES, LAYERS):
        tpu_compile.tell(compiled(name, layers))
