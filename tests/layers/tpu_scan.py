"""Compile the gradient of four layers of 16,384 tokens for eight TPUs: a scan, and unrolled.

    python -m tests.layers.tpu_scan

prints one line of JSON per program; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests import tpu_compile

LAYERS, LENGTH, EMBED, HEADS, HEAD_DIM = 4, 16384, 512, 8, 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiler says of one training step.

    Attributes:
      scan: Whether the layers are a scan.
      layers: Number of layers.
      temporary: Bytes per device beside arguments and results.
    """

    scan: bool
    layers: int
    temporary: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.layers.tpu_scan", Compiled)


def compiled(*, scan: bool, layers: int) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import attention_block, mlp_block, transformer_block
    from shardwright.layers.dtypes import Dtypes
    from shardwright.layers.placement import RESIDUAL

    dtypes = Dtypes(param="bfloat16")
    attention = attention_block.AttentionConfig(
        embed=EMBED, heads=HEADS, head_dim=HEAD_DIM, causal=True, dtypes=dtypes
    )
    config = transformer_block.TransformerConfig(
        layers=layers,
        attention=attention,
        mlp=mlp_block.MlpConfig(embed=EMBED, hidden=4 * EMBED, dtypes=dtypes),
        remat="full",
        scan=scan,
    )
    mesh = tpu_compile.tpu_mesh(fsdp=2, tp=4)
    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh, mode="train")
    params = pm.abstract(transformer_block.specs(config))
    x = pm.abstract(sw.ArraySpec((2, LENGTH, EMBED), jnp.bfloat16, RESIDUAL), role="activation")

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(transformer_block.apply(config, params, x)[0].astype(jnp.float32))

    with pm:
        program = tpu_compile.compile_for_tpus(jax.grad(loss, argnums=(0, 1)), params, x)
    return Compiled(
        scan=scan,
        layers=layers,
        temporary=tpu_compile.temporary(program),
    )


if __name__ == "__main__":
    for scan, layers in ((True, LAYERS), (False, LAYERS), (False, 1)):
        tpu_compile.tell(compiled(scan=scan, layers=layers))
