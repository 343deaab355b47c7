"""Train on sequences that are sharded over eight devices, with ring attention in zigzag order.

    python examples/long_context.py [--length N] [--steps N]

Eight virtual CPU devices take the place of eight accelerators. The model calls attention in the
same way under both strategy files; a line in `strategies/long_context.toml` selects the
implementation. The example fails unless the losses equal those of one device.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
except ModuleNotFoundError:
    sys.exit('This example needs optax: run python -m pip install -e ".[optax]" in the clone.')

from decoder.config import DecoderConfig, decoder_specs
from decoder.model import HIDDEN_AXES, LOGIT_AXES, NEW_ROW_AXES, QUERY_AXES, mlp, rms_norm, rope
from decoder.text import stdlib_text, text_batches

import shardwright as sw
from shardwright import attention
from shardwright.attention import zigzag
from shardwright.testing.meshes import virtual_devices

Tree = dict[str, Any]
STRATEGIES = Path(__file__).parent / "strategies"
TRAINED_UNDER = ("single", "long_context")
BATCH_AXES = (sw.BATCH, sw.LENGTH)
# Allowed relative difference of losses: float32 sums in another order differ.
TOLERANCE = 2e-5
SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    virtual_devices(8)  # JAX fixes the number of devices at its first operation
    config = DecoderConfig(layers=2, embed=64, heads=4, kv_heads=2, mlp=128)
    print(
        f"{options.steps} steps of one sequence of {options.length} bytes, a decoder of "
        f"{config.layers} layers"
    )
    losses = {}
    for name in TRAINED_UNDER:
        pm = sw.PartitionManager(sw.Strategy.load(STRATEGIES / f"{name}.toml")).for_mode("train")
        print(f"\n{name}: {choice(pm, config, options.length)}")
        losses[name] = train(pm, config, options)
        print(f"  losses {'  '.join(f'{loss:.4f}' for loss in losses[name])}")
    one, many = (losses[name] for name in TRAINED_UNDER)
    difference = max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))
    agree = difference <= TOLERANCE
    print(
        f"\n{'The losses agree' if agree else 'FAILED'}: largest relative difference "
        f"{difference:.1e} (at most {TOLERANCE:.0e})."
    )
    return 0 if agree else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on long sequences with ring attention.")
    parser.add_argument(
        "--length", type=int, default=4096, help="bytes of a sequence, a multiple of 16 (4096)"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps under each strategy (5)")
    options = parser.parse_args(argv)
    if options.length < 16 or options.length % 16 or options.steps < 1:
        parser.error(
            "--length must be a multiple of 16 (two chunks per device), and --steps at least 1"
        )
    return options


def choice(pm: sw.PartitionManager, config: DecoderConfig, length: int) -> attention.Choice:
    """Choose an implementation of attention under a strategy. Print and return the choice."""
    q = jax.ShapeDtypeStruct((1, length, config.heads, config.head_dim), config.dtype)
    k = jax.ShapeDtypeStruct((1, length, config.kv_heads, config.head_dim), config.dtype)
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with pm:
        return attention.explain(q, k, k, causal=True, positions=positions)


def train(
    pm: sw.PartitionManager, config: DecoderConfig, options: argparse.Namespace
) -> list[float]:
    """Train from one seed, and return the loss of each step in nats per byte."""
    optimizer, specs = optax.adamw(3e-3), decoder_specs(config)

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(next_byte_loss)(state["params"], batch, config)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params = pm.init(specs, jax.random.key(SEED))
    state = {"params": params, "opt": pm.init_state(optimizer, params, specs)}
    jitted = pm.jit_step(step, state, BATCH_AXES)
    losses = []
    for batch in itertools.islice(batches(pm, options.length), options.steps):
        state, loss = jitted(state, batch)
        losses.append(float(loss))
    return losses


def batches(pm: sw.PartitionManager, length: int) -> Iterator[Tree]:
    """Yield batches of one sequence and its positions in zigzag order, for equal work on shards."""
    shards = pm.axis_size(sw.QUERY_LENGTH)
    for batch in text_batches(stdlib_text(), batch=1, length=length, seed=SEED):
        batch["positions"] = np.arange(length, dtype=np.int32)[None]
        yield {
            name: pm.shard(array, BATCH_AXES)
            for name, array in zigzag.permute(batch, shards=shards).items()
        }


def next_byte_loss(params: Tree, batch: Tree, config: DecoderConfig) -> jax.Array:
    """Return the mean cross entropy of the next byte, in nats. Tokens may have any order."""
    logits = forward(params, batch["inputs"], batch["positions"], config)
    hit = jnp.arange(config.vocab) == batch["targets"][:, :, None]
    return jnp.mean(
        jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    )


def forward(
    params: Tree, tokens: jax.Array, positions: jax.Array, config: DecoderConfig
) -> jax.Array:
    """Return logits `[batch, length, vocab]`; tokens and positions are `[batch, length]`."""
    weights = sw.gather(params, decoder_specs(config))
    x = jnp.einsum(
        "bqv,ve->bqe",
        jax.nn.one_hot(tokens, config.vocab, dtype=config.dtype),
        weights["embedding"],
    )
    x = sw.shard(x, HIDDEN_AXES)
    for layer in weights["layers"]:
        x = sw.shard(x + attend(layer["attention"], x, positions, config), HIDDEN_AXES)
        x = sw.shard(x + mlp(layer["mlp"], x, config), HIDDEN_AXES)
    return sw.shard(
        jnp.einsum("bqe,ev->bqv", rms_norm(x, weights["norm"], config), weights["lm_head"]),
        LOGIT_AXES,
    )


def attend(weights: Tree, x: jax.Array, positions: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return what attention adds to `x` `[batch, length, embed]`; the mask uses positions."""
    x = rms_norm(x, weights["norm"], config)
    q = sw.shard(rope(jnp.einsum("bqe,ehd->bqhd", x, weights["q"]), positions, config), QUERY_AXES)
    k = sw.shard(
        rope(jnp.einsum("bqe,ekd->bqkd", x, weights["k"]), positions, config), NEW_ROW_AXES
    )
    v = sw.shard(jnp.einsum("bqe,ekd->bqkd", x, weights["v"]), NEW_ROW_AXES)
    out = attention.dot_product_attention(q, k, v, causal=True, positions=positions)
    return jnp.einsum("bqhd,hde->bqe", sw.shard(out, QUERY_AXES), weights["o"])


if __name__ == "__main__":
    sys.exit(main())
