"""Memory of a training step in a pipeline, planned and compiled, by schedule and microbatches.

    python -m tests.layers.pipeline_memory

prints what a compile for TPUs says; it needs libtpu.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

import shardwright as sw

WIDTH = 512
SCHEDULES, COUNTS = ("gpipe", "circular", "1f1b"), (8, 16, 32)
TOPOLOGY = "v5p:2x2x2"
# Rows are those of a microbatch. Arrays that fit into the VMEM of a TPU are not in its memory. TPUs
# multiply float32 as bfloat16, so XLA would keep the inputs of layers in bfloat16.
ON_TPUS = {"rows": 2**19, "layers": 8, "dtype": "bfloat16"}
ON_CPUS = {"rows": 2**13, "layers": 16, "dtype": "float32"}


class Program:
    """The gradients of a stack of layers and a head, over pp and, if the mesh has it, fsdp."""

    def __init__(
        self,
        schedule: str,
        count: int,
        mesh: Any,
        *,
        rows: int,
        layers: int,
        dtype: str,
        gather: str = "tick",
    ) -> None:
        table: dict[str, Any] = {"schedule": schedule, "microbatches": count, "gather": gather}
        if schedule == "circular":
            table["repeats"] = 2
        strategy = sw.Strategy(
            rules={"batch": "fsdp+pp", "layers": "pp", "embed": "-"},
            params={"embed": "fsdp"},
            policy={"gather": "fsdp"},
            pipeline=table,
        )
        self.manager = sw.PartitionManager(strategy, mesh=mesh, mode="train")
        spec = sw.ArraySpec((WIDTH, WIDTH), dtype, (sw.EMBED, sw.EMPTY))
        stack = sw.stack_specs(spec, layers, repeats=table.get("repeats", 1))
        x = sw.ArraySpec((rows * count, WIDTH), dtype, (sw.BATCH, sw.EMBED))
        last = sw.ArraySpec((WIDTH, 4), dtype, (sw.EMBED, sw.EMPTY))
        self.specs = (stack, x, last)

        def layer(w: Any, x: Any, _: Any) -> Any:
            return sw.shard(x + jnp.tanh(x @ sw.gather(w, spec)), sw.BATCH, sw.EMBED), None

        def head(w: Any, y: Any, _: Any) -> Any:
            return jnp.sum((y @ sw.gather(w, last)).astype(jnp.float32) ** 2)

        def loss(w: Any, x: Any, last: Any) -> Any:
            given = (layer, w, x, head, last, None)
            return sw.pipeline_loss(*given, specs=stack, by_row=True)[0]

        self.step = jax.value_and_grad(loss, (0, 1, 2))

    def planned(self) -> Any:
        """Return the walk of the plan."""
        shapes = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in self.specs]
        stack, x, last = self.specs
        with self.manager as pm:
            return pm.plan(self.step, *shapes, specs=(stack, x.axes, last)).walked

    def compiled(self) -> Any:
        """Return the compiled program."""
        with self.manager as pm:
            given = [
                pm.abstract(spec, role=role)
                for spec, role in zip(self.specs, ("param", "activation", "param"), strict=True)
            ]
            platform = pm.mesh.devices.flat[0].platform
            traced = jax.jit(self.step).trace(*given)
            return traced.lower(lowering_platforms=(platform,)).compile()


if __name__ == "__main__":
    from tests import tpu_compile

    os.environ.update(tpu_compile.SETTINGS)
    tpu_compile.TOPOLOGY = TOPOLOGY
    for schedule in SCHEDULES:
        for count in COUNTS:
            program = Program(schedule, count, tpu_compile.tpu_mesh(pp=4, fsdp=2), **ON_TPUS)
            plan = program.planned().memory
            peak = program.compiled().memory_analysis().peak_memory_in_bytes
            low, high, found = (f"{each / 2**20:,.0f}" for each in (plan.low, plan.high, peak))
            print(f"| {schedule} | {count} | {low} to {high} | {found} |", flush=True)
