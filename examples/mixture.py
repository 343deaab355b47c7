"""Train a small mixture of experts under four strategies, then serve it under a fifth.

    python examples/mixture.py [--steps N]

Eight virtual CPU devices take the place of eight accelerators. The mixture drops no token, so the
losses are equal; the example fails if they are not. For each strategy it prints how tokens reach
their experts, how many each expert got, and which collectives the loss and its gradient run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
except ModuleNotFoundError:
    sys.exit('This example needs optax: run python -m pip install -e ".[optax]" in the clone.')

from decoder.text import stdlib_text, text_batches

import shardwright as sw
from shardwright import attention, caches, layers
from shardwright.layers import moe, norm
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh, virtual_devices

VOCAB, EMBED, HEADS, HEAD_DIM, LAYERS = 256, 64, 8, 8, 2
BATCH, LENGTH = 16, 32
MIXTURE = moe.MoEConfig(
    embed=EMBED, hidden=128, experts=8, per_token=2, balance_loss=0.01, z_loss=0.001
)
STRATEGIES = {
    "single": "dp:1",
    "fsdp": "fsdp:8",
    "moe_ep": "fsdp:2,ep:4",
    "fsdp_tp": "fsdp:4,tp:2",
}
RESIDUAL = (sw.BATCH, sw.QUERY_LENGTH, sw.EMBED)
OPTIMIZER = optax.adamw(3e-3)
# Allowed relative difference of losses: float32 sums in another order differ.
TOLERANCE = 2e-5


def weight(*shape: int, axes: tuple[str, ...]) -> sw.ArraySpec:
    return sw.ArraySpec(shape, jnp.float32, axes, jax.nn.initializers.normal(0.1))


LAYER = {
    "attention_norm": norm.specs(norm.RMS, EMBED),
    "q": weight(EMBED, HEADS, HEAD_DIM, axes=(sw.EMBED, sw.HEAD, sw.HEAD_DIM)),
    "k": weight(EMBED, HEADS, HEAD_DIM, axes=(sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
    "v": weight(EMBED, HEADS, HEAD_DIM, axes=(sw.EMBED, sw.KV_HEAD, sw.KV_HEAD_DIM)),
    "o": weight(HEADS, HEAD_DIM, EMBED, axes=(sw.HEAD, sw.HEAD_DIM, sw.EMBED)),
    "mixture_norm": norm.specs(norm.RMS, EMBED),
    "mixture": moe.specs(MIXTURE),
}
SPECS = {
    "table": weight(VOCAB, EMBED, axes=(sw.VOCAB, sw.EMBED)),
    "layers": [LAYER] * LAYERS,
    "head": weight(EMBED, VOCAB, axes=(sw.EMBED, sw.VOCAB)),
}


def forward(params: Any, tokens: Any, cache: Any = None, valid: Any = None) -> Any:
    """Return logits, the caches of the layers, and the statistics of the mixtures."""
    x = sw.gather(params["table"], SPECS["table"])[tokens]
    x = sw.shard(x, *RESIDUAL)
    written, statistics = [], []
    for number, layer in enumerate(params["layers"]):
        dense = {name: layer[name] for name in LAYER if name != "mixture"}
        dense = sw.gather(dense, {name: LAYER[name] for name in dense})
        held = None if cache is None else cache[number]
        attended, held = attend(dense, x, held, valid)
        written.append(held)
        x = sw.shard(x + attended, *RESIDUAL)
        normed = norm.apply(norm.RMS, dense["mixture_norm"], x)
        y, state = moe.apply(MIXTURE, layer["mixture"], normed)
        statistics.append(state.stats)
        x = sw.shard(x + y, *RESIDUAL)
    logits = x @ sw.gather(params["head"], SPECS["head"])
    return sw.shard(logits, sw.BATCH, sw.QUERY_LENGTH, sw.VOCAB), written, statistics


def attend(weights: Any, x: Any, cache: Any, valid: Any) -> Any:
    """Return the output of causal attention, and the cache with the new rows."""
    normed = norm.apply(norm.RMS, weights["attention_norm"], x)
    q, k, v = (jnp.einsum("ble,ehd->blhd", normed, weights[name]) for name in "qkv")
    if cache is None:
        positions = jnp.arange(x.shape[1])[None]
        q, k = layers.rope(q, positions), layers.rope(k, positions)
        o = attention.dot_product_attention(q, k, v, causal=True)
    else:
        positions = attention.next_positions(cache, q_length=x.shape[1], valid=valid)
        q, k = layers.rope(q, positions), layers.rope(k, positions)
        result = attention.append_and_attend(q, k, v, cache, valid=valid)
        o, cache = result.o, result.cache
    return jnp.einsum("blhd,hde->ble", o, weights["o"]), cache


def loss_fn(params: Any, batch: Any) -> Any:
    logits, _, statistics = forward(params, batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    load = sum(stats.load for stats in statistics)
    return losses.mean() + sum(stats.aux for stats in statistics), (losses.mean(), load)


def train_step(state: Any, batch: Any) -> Any:
    gradient = jax.grad(loss_fn, has_aux=True)
    gradients, result = gradient(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "moments": moments}, result


def train(pm: sw.PartitionManager, steps: int, text: np.ndarray) -> tuple[Any, list[float]]:
    """Train, print what was sent and where tokens went, and return parameters and losses."""
    abstract = {"params": pm.abstract(SPECS), "moments": pm.abstract_state(OPTIMIZER, SPECS)}
    step = pm.jit_step(train_step, abstract, (sw.BATCH, sw.LENGTH))
    params = pm.init(SPECS, jax.random.key(0))
    state = {"params": params, "moments": pm.init_state(OPTIMIZER, params, SPECS)}
    losses = []
    for _, batch in zip(
        range(steps), text_batches(text, batch=BATCH, length=LENGTH, seed=0), strict=False
    ):
        placed = pm.shard(batch, dict.fromkeys(batch, (sw.BATCH, sw.LENGTH)))
        state, (loss, load) = step(state, placed)
        losses.append(float(loss))
    with pm:
        dispatch = moe.explain(MIXTURE, (BATCH, LENGTH, EMBED))
        compiled = jax.jit(jax.grad(loss_fn, has_aux=True)).lower(state["params"], placed).compile()
    print(f"\n{pm.name} on {dict(pm.mesh.shape)}")
    print(f"  {dispatch.why}")
    print("  tokens per expert, last step:", *load.tolist())
    sent: dict[str, int] = {}
    for event in read_collectives(compiled, pm.mesh):
        name = f"{event.kind} over {'+'.join(event.mesh_axes)}"
        sent[name] = sent.get(name, 0) + (event.count or 1)
    print("  loss and gradient:", ", ".join(f"{n} x {name}" for name, n in sorted(sent.items())))
    return state["params"], losses


def generate(pm: sw.PartitionManager, params: Any, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens after a prompt, with a cache."""
    prefill, decode = pm.for_mode("prefill"), pm.for_mode("decode")
    cached = jax.jit(forward)
    size = {"capacity": 64, "kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    with prefill:
        cache = [caches.init("dense", batch=1, **size) for _ in range(LAYERS)]
        valid = jnp.ones((1, len(prompt)), bool)
        logits, cache, _ = cached(params, jnp.array([prompt]), cache, valid)
    tokens = [int(logits[0, -1].argmax())]
    with decode:
        for _ in range(count - 1):
            latest, valid = jnp.array([tokens[-1:]]), jnp.ones((1, 1), bool)
            logits, cache, _ = cached(params, latest, cache, valid)
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


def check_text(params: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Tell whether a model without caches and without a mesh generates the same text."""
    single = sw.PartitionManager(
        sw.Strategy.preset("single"), mesh=cpu_mesh("dp:1"), mode="prefill"
    )
    whole = jax.device_put(jax.device_get(params), single.shardings(SPECS))
    with single:
        logits, _, _ = jax.jit(forward)(whole, jnp.array([prompt + tokens[:-1]]))
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist() == tokens


def main(argv: Sequence[str] | None = None) -> int:
    steps = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    virtual_devices(8)  # JAX fixes the number of devices at its first operation
    text = stdlib_text()
    losses: dict[str, list[float]] = {}
    params = None
    for name, mesh in STRATEGIES.items():
        strategy = sw.Strategy.preset(name)
        pm = sw.PartitionManager(strategy, mesh=cpu_mesh(mesh), mode="train")
        params, losses[name] = train(pm, steps, text)
    if not compare(losses):
        return 1
    serving = sw.PartitionManager(sw.Strategy.preset("serve_tp"), mesh=cpu_mesh("ep:4,tp:2"))
    params = jax.device_put(params, serving.shardings(SPECS))
    prompt = list(b"def __init__(self")
    tokens = generate(serving, params, prompt, 12)
    print(f"\nserve_tp on {dict(serving.mesh.shape)}: {bytes(tokens)!r}")
    if not check_text(params, prompt, tokens):
        print("FAILED: a model without mesh and caches generates another text.")
        return 1
    print("A model without mesh and caches generates the same text.")
    return 0


def parse(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps per strategy")
    steps: int = parser.parse_args(argv).steps
    if steps < 1:
        parser.error("--steps is at least 1")
    return steps


def compare(losses: dict[str, list[float]]) -> bool:
    """Print the losses as a table, and tell whether they are equal."""
    steps = len(next(iter(losses.values())))
    print("\nloss      " + "".join(f"{name:>10}" for name in losses))
    for step in sorted({0, steps // 2, steps - 1}):
        print(f"step {step + 1:4} " + "".join(f"{loss[step]:10.5f}" for loss in losses.values()))
    table = np.array(list(losses.values()))
    difference = float((np.abs(table - table[0]) / table[0]).max())
    if difference > TOLERANCE:
        print(f"FAILED: largest relative difference {difference:.1e} (at most {TOLERANCE}).")
        return False
    print(f"The losses agree: largest relative difference {difference:.1e}.")
    return True


if __name__ == "__main__":
    sys.exit(main())
