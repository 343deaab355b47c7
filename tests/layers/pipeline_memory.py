"""Temporary memory of a training step in a pipeline, by schedule and number of microbatches.

    python -m tests.layers.pipeline_memory

prints what a compile for TPUs says; it needs libtpu.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw

WIDTH, ROWS, LAYERS = 512, 8192, 16
MICROBATCH = WIDTH * ROWS * 4  # bytes: smaller ones lie in the VMEM of a TPU and do not count


def temporary(schedule: str, count: int, mesh: Any) -> int:
    """Return the temporary bytes of a device."""
    table = {"schedule": schedule, "microbatches": count}
    if schedule == "circular":
        table["repeats"] = 2
    strategy = sw.Strategy(rules={"batch": "pp", "layers": "pp", "embed": "-"}, pipeline=table)
    spec = sw.ArraySpec((WIDTH, WIDTH), jnp.float32, (sw.EMBED, sw.EMPTY))
    stack = sw.stack_specs(spec, LAYERS, repeats=table.get("repeats", 1))

    def layer(w: Any, x: Any, _: Any) -> Any:
        return x + jnp.tanh(x @ w), None

    def head(w: Any, y: Any, _: Any) -> Any:
        return jnp.sum((y @ w) ** 2)

    def loss(w: Any, x: Any, last: Any) -> Any:
        return sw.pipeline_loss(layer, w, x, head, last, None, specs=stack)[0]

    with sw.PartitionManager(strategy, mesh=mesh, mode="train") as pm:
        specs = {
            "w": stack,
            "x": sw.ArraySpec((ROWS * count, WIDTH), jnp.float32, (sw.BATCH, sw.EMBED)),
            "last": sw.ArraySpec((WIDTH, 4), jnp.float32, (sw.EMBED, sw.EMPTY)),
        }
        given = pm.abstract(specs, role="param")
        given["x"] = pm.abstract({"x": specs["x"]}, role="activation")["x"]
        step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        platform = mesh.devices.flat[0].platform
        traced = step.trace(given["w"], given["x"], given["last"])
        program = traced.lower(lowering_platforms=(platform,)).compile()
    return int(program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    from tests.tpu_compile import SETTINGS, tpu_mesh

    os.environ.update(SETTINGS)
    for schedule in ("gpipe", "circular", "1f1b"):
        for count in (8, 16, 32):
            mib = temporary(schedule, count, tpu_mesh(pp=8)) / 2**20
            print(f"{schedule} m={count}: {mib:.0f} MiB, microbatch {MICROBATCH / 2**20:.0f} MiB")
