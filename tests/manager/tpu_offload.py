"""Device memory of decoders with host arrays, by a TPU compile, beside the plan.

The shapes are of an 8B decoder on v5p:2x2x1, and of a 1B decoder on v5e:2x4.

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
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies

import shardwright as sw
from tests.tpu_compile import collectives, held, tell, tpu_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a decoder and of its batch, and the chips that train it."""

    layers: int
    embed: int
    hidden: int
    vocab: int
    batch: int
    topology: str
    mesh: str


SIZES = {
    "8B": Size(
        layers=32,
        embed=4096,
        hidden=14336,
        vocab=128256,
        batch=4,
        topology="v5p:2x2x1",
        mesh="fsdp:4",
    ),
    "1B": Size(
        layers=16,
        embed=2048,
        hidden=8192,
        vocab=32000,
        batch=16,
        topology="v5e:2x4",
        mesh="fsdp:8",
    ),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """Bytes on one device, compiled and planned.

    Attributes:
      name: A key of `CASES`: `device`, `whole` (moved by `jit_step`), `layers` (`offloaded`) or
        `params` (too), and others; perhaps with a size. Or `MLP`.
      peak: The most bytes in device memory.
      host: Arguments in host memory.
      host_temporaries: What the compiler says of temporaries there.
      state: Optimizer state.
      low: Lower end of the planned peak.
      high: Upper end.
      planned_host: Planned bytes on the host.
      sent: Collective -> bytes of the compiled program.
      planned: Collective -> planned bytes.
      complete: Whether the plan has a rule for each primitive.
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
    complete: bool


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
MLP = "offloaded activations"
PROGRAMS = [MLP, *CASES, "stacks, 1B", "forward, 1B"]


def model(size: Size) -> tuple[Any, Any]:
    """Return the specs of the parameters, and the loss."""
    hidden = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)

    def weight(*shape: int, axes: Any) -> sw.ArraySpec:
        return sw.ArraySpec(shape, jnp.bfloat16, axes)

    embed = size.embed
    layer = {
        "qkv": weight(embed, 3 * embed, axes=(sw.EMBED, sw.HEAD)),
        "out": weight(embed, embed, axes=(sw.HEAD, sw.EMBED)),
        "up": weight(embed, size.hidden, axes=(sw.EMBED, sw.MLP_INTERMEDIATE)),
        "gate": weight(embed, size.hidden, axes=(sw.EMBED, sw.MLP_INTERMEDIATE)),
        "down": weight(size.hidden, embed, axes=(sw.MLP_INTERMEDIATE, sw.EMBED)),
    }
    specs = {
        "embedding": weight(size.vocab, embed, axes=(sw.VOCAB, sw.EMBED)),
        "layers": sw.stack_specs(layer, size.layers),
        "head": weight(embed, size.vocab, axes=(sw.EMBED, sw.VOCAB)),
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


def compiled(key: str) -> Step:
    name, _, sizes = key.partition(", ")
    size = SIZES[sizes or "8B"]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=size.topology).devices
    mesh = sw.create_mesh(size.mesh, devices=list(np.array(devices).flat))
    strategy = sw.Strategy.preset("fsdp") | sw.Strategy(memory=CASES[name])
    pm = sw.PartitionManager(strategy, mesh=mesh, mode="train")
    specs, loss = model(size)
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
    tokens = jax.ShapeDtypeStruct((size.batch, 1024), jnp.int32)
    batch = pm.abstract(tokens, (sw.BATCH, sw.QUERY_LENGTH), role="activation")
    holds = ({"params": "parameters", "moments": "optimizer"}, "inputs")
    report = pm.plan(step, state, batch, holds=holds, donated=(0,), topology=size.topology)
    program = pm.jit_step(step, state, batch).lower(state, batch)
    return step_of(key, program, report, mesh, state=held(state["moments"]))


def step_of(name: str, program: Any, report: Any, mesh: Any, *, state: int) -> Step:
    """Compile a program, and return its bytes beside the plan's."""
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
        state=state,
        low=report.memory.low,
        high=report.memory.high,
        planned_host=report.memory.host,
        sent=collectives(done, mesh)[1],
        planned=dict(planned),
        complete=report.walked.complete,
    )


def mlp() -> Step:
    """Return one layer whose hidden values are copied to the host until the backward pass."""
    mesh = tpu_mesh(fsdp=4, tp=2)
    hidden = (sw.BATCH, sw.EMBED)
    inner = (sw.BATCH, sw.MLP_INTERMEDIATE)
    specs = {
        "up": sw.ArraySpec((64, 256), jnp.float32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
        "down": sw.ArraySpec((256, 64), jnp.float32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
    }
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params: Any, x: Any) -> Any:
        w = sw.gather(params, specs)
        h = checkpoint_name(sw.shard(sw.shard(x, hidden) @ w["up"], inner), "h")
        return (sw.shard(jax.nn.silu(h) @ w["down"], hidden) ** 2).sum()

    pm = sw.PartitionManager(sw.Strategy.preset("fsdp_tp"), mesh=mesh)
    gradient = jax.grad(jax.checkpoint(loss, policy=policy))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    given = pm.abstract(specs), pm.abstract(x, hidden, role="activation")
    report = pm.plan(gradient, *given, specs=(specs, hidden), outputs=specs, topology="v5e:2x4")
    with pm:
        program = jax.jit(gradient, out_shardings=pm.shardings(specs)).lower(*given)
    return step_of(MLP, program, report, mesh, state=0)


if __name__ == "__main__":
    for program in sys.argv[1:] or PROGRAMS:
        tell(mlp() if program == MLP else compiled(program))
