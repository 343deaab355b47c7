"""What an MoE layer sends between eight TPUs, forward and backward.

python -m tests.layers.moe.tpu_dispatch
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tests import tpu_compile


@dataclasses.dataclass(frozen=True)
class Program:
    """Runs and logical bytes by kind of collective.

    Attributes:
      name: Of the exchange, then "forward", "gradient" or "gradient of parameters".
      slot_bytes: Bytes of the slots of one device, which an all-to-all moves.
      matmul: How the experts multiply their slots.
      ragged: Number of ragged all-to-alls.
    """

    name: str
    slot_bytes: int
    matmul: str
    ragged: int
    counts: dict[str, int]
    sent: dict[str, int]


def main() -> None:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import moe
    from shardwright.layers.dtypes import Dtypes
    from tests.layers.moe.reference import NOTHING_GATHERED

    moe_config = moe.MoEConfig(
        embed=256, hidden=512, experts=16, per_token=2, dtypes=Dtypes(param="bfloat16")
    )
    configs = [dataclasses.replace(moe_config, exchange="slots"), moe_config]
    mesh = tpu_compile.tpu_mesh(fsdp=2, ep=4)
    pm = sw.PartitionManager(sw.Strategy.preset("moe_ep") | NOTHING_GATHERED, mesh=mesh)
    shape = (8, 128, 256)
    params = pm.abstract(moe.specs(moe_config))
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
    x = pm.abstract(sw.ArraySpec(shape, jnp.bfloat16, axes), role="activation")

    def forward(config: Any, params: Any, x: Any) -> Any:
        return moe.apply(config, params, x)[0]

    def loss(config: Any, params: Any, x: Any) -> Any:
        return jnp.square(forward(config, params, x).astype(jnp.float32)).sum()

    programs = {
        "forward": forward,
        "gradient": jax.grad(loss, argnums=(1, 2)),
        "gradient of parameters": jax.grad(loss, argnums=1),
    }
    with pm:
        for config in configs:
            dispatch = moe.explain(config, shape)
            for name, function in programs.items():
                own = functools.partial(function, config)
                compiled = tpu_compile.compile_for_tpus(own, params, x)
                counts, sent = tpu_compile.collectives(compiled, mesh)
                actual = Program(
                    name=f"{dispatch.exchange.name} {name}",
                    slot_bytes=moe_config.experts * dispatch.slots * 256 * 2,
                    matmul=dispatch.matmul.name,
                    ragged=compiled.as_text().count(" ragged-all-to-all("),
                    counts=counts,
                    sent=sent,
                )
                tpu_compile.tell(actual)


if __name__ == "__main__":
    main()
