"""Compile the insert of the example decoder for eight TPUs, without one.

    python -m tests.examples.tpu_insert

prints one line of JSON per mesh; see `tests.tpu_compile`. Needs the folder `examples` on the path.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tests import tpu_compile

SLOTS, CAPACITY = 16, 256
MESHES = {"slots": {"dp": 8, "ep": 1, "tp": 1}, "slots and heads": {"dp": 4, "ep": 1, "tp": 2}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler reports for an insert; bytes per device."""

    mesh: str
    sent: dict[str, int]
    held: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.examples.tpu_insert", Compiled)


def compiled(name: str) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw

    sys.path.insert(0, str(tpu_compile.ROOT / "examples"))
    from decoder.config import DecoderConfig
    from decoder.serve import empty_caches, make_server

    mesh = tpu_compile.tpu_mesh(**MESHES[name])
    config = DecoderConfig(dtype=jnp.bfloat16)
    strategy = sw.Strategy.preset("serve_tp")
    server = make_server(
        strategy, config, slots=SLOTS, capacity=CAPACITY, prompt_length=128, mesh=mesh
    )

    def abstract(mode: str, batch: int, capacity: int) -> Any:
        with server.pm.for_mode(mode) as pm:
            caches = jax.eval_shape(lambda: empty_caches(config, batch, capacity))
            axes = [cache.axes() for cache in caches]
            return pm.abstract(caches, axes, role="activation")

    def tokens(mode: str, count: int) -> jax.ShapeDtypeStruct:
        sharding = server.pm.sharding(sw.BATCH, shape=(count,), mode=mode)
        return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=sharding)

    cache = abstract("decode", SLOTS, CAPACITY)
    prefix = abstract("prefill", 1, 128)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    with server.pm.for_mode("insert"):
        traced = server.insert.trace(  # type: ignore[attr-defined]
            cache, tokens("decode", SLOTS), prefix, tokens("prefill", 1), slot
        )
        program = traced.lower(lowering_platforms=("tpu",)).compile()
    _, sent = tpu_compile.collectives(program, mesh)
    return Compiled(mesh=name, sent=sent, held=tpu_compile.held(cache))


if __name__ == "__main__":
    for name in MESHES:
        tpu_compile.tell(compiled(name))
