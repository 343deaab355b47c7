"""Train a small MoE model under four strategies, then serve it under a fifth.

    python examples/moe.py [--steps N]

Eight virtual CPU devices take the place of eight accelerators. The model drops no token, so the
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
from shardwright.layers import attention_block, embedding, loss, moe, norm, transformer_block
from shardwright.layers.moe_block import MoEBlockConfig
from shardwright.plan.collectives import read_collectives
from shardwright.testing import cpu_mesh, virtual_devices

VOCAB, EMBED = 256, 64
BATCH, LENGTH = 16, 32
MOE = moe.MoEConfig(
    embed=EMBED, hidden=128, experts=8, per_token=2, balance_loss=0.01, z_loss=0.001
)
STACK = transformer_block.TransformerConfig(
    layers=2,
    attention=attention_block.AttentionConfig(embed=EMBED, heads=8),
    mlp=MoEBlockConfig(moe=MOE),
    scan=False,
)
SPECS = {
    "table": embedding.specs(VOCAB, EMBED),
    "layers": transformer_block.specs(STACK),
    "norm": norm.specs(norm.RMS, EMBED),
    "head": loss.specs(VOCAB, EMBED),
}
STRATEGIES = {
    "single": "dp:1",
    "fsdp": "fsdp:8",
    "moe_ep": "fsdp:2,ep:4",
    "fsdp_tp": "fsdp:4,tp:2",
}
OPTIMIZER = optax.adamw(3e-3)
# Allowed relative difference of losses: a float32 sum in another order rounds differently.
TOLERANCE = 2e-5


def forward(params: Any, tokens: Any, caches: Any = None) -> Any:
    """Return the residual after the last norm, and the state of the layers."""
    x, state = embedding.apply(params["table"], tokens), transformer_block.StackState(caches=caches)
    x, state = transformer_block.apply(STACK, params["layers"], x, state=state)
    return norm.apply(norm.RMS, sw.gather(params["norm"], SPECS["norm"]), x), state


def loss_fn(params: Any, batch: Any) -> Any:
    x, state = forward(params, batch["inputs"])
    nats = loss.cross_entropy(x, params["head"], batch["targets"]).mean
    load = sum(layer.stats.load for layer in state.moe)
    return nats + state.aux, (nats, load)


def next_tokens(params: Any, tokens: Any, caches: Any = None) -> Any:
    """Return the likeliest token after each token, and the caches of the layers."""
    x, state = forward(params, tokens, caches)
    return loss.logits(x, params["head"]).argmax(-1), state.caches


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
        dispatch = moe.explain(MOE, (BATCH, LENGTH, EMBED))
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
    """Return greedy tokens after a prompt, with caches."""
    cached = jax.jit(next_tokens, donate_argnums=2)
    with pm.for_mode("prefill"):
        caches = transformer_block.init_caches(STACK, batch=1, capacity=64)
        likeliest, caches = cached(params, jnp.array([prompt]), caches)
    tokens = [int(likeliest[0, -1])]
    with pm.for_mode("decode"):
        for _ in range(count - 1):
            likeliest, caches = cached(params, jnp.array([tokens[-1:]]), caches)
            tokens.append(int(likeliest[0, -1]))
    return tokens


def check_text(params: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Tell whether a model without caches and without a mesh generates the same text."""
    single = sw.PartitionManager(
        sw.Strategy.preset("single"), mesh=cpu_mesh("dp:1"), mode="prefill"
    )
    whole = jax.device_put(jax.device_get(params), single.shardings(SPECS))
    with single:
        likeliest, _ = jax.jit(next_tokens)(whole, jnp.array([prompt + tokens[:-1]]))
    return likeliest[0, len(prompt) - 1 :].tolist() == tokens


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
