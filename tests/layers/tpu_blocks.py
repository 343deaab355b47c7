"""Compile a transformer layer for eight TPUs, without one: which collectives run over tp.

    python -m tests.layers.tpu_blocks

prints one line of JSON per preset; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses

from tests import tpu_compile

PRESETS = ("fsdp_tp", "fsdp_tp_sp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """How often a forward pass of one layer runs a kind of collective over tp."""

    preset: str
    all_gather: int
    reduce_scatter: int
    all_reduce: int


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.layers.tpu_blocks", Compiled)


def main() -> None:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import attention_block, mlp_block, transformer_block
    from shardwright.layers.dtypes import Dtypes
    from shardwright.layers.placement import RESIDUAL
    from shardwright.plan.collectives import read_collectives

    dtypes = Dtypes(param="bfloat16")
    config = transformer_block.TransformerConfig(
        layers=1,
        attention=attention_block.AttentionConfig(embed=512, heads=8, head_dim=128, dtypes=dtypes),
        mlp=mlp_block.MlpConfig(embed=512, hidden=2048, dtypes=dtypes),
        scan=False,
    )
    for preset in PRESETS:
        mesh = tpu_compile.tpu_mesh(fsdp=2, tp=4)
        pm = sw.PartitionManager(sw.Strategy.preset(preset), mesh=mesh, mode="train")
        params = pm.abstract(transformer_block.specs(config))
        x = pm.abstract(sw.ArraySpec((8, 512, 512), jnp.bfloat16, RESIDUAL), role="activation")
        with pm:
            compiled = (
                jax.jit(lambda params, x: transformer_block.apply(config, params, x)[0])
                .lower(params, x)
                .compile()
            )
        kinds = [
            collective.kind.value
            for collective in read_collectives(compiled, mesh)
            if collective.mesh_axes == ("tp",)
        ]
        tpu_compile.tell(
            Compiled(
                preset=preset,
                all_gather=kinds.count("all_gather"),
                reduce_scatter=kinds.count("reduce_scatter"),
                all_reduce=kinds.count("all_reduce"),
            )
        )


if __name__ == "__main__":
    main()
