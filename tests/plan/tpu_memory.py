"""Compare the range of live memory with the peak of the TPU compiler, for a v5e:2x4.

Attention is plain, or `dot_product_attention`, which takes the kernels of a TPU.

    python -m tests.plan.tpu_memory

Needs libtpu, which the extra `tpu-aot` brings. Each line is one program, in MiB.
"""

from __future__ import annotations

import os

from tests.tpu_compile import SETTINGS, TOPOLOGY

os.environ.update(SETTINGS)  # libtpu reads them when it is loaded

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import shardwright as sw
from shardwright import attention

EMBED, INNER, HEADS, DIM, VOCAB = 1024, 4096, 8, 128, 16384
BATCH, LENGTH, LAYERS = 16, 1024, 4
HIDDEN = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
INSIDE = (sw.BATCH, sw.QUERY_LENGTH, sw.MLP_INTERMEDIATE)
QUERY = (sw.BATCH, sw.QUERY_LENGTH, sw.HEAD, sw.HEAD_DIM)
KEY = (sw.BATCH, sw.KV_LENGTH, sw.HEAD, sw.HEAD_DIM)
F32 = jnp.float32
LAYER = {
    **{
        name: sw.ArraySpec((EMBED, HEADS, DIM), F32, (sw.EMBED, sw.HEAD, sw.HEAD_DIM))
        for name in ("q", "k", "v")
    },
    "o": sw.ArraySpec((HEADS, DIM, EMBED), F32, (sw.HEAD, sw.HEAD_DIM, sw.EMBED)),
    "gate": sw.ArraySpec((EMBED, INNER), F32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "up": sw.ArraySpec((EMBED, INNER), F32, (sw.EMBED, sw.MLP_INTERMEDIATE)),
    "down": sw.ArraySpec((INNER, EMBED), F32, (sw.MLP_INTERMEDIATE, sw.EMBED)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A decoder, and how it runs: scanned or unrolled, rematerialized, trained or only run.

    Attributes:
      attends: Options of `dot_product_attention`, or None for plain attention.
    """

    name: str
    preset: str
    mesh: Mapping[str, int]
    scan: bool = True
    remat: bool = True
    train: bool = True
    attends: Mapping[str, Any] | None = None


CAUSAL: Mapping[str, Any] = {"causal": True}
WINDOW: Mapping[str, Any] = {"window": (255, 0)}
TP, FSDP = {"fsdp": 4, "tp": 2}, {"fsdp": 8}
CASES = (
    Case(name="train, remat", preset="fsdp_tp", mesh=TP),
    Case(name="train, remat", preset="fsdp", mesh=FSDP),
    Case(name="train, no remat", preset="fsdp_tp", mesh=TP, remat=False),
    Case(name="train, no remat", preset="fsdp", mesh=FSDP, remat=False),
    Case(name="train, remat, unrolled", preset="fsdp_tp", mesh=TP, scan=False),
    Case(name="train, no remat, unrolled", preset="fsdp", mesh=FSDP, scan=False, remat=False),
    Case(name="train, remat", preset="ddp", mesh={"dp": 8}),
    Case(name="forward", preset="fsdp_tp", mesh=TP, train=False),
    Case(name="forward, unrolled", preset="fsdp", mesh=FSDP, train=False, scan=False),
    Case(name="train, causal", preset="fsdp_tp", mesh=TP, attends=CAUSAL),
    Case(name="train, windows", preset="fsdp_tp", mesh=TP, attends=WINDOW),
    Case(name="train, windows, unrolled", preset="fsdp", mesh=FSDP, scan=False, attends=WINDOW),
    Case(name="train, windows, no remat", preset="fsdp", mesh=FSDP, remat=False, attends=WINDOW),
    Case(name="forward, windows", preset="fsdp_tp", mesh=TP, train=False, attends=WINDOW),
)


def block(x: Any, weights: Any, attends: Mapping[str, Any] | None = None) -> Any:
    """One layer: attention and a gated feed-forward, both computed in bfloat16."""
    gathered = sw.gather(weights, LAYER)
    w = {name: value.astype(jnp.bfloat16) for name, value in gathered.items()}
    q = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["q"]), QUERY)
    k = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["k"]), KEY)
    v = sw.shard(jnp.einsum("bse,ehd->bshd", x, w["v"]), KEY)
    if attends is None:
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(F32) * DIM**-0.5
        weighted = jax.nn.softmax(scores).astype(jnp.bfloat16)
        mixed = sw.shard(jnp.einsum("bhst,bthd->bshd", weighted, v), QUERY)
    else:
        mixed = attention.dot_product_attention(q, k, v, mode="train", **attends)
    x = sw.shard(x + jnp.einsum("bshd,hde->bse", mixed, w["o"]), HIDDEN)
    inside = jax.nn.silu(sw.shard(x @ w["gate"], INSIDE)) * sw.shard(x @ w["up"], INSIDE)
    return sw.shard(x + inside @ w["down"], HIDDEN)


def program(case: Case) -> tuple[Any, Callable[..., Any]]:
    """Return the parameters' specs, and the loss as a function of parameters and tokens."""
    stacked = {
        name: sw.ArraySpec((LAYERS, *spec.shape), F32, (sw.EMPTY, *spec.axes))
        for name, spec in LAYER.items()
    }
    specs = {
        "layers": stacked if case.scan else [LAYER] * LAYERS,
        "embed": sw.ArraySpec((VOCAB, EMBED), F32, (sw.VOCAB, sw.EMBED)),
        "head": sw.ArraySpec((EMBED, VOCAB), F32, (sw.EMBED, sw.VOCAB)),
    }
    layer = functools.partial(block, attends=case.attends)
    run = jax.checkpoint(layer) if case.remat else layer

    def loss(params: Any, tokens: Any) -> Any:
        embed = sw.gather(params["embed"], sw.VOCAB, sw.EMBED).astype(jnp.bfloat16)
        x = sw.shard(embed[tokens], HIDDEN)
        if case.scan:
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, params["layers"])
        else:
            for weights in params["layers"]:
                x = run(x, weights)
        head = sw.gather(params["head"], sw.EMBED, sw.VOCAB).astype(jnp.bfloat16)
        logits = sw.shard(x @ head, sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB).astype(F32)
        return jax.nn.logsumexp(logits, -1).mean()

    return specs, loss


def compare(case: Case, devices: Any) -> str:
    """Return a line: the range, the compiler's peak, and their ratios."""
    grid = np.array(devices).reshape(tuple(case.mesh.values()))
    mesh = Mesh(grid, tuple(case.mesh), axis_types=(AxisType.Auto,) * grid.ndim)
    pm = sw.PartitionManager(sw.Strategy.preset(case.preset), mesh=mesh)
    specs, loss = program(case)
    tokens = (sw.BATCH, sw.QUERY_LENGTH)
    sharding = pm.sharding(tokens, shape=(BATCH, LENGTH))
    batch = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=sharding)

    def step(params: Any, moments: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    params = pm.abstract(specs)
    arguments, holds, donated = (params, batch), ("parameters", "inputs"), ()
    if case.train:
        arguments = (params, pm.abstract(specs, role="state"), batch)
        holds, donated = ("parameters", "optimizer", "inputs"), (0, 1)
    function = step if case.train else loss
    report = pm.plan(function, *arguments, holds=holds, donated=donated, topology=TOPOLOGY)
    memory = report.memory
    with pm:
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    # Low effort changes bytes by less than 10%, and takes a quarter of the time.
    compiled = lowered.compile(compiler_options={"exec_time_optimization_effort": -1.0})
    peak = compiled.memory_analysis().peak_memory_in_bytes
    sizes = [f"{size / 2**20:8.1f}" for size in (memory.low, memory.high, peak)]
    ratios = f"low/peak {memory.low / peak:.2f}  high/peak {memory.high / peak:.2f}"
    return f"{case.name:26} {case.preset:8} {' '.join(sizes)}  {ratios}"


def main(*names: str) -> None:
    """Print one line per case whose name has one of these words; for all cases without words."""
    devices = topologies.get_topology_desc(topology_name=TOPOLOGY, platform="tpu").devices
    print(f"{'program':26} {'preset':8} {'low':>8} {'high':>8} {'peak':>8}")
    for case in CASES:
        if names and not any(name in case.name for name in names):
            continue
        print(compare(case, devices), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
