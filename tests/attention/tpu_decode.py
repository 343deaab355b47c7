"""Compile decode over caches for a TPU, without one: temporary memory, and copies of an append.

    python -m tests.attention.tpu_decode

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tests import tpu_compile

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
    return tpu_compile.measure("tests.attention.tpu_decode", Compiled)


def compiled(kind: str, kv_heads: int, head_dim: int, capacity: int) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright import caches
    from shardwright.attention import dot_product_attention

    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=tpu_compile.tpu_mesh(dp=8)).for_mode(
        "decode"
    )

    def abstract(x: Any, axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pm.sharding(axes, shape=x.shape))

    def attend(q: Any, cache: Any) -> Any:
        view = cache.view()
        scales = {"k_scale": view.k_scale, "v_scale": view.v_scale}
        return dot_product_attention(
            q,
            view.k,
            view.v,
            **scales,
            lengths=view.lengths,
            causal=True,
            implementation="blockwise",
        )

    with pm:
        sizes = {"batch": BATCH, "capacity": capacity, "kv_heads": kv_heads, "head_dim": head_dim}
        cache = jax.eval_shape(lambda: caches.init(**KINDS[kind], **sizes))
        cache = jax.tree.map(abstract, cache, cache.axes())
        new, q = (
            abstract(
                jax.ShapeDtypeStruct((BATCH, 1, heads, head_dim), jnp.bfloat16),
                (sw.BATCH, sw.EMPTY, sw.EMPTY, sw.EMPTY),
            )
            for heads in (kv_heads, HEADS)
        )
        append = tpu_compile.compile_for_tpus(
            lambda cache, k, v: cache.append(k, v), cache, new, new, donate_argnums=0
        )
        attended = tpu_compile.compile_for_tpus(attend, q, cache)
    return Compiled(
        kind=kind,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=capacity,
        held=tpu_compile.held(cache),
        append=tpu_compile.temporary(append),
        attend=tpu_compile.temporary(attended),
    )


if __name__ == "__main__":
    for kind, (kv_heads, head_dim), capacity in itertools.product(KINDS, SHAPES, CAPACITIES):
        tpu_compile.tell(compiled(kind, kv_heads, head_dim, capacity))
