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

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
except ModuleNotFoundError:
    sys.exit('This example needs optax: run python -m pip install -e ".[optax]" in the clone.')

from decoder.config import DecoderConfig
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer, train

import shardwright as sw
from shardwright import attention
from shardwright.attention import zigzag
from shardwright.testing.meshes import virtual_devices

STRATEGIES = Path(__file__).parent / "strategies"
TRAINED_UNDER = ("single", "long_context")
# Allowed relative difference of losses: a float32 sum in another order rounds differently.
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
        strategy = sw.Strategy.load(STRATEGIES / f"{name}.toml")
        trainer = make_trainer(strategy, config, optax.adamw(3e-3))
        print(f"\n{name}: {choice(trainer.pm, config, options.length)}")
        texts = itertools.islice(batches(trainer.pm, options.length), options.steps)
        losses[name] = train(trainer, trainer.init(SEED), texts, on_step=lambda loss: None).losses
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
    """Return the implementation of attention that is chosen under a strategy, and why."""
    q = jax.ShapeDtypeStruct((1, length, config.heads, config.head_dim), config.dtype)
    k = jax.ShapeDtypeStruct((1, length, config.kv_heads, config.head_dim), config.dtype)
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with pm:
        return attention.explain(q, k, k, causal=True, positions=positions)


def batches(pm: sw.PartitionManager, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of one sequence in zigzag order, with its positions.

    With this order, all shards have equal work.
    """
    shards = pm.axis_size(sw.QUERY_LENGTH)
    for batch in text_batches(stdlib_text(), batch=1, length=length, seed=SEED):
        batch["positions"] = np.arange(length, dtype=np.int32)[None]
        yield zigzag.permute(batch, shards=shards)


if __name__ == "__main__":
    sys.exit(main())
