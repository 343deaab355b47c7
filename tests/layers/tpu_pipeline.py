"""Compile pipelines for eight TPUs, without one: attention in the stages, with tensor parallelism.

    python -m tests.layers.tpu_pipeline

prints one line of JSON per schedule; see `tests.tpu_compile`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests import tpu_compile

LAYERS, EMBED, LENGTH, MICROBATCHES = 8, 256, 256, 4
# Layers 0 and 1 of the pattern make equal calls of attention.
WINDOWS = ((127, 0), (127, 0), None, None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled training step.

    Attributes:
      schedule: The schedule of the pipeline.
      kernels: Whether attention is a kernel.
      kinds: The kinds of collectives over pp.
    """

    schedule: str
    kernels: bool
    kinds: list[str]


def measure() -> list[Compiled]:
    return tpu_compile.measure("tests.layers.tpu_pipeline", Compiled)


def compiled(schedule: str, windows: Any) -> Compiled:
    import jax
    import jax.numpy as jnp

    import shardwright as sw
    from shardwright.layers import attention_block, mlp_block, transformer_block
    from shardwright.layers.dtypes import Dtypes
    from shardwright.layers.placement import RESIDUAL
    from shardwright.plan.collectives import read_collectives

    dtypes = Dtypes(param="bfloat16")
    config = transformer_block.TransformerConfig(
        layers=LAYERS,
        attention=attention_block.AttentionConfig(
            embed=EMBED, heads=4, head_dim=128, dtypes=dtypes
        ),
        mlp=mlp_block.MlpConfig(embed=EMBED, hidden=2 * EMBED, dtypes=dtypes),
        windows=windows,
    )
    mesh = tpu_compile.tpu_mesh(pp=2, dp=2, tp=2)
    strategy = sw.Strategy.preset("fsdp_tp") | sw.Strategy(
        rules={"batch": "dp+fsdp+pp", "layers": "pp"},
        pipeline={"schedule": schedule, "microbatches": MICROBATCHES},
    )
    pm = sw.PartitionManager(strategy, mesh=mesh, mode="train")

    def loss(params: Any, x: Any) -> Any:
        def head(_: Any, y: Any, __: Any) -> Any:
            return jnp.sum(y.astype(jnp.float32) ** 2)

        given = {"head": head, "head_params": None, "head_inputs": None}
        return transformer_block.loss(config, params, x, **given)[0]

    with pm:
        params = pm.abstract(transformer_block.specs(config))
        x = pm.abstract(sw.ArraySpec((32, LENGTH, EMBED), jnp.bfloat16, RESIDUAL))
        program = tpu_compile.compile_for_tpus(jax.grad(loss, argnums=(0, 1)), params, x)
    kinds = {
        collective.kind.value
        for collective in read_collectives(program, mesh)
        if "pp" in collective.mesh_axes
    }
    return Compiled(
        schedule=schedule, kernels="tpu_custom_call" in program.as_text(), kinds=sorted(kinds)
    )


if __name__ == "__main__":
    for schedule, windows in (("gpipe", WINDOWS), ("1f1b", ())):
        tpu_compile.tell(compiled(schedule, windows))
