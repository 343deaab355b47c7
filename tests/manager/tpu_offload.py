"""Device memory of an 8B decoder's shapes on v5p:2x2x1, by a TPU compile, beside the plan.

    python -m tests.manager.tpu_offload

Prints one line per way of holding the optimizer state and the parameters. libtpu's
`peak_memory_in_bytes` counts host arguments too. Without temporaries on the host, the peak of a
device is the rest.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

import shardwright as sw
from tests.tpu_compile import collectives, held, tell

TOPOLOGY = "v5p:2x2x1"
LAYERS, EMBED, HIDDEN, VOCAB, HEADS = 32, 4096, 14336, 128256, 3 * 4096


@dataclasses.dataclass(frozen=True)
class Step:
    """Bytes on one device, compiled and planned.

    Attributes:
      name: `device`, `whole` (moved by `jit_step`), `layers` (`offloaded`) or `params` (too).
      peak: The most bytes in device memory.
      host: Arguments in host memory.
      host_temporaries: What the compiler says of temporaries there.
      state: Optimizer state.
      low: Lower end of the planned peak.
      high: Upper end.
      planned_host: Planned bytes on the host.
      sent: Collective -> bytes of the compiled program.
      planned: Collective -> planned bytes.
    """

    name: str
    peak: int
    host: int
    host_temporaries: int
    state: int
    low: int
    high: int
    planned_host: int
    sent: dict[str, int]
    planned: dict[str, int]


CASES: dict[str, dict[str, Any]] = {
    "device": {},
    "whole": {"state": "host"},
    "layers": {"state": "host"},
    "updates": {"state": "host"},
    "params": {"state": "host", "params": "host"},
    "stacks": {
        "state": "host",
        "tensors": [{"match": "embedding|head", "state": "device"}],
    },
    "forward": {"params": "host"},
}


def model() -> tuple[Any, Any]:
    """Return the specs of the parameters, and the loss."""
    hidden = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)

    def weight(*shape: int, axes: Any) -> sw.ArraySpec:
        return sw.ArraySpec(shape, jnp.bfloat16, axes)

    layer = {
        "qkv": weight(EMBED, HEADS, axes=(sw.EMBED, sw.HEAD)),
        "out": weight(HEADS // 3, EMBED, axes=(sw.HEAD, sw.EMBED)),
        "up": weight(EMBED, HIDDEN, axes=(sw.EMBED, sw.MLP_INTERMEDIATE)),
        "gate": weight(EMBED, HIDDEN, axes=(sw.EMBED, sw.MLP_INTERMEDIATE)),
        "down": weight(HIDDEN, EMBED, axes=(sw.MLP_INTERMEDIATE, sw.EMBED)),
    }
    specs = {
        "embedding": weight(VOCAB, EMBED, axes=(sw.VOCAB, sw.EMBED)),
        "layers": sw.stack_specs(layer, LAYERS),
        "head": weight(EMBED, VOCAB, axes=(sw.EMBED, sw.VOCAB)),
    }

    def run_layer(x: Any, stored: Any) -> Any:
        w = sw.gather(stored, layer)
        q, k, v = jnp.split(x @ w["qkv"], 3, -1)
        x = sw.shard(x + (q * k * v) @ w["out"], hidden)
        return sw.shard(x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], hidden), None

    def loss(params: Any, tokens: Any) -> Any:
        x = sw.shard(sw.gather(params["embedding"], specs["embedding"])[tokens], hidden)
        x, _ = jax.lax.scan(jax.checkpoint(run_layer), x, params["layers"])

        def end(x: Any, stored: Any) -> Any:
            logits = (x @ sw.gather(stored, specs["head"])).astype(jnp.float32)
            return jax.nn.logsumexp(logits, -1).mean()

        return jax.checkpoint(end)(x, params["head"])

    return specs, loss


def compiled(name: str) -> Step:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = sw.create_mesh("fsdp:4", devices=list(np.array(devices).flat))
    strategy = sw.Strategy.preset("fsdp") | sw.Strategy(memory=CASES[name])
    pm = sw.PartitionManager(strategy, mesh=mesh, mode="train")
    specs, loss = model()
    adam = optax.adam(1e-3, mu_dtype=jnp.float32)
    by_layer = sw.offloaded(adam, specs)

    def step(state: Any, tokens: Any) -> Any:
        if name == "forward":
            return state, loss(state["params"], tokens)
        value, grads = jax.value_and_grad(loss)(state["params"], tokens)
        params, moments = state["params"], state["moments"]
        if name in ("layers", "params", "stacks"):
            params, moments = by_layer.apply_gradients(grads, moments, params)
        else:
            optimizer = by_layer if name == "updates" else adam
            updates, moments = optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
        return {"params": params, "moments": moments}, value

    # Both moments in float32, as most trainers keep them.
    wide = [jax.ShapeDtypeStruct(spec.shape, jnp.float32) for spec in jax.tree.leaves(specs)]
    shapes = jax.tree.unflatten(jax.tree.structure(specs), wide)
    optimizer: Any = adam if name in ("device", "whole") else by_layer
    if name == "forward":
        optimizer = optax.identity()
    state = {
        "params": pm.abstract(specs),
        "moments": pm.abstract_state(optimizer, shapes, jax.tree.map(lambda s: s.axes, specs)),
    }
    tokens = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    batch = pm.abstract(tokens, (sw.BATCH, sw.QUERY_LENGTH), role="activation")
    holds = ({"params": "parameters", "moments": "optimizer"}, "inputs")
    report = pm.plan(step, state, batch, holds=holds, donated=(0,), topology=TOPOLOGY)
    program = pm.jit_step(step, state, batch).lower(state, batch)
    done = program.compile(compiler_options={"exec_time_optimization_effort": -1.0})
    memory: Any = done.memory_analysis()
    planned: Counter[str] = Counter()
    for event in report.events:
        planned[str(event.kind)] += event.runs * event.logical_bytes
    return Step(
        name=name,
        peak=memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes,
        host=memory.host_argument_size_in_bytes,
        host_temporaries=memory.host_temp_size_in_bytes,
        state=held(state["moments"]),
        low=report.memory.low,
        high=report.memory.high,
        planned_host=report.memory.host,
        sent=collectives(done, mesh)[1],
        planned=dict(planned),
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        tell(compiled(case))
