"""What a mixture of experts sends between eight TPUs, forward and backward.

python -m tests.layers.moe.tpu_dispatch
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests import tpu_compile


@dataclasses.dataclass(frozen=True)
class Program:
    """Runs and logical bytes by kind of collective.

    Attributes:
      name: "forward", "gradient" or "gradient of parameters".
      slot_bytes: Bytes of the slots of one device, which an all-to-all moves.
      product: How the experts multiply their slots.
    """

    name: str
    slot_bytes: int
    product: str
    counts: dict[str, int]
    sent: dict[str, int]


def main() -> None:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import moe
    from shardwright.layers.dtypes import Dtypes
    from tests.layers.moe.reference import NOTHING_GATHERED

    mixture = moe.MoEConfig(
        embed=256, hidden=512, experts=16, per_token=2, dtypes=Dtypes(param="bfloat16")
    )
    mesh = tpu_compile.tpu_mesh(fsdp=2, ep=4)
    pm = sw.PartitionManager(sw.Strategy.preset("moe_ep") | NOTHING_GATHERED, mesh=mesh)
    shape = (8, 128, 256)
    params = pm.abstract(moe.specs(mixture))
    axes = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
    x = pm.abstract(sw.ArraySpec(shape, jnp.bfloat16, axes), role="activation")

    def forward(params: Any, x: Any) -> Any:
        return moe.apply(mixture, params, x)[0]

    def loss(params: Any, x: Any) -> Any:
        return jnp.square(forward(params, x).astype(jnp.float32)).sum()

    programs = {
        "forward": forward,
        "gradient": jax.grad(loss, argnums=(0, 1)),
        "gradient of parameters": jax.grad(loss),
    }
    with pm:
        dispatch = moe.explain(mixture, shape)
        for name, function in programs.items():
            compiled = tpu_compile.compile_for_tpus(function, params, x)
            counts, sent = tpu_compile.collectives(compiled, mesh)
            slot_bytes = mixture.experts * dispatch.slots * 256 * 2
            product = dispatch.product.name
            tpu_compile.tell(Program(name, slot_bytes, product, counts, sent))


if __name__ == "__main__":
    main()
