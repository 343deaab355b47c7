"""Compile attention over a sharded sequence for eight TPUs, without one: memory, and what is sent.

    python -m tests.attention.tpu_memory [implementation ...]

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tests import tpu_compile

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
      kernels: calls of Mosaic kernels.
      counts: how often each kind of collective runs.
      sent: logical bytes of each kind, all runs together.
    """

    name: str
    temporary: int
    kernels: int
    counts: dict[str, int]
    sent: dict[str, int]


def measure(*names: str) -> dict[str, Compiled]:
    return {
        program.name: program
        for program in tpu_compile.measure("tests.attention.tpu_memory", Compiled, *names)
    }


def compiled(name: str) -> Compiled:
    """Compile a causal forward and backward pass, in zigzag order except for plain JAX."""
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.attention.api import dot_product_attention

    pm = sw.PartitionManager(sw.Strategy.loads(RULES), mesh=tpu_compile.tpu_mesh(sp=SHARDS))

    def array(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=pm.sharding(axes, shape=shape))

    q = array(
        (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM),
        (BATCH, LENGTH, HEADS, HEAD_DIM),
        jnp.bfloat16,
    )
    k = array(
        (sw.BATCH, sw.KV_LENGTH, sw.KV_HEAD, sw.KV_HEAD_DIM),
        (BATCH, LENGTH, KV_HEADS, HEAD_DIM),
        jnp.bfloat16,
    )
    positions = array((sw.BATCH, sw.QUERY_LENGTH), (BATCH, LENGTH), jnp.int32)

    def attend(q: Any, k: Any, v: Any, positions: Any) -> Any:
        if name == PLAIN:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dot_product_attention(
            q, k, v, causal=True, positions=positions, mode="train", implementation=name
        )

    def both(q: Any, k: Any, v: Any, positions: Any, do: Any) -> Any:
        o, pull_back = jax.vjp(lambda *arrays: attend(*arrays, positions), q, k, v)
        return o, pull_back(do)

    with pm:
        program = tpu_compile.compile_for_tpus(both, q, k, k, positions, q)
    counts, sent = tpu_compile.collectives(program, pm.mesh)
    kernels = program.as_text().count('custom_call_target="tpu_custom_call"')
    return Compiled(
        name=name,
        temporary=tpu_compile.temporary(program),
        kernels=kernels,
        counts=counts,
        sent=sent,
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or IMPLEMENTATIONS:
        tpu_compile.tell(compiled(name))
