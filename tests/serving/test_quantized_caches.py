"""Errors of 8-bit caches in a whole model: the demo's decoder reads a text token by token."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoder.config import DecoderConfig
from decoder.served import served
from decoder.text import stdlib_text, text_batches
from decoder.train import make_trainer, train

import shardwright as sw
from shardwright import caches
from shardwright.testing import cpu_mesh

pytestmark = pytest.mark.full

STEPS = 1000
CONFIG = DecoderConfig(dtype=jnp.bfloat16)
# Relative error in norm of each step's logits against a bfloat16 cache. Measured: 0.0067, 0.028.
BOUNDS = {"int8": 0.01, "float8_e4m3fn": 0.04}


@pytest.fixture(scope="module")
def manager() -> sw.PartitionManager:
    return sw.PartitionManager(sw.Strategy.preset("single"), mesh=cpu_mesh("dp:1"))


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return stdlib_text(200_000)


@pytest.fixture(scope="module")
def weights(manager: sw.PartitionManager, text: np.ndarray) -> Any:
    """The decoder, trained in float32 for a while, then rounded."""
    trainer = make_trainer(
        sw.Strategy.preset("single"), DecoderConfig(), optax.adamw(3e-3), mesh=manager.mesh
    )
    done = train(
        trainer,
        trainer.init(0),
        itertools.islice(text_batches(text, batch=16, length=128, seed=1), 40),
        on_step=lambda loss: None,
    )
    assert done.losses[-1] < 0.6 * done.losses[0]
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), done.state["params"])


def logits(
    manager: sw.PartitionManager, weights: Any, text: np.ndarray, kind: str, **options: Any
) -> np.ndarray:
    """Return the logits `[steps, vocab]` after each token of a text."""
    model = served(CONFIG)
    sizes = {
        "batch": 1,
        "capacity": STEPS,
        "kv_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_dim,
    }

    def step(held: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        actual, held = model(weights, token[None, None], held, jnp.ones((1, 1), bool))
        return held, actual[0, 0]

    with manager.for_mode("decode"):
        empty = [caches.init(kind, **sizes, **options) for _ in range(CONFIG.layers)]
        held, actual = jax.jit(lambda held, tokens: jax.lax.scan(step, held, tokens))(
            empty, jnp.asarray(text[1000:][:STEPS], jnp.int32)
        )
    assert [int(cache.length[0]) for cache in held] == [STEPS] * CONFIG.layers
    return np.asarray(actual, np.float32)


@pytest.fixture(scope="module")
def exact(manager: sw.PartitionManager, weights: Any, text: np.ndarray) -> np.ndarray:
    return logits(manager, weights, text, "dense")


@pytest.mark.parametrize("stored", BOUNDS)
def test_thousand_steps_stay_within_error_bound(
    stored: str, exact: np.ndarray, manager: sw.PartitionManager, weights: Any, text: np.ndarray
) -> None:
    actual = logits(manager, weights, text, "quantized", stored=stored)
    error = np.linalg.norm(actual - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error.max() < BOUNDS[stored]
    # No drift: the last steps, which read a thousand rounded rows, have no larger errors.
    assert 0 < np.median(error[-200:]) < 1.25 * np.median(error[:200])
    assert np.mean(actual.argmax(-1) == exact.argmax(-1)) > 0.97
