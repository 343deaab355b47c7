"""Compile the splash kernel for eight TPUs, without one: its memory, and what it sends.

    python -m tests.attention.tpu_splash [program ...]

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from tests import tpu_compile

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
    "window, capped, sinks": Program(
        options={"window": (300, 0), "softcap": 30.0}, arrays=("sinks",)
    ),
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
      sent: logical bytes of each kind, all runs together.
      seconds: to trace and compile.
    """

    name: str
    temporary: int
    kernels: int
    counts: dict[str, int]
    sent: dict[str, int]
    seconds: float


def measure(*names: str) -> dict[str, Compiled]:
    return {
        program.name: program
        for program in tpu_compile.measure("tests.attention.tpu_splash", Compiled, *names)
    }


def inputs(program: Program, pm: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return the shapes of the arrays with gradients, of the others, and of the cotangent."""
    import jax
    import jax.numpy as jnp

    import shardwright as sw

    def array(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=pm.sharding(axes, shape=shape))

    def by_head(length_axis: str, head_axis: str, *sizes: int) -> jax.ShapeDtypeStruct:
        return array(
            (sw.BATCH, length_axis, head_axis, sw.HEAD_DIM), (program.batch, *sizes), program.dtype
        )

    q = by_head(sw.QUERY_LENGTH, sw.HEAD, program.q_length, program.heads, program.head_dim)
    k, v = (
        by_head(sw.KV_LENGTH, sw.KV_HEAD, program.kv_length, program.kv_heads, dim)
        for dim in (program.head_dim, program.v_dim)
    )
    do = by_head(sw.QUERY_LENGTH, sw.HEAD, program.q_length, program.heads, program.v_dim)
    known = {
        "segment_ids": lambda: array(
            (sw.BATCH, sw.QUERY_LENGTH), (program.batch, program.q_length), jnp.int32
        ),
        "lengths": lambda: array((sw.BATCH,), (program.batch,), jnp.int32),
        "sinks": lambda: array((sw.HEAD,), (program.heads,), jnp.float32),
    }
    floats = {"q": q, "k": k, "v": v} | {
        name: known[name]() for name in program.arrays if name == "sinks"
    }
    rest = {name: known[name]() for name in program.arrays if name != "sinks"}
    return floats, rest, do


def compiled(name: str) -> Compiled:
    """Compile a forward and a backward pass."""
    import jax

    import shardwright as sw
    from shardwright.attention.api import dot_product_attention

    program = PROGRAMS[name]
    pm = sw.PartitionManager(
        sw.Strategy.loads(program.rules), mesh=tpu_compile.tpu_mesh(dp=2, tp=4)
    )

    floats, rest, do = inputs(program, pm)

    def both(floats: dict[str, Any], rest: dict[str, Any], do: Any) -> Any:
        def attend(floats: dict[str, Any]) -> Any:
            return dot_product_attention(
                **floats,
                **rest,
                **program.options,
                mode="train",
                implementation=program.implementation,
            )

        o, pull_back = jax.vjp(attend, floats)
        return o, pull_back(do)

    start = time.perf_counter()
    with pm:
        actual = tpu_compile.compile_for_tpus(both, floats, rest, do)
    seconds = time.perf_counter() - start
    counts, sent = tpu_compile.collectives(actual, pm.mesh)
    kernels = actual.as_text().count('custom_call_target="tpu_custom_call"')
    return Compiled(
        name=name,
        temporary=tpu_compile.temporary(actual),
        kernels=kernels,
        counts=counts,
        sent=sent,
        seconds=seconds,
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        tpu_compile.tell(compiled(name))
